package forkstest

import (
	"context"
	"os"
	"sync"

	"github.com/agentenv/agentenv/forks"
)

// Faults makes a driver fail.
type Faults struct {
	mu    sync.Mutex
	plans map[string]*fault
}

type fault struct {
	after int
	err   error
}

// Fail lets the nth call (from 1) of operation op fail with err, before it does
// anything; op is the name of a method of [forks.Driver] that returns an error.
// Later calls work.
func (f *Faults) Fail(op string, nth int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.plans == nil {
		f.plans = make(map[string]*fault)
	}
	f.plans[op] = &fault{after: nth, err: err}
}

func (f *Faults) check(op, what string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.plans[op]
	if p == nil {
		return nil
	}
	p.after--
	if p.after != 0 {
		return nil
	}
	delete(f.plans, op)
	return &forks.Error{Op: op, ID: what, Driver: "faulty", Err: p.err}
}

// Wrap returns a backend whose drivers fail as f says.
func (f *Faults) Wrap(b forks.Backend) forks.Backend {
	open := b.Open
	b.Open = func(ctx context.Context, dir string) (forks.Driver, error) {
		if err := f.check("Open", dir); err != nil {
			return nil, err
		}
		d, err := open(ctx, dir)
		if err != nil {
			return nil, err
		}
		return &faulty{Driver: d, f: f}, nil
	}
	return b
}

// Driver returns d, failing as f says.
func (f *Faults) Driver(d forks.Driver) forks.Driver { return &faulty{Driver: d, f: f} }

type faulty struct {
	forks.Driver
	f *Faults
}

func (d *faulty) Capture(ctx context.Context, id, base forks.ID, src forks.Source) (forks.Changes, error) {
	if err := d.f.check("Capture", string(id)); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Capture(ctx, id, base, src)
}

func (d *faulty) Compare(ctx context.Context, base forks.ID, src forks.Source) (forks.Changes, error) {
	if err := d.f.check("Compare", string(base)); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Compare(ctx, base, src)
}

func (d *faulty) Replace(ctx context.Context, id forks.ID, src forks.Source) (forks.Changes, error) {
	if err := d.f.check("Replace", string(id)); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Replace(ctx, id, src)
}

func (d *faulty) Attach(ctx context.Context, key forks.Key) (forks.Tree, error) {
	if err := d.f.check("Attach", string(key)); err != nil {
		return forks.Tree{}, err
	}
	return d.Driver.Attach(ctx, key)
}

func (d *faulty) Detach(ctx context.Context, key forks.Key) error {
	if err := d.f.check("Detach", string(key)); err != nil {
		return err
	}
	return d.Driver.Detach(ctx, key)
}

func (d *faulty) Use(ctx context.Context, key forks.Key) (*os.File, func(), error) {
	if err := d.f.check("Use", string(key)); err != nil {
		return nil, nil, err
	}
	return d.Driver.Use(ctx, key)
}

func (d *faulty) Fork(ctx context.Context, key forks.Key, base forks.ID, o forks.ForkOptions) (forks.Tree, error) {
	if err := d.f.check("Fork", string(key)); err != nil {
		return forks.Tree{}, err
	}
	return d.Driver.Fork(ctx, key, base, o)
}

func (d *faulty) Tree(key forks.Key) (forks.Tree, error) {
	if err := d.f.check("Tree", string(key)); err != nil {
		return forks.Tree{}, err
	}
	return d.Driver.Tree(key)
}

func (d *faulty) Status(ctx context.Context, key forks.Key) (forks.Changes, error) {
	if err := d.f.check("Status", string(key)); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Status(ctx, key)
}

func (d *faulty) Commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (forks.Changes, error) {
	if err := d.f.check("Commit", string(id)); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Commit(ctx, key, id, intent)
}

func (d *faulty) Checkout(ctx context.Context, key forks.Key, id forks.ID) error {
	if err := d.f.check("Checkout", string(id)); err != nil {
		return err
	}
	return d.Driver.Checkout(ctx, key, id)
}

func (d *faulty) RemoveFork(ctx context.Context, key forks.Key) error {
	if err := d.f.check("RemoveFork", string(key)); err != nil {
		return err
	}
	return d.Driver.RemoveFork(ctx, key)
}

func (d *faulty) RemoveSnapshot(ctx context.Context, id forks.ID) error {
	if err := d.f.check("RemoveSnapshot", string(id)); err != nil {
		return err
	}
	return d.Driver.RemoveSnapshot(ctx, id)
}

func (d *faulty) View(ctx context.Context, id forks.ID) (forks.View, error) {
	if err := d.f.check("View", string(id)); err != nil {
		return nil, err
	}
	return d.Driver.View(ctx, id)
}

func (d *faulty) Diff(ctx context.Context, a, b forks.ID) (forks.Changes, error) {
	if err := d.f.check("Diff", string(b)); err != nil {
		return forks.Changes{}, err
	}
	return d.Driver.Diff(ctx, a, b)
}

func (d *faulty) Apply(ctx context.Context, from, to forks.ID, dir string, o forks.ApplyOptions) (forks.ApplyResult, error) {
	if err := d.f.check("Apply", string(to)); err != nil {
		return forks.ApplyResult{}, err
	}
	return d.Driver.Apply(ctx, from, to, dir, o)
}

func (d *faulty) Snapshots(ctx context.Context) ([]forks.ID, error) {
	if err := d.f.check("Snapshots", ""); err != nil {
		return nil, err
	}
	return d.Driver.Snapshots(ctx)
}

func (d *faulty) Forks(ctx context.Context) ([]forks.Key, error) {
	if err := d.f.check("Forks", ""); err != nil {
		return nil, err
	}
	return d.Driver.Forks(ctx)
}

func (d *faulty) Sweep(ctx context.Context) (int64, error) {
	if err := d.f.check("Sweep", ""); err != nil {
		return 0, err
	}
	return d.Driver.Sweep(ctx)
}
