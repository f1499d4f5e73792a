package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/subid"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
)

const (
	nobody = 65534
	// usualGrant is what useradd would give.
	usualGrant = "nobody:200000:65536\n"
	grantVar   = "AGENTENV_TEST_GRANT"
)

// granted runs the test anew where /etc/subuid and /etc/subgid say grant, in a
// mount namespace, and returns true there, with the file that stands for both.
func granted(t *testing.T, grant string) (file string, there bool) {
	if file = os.Getenv(grantVar); file != "" {
		return file, true
	}
	if os.Getuid() != 0 {
		t.Skip("to grant ids needs root")
	}
	for _, need := range []string{"/etc/subuid", "/etc/subgid", "/usr/bin/newuidmap", "/usr/bin/unshare", "/usr/bin/ldd"} {
		if _, err := os.Stat(need); err != nil {
			t.Skipf("%v: the packages uidmap and util-linux have it", err)
		}
	}
	envtest.Census(t)
	file = filepath.Join(t.TempDir(), "grant")
	assert.NilError(t, os.WriteFile(file, []byte(grant), 0o644))
	cmd := exec.Command("unshare", "-m", "sh", "-ec",
		`mount --bind "$0" /etc/subuid; mount --bind "$0" /etc/subgid; exec "$@"`, file,
		os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), grantVar+"="+file)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if bytes.Contains(out, []byte("--- SKIP")) {
		t.Skipf("%s", out)
	}
	return file, false
}

// tinySystem makes a tar of a system of a few of this machine's programs. A file
// in it is of somebody beyond all grants.
func (p *person) tinySystem(t *testing.T) string {
	sys := filepath.Join(t.TempDir(), "sys")
	for _, d := range []string{"etc", "proc", "dev", "sys", "run", "tmp", "bin", "var"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(sys, d), 0o755))
	}
	assert.NilError(t, os.WriteFile(filepath.Join(sys, "etc/resolv.conf"), nil, 0o644))
	for _, name := range []string{"sh", "id", "stat", "chown", "chmod", "mkdir", "touch", "cat", "sleep", "setpriv"} {
		path, err := exec.LookPath(name)
		assert.NilError(t, err)
		copyProgram(t, path, filepath.Join(sys, "bin", name))
		libs, err := exec.Command("ldd", path).Output()
		if err != nil {
			continue // it is static
		}
		for _, word := range strings.Fields(string(libs)) {
			if strings.HasPrefix(word, "/") {
				copyProgram(t, word, filepath.Join(sys, word))
			}
		}
	}
	for name, id := range map[string]int{"etc/theirs": 33, "etc/beyond": 205001} {
		assert.NilError(t, os.WriteFile(filepath.Join(sys, name), []byte(name), 0o600))
		assert.NilError(t, os.Chown(filepath.Join(sys, name), id, id))
	}
	file := filepath.Join(p.home, "sys.tar")
	out, err := exec.Command("tar", "-C", sys, "-cf", file, ".").CombinedOutput()
	assert.NilError(t, err, string(out))
	p.own(t, file)
	return file
}

func copyProgram(t *testing.T, from, to string) {
	data, err := os.ReadFile(from)
	assert.NilError(t, err)
	assert.NilError(t, os.MkdirAll(filepath.Dir(to), 0o755))
	assert.NilError(t, os.WriteFile(to, data, 0o755))
}

// inTiny is a command line on the person's environment.
func (p *person) inTiny(args ...string) []string {
	return append([]string{"--root", filepath.Join(p.home, "root")}, args...)
}

// TestIDs: with ids of his own, an ordinary user's system has users.
func TestIDs(t *testing.T) {
	if _, there := granted(t, usualGrant); !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	tar := p.tinySystem(t)
	for _, backend := range []string{"overlay", "copy"} {
		t.Run(backend, func(t *testing.T) { p.tryIDs(t, backend, tar) })
	}
}

func (p *person) tryIDs(t *testing.T, backend, tar string) {
	agentenv := func(args ...string) string { return p.must(t, p.home, "agentenv", p.inTiny(args...)...) }
	sh := func(script string) string { return agentenv("exec", "--", "sh", "-ec", script) }
	_, said, code := p.run(t, p.home, "agentenv", p.inTiny("--backend", backend, "init", "--tarball", tar)...)
	assert.Equal(t, code, 0, said)
	assert.Assert(t, strings.Contains(said, "(such as 205001): commands see those files (1) as root's"), said)
	first := agentenv("head")

	assert.Equal(t, sh("id -u; stat -c %u:%g /etc/theirs /etc/beyond"), "0\n33:33\n0:0")
	assert.Equal(t, sh("setpriv --reuid 33 --regid 33 --groups 4,33 id -G; setpriv --reuid 33 --regid 33 --clear-groups cat /etc/theirs"), "33 4\netc/theirs")
	sh("echo more >>/etc/beyond; mkdir -p /var/closed/deep; touch /var/closed/deep/f; chown 33 /var/closed; chmod 0 /var/closed /var/closed/deep")
	assert.Equal(t, agentenv("exec", "--fork", "--", "stat", "-c", "%u %a", "/var/closed"), "33 0")
	p.tournament(t, p.home, 0, p.inTiny("--test", "[ $(stat -c %u /var/won) = 65534 ]", "--", "touch /var/won; chown 65534 /var/won", "false")...)
	assert.Equal(t, sh("stat -c %u /var/won"), "65534")
	assert.Equal(t, p.owner(t, "etc/beyond"), [2]uint32{205001, 205001})
	assert.Equal(t, p.owner(t, "var/won"), [2]uint32{65534, 0})
	st := p.status(t, p.home, p.inTiny()...)
	assert.Assert(t, !st.Dirty && st.Kind == env.Rootfs, "%+v", st)

	agentenv("checkout", first)
	assert.Equal(t, sh("stat -c %u:%g /etc/theirs; echo /var/*"), "33:33\n/var/*")
	agentenv("delete", "--all")
	_, err := os.Lstat(filepath.Join(p.home, "root"))
	assert.ErrorIs(t, err, os.ErrNotExist)
}

const (
	ownerName = "agentenv-test-owner"
	outerName = "agentenv-test-owner-of"
)

func init() {
	reexec.Register(outerName, func() {
		m, err := subid.Mine()
		code := 1
		if err == nil {
			code, err = subid.Run(m, os.Stdin, nil, append([]string{ownerName}, os.Args[1:]...)...)
		}
		if err != nil {
			fmt.Println(err)
		}
		os.Exit(code)
	})
	// It tells the owner that HEAD of a root has in the record for a path.
	subid.Register(ownerName, func() {
		err := func() error {
			e, err := env.Open(context.Background(), os.Args[1], env.Options{Backends: all.Backends()})
			if err != nil {
				return err
			}
			defer e.Close()
			v, err := e.View(context.Background(), e.Head().ID)
			if err != nil {
				return err
			}
			defer v.Close()
			var ent forks.Entry
			if ent, err = v.Lookup(os.Args[2]); err == nil {
				fmt.Println(ent.UID, ent.GID)
			}
			return err
		}()
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	})
}

// owner is what HEAD's record says of a path.
func (p *person) owner(t *testing.T, path string) (owner [2]uint32) {
	t.Helper()
	self := filepath.Join(p.home, "bin", "tests")
	if _, err := os.Stat(self); err != nil {
		copyProgram(t, "/proc/self/exe", self)
	}
	cmd := p.command(p.home, self, filepath.Join(p.home, "root"), path)
	cmd.Args[0] = outerName
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, string(out))
	_, err = fmt.Sscan(string(out), &owner[0], &owner[1])
	assert.NilError(t, err, string(out))
	return owner
}

// TestIDsTakenAway: what needs the ids says so when they are gone, and how to get
// them back.
func TestIDsTakenAway(t *testing.T) {
	grant, there := granted(t, usualGrant)
	if !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	p.must(t, p.home, "agentenv", p.inTiny("init", "--tarball", p.tinySystem(t))...)
	assert.NilError(t, os.WriteFile(grant, []byte("nobody:300000:65536\n"), 0o644))
	for _, args := range [][]string{{"head"}, {"exec", "--", "true"}, {"delete", "--all"}} {
		_, said, code := p.run(t, p.home, "agentenv", p.inTiny(args...)...)
		assert.Assert(t, code == 3 || code == 125 && args[0] == "exec", "%d %s", code, said)
		assert.Assert(t, strings.Contains(said, "/etc/subuid does not give nobody the ids 200000-265535 any more"), said)
		assert.Assert(t, strings.Contains(said, "sudo usermod --add-subuids 200000-265535 nobody"), said)
	}
	out, _, code := p.run(t, p.home, "agentenv", p.inTiny("doctor")...)
	assert.Equal(t, code, exitHarness, out)
	for _, want := range []string{"sudo usermod --add-subuids 200000-265535 nobody", "No tournament can run here."} {
		assert.Assert(t, strings.Contains(out, want), out)
	}
	// More ids are no harm; and nobody but he can use it.
	assert.NilError(t, os.WriteFile(grant, []byte("nobody:300000:65536\n"+usualGrant), 0o644))
	p.must(t, p.home, "agentenv", p.inTiny("head")...)
	p.must(t, p.home, "agentenv", p.inTiny("doctor")...)
	p.must(t, p.home, "env", append([]string{"PATH=", filepath.Join(p.home, "bin", "agentenv")}, p.inTiny("head")...)...)
	root := *p
	root.uid = 0
	_, said, code := root.run(t, p.home, "agentenv", p.inTiny("head")...)
	assert.Equal(t, code, 3, said)
	assert.Assert(t, strings.Contains(said, "it is of the user with id 65534, and this is 0"), said)

	// An environment whose history is lost can still be removed.
	assert.NilError(t, os.WriteFile(filepath.Join(p.home, "root", "meta.json"), []byte("{"), 0o600))
	p.must(t, p.home, "agentenv", p.inTiny("delete", "--all")...)
	_, err := os.Lstat(filepath.Join(p.home, "root"))
	assert.ErrorIs(t, err, os.ErrNotExist)
}

// TestWithoutIDs: who has none is told what fails and what mends it.
func TestWithoutIDs(t *testing.T) {
	if _, there := granted(t, "somebody:100000:65536\n"); !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	_, said, code := p.run(t, p.home, "agentenv", p.inTiny("init", "--tarball", p.tinySystem(t))...)
	assert.Equal(t, code, 0, said)
	for _, want := range []string{
		"programs that change their user or a file's owner, such as apt and postgres, fail",
		"(/etc/subuid gives nobody no ids: sudo usermod --add-subuids 165536-231071 --add-subgids 165536-231071 nobody), then `agentenv --root ",
	} {
		assert.Assert(t, strings.Contains(said, want), said)
	}
	assert.Equal(t, p.must(t, p.home, "agentenv", p.inTiny("exec", "--", "sh", "-c", "id -u; chown 33 /etc || echo no")...), "0\nno")
	p.must(t, p.home, "agentenv", p.inTiny("delete", "--all")...)
}

// TestIDsOfDirectory: what a user may read but nobody inside owns keeps its owner,
// also when it is taken in again, as the base of a tournament.
func TestIDsOfDirectory(t *testing.T) {
	if _, there := granted(t, "nobody:300000:65536\n"); !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	sys := filepath.Join(p.home, "sys")
	assert.NilError(t, os.Mkdir(sys, 0o755))
	out, err := exec.Command("tar", "-C", sys, "-xpf", p.tinySystem(t), "--no-same-permissions").CombinedOutput()
	assert.NilError(t, err, string(out))
	odd := filepath.Join(sys, "etc", "odd\xff\n")
	assert.NilError(t, os.WriteFile(odd, nil, 0o644))
	for _, name := range []string{"theirs", "beyond"} {
		assert.NilError(t, os.Chmod(filepath.Join(sys, "etc", name), 0o644))
	}
	assert.NilError(t, os.Chown(odd, 7, 300008)) // 300000 is 1 inside
	p.must(t, p.home, "agentenv", p.inTiny("init", "--from", sys)...)
	want := "0:0 /\n33:33 /etc/theirs\n0:0 /etc/beyond\n7:9 /etc/odd\xff\n"
	assert.Equal(t, p.must(t, p.home, "agentenv", p.inTiny("exec", "--", "sh", "-c", "stat -c '%u:%g %n' / /etc/theirs /etc/beyond /etc/odd*")...), want)
	assert.Equal(t, p.owner(t, "etc/beyond"), [2]uint32{205001, 205001})
	p.tournament(t, p.home, 1, p.inTiny("--base", "dir:"+sys, "--test", "false", "--", "true")...)
	log := p.must(t, p.home, "agentenv", p.inTiny("log")...)
	assert.Equal(t, len(strings.Split(log, "\n")), 1, log) // nothing differed
}

// TestIDsPlanInPipe: a plan that can be read only once is read where it matters.
func TestIDsPlanInPipe(t *testing.T) {
	if _, there := granted(t, usualGrant); !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	tar := p.tinySystem(t)
	p.must(t, p.home, "sh", "-c", "cat "+tar+" | agentenv --root root init --tarball -")
	p.must(t, p.home, "bash", "-c", `agentenv --root root tournament -f <(echo 'candidates: ["chown 33 /var"]'; echo 'test: "[ $(stat -c %u /var) = 33 ]"')`)
	assert.Equal(t, p.owner(t, "var"), [2]uint32{33, 0})
}

// TestIDsSignals: what a user types and sends reaches what runs, once, and
// nothing outlives the process that he sees.
func TestIDsSignals(t *testing.T) {
	if _, there := granted(t, usualGrant); !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	p.must(t, p.home, "agentenv", p.inTiny("init", "--tarball", p.tinySystem(t))...)
	_, _, code := p.run(t, p.home, "agentenv", p.inTiny("exec", "--", "sh", "-c", "kill -SEGV $$")...)
	assert.Equal(t, code, 128+int(unix.SIGSEGV))
	t.Run("killed", p.killedIDs)
	t.Run("typed", p.typedIDs)
	t.Run("killed inside", p.killedInside)
	t.Run("jobs", p.jobsIDs)
}

// killedInside: that the process that does the work was killed is said.
func (p *person) killedInside(t *testing.T) {
	for _, asJSON := range []bool{false, true} {
		cmd := p.command(p.home, "agentenv", p.inTiny(waiting...)...)
		var errs, out bytes.Buffer
		cmd.Stderr = &errs
		from, err := cmd.StdoutPipe()
		if asJSON {
			cmd.Args = slices.Insert(cmd.Args, 1, "--json")
			cmd.Stdout, cmd.Stderr = &out, nil
			from, err = cmd.StderrPipe()
		}
		assert.NilError(t, err)
		assert.NilError(t, cmd.Start())
		_, err = from.Read(make([]byte, 6))
		assert.NilError(t, err)
		assert.NilError(t, syscall.Kill(childOf(t, cmd.Process.Pid), syscall.SIGKILL))
		_ = cmd.Wait() // the status says all
		assert.Equal(t, cmd.ProcessState.ExitCode(), exitOwnFailure)
		said := errs.String()
		if asJSON {
			said = out.String()
			assert.Assert(t, strings.Contains(said, `"code": "internal"`), said)
		}
		assert.Assert(t, strings.Contains(said, "agentenv was killed (SIGKILL)"), said)
	}
}

// jobsIDs: ^Z stops the command itself, and fg lets it go on.
func (p *person) jobsIDs(t *testing.T) {
	out := filepath.Join(p.home, "out")
	assert.NilError(t, os.Mkdir(out, 0o777))
	p.own(t, out)
	s := p.shellIn(t, p.home, "OUT="+out)
	main := filepath.Join(out, "main")
	grows := func() {
		t.Helper()
		was := size(main)
		waitUntil(t, "a tick", func() bool { return size(main) > was })
	}
	s.types(strings.ReplaceAll(`agentenv --root root exec --mount "$OUT:/var:rw" -- sh -c '
trap "echo >>/var/int; exit 9" INT; while :; do echo >>/var/main; sleep 0.02; done'`, "\n", " ") + "\r")
	grows()
	for range 2 {
		s.types("\x1a")
		s.shows("Stopped")
		was := size(main)
		time.Sleep(60 * time.Millisecond)
		assert.Equal(t, size(main), was)
		s.types("fg\r")
		grows()
	}
	s.types("\x03")
	s.shows(`\$ $`)
	s.types("echo code: $?\r")
	s.shows(`code: 9\r`)
	s.types("agentenv --root root exec -- cat & wait; echo over $((40+2))\r")
	s.shows("has no input")
	s.shows("over 42")
}

// waiting is a command that says ready, counts interrupts and ends with their
// number at TERM.
var waiting = []string{"exec", "--no-commit", "--", "sh", "-c",
	`n=0; trap 'n=$((n+1)); echo int$n' INT; trap 'exit $n' TERM; echo ready; while :; do sleep 0.05; done`}

func (p *person) killedIDs(t *testing.T) {
	cmd := p.command(p.home, "agentenv", p.inTiny(waiting...)...)
	out, err := cmd.StdoutPipe()
	assert.NilError(t, err)
	assert.NilError(t, cmd.Start())
	_, err = out.Read(make([]byte, 6))
	assert.NilError(t, err)
	inner := childOf(t, cmd.Process.Pid)
	assert.NilError(t, cmd.Process.Kill())
	assert.ErrorContains(t, cmd.Wait(), "killed")
	waitUntil(t, "the end of the process inside", func() bool { s := stateOf(inner); return s == "" || s == "Z" })
	// The lock is free, and nobody is at work in the tree.
	p.must(t, p.home, "agentenv", p.inTiny("exec", "--", "id")...)
}

func childOf(t *testing.T, pid int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	assert.NilError(t, err)
	for f := range strings.FieldsSeq(string(data)) {
		child, err := strconv.Atoi(f)
		assert.NilError(t, err)
		return child
	}
	// Not the first thread started it.
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	assert.NilError(t, err)
	for _, file := range tasks {
		data, _ := os.ReadFile(file) // a thread may be gone
		for f := range strings.FieldsSeq(string(data)) {
			child, err := strconv.Atoi(f)
			assert.NilError(t, err)
			return child
		}
	}
	t.Fatalf("%d has no child", pid)
	return 0
}

func (p *person) typedIDs(t *testing.T) {
	s := &shell{t: t, cmd: p.command(p.home, "agentenv", p.inTiny(waiting...)...)}
	var err error
	s.tty, err = pty.Start(s.cmd)
	assert.NilError(t, err)
	defer s.tty.Close()
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4096)
		for {
			n, err := s.tty.Read(buf)
			s.mu.Lock()
			s.out.Write(buf[:n])
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	s.shows("ready")
	inner := childOf(t, s.cmd.Process.Pid)
	s.types("\x03")
	s.shows("int1")
	s.types("\x1a") // nobody could continue it
	time.Sleep(100 * time.Millisecond)
	assert.Assert(t, !stopped(s.cmd.Process.Pid) && !stopped(inner))
	s.types("\x03")
	s.shows("int2")
	assert.NilError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	assert.ErrorContains(t, s.cmd.Wait(), "exit status 2")
	<-read
	assert.Assert(t, !strings.Contains(s.shown(), "int3"), s.shown())
}

func stopped(pid int) bool { return stateOf(pid) == "T" }

// stateOf is the letter of proc(5) for a process, or "" if it is gone.
func stateOf(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, _ := strings.Cut(string(data), ") ")
	if err != nil || after == "" {
		return ""
	}
	return after[:1]
}

// TestIDsDebian: apt, which changes its user and its groups, and what packages do
// to owners, work in a real system of an ordinary user.
func TestIDsDebian(t *testing.T) {
	long(t)
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("dpkg-deb is not installed")
	}
	tarball := ""
	if os.Getenv(grantVar) == "" {
		tarball = debianTar(t)
		t.Setenv("AGENTENV_TEST_TARBALL", tarball)
	}
	if _, there := granted(t, usualGrant); !there {
		return
	}
	p := newPerson(t, "nobody", nobody)
	copyProgram(t, os.Getenv("AGENTENV_TEST_TARBALL"), filepath.Join(p.home, "sys.tar"))
	p.must(t, p.home, "agentenv", p.inTiny("init", "--tarball", "sys.tar")...)
	build := t.TempDir()
	for _, name := range []string{"first", "second"} {
		control := "Package: " + name + "\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
		assert.NilError(t, os.MkdirAll(filepath.Join(build, name, "DEBIAN"), 0o755))
		assert.NilError(t, os.WriteFile(filepath.Join(build, name, "DEBIAN", "control"), []byte(control), 0o644))
		script := "#!/bin/sh\nset -e\nmkdir -p /var/lib/" + name + "\nchown games:mail /var/lib/" + name + "\nchmod 700 /var/lib/" + name + "\n"
		assert.NilError(t, os.WriteFile(filepath.Join(build, name, "DEBIAN", "postinst"), []byte(script), 0o755))
		out, err := exec.Command("dpkg-deb", "--root-owner-group", "-b", filepath.Join(build, name), filepath.Join(p.home, name+".deb")).CombinedOutput()
		assert.NilError(t, err, string(out))
		deb, err := os.ReadFile(filepath.Join(p.home, name+".deb"))
		assert.NilError(t, err)
		index := fmt.Sprintf("%sFilename: ./%s.deb\nSize: %d\nSHA256: %x\n", control, name, len(deb), sha256.Sum256(deb))
		assert.NilError(t, os.WriteFile(filepath.Join(p.home, "Packages"), []byte(index), 0o644))
	}
	p.own(t, p.home)
	got := p.must(t, p.home, "agentenv", p.inTiny("exec", "--mount", p.home+":/srv:ro", "--", "sh", "-ec", `
		echo 'deb [trusted=yes] file:/srv ./' >/etc/apt/sources.list
		apt-get update -q >/dev/null
		apt-get install -y -q second /srv/first.deb >/dev/null 2>&1
		stat -c '%U:%G %a' /var/lib/first /var/lib/second
		su nobody -s /bin/sh -c id`)...)
	assert.Equal(t, got, "games:mail 700\ngames:mail 700\nuid=65534(nobody) gid=65534(nogroup) groups=65534(nogroup)")
	p.must(t, p.home, "agentenv", p.inTiny("delete", "--all")...)
	_, err := os.Lstat(filepath.Join(p.home, "root"))
	assert.ErrorIs(t, err, os.ErrNotExist)
}
