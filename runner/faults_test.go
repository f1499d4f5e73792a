package runner

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/forks"
)

// faultyDriver fails where its fault says so: op on a fork whose key contains
// what.
type faultyDriver struct {
	forks.Driver
	fault *fault
}

type fault struct {
	mu       sync.Mutex
	op, what string
	err      error
}

func (f *fault) set(op, what string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.op, f.what, f.err = op, what, err
}

func (f *fault) check(op string, key forks.Key) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.op == op && strings.Contains(string(key), f.what) {
		return &forks.Error{Op: op, ID: string(key), Driver: "copy", Err: f.err}
	}
	return nil
}

func (d faultyDriver) Fork(ctx context.Context, key forks.Key, base forks.ID, o forks.ForkOptions) (forks.Tree, error) {
	if err := d.fault.check("fork", key); err != nil {
		return forks.Tree{}, err
	}
	return d.Driver.Fork(ctx, key, base, o)
}

func (d faultyDriver) Commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (forks.Changes, error) {
	if err := d.fault.check("commit", key); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Commit(ctx, key, id, intent)
}

func (d faultyDriver) Checkout(ctx context.Context, key forks.Key, id forks.ID) error {
	if err := d.fault.check("checkout", key); err != nil {
		return err
	}
	return d.Driver.Checkout(ctx, key, id)
}

// newFaulty is a world whose driver fails on demand.
func newFaulty(t *testing.T) (*world, *fault) {
	f := &fault{}
	b, _, err := forks.Choose(t.Context(), testBackends, forks.Auto, t.TempDir())
	assert.NilError(t, err)
	open := b.Open
	b.Open = func(ctx context.Context, dir string) (forks.Driver, error) {
		d, err := open(ctx, dir)
		return faultyDriver{d, f}, err
	}
	return newWorld(t, map[string]string{"f": "x"}, plainExecutor{}, b), f
}

// What the harness cannot do for one attempt is that attempt's error alone.
func TestFaultOfOneAttempt(t *testing.T) {
	for _, c := range []struct{ op, what, reason string }{
		{"fork", ".0.run", "cannot fork the base: "},
		{"commit", ".0.run", "cannot freeze the tree: "},
		{"fork", ".0.test", "cannot fork the frozen tree: "},
	} {
		t.Run(c.reason, func(t *testing.T) {
			w, f := newFaulty(t)
			f.set(c.op, c.what, syscall.ENOSPC)
			r, err := w.run(t.Context(), newPlan("true", "echo 1 >f", "sleep 0.5; echo 2 >f"))
			assert.NilError(t, err)
			assert.Equal(t, statuses(r), "error passed")
			assert.Assert(t, strings.HasPrefix(reason(r.Attempts[0]), c.reason), reason(r.Attempts[0]))
			assert.Assert(t, strings.Contains(reason(r.Attempts[0]), "no space left on device"), reason(r.Attempts[0]))
			assert.Equal(t, r.Status, RunPromoted)
			assert.Equal(t, w.work("f"), "2\n")
		})
	}
}

func TestNoSpaceForAnybody(t *testing.T) {
	w, f := newFaulty(t)
	f.set("fork", "", syscall.ENOSPC)
	r, err := w.run(t.Context(), newPlan("true", "true", "true"))
	assert.NilError(t, err)
	assert.Equal(t, r.Status, RunFailed)
	assert.Assert(t, strings.Contains(*r.Error, "no space left on device"), *r.Error)
}

// A damaged store stops everything: no attempt could fare better.
func TestDamagedStore(t *testing.T) {
	w, f := newFaulty(t)
	head := w.env.Head().ID
	f.set("fork", ".1.run", forks.ErrDamaged)
	r, err := w.run(t.Context(), newPlan("true", "exec sleep 60", "true", "true"))
	assert.Assert(t, errors.Is(err, forks.ErrDamaged), "%v", err)
	assert.Equal(t, r.Status, RunFailed)
	assert.Equal(t, r.Attempts[0].Status, Cancelled)
	assert.Equal(t, r.Attempts[1].Status, Error)
	assert.Equal(t, w.env.Head().ID, head)
}

// A promotion that fails half way is a failure of the harness, and the result
// says where HEAD is.
func TestPromotionFails(t *testing.T) {
	w, f := newFaulty(t)
	f.set("checkout", "current", syscall.EIO)
	r, err := w.run(t.Context(), newPlan("true", "echo 1 >f"))
	assert.Assert(t, errors.Is(err, syscall.EIO), "%v", err)
	assert.Equal(t, r.Status, RunFailed)
	assert.Equal(t, r.Head, w.env.Head().ID)
	assert.Equal(t, r.Promoted, r.Head == *r.Winner.Snapshot)
	f.set("", "", nil)
}

func TestPromotionCannotSave(t *testing.T) {
	w, f := newFaulty(t)
	head := w.env.Head().ID
	f.set("commit", "current", syscall.ENOSPC)
	r, err := w.run(t.Context(), newPlan("true", "echo 1 >f"))
	assert.Assert(t, errors.Is(err, syscall.ENOSPC), "%v", err)
	assert.Equal(t, r.Status, RunFailed)
	assert.Assert(t, !r.Promoted && r.Winner.Snapshot == nil)
	assert.Equal(t, w.env.Head().ID, head)
	f.set("", "", nil)
}

// A result that cannot be written is an error, and the caller still has it.
func TestResultCannotBeWritten(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	o := w.options(newPlan("rm -r "+w.env.RunsDir(), "true"))
	r, err := Run(t.Context(), o)
	assert.ErrorContains(t, err, "write the result")
	assert.Assert(t, r.Promoted)
}

// What is left behind is counted and named: here, by an executor that lets
// processes get away, and by hand.
func TestLeaksAreFound(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	pid := filepath.Join(t.TempDir(), "pid")
	o := w.options(newPlan("true", `setsid sh -c 'echo $$ >`+pid+`; exec sleep 60' >/dev/null 2>&1 & while ! [ -s `+pid+` ]; do sleep 0.01; done`))
	mounted := filepath.Join(w.root, "scratch", "m")
	o.Sinks = append(o.Sinks, func(e Event) {
		if e.Type == EventForked {
			assert.NilError(t, os.MkdirAll(mounted, 0o700))
			assert.NilError(t, os.WriteFile(filepath.Join(w.root, "forks", "left"), make([]byte, 10000), 0o600))
			if os.Geteuid() == 0 {
				assert.NilError(t, syscall.Mount("none", mounted, "tmpfs", 0, ""))
			}
		}
	})
	r, err := Run(t.Context(), o)
	assert.NilError(t, err)
	out, err := os.ReadFile(pid)
	assert.NilError(t, err)
	assert.NilError(t, exec.Command("kill", "-9", strings.TrimSpace(string(out))).Run())
	names := strings.Join(r.Leaks.Names, "\n")
	assert.Equal(t, r.Leaks.Processes, 1, names)
	assert.Assert(t, strings.Contains(names, "process "+strings.TrimSpace(string(out))+" (sleep)"), names)
	assert.Assert(t, r.Leaks.Bytes >= 10000, "%d", r.Leaks.Bytes)
	assert.Assert(t, strings.Contains(names, "forks/left"), names)
	if os.Geteuid() == 0 {
		assert.Equal(t, r.Leaks.Mounts, 1, names)
		assert.NilError(t, syscall.Unmount(mounted, 0))
	}
}

// A run in which everything took its time still adds up.
func TestTimes(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	p := newPlan("exit 1", "sleep 0.2", "sleep 0.2")
	p.Parallel = 1
	start := time.Now()
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	whole := time.Since(start).Seconds()
	a, b := r.Attempts[0], r.Attempts[1]
	assert.Assert(t, a.Duration >= 0.2 && a.Fork > 0 && a.Test.Runs[0].Duration > 0, "%+v", a)
	assert.Assert(t, b.Queued >= a.Queued+a.Duration, "%+v", b)
	assert.Assert(t, r.Duration <= whole && r.Duration >= b.Queued+b.Duration, "%v of %v", r.Duration, whole)
	assert.Assert(t, !w.env.Head().Created.After(r.Started), "nothing was promoted")
}

// What the harness could not do is told in the caller's words.
func TestExplained(t *testing.T) {
	w, f := newFaulty(t)
	f.set("fork", "", syscall.ENOSPC)
	o := w.options(newPlan("true", "true"))
	o.Explain = func(err error) string { return "make room, for: " + err.Error() }
	r, err := Run(t.Context(), o)
	assert.NilError(t, err)
	assert.Assert(t, strings.HasPrefix(reason(r.Attempts[0]), "cannot fork the base: make room, for: "), reason(r.Attempts[0]))
}
