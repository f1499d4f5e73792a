package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
	"github.com/agentenv/agentenv/forks"
)

// desk is a user at his terminal: what he sees, and what he types.
type desk struct {
	t         *testing.T
	keys, tty *os.File
	before    unix.Termios
	dir       string
	level     sandbox.Level

	mu     sync.Mutex
	screen bytes.Buffer
}

func newDesk(t *testing.T, level sandbox.Level) *desk {
	t.Helper()
	keys, tty, err := pty.Open()
	if err != nil {
		t.Skip(err)
	}
	assert.NilError(t, pty.Setsize(tty, &pty.Winsize{Rows: 33, Cols: 101}))
	keys = pollable(t, keys)
	d := &desk{t: t, keys: keys, tty: tty, dir: scratchHome(t), level: level}
	d.before = d.settings()
	var reading sync.WaitGroup
	reading.Go(func() { io.Copy(d, keys) })
	t.Cleanup(func() {
		tty.Close()
		reading.Wait() // the end of the terminal is an error, after the last byte
		keys.Close()
	})
	return d
}

// pollable is f, whose Close does not wait for a read.
func pollable(t *testing.T, f *os.File) *os.File {
	t.Helper()
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	assert.NilError(t, err)
	assert.NilError(t, unix.SetNonblock(fd, true))
	return os.NewFile(uintptr(fd), f.Name())
}

func (d *desk) Write(b []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.screen.Write(b)
}

// seen is what is on the screen, with plain ends of lines.
func (d *desk) seen() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.ReplaceAll(d.screen.String(), "\r\n", "\n")
}

func (d *desk) settings() unix.Termios {
	d.t.Helper()
	now, err := unix.IoctlGetTermios(int(d.tty.Fd()), unix.TCGETS)
	assert.NilError(d.t, err)
	return *now
}

func (d *desk) see(text string) {
	d.t.Helper()
	d.until(func() bool { return strings.Contains(d.seen(), text) }, "%q does not come", text)
}

func (d *desk) until(done func() bool, format string, args ...any) {
	d.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			d.t.Fatalf("%s; on the screen:\n%s", fmt.Sprintf(format, args...), d.seen())
		}
	}
}

func (d *desk) typed(keys string) {
	d.t.Helper()
	_, err := d.keys.WriteString(keys)
	assert.NilError(d.t, err)
}

func (d *desk) command(script string) sandbox.Command {
	c := scene(d.t, d.dir, d.level)
	c.Args, c.Terminal = []string{"sh", "-c", script}, d.tty
	c.Env = append(c.Env, "TERM=xterm")
	return c
}

func (d *desk) start(c sandbox.Command) sandbox.Process {
	d.t.Helper()
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(d.t, err)
	return p
}

// end waits for the end of a command, which must leave the terminal as it was.
func (d *desk) end(p sandbox.Process) sandbox.Result {
	d.t.Helper()
	res, err := p.Wait()
	assert.NilError(d.t, err)
	assert.Equal(d.t, d.settings(), d.before)
	return res
}

func onLevels(t *testing.T, test func(t *testing.T, level sandbox.Level)) {
	envtest.Census(t)
	for _, level := range []sandbox.Level{sandbox.LevelNamespaces, sandbox.LevelProcess} {
		t.Run(string(level), func(t *testing.T) {
			if err := sandbox.Probe(level); err != nil {
				t.Skip(err)
			}
			test(t, level)
		})
	}
}

// TestTerminal: the command has a terminal of its own, of the right size, whose
// name is good inside, and the user's is raw meanwhile and no longer.
func TestTerminal(t *testing.T) {
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		d := newDesk(t, level)
		p := d.start(d.command(`tty; stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo three; trap 'stty size' WINCH
			: </dev/tty && echo controlling; stty -a | grep -o ' echo '; ls /proc/self/fd | wc -l; echo ready; until read x; do :; done; echo "got $x"; exit 7`))
		d.see("ready\n")
		name, rest, _ := strings.Cut(d.seen(), "\n")
		assert.Equal(t, rest, "33 101\nthree\ncontrolling\n echo \n4\nready\n")
		assert.Assert(t, strings.HasPrefix(name, "/dev/pts/"), name)
		if level == sandbox.LevelNamespaces {
			assert.Equal(t, name, "/dev/pts/0")
		}
		raw := d.settings()
		assert.Equal(t, raw.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG), uint32(0))
		assert.NilError(t, pty.Setsize(d.tty, &pty.Winsize{Rows: 12, Cols: 34}))
		assert.NilError(t, p.Signal(syscall.SIGWINCH))
		d.see("12 34\n")
		d.typed("abc\r")
		assert.Equal(t, d.end(p).ExitCode, 7)
		d.see("got abc\n")
	})
}

// TestTerminalKeys: ^C, ^\ and ^Z act inside, once.
func TestTerminalKeys(t *testing.T) {
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		d := newDesk(t, level)
		p := d.start(d.command(`trap 'echo INT' INT; trap 'echo QUIT' QUIT; trap 'echo TSTP' TSTP; echo ready
			i=0; while [ $i -lt 60 ]; do sleep 0.01 || :; i=$((i+1)); done; echo over`))
		d.see("ready\n")
		for _, key := range []struct{ key, said string }{{"\x03", "INT"}, {"\x1c", "QUIT"}, {"\x1a", "TSTP"}} {
			d.typed(key.key)
			d.see(key.said + "\n")
		}
		d.end(p)
		for _, said := range []string{"INT\n", "QUIT\n", "TSTP\n"} {
			assert.Equal(t, strings.Count(d.seen(), said), 1, d.seen())
		}
	})
}

const tui = `stty raw -echo; printf '\033[?1049h\033[?25l\033[?1006;2004h\033[31m'; echo up; sleep 1000`

// tuiUndone is what makes the screen sane after that.
const tuiUndone = "\x1b[m\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[?1049l"

// TestTerminalRestored: however the command ends, the terminal is as it was,
// the screen too.
func TestTerminalRestored(t *testing.T) {
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		for name, kill := range map[string]func(d *desk, p sandbox.Process){
			"signal":  func(d *desk, p sandbox.Process) { assert.NilError(t, p.Signal(syscall.SIGTERM)) },
			"stop":    func(d *desk, p sandbox.Process) { p.Stop(50 * time.Millisecond) },
			"at once": func(d *desk, p sandbox.Process) { p.Stop(0) },
			"helper": func(d *desk, p sandbox.Process) {
				for _, pid := range helpers(d.t) {
					assert.Check(t, exec.Command("kill", "-9", pid).Run())
				}
			},
		} {
			t.Run(name, func(t *testing.T) {
				d := newDesk(t, level)
				p := d.start(d.command(tui))
				d.see("up")
				kill(d, p)
				assert.Assert(t, d.end(p).Signal != 0)
				d.until(func() bool { return strings.HasSuffix(d.seen(), tuiUndone) }, "the screen is not put back: %q", d.seen())
			})
		}
		t.Run("by itself", func(t *testing.T) {
			d := newDesk(t, level)
			assert.Equal(t, d.end(d.start(d.command(`printf '\033[?1049h\033[?25lx\033[?25h\033[?1049l'; exit 3`))).ExitCode, 3)
			d.until(func() bool { return d.seen() != "" }, "nothing comes")
			assert.Equal(t, d.seen(), "\x1b[?1049h\x1b[?25lx\x1b[?25h\x1b[?1049l")
		})
		t.Run("not started", func(t *testing.T) {
			d := newDesk(t, level)
			c := d.command("")
			c.Args = []string{"no-such-command"}
			assert.Equal(t, d.end(d.start(c)).ExitCode, 127)
			assert.Equal(t, d.seen(), "")
		})
	})
}

// TestTerminalOutput: nothing is lost or changed, the last bytes least of all.
func TestTerminalOutput(t *testing.T) {
	rounds, size := 12, 4<<20
	if envtest.Long() {
		rounds, size = 500, 2<<30
	}
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		for range rounds {
			d := newDesk(t, level)
			d.end(d.start(d.command("seq 1 2000")))
			d.until(func() bool { return strings.HasSuffix(d.seen(), "\n2000\n") }, "the last bytes do not come")
			assert.Equal(t, strings.Count(d.seen(), "\n"), 2000)
			d.tty.Close() // a machine has no end of them
			if t.Failed() {
				return
			}
		}
		d := newDesk(t, level)
		var out counter
		c := d.command(fmt.Sprintf(`stty -opost; seq -f '%%015.0f' 1 %d`, size/16))
		c.Stdout = &out
		d.end(d.start(c))
		assert.Equal(t, out.bytes, int64(size/16*16))
		assert.Assert(t, !out.wrong)
	})
}

// counter checks that every line is one more than the last, in 16 bytes.
type counter struct {
	bytes int64
	line  []byte
	wrong bool
}

func (c *counter) Write(b []byte) (int, error) {
	for _, x := range b {
		c.line = append(c.line, x)
		if c.bytes++; x == '\n' {
			n := 0
			_, err := fmt.Sscan(string(bytes.TrimLeft(c.line, "0")), &n)
			c.wrong = c.wrong || len(c.line) != 16 || c.bytes%4096 == 0 && (err != nil || int64(n) != c.bytes/16)
			c.line = c.line[:0]
		}
	}
	return len(b), nil
}

// TestTerminalHeld: who holds the terminal does not make the end wait.
func TestTerminalHeld(t *testing.T) {
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		d := newDesk(t, level)
		p := d.start(d.command(`(setsid sh -c 'trap "" HUP TERM; while :; do echo x; sleep 0.01; done' &); sleep 0.1; echo bye`))
		began := time.Now()
		d.end(p)
		assert.Assert(t, time.Since(began) < 3*time.Second) // a second, on a machine that does nothing else
		d.see("bye\n")
	})
}

// TestTerminalHungUp: a command whose user is gone is told, and ends.
func TestTerminalHungUp(t *testing.T) {
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		d := newDesk(t, level)
		p := d.start(d.command(`trap 'echo hup >>told' HUP; echo ready; while :; do sleep 0.05; done`))
		d.see("ready\n")
		assert.NilError(t, d.keys.Close()) // the user closes the window
		began := time.Now()
		res, err := p.Wait()
		assert.NilError(t, err)
		assert.Assert(t, time.Since(began) < 6*time.Second)
		assert.Assert(t, res.Signal == syscall.SIGTERM || res.Signal == syscall.SIGKILL, "%v", res)
		told, err := os.ReadFile(d.dir + "/tree/told")
		assert.NilError(t, err)
		assert.Equal(t, string(told), "hup\n")
	})
}

// TestTerminalOfSystem: a tree that is a whole system, with a /dev, and with
// nothing but a shell.
func TestTerminalOfSystem(t *testing.T) {
	envtest.Census(t)
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip(err)
	}
	for _, dirs := range [][]string{{"proc", "dev"}, {"dev"}, {"proc"}, nil} {
		t.Run(strings.Join(dirs, "+"), func(t *testing.T) {
			d := newDesk(t, sandbox.LevelNamespaces)
			c := d.command(`[ -t 0 ] && busybox stty size; busybox tty || :; [ ! -d /dev/pts ] || busybox ls /dev; echo ready; read x; echo "got $x"`)
			tree := d.dir + "/tree"
			for _, dir := range append(dirs, "bin") {
				assert.NilError(t, os.Mkdir(filepath.Join(tree, dir), 0o755))
			}
			data, err := os.ReadFile(busybox)
			assert.NilError(t, err)
			for _, name := range []string{"busybox", "sh"} {
				assert.NilError(t, os.WriteFile(tree+"/bin/"+name, data, 0o755))
			}
			c.View = sandbox.View{Tree: forks.Mount{Dir: tree}, Scratch: c.View.Scratch}
			c.Env = []string{"PATH=/bin"}
			p := d.start(c)
			d.see("ready\n")
			assert.Assert(t, strings.HasPrefix(d.seen(), "33 101\n"), d.seen())
			if len(dirs) == 2 {
				assert.Assert(t, strings.HasPrefix(d.seen(), "33 101\n/dev/pts/0\n"), d.seen())
			}
			d.typed("abc\r")
			assert.Equal(t, d.end(p).ExitCode, 0)
			d.see("got abc\n")
		})
	}
}

// TestTerminalRefused: what is no terminal is said to be none.
func TestTerminalRefused(t *testing.T) {
	onLevels(t, func(t *testing.T, level sandbox.Level) {
		null, err := os.Open(os.DevNull)
		assert.NilError(t, err)
		defer null.Close()
		c := scene(t, scratchHome(t), level)
		c.Args, c.Terminal = []string{"true"}, null
		_, err = sandbox.New(sandbox.Options{}).Start(context.Background(), c)
		var e *sandbox.Error
		assert.Assert(t, errors.As(err, &e) && e.What == "terminal", "%v", err)
	})
}

func TestTerminalAsUser(t *testing.T) {
	as(t, ordinaryUser(), "^(TestTerminal|TestTerminalRestored|TestTerminalOfSystem)$")
}

func TestTerminalInUserNamespace(t *testing.T) {
	as(t, inNamespace(), "^(TestTerminal|TestTerminalOfSystem)$")
}
