package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// shell is an interactive bash on a terminal of its own.
type shell struct {
	t   *testing.T
	cmd *exec.Cmd
	tty *os.File
	mu  sync.Mutex
	out bytes.Buffer
}

// newShell starts one for a person who has an environment and a directory, $OUT,
// that commands may write to.
func newShell(t *testing.T, p *person) (*shell, string) {
	src, out := smallEnvironment(t, p), filepath.Join(p.home, "out")
	assert.NilError(t, os.Mkdir(out, 0o755))
	p.own(t, out)
	return p.shellIn(t, src, "OUT="+out), out
}

// shellIn starts one in a directory.
func (p *person) shellIn(t *testing.T, dir string, env ...string) *shell {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not installed")
	}
	s := &shell{t: t, cmd: p.command(dir, bash, "--norc", "--noprofile", "-i")}
	s.cmd.Env = append(s.cmd.Env, append(env, "TERM=dumb", "PS1=$ ")...)
	s.tty, err = pty.Start(s.cmd)
	assert.NilError(t, err)
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
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.tty.Close()
		<-read
		if t.Failed() {
			t.Logf("the shell showed:\n%s", s.shown())
		}
	})
	return s
}

// smallEnvironment gives the person an environment of one file, and returns the
// directory that it is of.
func smallEnvironment(t *testing.T, p *person) string {
	src := filepath.Join(p.home, "src")
	assert.NilError(t, os.Mkdir(src, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(src, "f"), []byte("f"), 0o644))
	p.own(t, src)
	p.must(t, src, "agentenv", "init", "--from", ".")
	return src
}

func (s *shell) shown() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.String()
}

// types types keys.
func (s *shell) types(keys string) {
	s.t.Helper()
	_, err := s.tty.WriteString(keys)
	assert.NilError(s.t, err)
}

// shows waits until what came since the last call matches.
func (s *shell) shows(pattern string) {
	s.t.Helper()
	re := regexp.MustCompile(pattern)
	waitUntil(s.t, pattern, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		at := re.FindIndex(s.out.Bytes())
		if at != nil {
			s.out.Next(at[1])
		}
		return at != nil
	})
}

func waitUntil(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// size is that of a file, 0 if there is none.
func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// ticking is a command that writes to $OUT without end, and so does a child that
// left its session. It counts the interrupts.
const ticking = `agentenv exec --mount "$OUT:/mnt:rw" -- sh -c '
setsid sh -c "while :; do echo >>/mnt/child; sleep 0.02; done" &
trap "echo >>/mnt/int; exit 9" INT; while :; do echo >>/mnt/main; sleep 0.02; done'` + "\r"

// TestJobControl: ^Z stops the command and everything it started, fg and bg
// let it go on, and ^C reaches it once.
func TestJobControl(t *testing.T) {
	asEach(t, func(t *testing.T, p *person) {
		envtest.Census(t)
		s, out := newShell(t, p)
		files := []string{filepath.Join(out, "main"), filepath.Join(out, "child")}
		grows := func() {
			t.Helper()
			for _, f := range files {
				was := size(f)
				waitUntil(t, f+" grows", func() bool { return size(f) > was })
			}
		}
		stands := func() {
			t.Helper()
			for _, f := range files {
				was := size(f)
				time.Sleep(60 * time.Millisecond)
				assert.Equal(t, size(f), was, f)
			}
		}
		s.types(ticking)
		grows()
		s.types("\x1a")
		s.shows(`\[1\]\+ +Stopped`)
		stands()
		s.types("fg\r")
		grows()
		s.types("\x1a")
		s.shows(`\[1\]\+ +Stopped`)
		stands()
		s.types("bg\r")
		grows()
		s.types("echo \"here: $((40+2))\"; fg\r")
		s.shows("here: 42")
		grows()
		s.types("\x03")
		s.shows(`\$ $`)
		s.types("echo code: $?\r")
		s.shows(`code: 9\r`)
		assert.Equal(t, size(filepath.Join(out, "int")), int64(1))
	})
}

// TestStoppedJobEnds: a stopped job can be ended, also with KILL.
func TestStoppedJobEnds(t *testing.T) {
	asEach(t, func(t *testing.T, p *person) {
		envtest.Census(t)
		s, out := newShell(t, p)
		for _, signal := range []string{"TERM", "KILL"} {
			was := size(filepath.Join(out, "child"))
			s.types(ticking)
			waitUntil(t, "a tick", func() bool { return size(filepath.Join(out, "child")) > was })
			s.types("\x1a")
			s.shows(`Stopped`)
			s.types("kill -" + signal + " %1\r")
			waitUntil(t, "all are gone", func() bool { return len(sandbox.Descendants(s.cmd.Process.Pid)) == 0 })
		}
	})
}

// TestStoppedWithoutShell: where no shell could continue it, TSTP stops nothing.
func TestStoppedWithoutShell(t *testing.T) {
	asEach(t, func(t *testing.T, p *person) {
		envtest.Census(t)
		src := smallEnvironment(t, p)
		out := p.must(t, src, "setsid", "-w", "sh", "-c", strings.TrimSpace(`
agentenv exec -- sh -c 'sleep 1; echo done' & sleep 0.5; kill -TSTP $!; wait $!`))
		assert.Equal(t, out, "done")
	})
}

// TestBackgroundInput: a command in the background leaves what is typed to the
// shell, and one in the foreground gets it.
func TestBackgroundInput(t *testing.T) {
	asEach(t, func(t *testing.T, p *person) {
		envtest.Census(t)
		s, out := newShell(t, p)
		s.types(`agentenv exec --mount "$OUT:/mnt:rw" -- sh -c 'cat >/mnt/typed; stty -echo; sleep 0.3' & wait; echo over $((40+2))` + "\r")
		s.types("echo mine $((40+2))\r")
		s.shows("has no input")
		s.shows("over 42")
		s.shows("mine 42")
		assert.Equal(t, size(filepath.Join(out, "typed")), int64(0))
		s.types("agentenv exec -- cat\r")
		time.Sleep(300 * time.Millisecond)
		s.types("a line\r\x04")
		s.shows("a line\r\na line\r\n")
	})
}

// TestCommandThatStays: one that heeds no signal is killed when agentenv was asked
// to end; a first HUP, and ^C, are its own.
func TestCommandThatStays(t *testing.T) {
	envtest.Census(t)
	p := newPerson(t, "self", os.Getuid())
	src := smallEnvironment(t, p)
	const stays = `trap "" TERM; trap "echo HUP" HUP; trap "echo INT" INT; echo ready; while :; do sleep 0.05; done`
	start := func(prefix ...string) (*exec.Cmd, <-chan string) {
		args := append(prefix, "agentenv", "exec", "--fork", "--", "sh", "-c", stays)
		cmd := p.command(src, args[0], args[1:]...)
		r, w, err := os.Pipe()
		assert.NilError(t, err)
		defer w.Close()
		cmd.Stdout, cmd.Stderr = w, w
		assert.NilError(t, cmd.Start())
		buf := make([]byte, 6)
		_, err = io.ReadFull(r, buf)
		assert.NilError(t, err)
		assert.Equal(t, string(buf), "ready\n")
		t.Cleanup(func() { r.Close() })
		rest := make(chan string, 1)
		go func() {
			out, _ := io.ReadAll(r) // what came before it was closed
			rest <- string(out)
		}()
		return cmd, rest
	}
	began := time.Now()
	byTimeout, _ := start("timeout", "0.5")
	twice, _ := start()
	reload, said := start()
	for range 2 {
		assert.NilError(t, twice.Process.Signal(unix.SIGHUP))
		time.Sleep(100 * time.Millisecond)
	}
	assert.NilError(t, reload.Process.Signal(unix.SIGHUP))
	for range 2 {
		time.Sleep(100 * time.Millisecond)
		assert.NilError(t, reload.Process.Signal(unix.SIGINT))
	}
	window := openWindow(t, p, src, "agentenv", "exec", "--fork", "--", "sh", "-c", `trap "" HUP TERM; echo ready; while :; do sleep 0.05; done`)
	window.see(1, "ready")
	assert.NilError(t, window.keys.Close())
	for cmd, code := range map[*exec.Cmd]int{byTimeout: 124, twice: 137, window.cmd: 137} {
		_ = cmd.Wait() // the status says all
		assert.Equal(t, cmd.ProcessState.ExitCode(), code, cmd.Args)
	}
	assert.Assert(t, time.Since(began) < 3*execGrace)
	assert.NilError(t, reload.Process.Signal(unix.Signal(0)))
	assert.NilError(t, reload.Process.Signal(unix.SIGKILL))
	_ = reload.Wait()
	all := <-said // all who could write are dead
	for _, want := range []string{"HUP", "INT\nINT"} {
		assert.Assert(t, strings.Contains(all, want), all)
	}
}

// TestQuit: QUIT ends agentenv as TERM does, and shows nobody its inside.
func TestQuit(t *testing.T) {
	envtest.Census(t)
	p := newPerson(t, "self", os.Getuid())
	src := smallEnvironment(t, p)
	for _, args := range [][]string{
		{"tournament", "--test", "true", "--", "sleep 600"},
		{"init", "--root", p.home + "/other", "--tarball", "-"},
	} {
		cmd := p.command(src, "agentenv", args...)
		in, err := cmd.StdinPipe()
		assert.NilError(t, err)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		assert.NilError(t, cmd.Start())
		time.Sleep(300 * time.Millisecond)
		assert.NilError(t, cmd.Process.Signal(unix.SIGQUIT))
		time.AfterFunc(2*time.Second, func() { in.Close() })
		_ = cmd.Wait() // the status says all
		assert.Equal(t, cmd.ProcessState.ExitCode(), exitQuit, "%s: %s", args, errs.String())
		assert.Assert(t, !strings.Contains(errs.String(), "goroutine"), errs.String())
	}
}

// TestFullOutput: a document that cannot be written is told on stderr.
func TestFullOutput(t *testing.T) {
	envtest.Census(t)
	p := newPerson(t, "self", os.Getuid())
	src := smallEnvironment(t, p)
	_, errs, code := p.run(t, src, "sh", "-c", "agentenv --json -q tournament --test true -- true >/dev/full")
	assert.Equal(t, code, exitHarness)
	assert.Assert(t, strings.Contains(errs, "no space left on device"), errs)
}
