package sandbox_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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

// The tests of the way out never use the machine's network. Each runs in a network
// namespace that plays the host; a second one plays the world, beside it on a pair
// of devices. The addresses are those for documentation and private use.
const (
	hostAddr   = "10.99.0.2"
	worldGate  = "10.99.0.1"
	worldAddr  = "203.0.113.5"
	worldDNS   = "203.0.113.53"
	stubDNS    = "127.0.0.53"
	worldWord  = "world"
	loopback   = "127.0.0.1:8001" // a service of the host for itself
	everywhere = "0.0.0.0:8002"   // one for all
)

// stage says which part of a test a process plays.
func stage() string { return os.Getenv("SANDBOX_STAGE") }

// asHost runs the test itself again as the host of a small world.
func asHost(t *testing.T, env ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making a world needs root")
	}
	for _, tool := range []string{"ip", "nft"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(append(os.Environ(), "SANDBOX_STAGE=host"), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, string(out))
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "--- SKIP") || strings.Contains(line, "not installed") {
			t.Log(strings.TrimSpace(line))
		}
	}
}

// beHost makes the world and the host's own services. The host's resolver is dns.
func beHost(t *testing.T, dns string) {
	t.Helper()
	assert.NilError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	assert.NilError(t, os.WriteFile(conf, []byte("search example\nnameserver "+dns+"\n"), 0o644))
	if err := unix.Mount(conf, "/etc/resolv.conf", "", unix.MS_BIND, ""); err != nil {
		t.Skip("/etc/resolv.conf: ", err)
	}
	t.Cleanup(func() { assert.NilError(t, unix.Unmount("/etc/resolv.conf", unix.MNT_DETACH)) })
	world := exec.Command("/proc/self/exe", "-test.run", "^TestWorld$")
	world.Env = append(os.Environ(), "SANDBOX_STAGE=world")
	world.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	in, err := world.StdinPipe()
	assert.NilError(t, err)
	out, err := world.StdoutPipe()
	assert.NilError(t, err)
	assert.NilError(t, world.Start())
	t.Cleanup(func() { in.Close(); world.Wait() })
	ip(t, "link set lo up")
	ip(t, "link add inet0 type veth peer name e0 netns "+strconv.Itoa(world.Process.Pid))
	ip(t, "addr add "+hostAddr+"/24 dev inet0")
	ip(t, "link set inet0 up")
	ip(t, "route add default via "+worldGate)
	fmt.Fprintln(in, "go")
	line, err := bufio.NewReader(out).ReadString('\n')
	assert.NilError(t, err)
	assert.Equal(t, line, "ready\n")
	assert.NilError(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	listen(t, "tcp", loopback, "host")
	listen(t, "tcp", everywhere, "host")
	if dns == stubDNS {
		l, err := net.ListenPacket("udp", net.JoinHostPort(stubDNS, "53"))
		assert.NilError(t, err)
		t.Cleanup(func() { l.Close() })
		go answer(l)
	}
}

func ip(t *testing.T, args string) {
	t.Helper()
	out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput()
	assert.NilError(t, err, "ip %s: %s", args, out)
}

// TestWorld is no test but the world: it serves a word and names until its input
// ends.
func TestWorld(t *testing.T) {
	if stage() != "world" {
		t.Skip("only run by the tests of the way out")
	}
	in := bufio.NewReader(os.Stdin)
	_, err := in.ReadString('\n')
	assert.NilError(t, err)
	for _, args := range []string{"link set lo up", "link set e0 up", "addr add " + worldGate + "/24 dev e0",
		"addr add " + worldAddr + "/32 dev lo", "addr add " + worldDNS + "/32 dev lo"} {
		ip(t, args)
	}
	listen(t, "tcp", worldAddr+":80", worldWord)
	l, err := net.ListenPacket("udp", worldDNS+":53")
	assert.NilError(t, err)
	go answer(l)
	fmt.Println("ready")
	io.Copy(io.Discard, in)
	os.Exit(0)
}

// answer is a server of names: each has the address worldAddr, and none of IPv6
// (RFC 1035, 4.1).
func answer(l net.PacketConn) {
	buf := make([]byte, 512)
	for {
		n, from, err := l.ReadFrom(buf)
		if err != nil {
			return
		}
		if n < 17 {
			continue
		}
		end := 12 // of the question
		for end < n && buf[end] != 0 {
			end += int(buf[end]) + 1
		}
		end += 5
		if end > n {
			continue
		}
		reply := append([]byte{buf[0], buf[1], 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}, buf[12:end]...)
		if buf[end-3] == 1 {
			reply[7] = 1
			reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
			reply = append(reply, net.ParseIP(worldAddr).To4()...)
		}
		l.WriteTo(reply, from)
	}
}

// natTools are the ways out, and the programs that PATH has to have for each.
var natTools = map[string][]string{"pasta": {"pasta"}, "slirp4netns": {"slirp4netns"}, "veth and nftables": {"ip", "nft"}}

// onlyTool leaves but one way out.
func onlyTool(t *testing.T, tool string) {
	t.Helper()
	dir := t.TempDir()
	assert.NilError(t, os.Chmod(filepath.Dir(dir), 0o755))
	for _, prog := range natTools[tool] {
		path, err := exec.LookPath(prog)
		if err != nil {
			t.Skip(prog, " is not installed")
		}
		assert.NilError(t, os.Symlink(path, filepath.Join(dir, prog)))
	}
	t.Setenv("PATH", dir)
	sandbox.OnlyPath(t)
	if got, err := sandbox.NATTool(); got != tool {
		t.Skipf("%q is found instead, %v", got, err)
	}
}

// TestWayOut: with nat a command reaches the world and its names, and neither is
// the host reached from inside nor the command from the host.
func TestWayOut(t *testing.T) {
	switch stage() {
	case "":
		asHost(t, "SANDBOX_DNS="+worldDNS)
		asHost(t, "SANDBOX_DNS="+stubDNS)
	case "host":
		beHost(t, os.Getenv("SANDBOX_DNS"))
		t.Run("root", testTools)
		if os.Getenv("SANDBOX_DNS") == stubDNS {
			return // who it is makes no difference to the resolver
		}
		t.Run("user", func(t *testing.T) {
			who := ordinaryUser()
			who.env = []string{"SANDBOX_STAGE=check", "SANDBOX_DNS=" + os.Getenv("SANDBOX_DNS")}
			as(t, who, "^TestWayOut$")
		})
		t.Run("namespace", func(t *testing.T) {
			as(t, inNamespace("SANDBOX_STAGE=check", "SANDBOX_DNS="+os.Getenv("SANDBOX_DNS")), "^TestWayOut$")
		})
	case "check":
		testTools(t)
	}
}

func testTools(t *testing.T) {
	for tool := range natTools {
		t.Run(tool, func(t *testing.T) {
			onlyTool(t, tool)
			envtest.Census(t)
			testWayOut(t, tool)
		})
	}
}

func testWayOut(t *testing.T, tool string) {
	if tool == "veth and nftables" && os.Getenv("SANDBOX_DNS") == stubDNS {
		t.Skip("the kernel cannot forward to the host's own resolver")
	}
	_, all, _ := net.SplitHostPort(everywhere)
	_, own, _ := net.SplitHostPort(loopback)
	gate := worldGate
	if tool == "slirp4netns" {
		gate = "10.0.2.2" // it would be the host's loopback, were it not told otherwise
	}
	got := inside(t, sandbox.NetworkNAT, "dial="+worldAddr+":80", "lookup=some.example", "lookup=localhost",
		"try="+loopback, "try="+gate+":"+own, "try="+hostAddr+":"+own, "serve="+loopback, "down", "dial="+hostAddr+":"+all)
	last := got[len(got)-1]
	assert.DeepEqual(t, got[:3], []string{"dial=" + worldAddr + ":80: " + worldWord, "lookup=some.example: " + worldAddr, "lookup=localhost: " + localhost(t)})
	for _, line := range got[3:6] {
		assert.Check(t, !strings.Contains(line, ": host"), line)
	}
	assert.DeepEqual(t, got[6:8], []string{"serve=" + loopback + ": mine", "down: EPERM"})
	// What the host serves to everybody slirp reaches, as any neighbour does.
	assert.Check(t, strings.HasSuffix(last, ": host") == (tool == "slirp4netns"), last)
}

// TestManyWaysOut: 16 at once, and nothing of them is left.
func TestManyWaysOut(t *testing.T) {
	if stage() == "" {
		asHost(t)
		return
	}
	beHost(t, worldDNS)
	for tool := range natTools {
		t.Run(tool, func(t *testing.T) {
			onlyTool(t, tool)
			envtest.Census(t)
			before := hostState(t)
			var wg sync.WaitGroup
			for range 16 {
				wg.Go(func() {
					got := inside(t, sandbox.NetworkNAT, "dial="+worldAddr+":80", "serve=0.0.0.0:80")
					assert.Check(t, strings.HasSuffix(got[0], worldWord) && strings.HasSuffix(got[1], "mine"), "%v", got)
				})
			}
			wg.Wait()
			sameState(t, before)
		})
	}
}

// hostState is what a way out could leave on a host.
func hostState(t *testing.T) []string {
	t.Helper()
	var found []string
	list, err := net.Interfaces()
	assert.NilError(t, err)
	for _, i := range list {
		found = append(found, i.Name)
	}
	rules, err := exec.Command("/usr/sbin/nft", "list", "tables").CombinedOutput()
	assert.NilError(t, err, string(rules))
	found = append(found, string(rules))
	spaces, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, s := range spaces {
		if to, err := os.Readlink(s); err == nil && ours(s) {
			found = append(found, to)
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// ours says whether a process is one of this test, or of a way out; other tests
// run beside this one.
func ours(file string) bool {
	line, _ := os.ReadFile(filepath.Join("/proc", strings.Split(file, "/")[2], "environ"))
	return bytes.Contains(line, []byte("SANDBOX_STAGE=")) && !bytes.Contains(line, []byte("SANDBOX_STAGE=world"))
}

// sameState waits for the kernel, which takes namespaces apart in its own time,
// and for nothing else.
func sameState(t *testing.T, before []string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		now := hostState(t)
		if slices.Equal(before, now) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("left over: %v, was %v", now, before)
		}
	}
}

// TestWayOutVictim is what TestWayOutKilled kills.
func TestWayOutVictim(t *testing.T) {
	if stage() != "victim" {
		t.Skip("only run by TestWayOutKilled")
	}
	sandbox.OnlyPath(t)
	for i := range 3 {
		c := scene(t, filepath.Join(os.Getenv("SANDBOX_VICTIM"), strconv.Itoa(i)), sandbox.LevelNamespaces)
		c.Network, c.Args = sandbox.NetworkNAT, []string{"/bin/sleep", "1000"}
		go sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	}
	time.Sleep(time.Hour)
}

// TestWayOutKilled: whenever agentenv is killed, its forwarders end.
func TestWayOutKilled(t *testing.T) {
	rounds := 4
	if envtest.Long() {
		rounds = 100
	}
	if stage() == "" {
		asHost(t)
		return
	}
	beHost(t, worldDNS)
	for tool := range natTools {
		t.Run(tool, func(t *testing.T) {
			onlyTool(t, tool)
			before := hostState(t)
			for round := range rounds {
				dir := scratchHome(t)
				cmd := exec.Command("/proc/self/exe", "-test.run", "^TestWayOutVictim$")
				cmd.Env = append(os.Environ(), "SANDBOX_STAGE=victim", "SANDBOX_VICTIM="+dir)
				assert.NilError(t, cmd.Start())
				time.Sleep(time.Duration(rand.IntN(200)) * time.Millisecond)
				if round%2 == 1 {
					stopBelow("agentenv-nat") // as Freeze does
				}
				assert.NilError(t, cmd.Process.Kill())
				_ = cmd.Wait()
				for end := time.Now().Add(10 * time.Second); len(forwarders()) > 0; time.Sleep(2 * time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("left over: %v", forwarders())
					}
				}
				sameState(t, before)
			}
		})
	}
}

// stopBelow stops what is below processes of that name.
func stopBelow(name string) {
	for _, f := range forwarders() {
		if file, n, _ := strings.Cut(f, " "); n == name {
			pid, _ := strconv.Atoi(strings.Split(file, "/")[2])
			for _, p := range sandbox.Descendants(pid) {
				_ = syscall.Kill(p, syscall.SIGSTOP) // an error means that it is gone
			}
		}
	}
}

// forwarders lists the processes of ways out in this network namespace.
func forwarders() []string {
	mine, _ := os.Readlink("/proc/self/ns/net")
	var found []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		line, _ := os.ReadFile(f)
		name := filepath.Base(string(bytes.TrimRight(bytes.SplitN(line, []byte{0}, 2)[0], "\x00")))
		in, err := os.Readlink(filepath.Join(filepath.Dir(f), "ns/net"))
		if err == nil && in == mine && slices.Contains([]string{"agentenv-nat", "pasta", "passt", "pasta.avx2", "slirp4netns", "nft"}, name) {
			found = append(found, f+" "+name)
		}
	}
	return found
}

// TestForwarderIsApart: the command sees no process of its way out, and the host
// no port of the command.
func TestForwarderIsApart(t *testing.T) {
	if stage() == "" {
		asHost(t)
		return
	}
	beHost(t, worldDNS)
	for tool := range natTools {
		t.Run(tool, func(t *testing.T) {
			onlyTool(t, tool)
			envtest.Census(t)
			c, out := netCommand(t, sandbox.NetworkNAT, "hold=0.0.0.0:8003")
			p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
			assert.NilError(t, err)
			for range 100 {
				for _, a := range []string{"127.0.0.1", hostAddr, "::1"} {
					conn, err := net.Dial("tcp", net.JoinHostPort(a, "8003"))
					if err == nil {
						conn.Close()
					}
					assert.Check(t, err != nil, "the host reached port 8003 of the command at %s", a)
				}
				time.Sleep(2 * time.Millisecond)
			}
			p.Stop(0)
			_, err = p.Wait()
			assert.NilError(t, err)
			seen := strings.Fields(strings.Trim(strings.TrimPrefix(strings.TrimSpace(out.String()), "PIDs"), " []"))
			assert.Check(t, len(seen) == 2 && seen[0] == "1", "the command sees more than its init and itself: %s", out)
		})
	}
}

// TestWayOutRootfs: in a system of its own a command finds a resolver that works
// there, and the tree stays as it is.
func TestWayOutRootfs(t *testing.T) {
	if stage() == "" {
		asHost(t)
		return
	}
	beHost(t, worldDNS)
	if _, err := sandbox.NATTool(); err != nil {
		t.Skip(err)
	}
	envtest.Census(t)
	for name, link := range map[string]string{"file": "", "link": "../run/systemd/resolve/stub-resolv.conf", "link of old": "/var/run/resolv.conf"} {
		dir := scratchHome(t)
		c := scene(t, dir, sandbox.LevelNamespaces)
		c.View.At, c.Network = "", sandbox.NetworkNAT
		smallSystem(t, c.View.Tree.Dir, "getent", "sh")
		assert.NilError(t, os.MkdirAll(c.View.Tree.Dir+"/var", 0o755))
		assert.NilError(t, os.Symlink("/run", c.View.Tree.Dir+"/var/run"))
		assert.NilError(t, os.WriteFile(c.View.Tree.Dir+"/etc/hosts", nil, 0o644))
		assert.NilError(t, os.WriteFile(c.View.Tree.Dir+"/etc/nsswitch.conf", []byte("hosts: files dns\n"), 0o644))
		conf := c.View.Tree.Dir + "/etc/resolv.conf"
		if link == "" {
			assert.NilError(t, os.WriteFile(conf, []byte("tree"), 0o644))
		} else {
			assert.NilError(t, os.Symlink(link, conf))
		}
		out := &bytes.Buffer{}
		c.Stdout, c.Stderr, c.Args = out, out, []string{"sh", "-c", "getent ahosts some.example && getent ahosts localhost"}
		r := finish(t, sandbox.New(sandbox.Options{}), c)
		assert.Check(t, r.ExitCode == 0 && strings.Contains(out.String(), worldAddr) && strings.Contains(out.String(), "127.0.0.1"), "%s: %d %s", name, r.ExitCode, out)
		if now, err := os.Readlink(conf); link != "" {
			assert.Check(t, err == nil && now == link)
		} else {
			now, err := os.ReadFile(conf)
			assert.Check(t, err == nil && string(now) == "tree", "%s", now)
		}
	}
}

// fakeTools has programs in PATH, and no others: scripts, or the real ones.
func fakeTools(t *testing.T, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, script := range scripts {
		if script == "" {
			path, err := exec.LookPath(name)
			if err != nil {
				t.Skip(name, " is not installed")
			}
			assert.NilError(t, os.Symlink(path, filepath.Join(dir, name)))
			continue
		}
		assert.NilError(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	t.Setenv("PATH", dir)
	sandbox.OnlyPath(t)
	if _, err := sandbox.NATTool(); err != nil {
		t.Skip(err)
	}
}

// newPasta is the version of a pasta that is preferred.
const newPasta = `[ "$1" = --version ] && echo pasta 2099_01_01.abcdef && exit; `

// TestForwarderFails: what the programs say is told, and the command does not run.
func TestForwarderFails(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	fakeTools(t, map[string]string{"pasta": newPasta + `echo "no uplink at all" for $* >&2; exit 1`, "slirp4netns": "echo nor here >&2; kill -9 $$"})
	c, _ := netCommand(t, sandbox.NetworkNAT)
	c.Args = []string{"/bin/sh", "-c", "touch " + c.View.At + "/ran"}
	_, err := sandbox.New(sandbox.Options{}).Start(t.Context(), c)
	assert.ErrorIs(t, err, sandbox.ErrSandbox)
	assert.ErrorContains(t, err, "pasta: exit status 1: no uplink at all")
	assert.ErrorContains(t, err, "slirp4netns: it ended before it was ready: nor here")
	if exists("/run/user") { // as the profile of AppArmor has it
		assert.ErrorContains(t, err, "--netns /run/user/0/netns/")
	}
	assert.Check(t, !exists(c.View.Tree.Dir+"/ran"))
	_, terr := sandbox.TryNAT()
	assert.Error(t, terr, err.Error())
}

// TestForwarderFallsBack: if a program does not work, the next does, with its
// resolver, and the user is told.
func TestForwarderFallsBack(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	fakeTools(t, map[string]string{"pasta": newPasta + "echo not allowed >&2; exit 1", "slirp4netns": ""})
	if first, _ := sandbox.NATTool(); first != "pasta" {
		t.Skip("this machine has no default route")
	}
	c, out := netCommand(t, sandbox.NetworkNAT)
	c.Args = []string{"/bin/cat", "/etc/resolv.conf", "/proc/net/dev"}
	var n notices
	p, err := sandbox.New(sandbox.Options{Notice: n.add}).Start(t.Context(), c)
	if err != nil && strings.Contains(err.Error(), "slirp4netns: ") {
		t.Skip("slirp4netns does not work here either: ", err)
	}
	assert.NilError(t, err)
	_, err = p.Wait()
	assert.NilError(t, err)
	assert.Check(t, strings.Contains(out.String(), "tap0:"), out)
	if host, _ := os.ReadFile("/etc/resolv.conf"); strings.Contains(string(host), "nameserver 1") {
		assert.Check(t, strings.Contains(out.String(), "nameserver 10.0.2.3"), out)
	}
	assert.Check(t, len(n.all()) == 1 && strings.Contains(n.all()[0], "by slirp4netns, for others do not work here: pasta: exit status 1: not allowed"), "%q", n.all())
}

// TestTryNAT: trying leaves nothing.
func TestTryNAT(t *testing.T) {
	needNamespaces(t)
	envtest.Census(t)
	before := forwarders()
	tool, err := sandbox.TryNAT()
	if err != nil {
		t.Skip(err)
	}
	_, known := natTools[tool]
	assert.Check(t, known, tool)
	assert.DeepEqual(t, forwarders(), before)
}

// TestNoDefaultRoute: a pasta that needs one is refused before anything starts,
// and what needs none is used.
func TestNoDefaultRoute(t *testing.T) {
	if stage() == "" {
		asHost(t)
		return
	}
	assert.NilError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	t.Run("pasta", func(t *testing.T) {
		envtest.Census(t)
		fakeTools(t, map[string]string{"pasta": "echo External interface not usable >&2; exit 1"})
		err := sandbox.CheckNetwork(sandbox.LevelNamespaces, sandbox.NetworkNAT)
		assert.ErrorContains(t, err, "no default route")
		assert.ErrorContains(t, err, "External interface not usable")
		assert.ErrorContains(t, err, "apt install slirp4netns")
	})
	t.Run("both", func(t *testing.T) {
		envtest.Census(t)
		fakeTools(t, map[string]string{"pasta": newPasta + "exit 1", "slirp4netns": ""})
		assert.NilError(t, sandbox.CheckNetwork(sandbox.LevelNamespaces, sandbox.NetworkNAT))
		var n notices
		c, _ := netCommand(t, sandbox.NetworkNAT)
		c.Args = []string{"/bin/true"}
		r := finish(t, sandbox.New(sandbox.Options{Notice: n.add}), c)
		assert.Check(t, r.ExitCode == 0 && len(n.all()) == 0, "%d %q", r.ExitCode, n.all())
	})
}

// TestForwarderEnds: if the way out is lost, the user is told, and the command goes
// on.
func TestForwarderEnds(t *testing.T) {
	if stage() == "" {
		asHost(t)
		return
	}
	beHost(t, worldDNS)
	for tool, progs := range natTools {
		t.Run(tool, func(t *testing.T) {
			onlyTool(t, tool)
			envtest.Census(t)
			var n notices
			c, _ := netCommand(t, sandbox.NetworkNAT)
			c.Args = []string{"/bin/sleep", "1000"}
			p, err := sandbox.New(sandbox.Options{Notice: n.add}).Start(context.Background(), c)
			assert.NilError(t, err)
			defer func() { p.Stop(0); p.Wait() }()
			for _, f := range forwarders() {
				file, name, _ := strings.Cut(f, " ")
				if strings.HasPrefix(name, progs[len(progs)-1]) {
					pid, err := strconv.Atoi(strings.Split(file, "/")[2])
					assert.NilError(t, err)
					assert.NilError(t, syscall.Kill(pid, syscall.SIGKILL))
				}
			}
			for end := time.Now().Add(5 * time.Second); len(n.all()) == 0 && time.Now().Before(end); {
				time.Sleep(5 * time.Millisecond)
			}
			assert.Assert(t, len(n.all()) == 1 && strings.Contains(n.all()[0], tool+" ended"), "%q", n.all())
		})
	}
}
