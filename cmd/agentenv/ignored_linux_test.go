package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
)

// hangsUp is a command that a HUP ends, however agentenv was started.
const hangsUp = `echo ready; sleep 0.3; trap "exit 7" HUP; (kill -HUP $$); exit 9`

// TestIgnoredSignals: what nohup, or a shell without job control, had ignored does
// not end agentenv; the command that it runs starts with signals as usual.
func TestIgnoredSignals(t *testing.T) {
	asEach(t, func(t *testing.T, p *person) {
		envtest.Census(t)
		src := smallEnvironment(t, p)
		p.ignoring(t, src, exitNo, "-v", "tournament", "--test", "true", "--", hangsUp)
		p.ignoring(t, src, 7, "exec", "--", "sh", "-c", hangsUp)
		p.ignoring(t, src, 7, "exec", "--fork", "--isolation", "process", "--", "sh", "-c", hangsUp)
	})
}

// TestIgnoredSignalsIDs: nor does it where another process does the work.
func TestIgnoredSignalsIDs(t *testing.T) {
	if _, there := granted(t, usualGrant); !there {
		return
	}
	envtest.Census(t)
	p := newPerson(t, "nobody", nobody)
	p.must(t, p.home, "agentenv", p.inTiny("init", "--tarball", p.tinySystem(t))...)
	p.ignoring(t, p.home, 7, p.inTiny("exec", "--", "sh", "-c", hangsUp)...)
}

// ignoring runs agentenv with three signals ignored, sends them once its command
// says that it is ready, and checks how it ends.
func (p *person) ignoring(t *testing.T, dir string, code int, args ...string) {
	t.Helper()
	cmd := p.command(dir, "sh", append([]string{"-c", `trap "" HUP INT QUIT; exec agentenv "$@"`, "sh"}, args...)...)
	r, w, err := os.Pipe()
	assert.NilError(t, err)
	defer r.Close()
	cmd.Stdout, cmd.Stderr = w, w
	assert.NilError(t, cmd.Start())
	w.Close()
	var out bytes.Buffer
	for buf := make([]byte, 512); !strings.Contains(out.String(), "ready"); {
		n, err := r.Read(buf)
		assert.NilError(t, err, "%s: %s", args, out.String())
		out.Write(buf[:n])
	}
	for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP} {
		assert.NilError(t, cmd.Process.Signal(sig))
		time.Sleep(20 * time.Millisecond)
	}
	_, _ = io.Copy(&out, r) // the status says all
	_ = cmd.Wait()
	assert.Equal(t, cmd.ProcessState.ExitCode(), code, "%s: %s", args, out.String())
}

// TestEarlyInterrupt: a tournament that is interrupted while it still finds out
// what this machine can do says so.
func TestEarlyInterrupt(t *testing.T) {
	envtest.Census(t)
	p := newPerson(t, "self", os.Getuid())
	src := smallEnvironment(t, p)
	for _, level := range []string{"namespaces", "process"} {
		cmd := p.command(src, "agentenv", "--json", "tournament", "--isolation", level, "--test", "true", "--", "sleep 60")
		var out bytes.Buffer
		cmd.Stdout = &out
		assert.NilError(t, cmd.Start())
		waitUntil(t, "a probe", func() bool {
			files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", cmd.Process.Pid))
			return err == nil && slices.ContainsFunc(files, func(f string) bool {
				data, err := os.ReadFile(f)
				return err == nil && len(data) > 0
			})
		})
		assert.NilError(t, cmd.Process.Signal(unix.SIGINT))
		_ = cmd.Wait() // the status says all
		assert.Equal(t, cmd.ProcessState.ExitCode(), exitInterrupt, "%v: %s", cmd.ProcessState, out.String())
		assert.Assert(t, strings.Contains(out.String(), "interrupted"), out.String())
	}
}
