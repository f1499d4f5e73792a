package copytree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/hold"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/place"
	"golang.org/x/sys/unix"
)

// Name is the word users write for this driver.
const Name = "copy"

// Backend returns the driver.
func Backend() forks.Backend { return forks.Backend{Name: Name, Probe: probe, Open: open} }

func probe(_ context.Context, dir string) forks.Probe {
	p := forks.Probe{Name: Name, Lost: "the driver that needs nothing but a file system"}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		p.Detail = (&os.PathError{Op: "statfs", Path: dir, Err: err}).Error()
		return p
	}
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		p.Detail, p.Fix = "/proc is not mounted", "mount -t proc proc /proc"
		return p
	}
	clone, err := fsat.CanClone(dir)
	if err != nil {
		p.Detail, p.Fix = err.Error(), "choose another root with --root"
		return p
	}
	p.OK, p.Lost = true, ""
	p.Detail = "files share their blocks on " + fsName(fs.Type)
	if !clone {
		p.Detail = fmt.Sprintf("no reflink on %s, files are copied", fsName(fs.Type))
	}
	return p
}

// fsName names a file system by the magic of linux/magic.h.
func fsName(magic int64) string {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	}
	return fmt.Sprintf("file system 0x%x", magic)
}

type driver struct {
	store *layer.Store
	holds hold.Table

	mu     sync.Mutex
	probed bool // whether clone is known
	clone  bool
}

func open(_ context.Context, dir string) (forks.Driver, error) {
	if !filepath.IsAbs(dir) {
		return nil, &forks.Error{Op: "open", ID: dir, Driver: Name, Err: errors.New("the path is not absolute")}
	}
	return &driver{store: layer.NewStore(filepath.Clean(dir))}, nil
}

// wrap says which operation on what failed.
func wrap[T ~string](op string, what T, err *error) {
	if *err == nil {
		return
	}
	var fe *forks.Error
	if !errors.As(*err, &fe) {
		*err = &forks.Error{Op: op, ID: string(what), Driver: Name, Err: *err}
	}
}

func (d *driver) Name() string { return Name }

func (d *driver) Features() forks.Features {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.probed {
		clone, err := fsat.CanClone(d.store.Dir)
		d.clone, d.probed = clone, err == nil // there may be no directory yet
	}
	root := os.Geteuid() == 0
	return forks.Features{SharedExtents: d.clone, Owners: root, Devices: root}
}

func (d *driver) Close() error {
	d.holds.Close()
	return d.store.Close()
}

// Attach does nothing: the trees of this driver stand on the host.
func (d *driver) Attach(_ context.Context, key forks.Key) (forks.Tree, error) { return d.Tree(key) }

// Detach does nothing, for the same reason.
func (d *driver) Detach(context.Context, forks.Key) error { return nil }

func (d *driver) Use(ctx context.Context, key forks.Key) (file *os.File, release func(), err error) {
	defer wrap("use", key, &err)
	if err := key.Check(); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", forks.ErrNotFound, err)
	}
	dir, _ := d.store.ForkDir(key)
	return d.holds.Use(ctx, key, dir)
}

func (d *driver) Capture(ctx context.Context, id, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap("capture", id, &err)
	return d.store.Capture(ctx, id, base, src)
}

func (d *driver) Compare(ctx context.Context, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap("compare", base, &err)
	return d.store.Compare(ctx, base, src)
}

func (d *driver) Replace(ctx context.Context, id forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap("replace", id, &err)
	return place.Replace(ctx, d, id, src)
}

func (d *driver) View(_ context.Context, id forks.ID) (v forks.View, err error) {
	defer wrap("view", id, &err)
	return d.store.View(id)
}

func (d *driver) Diff(_ context.Context, a, b forks.ID) (c forks.Changes, err error) {
	defer wrap("diff", a+".."+b, &err)
	return d.store.Diff(a, b)
}

func (d *driver) Apply(ctx context.Context, from, to forks.ID, dir string, o forks.ApplyOptions) (r forks.ApplyResult, err error) {
	defer wrap("apply", to, &err)
	return d.store.Apply(ctx, from, to, dir, o)
}

func (d *driver) RemoveSnapshot(ctx context.Context, id forks.ID) (err error) {
	defer wrap("remove", id, &err)
	return d.store.RemoveSnapshot(ctx, id)
}

func (d *driver) Snapshots(context.Context) (ids []forks.ID, err error) {
	defer wrap("list", d.store.Dir, &err)
	return d.store.Snapshots()
}

func (d *driver) Forks(context.Context) (keys []forks.Key, err error) {
	defer wrap("list", d.store.Dir, &err)
	return d.store.Forks()
}

func (d *driver) Sweep(ctx context.Context) (n int64, err error) {
	defer wrap("sweep", d.store.Dir, &err)
	return d.store.Sweep(ctx)
}

func (d *driver) Tree(key forks.Key) (t forks.Tree, err error) {
	defer wrap("tree", key, &err)
	base, settled, err := d.store.ForkBase(key)
	if err != nil {
		return forks.Tree{}, err
	}
	t = d.tree(key, base)
	t.Interrupted = !settled
	return t, nil
}

func (d *driver) tree(key forks.Key, base forks.ID) forks.Tree {
	dir, name := d.store.ForkDir(key)
	return forks.Tree{Key: key, Base: base, Mount: forks.Mount{Dir: filepath.Join(dir, name)}}
}

func (d *driver) Fork(ctx context.Context, key forks.Key, base forks.ID, _ forks.ForkOptions) (t forks.Tree, err error) {
	defer wrap("fork", key, &err)
	if err := key.Check(); err != nil {
		return t, fmt.Errorf("%w: %w", forks.ErrUnsupported, err)
	}
	if err := d.store.Exists(base); err != nil {
		return t, fmt.Errorf("base %s: %w", base, err)
	}
	dir, _ := d.store.ForkDir(key)
	if _, err := os.Lstat(filepath.Join(dir, "base")); err == nil {
		return t, forks.ErrExists
	}
	state, err := d.store.State(base)
	if err != nil {
		return t, err
	}
	st, err := d.store.NewStage()
	if err != nil {
		return t, err
	}
	t, err = d.forkStage(ctx, st, key, base, state.Clone())
	return t, errors.Join(err, st.Remove(ctx))
}

func (d *driver) forkStage(ctx context.Context, st *layer.Stage, key forks.Key, base forks.ID, state *layer.State) (forks.Tree, error) {
	var warn layer.Warnings
	dir, name := d.store.ForkDir(key)
	in, err := st.Mkdir("fork")
	if err != nil {
		return forks.Tree{}, err
	}
	defer in.Release()
	if err := st.Restore(ctx, state, in, name, &warn); err != nil {
		return forks.Tree{}, err
	}
	made := filepath.Join(st.Path, "fork")
	state.MarkRacy(time.Now())
	if err := layer.SaveIndex(filepath.Join(made, "index"), base, state); err != nil {
		return forks.Tree{}, err
	}
	if err := st.SetForkBase(made, base, true); err != nil {
		return forks.Tree{}, err
	}
	if key == forks.Work {
		if err := unix.Syncfs(in.FD); err != nil {
			return forks.Tree{}, &os.PathError{Op: "syncfs", Path: made, Err: err}
		}
	}
	if err := d.publishFork(key, made, dir); err != nil {
		return forks.Tree{}, err
	}
	t := d.tree(key, base)
	t.Warnings = warn.Lines()
	return t, nil
}

// publishFork gives a fork its place; it is held before it is seen.
func (d *driver) publishFork(key forks.Key, made, dir string) error {
	lock, err := os.Open(made)
	if err != nil {
		return err
	}
	if err := d.holds.Made(key, lock); err != nil {
		return errors.Join(err, lock.Close())
	}
	err = os.Rename(made, dir)
	if err != nil {
		d.holds.Drop(key)
	}
	if errors.Is(err, unix.ENOTEMPTY) {
		err = forks.ErrExists
	}
	return err
}

// scan compares a fork with its base.
func (d *driver) scan(ctx context.Context, key forks.Key, xattrs bool) (f *fork, err error) {
	f = &fork{}
	f.dir, f.name = d.store.ForkDir(key)
	if f.base, f.settled, err = d.store.ForkBase(key); err != nil {
		return nil, err
	}
	if f.index, f.trust, err = d.store.ForkState(key, f.base, f.settled); err != nil {
		return nil, err
	}
	path := filepath.Join(f.dir, f.name)
	parent, err := unix.Open(f.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: f.dir, Err: err}
	}
	defer unix.Close(parent)
	access := layer.Access
	access.CrossMounts = true // the tree itself may be a mount point
	if f.root, err = access.OpenDir(parent, f.name); err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f.scan, err = layer.ScanTree(ctx, f.root, layer.ScanOptions{
		Base: f.index, Trust: f.trust, Ours: true, Access: layer.Access,
		FileXattrs: xattrs, Same: d.store.SameAsStored(f.index),
	})
	if err != nil {
		f.close()
		return nil, err
	}
	if !f.settled {
		f.scan.Warnings.Add("a checkout of this tree was cut short: it is neither %s nor what was to be checked out", f.base)
	}
	return f, nil
}

// fork is a fork that was compared with its base.
type fork struct {
	dir, name string
	base      forks.ID
	settled   bool
	index     *layer.State
	trust     bool
	root      int
	scan      *layer.Scan
}

func (f *fork) close() { unix.Close(f.root) }

func (d *driver) Status(ctx context.Context, key forks.Key) (c forks.Changes, err error) {
	defer wrap("status", key, &err)
	f, err := d.scan(ctx, key, true)
	if err != nil {
		return c, err
	}
	defer f.close()
	if f.scan.Delta != nil {
		c.List, err = layer.Changes(f.index, f.scan.Delta)
	}
	c.Warnings = f.scan.Warnings.Lines()
	return c, err
}

func (d *driver) Commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (c forks.Changes, err error) {
	defer wrap("commit", id, &err)
	if err := d.store.Available(id); err != nil {
		return c, err
	}
	f, err := d.scan(ctx, key, false)
	if err != nil {
		return c, err
	}
	defer f.close()
	if f.scan.Delta == nil && f.trust && !f.scan.Refreshed {
		return forks.Changes{Warnings: f.scan.Warnings.Lines()}, nil
	}
	st, err := d.store.NewStage()
	if err != nil {
		return c, err
	}
	c, err = d.commitStage(ctx, st, f, id, intent)
	if err = errors.Join(err, st.Remove(ctx)); err != nil {
		return c, err
	}
	return c, d.store.Collect(ctx)
}

func (d *driver) commitStage(ctx context.Context, st *layer.Stage, f *fork, id forks.ID, intent func() error) (c forks.Changes, err error) {
	delta := f.scan.Delta
	if delta != nil {
		delta, c.Bytes, err = st.Write(ctx, f.root, delta, layer.WriteOptions{
			ID: id, BaseID: f.base, Base: f.index, Ours: true, Access: layer.Access,
		}, &f.scan.Warnings)
		if err != nil {
			return c, err
		}
		if c.List, err = layer.Changes(f.index, delta); err != nil {
			return c, err
		}
	}
	c.Warnings = f.scan.Warnings.Lines()
	if len(c.List) == 0 {
		c.Bytes = 0
		return c, d.settleUnchanged(st, f)
	}
	if intent != nil {
		if err := intent(); err != nil {
			return c, err
		}
	}
	whole, err := layer.Merge(f.index, delta, true)
	if err != nil {
		return c, err
	}
	if err := st.Publish(id, f.base); err != nil {
		return c, err
	}
	if err := st.SaveForkIndex(f.dir, id, whole); err != nil {
		return c, err
	}
	return c, st.SetForkBase(f.dir, id, true)
}

// settleUnchanged keeps what a scan without changes found out.
func (d *driver) settleUnchanged(st *layer.Stage, f *fork) error {
	if err := st.SaveForkIndex(f.dir, f.base, f.index); err != nil {
		return err
	}
	if f.settled {
		return nil
	}
	return st.SetForkBase(f.dir, f.base, true)
}

func (d *driver) RemoveFork(ctx context.Context, key forks.Key) (err error) {
	defer wrap("remove", key, &err)
	if key.Check() != nil {
		return nil
	}
	dir, _ := d.store.ForkDir(key)
	if err := d.holds.Try(key, dir); errors.Is(err, forks.ErrNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	defer d.holds.Drop(key)
	st, err := d.store.NewStage()
	if err != nil {
		return err
	}
	err = os.Rename(dir, filepath.Join(st.Path, "fork"))
	if err = errors.Join(err, st.Remove(ctx)); err != nil {
		return err
	}
	return d.store.Collect(ctx)
}
