//go:build linux

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/hold"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/place"
)

// Options are what tells the drivers apart.
type Options struct {
	// Name is the word users write.
	Name string
	// Mounted: the work tree is an overlay, as are all forks.
	Mounted bool
}

type driver struct {
	Options
	store *layer.Store
	holds hold.Table

	mu       sync.Mutex
	clone    *bool // whether files share blocks, once it is known
	stacks   *bool // whether overlays can be mounted, once it is known
	lingered map[forks.Key]bool
}

// Open opens the store whose root is dir.
func Open(dir string, o Options) (forks.Driver, error) {
	if !filepath.IsAbs(dir) {
		return nil, &forks.Error{Op: "open", ID: dir, Driver: o.Name, Err: errors.New("the path is not absolute")}
	}
	return &driver{Options: o, store: layer.NewStore(filepath.Clean(dir)), lingered: make(map[forks.Key]bool)}, nil
}

// wrap says which operation on what failed.
func wrap[T ~string](d *driver, op string, what T, err *error) {
	if *err == nil {
		return
	}
	var fe *forks.Error
	if !errors.As(*err, &fe) {
		*err = &forks.Error{Op: op, ID: string(what), Driver: d.Options.Name, Err: *err}
	}
}

func (d *driver) Name() string { return d.Options.Name }

func (d *driver) Features() forks.Features {
	root := os.Geteuid() == 0
	return forks.Features{
		ConstantFork: d.Mounted || d.canStack(context.Background()), Mounted: d.Mounted,
		SharedExtents: d.canClone(), Owners: root, Devices: root,
	}
}

func (d *driver) canClone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.clone == nil {
		clone := false
		if d.try(context.Background(), func(dir string) (err error) {
			clone, err = fsat.CanClone(dir)
			return err
		}) != nil {
			return false // there may be no directory yet
		}
		d.clone = &clone
	}
	return *d.clone
}

// try calls fn with a directory for a trial, which Sweep takes away if this
// process is killed in its middle.
func (d *driver) try(ctx context.Context, fn func(dir string) error) error {
	if _, err := os.Lstat(d.store.Dir); err != nil {
		return err
	}
	st, err := d.store.NewStage()
	if err != nil {
		return err
	}
	return errors.Join(fn(st.Path), st.Remove(ctx))
}

// canStack says whether forks can be overlays on this store for this user.
func (d *driver) canStack(ctx context.Context) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stacks == nil {
		if _, err := os.Lstat(d.store.Dir); err != nil {
			return false // there may be no directory yet
		}
		rights := rights()
		ok := d.tried(rights)
		if !ok {
			ok = d.try(ctx, func(dir string) error { return Try(ctx, dir) }) == nil
			if ok && len(rights) > 0 {
				d.keepTried(rights)
			}
		}
		d.stacks = &ok
	}
	return *d.stacks
}

func (d *driver) Close() error {
	d.holds.Close()
	return d.store.Close()
}

func (d *driver) Use(ctx context.Context, key forks.Key) (file *os.File, release func(), err error) {
	defer wrap(d, "use", key, &err)
	if err := key.Check(); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", forks.ErrNotFound, err)
	}
	dir, _ := d.store.ForkDir(key)
	idle := !d.holds.InUse(key)
	file, release, err = d.holds.Use(ctx, key, dir)
	if err != nil || !idle {
		return file, release, err
	}
	if err := d.ready(ctx, key); err != nil {
		release()
		return nil, nil, err
	}
	return file, release, nil
}

// ready brings a fork into a state in which it can be mounted, if it has to be.
func (d *driver) ready(ctx context.Context, key forks.Key) error {
	st, err := d.stack(key)
	if err != nil || st == nil || d.mounted(key) {
		return err
	}
	if _, err := st.Mount(); err != nil {
		return err
	}
	if key == forks.Work && d.Mounted {
		if err := d.guard(); err != nil {
			return err
		}
	}
	return d.store.Ready(ctx, key)
}

// stack returns the fork's stack; nil if it is a plain tree, or none.
func (d *driver) stack(key forks.Key) (*layer.Stack, error) {
	st, err := d.store.Stack(key)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return st, err
}

func (d *driver) Capture(ctx context.Context, id, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap(d, "capture", id, &err)
	return d.store.Capture(ctx, id, base, src)
}

func (d *driver) Compare(ctx context.Context, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap(d, "compare", base, &err)
	return d.store.Compare(ctx, base, src)
}

func (d *driver) Replace(ctx context.Context, id forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap(d, "replace", id, &err)
	return place.Replace(ctx, d, id, src)
}

func (d *driver) View(_ context.Context, id forks.ID) (v forks.View, err error) {
	defer wrap(d, "view", id, &err)
	return d.store.View(id)
}

func (d *driver) Diff(_ context.Context, a, b forks.ID) (c forks.Changes, err error) {
	defer wrap(d, "diff", a+".."+b, &err)
	return d.store.Diff(a, b)
}

func (d *driver) Apply(ctx context.Context, from, to forks.ID, dir string, o forks.ApplyOptions) (r forks.ApplyResult, err error) {
	defer wrap(d, "apply", to, &err)
	return d.store.Apply(ctx, from, to, dir, o)
}

func (d *driver) RemoveSnapshot(ctx context.Context, id forks.ID) (err error) {
	defer wrap(d, "remove", id, &err)
	return d.store.RemoveSnapshot(ctx, id)
}

func (d *driver) Snapshots(context.Context) (ids []forks.ID, err error) {
	defer wrap(d, "list", d.store.Dir, &err)
	return d.store.Snapshots()
}

func (d *driver) Forks(context.Context) (keys []forks.Key, err error) {
	defer wrap(d, "list", d.store.Dir, &err)
	return d.store.Forks()
}

func (d *driver) Sweep(ctx context.Context) (n int64, err error) {
	defer wrap(d, "sweep", d.store.Dir, &err)
	return d.store.Sweep(ctx)
}

func (d *driver) Tree(key forks.Key) (t forks.Tree, err error) {
	defer wrap(d, "tree", key, &err)
	st, err := d.stack(key)
	if err != nil {
		return t, err
	}
	if st != nil {
		return d.stackTree(key, st)
	}
	base, settled, err := d.store.ForkBase(key)
	if err != nil {
		return t, err
	}
	t = d.plainTree(key, base)
	t.Interrupted = !settled
	return t, nil
}

func (d *driver) Fork(ctx context.Context, key forks.Key, base forks.ID, o forks.ForkOptions) (t forks.Tree, err error) {
	defer wrap(d, "fork", key, &err)
	if err := key.Check(); err != nil {
		return t, fmt.Errorf("%w: %w", forks.ErrUnsupported, err)
	}
	if err := d.store.Exists(base); err != nil {
		return t, fmt.Errorf("base %s: %w", base, err)
	}
	dir, _ := d.store.ForkDir(key)
	if _, err := os.Lstat(dir); err == nil {
		return t, forks.ErrExists
	}
	if !o.Plain && (d.Mounted || key != forks.Work && d.canStack(ctx)) {
		t, err = d.forkStack(ctx, key, base)
		var many *layer.TooManyLayers
		if d.Mounted || !errors.As(err, &many) {
			return t, err
		}
	}
	return d.forkPlain(ctx, key, base)
}

func (d *driver) Status(ctx context.Context, key forks.Key) (c forks.Changes, err error) {
	defer wrap(d, "status", key, &err)
	st, err := d.stack(key)
	if err != nil {
		return c, err
	}
	if st == nil {
		return d.statusPlain(ctx, key)
	}
	return d.statusStack(ctx, key)
}

func (d *driver) Commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (c forks.Changes, err error) {
	defer wrap(d, "commit", id, &err)
	if err := d.store.Available(id); err != nil {
		return c, err
	}
	st, err := d.stack(key)
	if err != nil {
		return c, err
	}
	was, err := d.built(key, st)
	if err != nil {
		return c, err
	}
	if st == nil {
		c, err = d.commitPlain(ctx, key, id, intent)
	} else {
		c, err = d.commitStack(ctx, st, key, id, intent)
	}
	if err != nil {
		return c, err
	}
	return c, d.store.CollectFrom(ctx, was...)
}

func (d *driver) Checkout(ctx context.Context, key forks.Key, id forks.ID) (err error) {
	defer wrap(d, "checkout", id, &err)
	if err := d.store.Exists(id); err != nil {
		return err
	}
	if err := d.store.Whole(id); err != nil {
		return err
	}
	// What the fork is built upon may be damaged: this is the way out of it.
	st, err := d.stack(key)
	if err != nil && !errors.Is(err, forks.ErrDamaged) {
		return err
	}
	known := err == nil
	was, err := d.built(key, st)
	if err != nil && !errors.Is(err, forks.ErrDamaged) {
		return err
	}
	known = known && err == nil
	if st == nil {
		err = d.checkoutPlain(ctx, key, id)
	} else {
		err = d.checkoutStack(ctx, key, id)
	}
	if err != nil {
		return err
	}
	return d.collectFrom(ctx, was, known)
}

// collectFrom frees what a fork let go of, which was built upon the snapshots
// was, if that is known.
func (d *driver) collectFrom(ctx context.Context, was []forks.ID, known bool) error {
	if !known {
		return d.store.Collect(ctx)
	}
	return d.store.CollectFrom(ctx, was...)
}

func (d *driver) RemoveFork(ctx context.Context, key forks.Key) (err error) {
	defer wrap(d, "remove", key, &err)
	if key.Check() != nil {
		return nil
	}
	dir, _ := d.store.ForkDir(key)
	if err := d.holds.Try(key, dir); errors.Is(err, forks.ErrNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	if d.holds.InUse(key) {
		return forks.ErrInUse
	}
	defer d.holds.Drop(key)
	if _, err := d.unmount(key); err != nil {
		return err
	}
	if key == forks.Work && d.Mounted {
		if err := vacant(d.place(key)); err != nil {
			return err
		}
	}
	was, whole := d.fork(key)
	st, err := d.store.NewStage()
	if err != nil {
		return err
	}
	if err = os.Rename(dir, filepath.Join(st.Path, "fork")); err == nil {
		err = d.store.Discard(ctx, st)
	} else {
		err = errors.Join(err, st.Remove(ctx))
	}
	if err != nil {
		return err
	}
	return d.collectFrom(ctx, was, whole)
}

// fork returns the snapshots that a fork is built upon, and false where that
// cannot be read.
func (d *driver) fork(key forks.Key) ([]forks.ID, bool) {
	st, err := d.stack(key)
	if err != nil {
		return nil, false
	}
	was, err := d.built(key, st)
	return was, err == nil
}

// built returns the snapshots that a fork, whose stack is st, is built upon.
func (d *driver) built(key forks.Key, st *layer.Stack) ([]forks.ID, error) {
	if st != nil {
		return []forks.ID{st.Base, st.Lower}, nil
	}
	base, _, err := d.store.ForkBase(key)
	return []forks.ID{base}, err
}
