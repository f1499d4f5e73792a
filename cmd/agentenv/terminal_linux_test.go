package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// window is a terminal in which a person runs something, as the leader of its
// session.
type window struct {
	t         *testing.T
	p         *person
	keys, tty *os.File
	before    unix.Termios
	cmd       *exec.Cmd

	mu  sync.Mutex
	out bytes.Buffer
}

func openWindow(t *testing.T, p *person, dir, name string, args ...string) *window {
	t.Helper()
	keys, tty, err := pty.Open()
	if err != nil {
		t.Skip(err)
	}
	// So that closing it, which ends all in the session, waits for no read.
	fd, err := unix.FcntlInt(keys.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	assert.NilError(t, err)
	assert.NilError(t, unix.SetNonblock(fd, true))
	keys.Close()
	keys = os.NewFile(uintptr(fd), "keys")
	assert.NilError(t, os.Chown(tty.Name(), p.uid, -1))
	w := &window{t: t, p: p, keys: keys, tty: tty, cmd: p.command(dir, name, args...)}
	w.before = w.settings()
	if w.cmd.SysProcAttr == nil {
		w.cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	w.cmd.SysProcAttr.Setsid, w.cmd.SysProcAttr.Setctty = true, true
	w.cmd.Env = append(w.cmd.Env, "TERM=xterm", "SHELL=/bin/bash", "PS1=> ")
	w.cmd.Stdin, w.cmd.Stdout, w.cmd.Stderr = tty, tty, tty
	assert.NilError(t, w.cmd.Start())
	var reading sync.WaitGroup
	reading.Go(func() { io.Copy(w, keys) })
	t.Cleanup(func() {
		_ = w.cmd.Process.Kill() // an error means that it has ended
		tty.Close()
		keys.Close()
		reading.Wait()
	})
	return w
}

func (w *window) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(b)
}

func (w *window) seen() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.ReplaceAll(w.out.String(), "\r\n", "\n")
}

// see waits until text was seen for the nth time.
func (w *window) see(n int, text string) {
	w.t.Helper()
	w.until(func() bool { return strings.Count(w.seen(), text) >= n }, text)
}

func (w *window) until(done func() bool, what string) {
	w.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("no %q in:\n%s", what, w.seen())
		}
	}
}

func (w *window) typed(keys string) {
	w.t.Helper()
	_, err := w.keys.WriteString(keys)
	assert.NilError(w.t, err)
}

func (w *window) settings() unix.Termios {
	w.t.Helper()
	s, err := unix.IoctlGetTermios(int(w.tty.Fd()), unix.TCGETS)
	assert.NilError(w.t, err)
	return *s
}

// end waits for the program's end and returns its status.
func (w *window) end() int {
	w.t.Helper()
	_ = w.cmd.Wait() // the status says all
	return w.cmd.ProcessState.ExitCode()
}

// asEachInTree runs test as each person in a directory with an environment.
func asEachInTree(t *testing.T, test func(t *testing.T, p *person, dir string)) {
	envtest.Census(t)
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	asEach(t, func(t *testing.T, p *person) {
		dir := filepath.Join(p.home, "tree")
		out, err := p.command(p.home, "sh", "-c", "mkdir tree && echo x >tree/f && cd tree && agentenv init --from .").CombinedOutput()
		assert.NilError(t, err, string(out))
		test(t, p, dir)
	})
}

// TestShell: job control inside, the end's code, and the snapshot that follows.
func TestShell(t *testing.T) {
	asEachInTree(t, func(t *testing.T, p *person, dir string) {
		w := openWindow(t, p, dir, "agentenv", "shell", "--env", "PS1=> ")
		w.typed("echo $((40+2)); pwd; stty -echo\r")
		w.see(1, "42\n"+dir+"\n")
		w.typed("sleep 1000\r")
		time.Sleep(200 * time.Millisecond)
		w.typed("\x1a")
		w.see(1, "Stopped")
		w.typed("fg\r")
		w.see(1, "fg\nsleep 1000\n"[3:])
		time.Sleep(200 * time.Millisecond)
		w.typed("\x03")
		w.typed("echo code $?; echo new >made; exit 7\r")
		w.see(1, "code 130\n")
		assert.Equal(t, w.end(), 7)
		w.see(1, "agentenv: saved as ")
		assert.Equal(t, w.settings(), w.before)
		out, err := p.command(dir, "agentenv", "log", "-n", "1").CombinedOutput()
		assert.NilError(t, err)
		assert.Assert(t, strings.Contains(string(out), "shell"), "%s", out)
	})
}

// TestTUI: a full-screen program works, ends by itself and leaves no trace; one
// that is killed, by a signal, by the clock or with agentenv, leaves none either.
func TestTUI(t *testing.T) {
	const tui = `stty raw -echo; printf '\033[?1049h\033[?25l\033[?1000h'; echo up; exec sleep 1003`
	const undone = "\x1b[?1000l\x1b[?25h\x1b[?1049l"
	asEachInTree(t, func(t *testing.T, p *person, dir string) {
		for name, x := range map[string]struct {
			args []string
			do   func(w *window)
			code int
		}{
			"terminated":              {nil, func(w *window) { w.cmd.Process.Signal(syscall.SIGTERM) }, 143},
			"killed":                  {nil, func(w *window) { w.cmd.Process.Kill() }, -1},
			"killed at level process": {[]string{"--isolation", "process", "--fork"}, func(w *window) { w.cmd.Process.Kill() }, -1},
			"timed out":               {[]string{"--timeout", "300ms"}, func(*window) {}, 124},
		} {
			t.Run(name, func(t *testing.T) {
				w := openWindow(t, p, dir, "agentenv", append(append([]string{"exec", "-t"}, x.args...), "--", "sh", "-c", tui)...)
				w.see(1, "up\n")
				x.do(w)
				assert.Equal(t, w.end(), x.code)
				w.see(1, undone)
				w.until(func() bool { return w.settings() == w.before }, "settings as before")
			})
		}
		t.Run("vi", func(t *testing.T) {
			if _, err := exec.LookPath("vi"); err != nil {
				t.Skip(err)
			}
			w := openWindow(t, p, dir, "agentenv", "exec", "-t", "--", "vi", "-u", "NONE", "f")
			w.see(1, "\x1b[?1049h")
			w.typed("ihello \x1b:wq\r")
			assert.Equal(t, w.end(), 0)
			assert.Equal(t, w.settings(), w.before)
			out, err := p.command(dir, "agentenv", "show", "HEAD:f").Output()
			assert.NilError(t, err)
			assert.Equal(t, string(out), "hello x\n")
		})
	})
}

// TestBackground: in the background it is stopped, as every program that wants
// the terminal, and goes on in the foreground; the terminal is the user's own
// while it is stopped.
func TestBackground(t *testing.T) {
	asEachInTree(t, func(t *testing.T, p *person, dir string) {
		w := openWindow(t, p, dir, "bash", "--norc", "-i")
		w.typed("stty -echo; agentenv exec -t --no-commit -- sh -c 'echo up; read x; echo got $x; stty size' &\r")
		time.Sleep(300 * time.Millisecond)
		w.until(func() bool {
			w.typed("jobs\r")
			time.Sleep(100 * time.Millisecond)
			return strings.Contains(w.seen(), "Stopped")
		}, "Stopped")
		w.typed("fg\r")
		w.see(1, "up\n")
		stopped := strings.Count(w.seen(), "Stopped")
		w.until(func() bool { return w.settings().Lflag&unix.ICANON == 0 }, "raw mode")
		assert.NilError(t, exec.Command("kill", "-TSTP", strconv.Itoa(foreground(t, w))).Run())
		w.see(stopped+1, "Stopped")
		w.typed("fg\r")
		time.Sleep(300 * time.Millisecond)
		w.typed("abc\r")
		w.see(1, "got abc\n")
		// What is typed while the command still ends is the command's.
		ended := make(chan int, 1)
		go func() { ended <- w.end() }()
		for deadline := time.Now().Add(10 * time.Second); len(ended) == 0 && time.Now().Before(deadline); time.Sleep(300 * time.Millisecond) {
			w.typed("exit 3\r")
		}
		assert.Equal(t, len(ended), 1, w.seen())
		assert.Equal(t, <-ended, 3)
	})
}

// foreground is the process group in the foreground of a window.
func foreground(t *testing.T, w *window) int {
	t.Helper()
	// Only of one's own terminal does the kernel tell it by ioctl.
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", w.cmd.Process.Pid))
	assert.NilError(t, err)
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	group, err := strconv.Atoi(fields[5]) // tpgid, the eighth of all
	assert.NilError(t, err)
	return group
}
