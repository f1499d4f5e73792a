//go:build linux

package forkstest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"github.com/moby/sys/reexec"
	"gotest.tools/v3/assert"
)

// backend is what the child processes of the tests use.
var backend forks.Backend

const childName = "forkstest-child"

func init() { reexec.Register(childName, childMain) }

// actor is somebody who works in a store: mostly a child process. A line that it
// prints is read by the test; the end of its input means that it shall end.
type actor struct {
	ctx  context.Context
	d    forks.Driver
	dir  string // of the test; the store is in it
	args []string
}

// jobs are what children do.
func jobs() map[string]func(*actor) error {
	return map[string]func(*actor) error{
		"use": (*actor).use, "fork": (*actor).fork, "collect": (*actor).collect, "read": (*actor).read,
		"kill": (*actor).untilKilled, "steps": (*actor).steps, "files": (*actor).fewFiles,
	}
}

func childMain() {
	a := &actor{ctx: context.Background(), dir: os.Args[2], args: os.Args[3:]}
	var err error
	a.d, err = backend.Open(a.ctx, filepath.Join(a.dir, "store"))
	exitOn(err)
	exitOn(jobs()[os.Args[1]](a))
	exitOn(a.d.Close())
}

// show makes a fork's tree visible.
func (a *actor) show(key forks.Key) (dir string, hide func() error, err error) {
	return show(a.ctx, a.d, key, filepath.Join(a.dir, "seen"))
}

// ended is closed when this child shall end.
func ended() <-chan struct{} {
	end := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // whatever ends it
		close(end)
	}()
	return end
}

// until runs fn again and again until the child shall end.
func until(fn func(i int) error) error {
	end := ended()
	for i := 0; ; i++ {
		select {
		case <-end:
			return nil
		default:
			if err := fn(i); err != nil {
				return err
			}
		}
	}
}

// running is a child as the test that started it sees it.
type running struct {
	w    *world
	cmd  *exec.Cmd
	in   io.Closer
	out  *bufio.Reader
	errs strings.Builder
	wait func() error
}

// start starts a child.
func (w *world) start(job string, args ...string) *running {
	w.Helper()
	r := &running{w: w, cmd: exec.Command(reexec.Self())}
	r.cmd.Args = append([]string{childName, job, w.dir}, args...)
	r.cmd.Stderr = &r.errs
	in, err := r.cmd.StdinPipe()
	assert.NilError(w, err)
	r.in = in
	out, err := r.cmd.StdoutPipe()
	assert.NilError(w, err)
	r.out = bufio.NewReader(out)
	assert.NilError(w, r.cmd.Start())
	r.wait = sync.OnceValue(r.cmd.Wait)
	w.Cleanup(func() { _ = r.cmd.Process.Kill(); _ = r.wait() }) // if the test failed before
	return r
}

// line is the next line that the child prints.
func (r *running) line() string {
	r.w.Helper()
	s, err := r.out.ReadString('\n')
	assert.NilError(r.w, err, "the child ended: %s", r.errs.String())
	return strings.TrimSpace(s)
}

// end lets the child end and returns the rest of what it printed.
func (r *running) end() string {
	r.w.Helper()
	assert.NilError(r.w, r.in.Close())
	rest, err := io.ReadAll(r.out)
	assert.NilError(r.w, err)
	assert.NilError(r.w, r.wait(), "%s", r.errs.String())
	return string(rest)
}

// kill kills the child, which has not failed until then, and returns what it
// had printed.
func (r *running) kill() string {
	r.w.Helper()
	assert.NilError(r.w, r.cmd.Process.Kill())
	return r.killed()
}

// killed waits for a child that is killed.
func (r *running) killed() string {
	r.w.Helper()
	out, err := io.ReadAll(r.out)
	assert.NilError(r.w, err)
	_ = r.wait() // it says that it was killed
	assert.Equal(r.w, r.errs.String(), "")
	assert.NilError(r.w, hideAll(r.w.seen()))
	return string(out)
}

// say prints a line for the test.
func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }
