//go:build linux

package envtest

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// testStatus: how a command ended, or why it could not begin, arrives exactly.
func testStatus(t *testing.T, s Subject) {
	t.Run("exit code", func(t *testing.T) {
		b := newBench(t, s)
		for _, code := range []string{"0", "1", "77", "124", "126", "127", "255"} {
			r := b.run("sh", "-c", "exit "+code)
			assert.Equal(t, itoa(r.ExitCode), code)
			assert.Assert(t, !r.NotStarted && r.Signal == 0)
			assert.Assert(t, !r.Started.IsZero() && r.Duration > 0)
		}
	})
	t.Run("signal", func(t *testing.T) {
		b := newBench(t, s)
		for name, sig := range map[string]syscall.Signal{
			"SEGV": syscall.SIGSEGV, "TERM": syscall.SIGTERM, "INT": syscall.SIGINT, "KILL": syscall.SIGKILL, "HUP": syscall.SIGHUP,
		} {
			// The command is not PID 1, for which most of these do nothing.
			r := b.run("sh", "-c", "kill -"+name+" $$; echo survived")
			assert.Equal(t, r.Signal, sig)
			assert.Equal(t, r.ExitCode, 128+int(sig))
			assert.Equal(t, r.out, "")
		}
	})
	t.Run("not started", func(t *testing.T) { testNotStarted(t, s) })
	t.Run("working directory", func(t *testing.T) { testDir(t, s) })
	t.Run("environment", func(t *testing.T) {
		b := newBench(t, s)
		b.command.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.home, "A=1=2", "B=", "C=x\ny"}
		r := b.run("env")
		assert.Equal(t, r.out, strings.Join(b.command.Env, "\n")+"\n")
	})
	t.Run("many arguments", func(t *testing.T) {
		b := newBench(t, s)
		r := b.run("sh", "-c", "true", strings.Repeat("x", 200<<10))
		assert.Equal(t, r.ExitCode, 126)
		assert.Assert(t, r.NotStarted)
		assert.ErrorContains(t, reason(r), "too long")
		long := strings.Repeat("y", 100<<10)
		r = b.run("sh", "-c", `printf %s "$1"`, "sh", long)
		assert.Equal(t, r.out, long)
	})
	t.Run("signal from outside", func(t *testing.T) {
		b := newBench(t, s)
		p, out := b.start(context.Background(), "sh", "-c", `trap 'echo got; exit 5' USR1; touch ready; while :; do sleep 0.02; done`)
		waitFor(t, "trap", func() bool { return exists(filepath.Join(b.tree, "ready")) })
		assert.NilError(t, p.Signal(syscall.SIGUSR1))
		r, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, r.ExitCode, 5)
		assert.Equal(t, out.String(), "got\n")
		assert.ErrorIs(t, p.Signal(syscall.SIGUSR1), os.ErrProcessDone)
	})
}

func testNotStarted(t *testing.T, s Subject) {
	b := newBench(t, s)
	write(t, b.tree+"/bin/data", "x")
	write(t, b.tree+"/bin/noexec", "#!/bin/sh\n")
	write(t, b.tree+"/bin/noformat", "just text\n")
	write(t, b.tree+"/bin/nointerp", "#!/nowhere/sh\n")
	write(t, b.tree+"/bin/crlf", "#!/bin/sh\r\necho\r\n")
	for _, f := range []string{"noformat", "nointerp", "crlf"} {
		assert.NilError(t, os.Chmod(b.tree+"/bin/"+f, 0o755))
	}
	assert.NilError(t, os.Symlink("loop", b.tree+"/loop"))
	path := b.command.Env[0]
	for _, c := range []struct {
		arg    string
		code   int
		reason string
	}{
		{"no-such-command-anywhere", 127, "no-such-command-anywhere: command not found"},
		{"/nonexistent", 127, "/nonexistent: no such file"},
		{"./bin/none", 127, "./bin/none: no such file"},
		{"bin/data/x", 127, "no such file"},
		{"bin/noexec", 126, "bin/noexec: not executable"},
		{"./bin", 126, "is a directory"},
		{"bin/noformat", 126, "exec format error"},
		{"bin/nointerp", 127, "/nowhere/sh"},
		{"bin/crlf", 127, "carriage return"},
		{"./loop", 126, "too many levels of symbolic links"},
		{"noexec", 126, "not executable"}, // found in PATH
	} {
		b.command.Env[0] = path
		if c.arg == "noexec" {
			b.command.Env[0] = "PATH=bin"
		}
		r := b.run(c.arg)
		assert.Check(t, r.NotStarted, c.arg)
		assert.Check(t, r.ExitCode == c.code, "%s: %d", c.arg, r.ExitCode)
		assert.Check(t, strings.Contains(r.Reason, c.reason), "%s: %s", c.arg, r.Reason)
		assert.Check(t, r.out == "", r.out)
	}
}

func testDir(t *testing.T, s Subject) {
	b := newBench(t, s)
	write(t, b.tree+"/sub/tool", "#!/bin/sh\npwd\n")
	assert.NilError(t, os.Chmod(b.tree+"/sub/tool", 0o755))
	top := b.command.View.At
	if s.Level == sandbox.LevelProcess {
		top = b.tree
	}
	assert.Equal(t, b.run("pwd").out, top+"\n")
	b.command.Dir = top + "/sub"
	// A relative program is found from there.
	assert.Equal(t, b.run("./tool").out, top+"/sub\n")
	b.command.Dir = top + "/gone"
	r := b.run("pwd")
	assert.Assert(t, r.NotStarted)
	assert.Equal(t, r.ExitCode, 126)
	assert.ErrorContains(t, reason(r), "working directory "+top+"/gone")
}

// reason makes a result's reason fit assert.ErrorContains.
func reason(r outcome) error { return textError(r.Reason) }

type textError string

func (e textError) Error() string { return string(e) }
