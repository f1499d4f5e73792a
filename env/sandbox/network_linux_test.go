package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// atOnce is less than any time-out of a network (5 s for a name, resolv.conf(5)),
// and more than a busy machine needs to say no.
const atOnce = 3 * time.Second

// TestInside is no test: it is what commands run that look at their network, one
// line of output for each word of SANDBOX_INSIDE, and "slow" where it took long.
func TestInside(t *testing.T) {
	words := os.Getenv("SANDBOX_INSIDE")
	if words == "" {
		t.Skip("only run inside of sandboxes")
	}
	for _, word := range strings.Fields(words) {
		what, arg, _ := strings.Cut(word, "=")
		began := time.Now()
		said := lookInside(what, arg)
		if time.Since(began) > atOnce {
			said += " slow"
		}
		fmt.Printf("%s: %s\n", word, said)
	}
	os.Exit(0)
}

func lookInside(what, arg string) string {
	var err error
	switch what {
	case "dial", "try": // try does not wait for those that never answer
		wait := map[string]time.Duration{"dial": 10 * time.Second, "try": 200 * time.Millisecond}[what]
		var c net.Conn
		if c, err = net.DialTimeout("tcp", arg, wait); err == nil {
			defer c.Close()
			text, rerr := io.ReadAll(c)
			return string(text) + errno(rerr)
		}
	case "abstract":
		_, err = net.Dial("unix", "@"+arg)
	case "serve": // and be one's own client
		var l net.Listener
		if l, err = net.Listen("tcp", arg); err == nil {
			go serve(l, "mine")
			return lookInside("dial", l.Addr().String())
		}
	case "lookup":
		var addrs []string
		if addrs, err = net.DefaultResolver.LookupHost(context.Background(), arg); err == nil {
			return strings.Join(addrs, ",")
		}
		return "not found"
	case "interfaces":
		list, lerr := net.Interfaces()
		if lerr != nil {
			return lerr.Error()
		}
		names := []string{}
		for _, i := range list {
			names = append(names, i.Name)
		}
		in, _ := os.ReadDir("/sys/class/net")
		for _, e := range in {
			names = append(names, "sys/"+e.Name())
		}
		return strings.Join(names, ",")
	case "hold":
		if _, err = net.Listen("tcp", arg); err == nil {
			pids, _ := filepath.Glob("/proc/[0-9]*")
			for i := range pids {
				pids[i] = filepath.Base(pids[i])
			}
			fmt.Println("PIDs", pids)
			time.Sleep(time.Hour)
		}
	case "down": // what a command must not be able to do
		fd, _ := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		lo, _ := unix.NewIfreq("lo")
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
	}
	return errno(err)
}

func errno(err error) string {
	var e syscall.Errno
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return unix.ErrnoName(e)
	}
	return err.Error()
}

// serve gives every client a word.
func serve(l net.Listener, word string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		io.WriteString(c, word)
		c.Close()
	}
}

func listen(t *testing.T, network, addr, word string) string {
	t.Helper()
	l, err := net.Listen(network, addr)
	assert.NilError(t, err)
	t.Cleanup(func() { l.Close() })
	go serve(l, word)
	return l.Addr().String()
}

// netCommand is a command with a network that runs the words of TestInside in a
// workspace.
func netCommand(t *testing.T, n sandbox.Network, words ...string) (sandbox.Command, *bytes.Buffer) {
	t.Helper()
	dir := scratchHome(t)
	c := scene(t, dir, sandbox.LevelNamespaces)
	self, err := os.ReadFile("/proc/self/exe")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(dir+"/inside", self, 0o755))
	out := &bytes.Buffer{}
	c.Args = []string{dir + "/inside", "-test.run", "^TestInside$"}
	c.Env = append(c.Env, "SANDBOX_INSIDE="+strings.Join(words, " "))
	c.Network, c.Stdout, c.Stderr = n, out, out
	return c, out
}

func finish(t *testing.T, s *sandbox.Sandbox, c sandbox.Command) sandbox.Result {
	t.Helper()
	p, err := s.Start(context.Background(), c)
	assert.NilError(t, err)
	r, err := p.Wait()
	assert.NilError(t, err)
	return r
}

// inside runs words in a network and gives their lines.
func inside(t *testing.T, n sandbox.Network, words ...string) []string {
	t.Helper()
	c, out := netCommand(t, n, words...)
	r := finish(t, sandbox.New(sandbox.Options{}), c)
	assert.Equal(t, r.ExitCode, 0, "%s%s", out, r.Reason)
	return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
}

func needNamespaces(t *testing.T) {
	t.Helper()
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
}

func TestPrivateNetwork(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	taken := listen(t, "tcp", "127.0.0.1:0", "host")
	listen(t, "unix", "@"+t.Name(), "host")
	_, port, err := net.SplitHostPort(taken)
	assert.NilError(t, err)
	assert.DeepEqual(t, inside(t, "", "dial="+taken, "abstract="+t.Name()),
		[]string{"dial=" + taken + ": host", "abstract=" + t.Name() + ": "})
	assert.DeepEqual(t, inside(t, sandbox.NetworkPrivate, "dial="+taken, "abstract="+t.Name(), "dial=203.0.113.5:80",
		"dial=[2001:db8::5]:80", "lookup=example.invalid", "lookup=localhost", "down", "serve="+taken, "serve=[::1]:"+port,
		"serve=localhost:81", "serve=:80", "interfaces"),
		[]string{
			"dial=" + taken + ": ECONNREFUSED", "abstract=" + t.Name() + ": ECONNREFUSED", "dial=203.0.113.5:80: ENETUNREACH",
			"dial=[2001:db8::5]:80: ENETUNREACH", "lookup=example.invalid: not found", "lookup=localhost: " + localhost(t), "down: EPERM",
			"serve=" + taken + ": mine", "serve=[::1]:" + port + ": mine", "serve=localhost:81: mine", "serve=:80: mine",
			"interfaces: lo,sys/lo",
		})
}

func localhost(t *testing.T) string {
	addrs, err := net.LookupHost("localhost")
	assert.NilError(t, err)
	return strings.Join(addrs, ",")
}

// TestSamePort: several at once take one port, and none hinders another; in the
// host's network the second fails.
func TestSamePort(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			got := inside(t, sandbox.NetworkPrivate, "serve=127.0.0.1:3001", "serve=[::1]:3001")
			assert.Check(t, strings.HasSuffix(got[0], ": mine") && strings.HasSuffix(got[1], ": mine"), "%d: %v", i, got)
		})
	}
	wg.Wait()
}

// TestResolvers: whatever the host's resolver is, C programs that ask for a name
// fail at once, and know localhost.
func TestResolvers(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	for _, prog := range [][]string{
		{"getent", "ahosts", "example.invalid"},
		{"curl", "-sS", "-m", "20", "http://example.invalid/"},
		{"curl", "-sS", "-m", "20", "http://203.0.113.5/"},
		{"python3", "-c", "import socket; socket.create_connection(('example.invalid', 80))"},
	} {
		if _, err := exec.LookPath(prog[0]); err != nil {
			t.Log(err)
			continue
		}
		c, out := netCommand(t, sandbox.NetworkPrivate)
		c.Args = prog
		r := finish(t, sandbox.New(sandbox.Options{}), c)
		assert.Check(t, r.ExitCode != 0 && r.ExitCode < 126 && r.Duration < atOnce, "%v took %v: %d %s", prog, r.Duration, r.ExitCode, out)
	}
	c, out := netCommand(t, sandbox.NetworkPrivate)
	c.Args = []string{"getent", "ahosts", "localhost"}
	r := finish(t, sandbox.New(sandbox.Options{}), c)
	assert.Equal(t, r.ExitCode, 0, out)
	assert.Assert(t, strings.Contains(out.String(), "127.0.0.1") || strings.Contains(out.String(), "::1"), out)
}

// smallSystem is a tree with the given tools and what they need.
func smallSystem(t *testing.T, tree string, tools ...string) {
	t.Helper()
	for _, d := range []string{"proc", "dev", "sys", "run", "tmp", "etc"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(tree, d), 0o755))
	}
	copyTo := func(path string) {
		data, err := os.ReadFile(path)
		assert.NilError(t, err)
		assert.NilError(t, os.MkdirAll(tree+filepath.Dir(path), 0o755))
		assert.NilError(t, os.WriteFile(tree+path, data, 0o755))
	}
	for _, tool := range tools {
		path, err := exec.LookPath(tool)
		assert.NilError(t, err)
		out, err := exec.Command("ldd", path).Output()
		if err != nil {
			t.Skip("ldd: ", err)
		}
		for _, lib := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
			copyTo(lib)
		}
		copyTo(path)
	}
}

// TestPrivateRootfs: in a system of its own localhost is a name too, and its files
// stay as they are.
func TestPrivateRootfs(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	for hosts, want := range map[string]string{
		"":                         "127.0.0.1",
		"10.1.2.3 other\n":         "127.0.0.1",
		"127.9.9.9 x localhost #y": "127.9.9.9",
		"10.0.0.1 h # localhost":   "127.0.0.1",
		"-":                        "",
	} {
		dir := scratchHome(t)
		c := scene(t, dir, sandbox.LevelNamespaces)
		c.View.At, c.Network = "", sandbox.NetworkPrivate
		smallSystem(t, c.View.Tree.Dir, "getent", "ls", "cat", "sh")
		assert.NilError(t, os.WriteFile(c.View.Tree.Dir+"/etc/nsswitch.conf", []byte("hosts: files dns\n"), 0o644))
		file := c.View.Tree.Dir + "/etc/hosts"
		if hosts != "-" {
			assert.NilError(t, os.WriteFile(file, []byte(hosts), 0o644))
		}
		var n notices
		out := &bytes.Buffer{}
		c.Stdout, c.Stderr = out, out
		c.Args = []string{"sh", "-c", "getent ahosts localhost; ls /sys/class/net; cat /etc/hosts"}
		finish(t, sandbox.New(sandbox.Options{Notice: n.add}), c)
		if want == "" {
			assert.Check(t, strings.Contains(strings.Join(n.all(), "\n"), "no /etc/hosts"), "%q", n.all())
			assert.Check(t, !exists(file))
			continue
		}
		assert.Check(t, strings.Contains(out.String(), want+" "), "%q: %s", hosts, out)
		assert.Check(t, strings.Contains(out.String(), "\nlo\n") && strings.Contains(out.String(), hosts), "%q: %s", hosts, out)
		now, err := os.ReadFile(file)
		assert.NilError(t, err)
		assert.Equal(t, string(now), hosts)
		entries, err := os.ReadDir(c.View.Tree.Dir + "/etc")
		assert.NilError(t, err)
		assert.Equal(t, len(entries), 2, "%v", entries)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestNetworkRefused(t *testing.T) {
	var e *sandbox.Error
	for _, n := range []sandbox.Network{sandbox.NetworkPrivate, sandbox.NetworkNAT} {
		assert.Assert(t, errors.As(sandbox.CheckNetwork(sandbox.LevelProcess, n), &e))
		assert.Check(t, strings.Contains(e.Fix, "--isolation namespaces"), e.Error())
	}
	assert.NilError(t, sandbox.CheckNetwork(sandbox.LevelProcess, sandbox.NetworkHost))
	assert.NilError(t, sandbox.CheckNetwork(sandbox.LevelProcess, ""))
}

// TestNoNetworkNamespaces: a limit of 0 is told with the setting, before anything
// runs.
func TestNoNetworkNamespaces(t *testing.T) {
	if os.Getenv("SANDBOX_REFUSED") == "" {
		as(t, inNamespace("SANDBOX_REFUSED=1"), "^TestNoNetworkNamespaces$")
		return
	}
	assert.NilError(t, os.WriteFile("/proc/sys/user/max_net_namespaces", []byte("0"), 0))
	c, _ := netCommand(t, sandbox.NetworkPrivate)
	_, err := sandbox.New(sandbox.Options{}).Start(t.Context(), c)
	assert.ErrorIs(t, err, syscall.ENOSPC)
	assert.ErrorIs(t, err, sandbox.ErrSandbox)
	assert.ErrorContains(t, err, "sysctl user.max_net_namespaces=")
	assert.Equal(t, sandbox.Expected(), sandbox.LevelNamespaces)
	c.Network = ""
	finish(t, sandbox.New(sandbox.Options{}), c)
}

// TestNetworkBounded: also where no further user namespace can be had.
func TestNetworkBounded(t *testing.T) {
	if os.Getenv("SANDBOX_BOUNDED") == "" {
		as(t, inNamespace("SANDBOX_BOUNDED=1"), "^TestNetworkBounded$")
		return
	}
	assert.NilError(t, os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
	TestPrivateNetwork(t)
}

const networkTests = "^(TestPrivateNetwork|TestSamePort|TestResolvers|TestPrivateRootfs|TestNetworkRefused)$"

func TestNetworkAsUser(t *testing.T)          { as(t, ordinaryUser(), networkTests) }
func TestNetworkInUserNamespace(t *testing.T) { as(t, inNamespace(), networkTests) }
