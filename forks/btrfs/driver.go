//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	library "github.com/containerd/btrfs/v2"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/hold"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/place"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// Backend returns the driver.
func Backend() forks.Backend { return forks.Backend{Name: Name, Probe: probe, Open: open} }

type driver struct {
	// store has the directories that the formats have in common: a snapshot's
	// files lie in nodes/ID/tree, as in a layer.
	store  *layer.Store
	copier fsat.Copier
	holds  hold.Table

	// making is held while a subvolume is made or deleted: each is a commit of
	// a transaction, and parallel ones are slower.
	making sync.Mutex

	// needing is held for reading by who needs a snapshot that may be removed,
	// for writing by who gives back what nothing needs.
	needing sync.RWMutex
	// kept says that there may be snapshots that are removed and still needed.
	kept bool

	mu       sync.Mutex
	warnings map[forks.Key][]string
}

func open(_ context.Context, dir string) (forks.Driver, error) {
	if !filepath.IsAbs(dir) {
		return nil, &forks.Error{Op: "open", ID: dir, Driver: Name, Err: errors.New("the path is not absolute")}
	}
	return &driver{store: layer.NewStore(filepath.Clean(dir)), kept: true, warnings: make(map[forks.Key][]string)}, nil
}

// wrap says which operation on what failed.
func wrap[T ~string](op string, what T, err *error) {
	if *err == nil {
		return
	}
	var fe *forks.Error
	if !errors.As(*err, &fe) {
		*err = &forks.Error{Op: op, ID: string(what), Driver: Name, Err: explain(*err)}
	}
}

// explain adds what to do to what btrfs alone says.
func explain(err error) error {
	if errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: a quota group is full: see `btrfs qgroup show`, and raise its limit with `btrfs qgroup limit`", err)
	}
	return err
}

func (d *driver) Name() string { return Name }

func (d *driver) Features() forks.Features {
	root := os.Geteuid() == 0
	return forks.Features{ConstantFork: true, Replaced: true, SharedExtents: true, Owners: root, Devices: root}
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

func (d *driver) Replace(ctx context.Context, id forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap("replace", id, &err)
	return place.Replace(ctx, d, id, src)
}

func (d *driver) Snapshots(context.Context) (ids []forks.ID, err error) {
	defer wrap("list", d.store.Dir, &err)
	return d.store.Snapshots()
}

func (d *driver) Forks(context.Context) (keys []forks.Key, err error) {
	defer wrap("list", d.store.Dir, &err)
	return d.store.Forks()
}

// treePath is where a snapshot's subvolume stands.
func (d *driver) treePath(id forks.ID) string { return filepath.Join(d.store.NodePath(id), "tree") }

// snapshot makes the subvolume dst a snapshot of src.
func (d *driver) snapshot(dst, src string, readOnly bool) error {
	d.making.Lock()
	defer d.making.Unlock()
	return library.SubvolSnapshot(dst, src, readOnly)
}

// openSnapshot opens the tree of snapshot id.
func (d *driver) openSnapshot(id forks.ID) (int, error) {
	root, err := openTree(d.treePath(id))
	if errors.Is(err, os.ErrNotExist) {
		if err = d.store.Exists(id); err == nil {
			err = fmt.Errorf("%w: its tree is missing", forks.ErrDamaged)
		}
		err = fmt.Errorf("snapshot %s: %w", id, err)
	}
	return root, err
}

// side opens snapshot id for reading.
func (d *driver) side(id forks.ID) (*side, error) {
	root, err := d.openSnapshot(id)
	if err != nil {
		return nil, err
	}
	s := &side{root: root, frozen: true}
	if s.record, err = d.readRecord(id); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (d *driver) Tree(key forks.Key) (t forks.Tree, err error) {
	defer wrap("tree", key, &err)
	base, err := d.forkBase(key)
	if err != nil {
		return t, err
	}
	t = d.tree(key, base)
	var st unix.Stat_t
	if err := unix.Lstat(t.Mount.Dir, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Ino != rootDir) {
		return t, forks.ErrReplaced // such as a copy, which is no subvolume
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	t.Warnings = d.warnings[key]
	return t, nil
}

func (d *driver) tree(key forks.Key, base forks.ID) forks.Tree {
	dir, name := d.store.ForkDir(key)
	return forks.Tree{Key: key, Base: base, Mount: forks.Mount{Dir: filepath.Join(dir, name)}}
}

func (d *driver) warn(key forks.Key, lines []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.warnings[key] = lines
}

// missingDevices says what a fork has not of what its base's record has.
func missingDevices(o *recorded) []string {
	if o == nil || len(o.devices) == 0 {
		return nil
	}
	n := 0
	for _, in := range o.devices {
		n += len(in)
	}
	return []string{fmt.Sprintf("%d device nodes, which only root can make, are kept in the record and left out here", n)}
}

func (d *driver) Fork(ctx context.Context, key forks.Key, base forks.ID, _ forks.ForkOptions) (t forks.Tree, err error) {
	defer wrap("fork", key, &err)
	if err := key.Check(); err != nil {
		return t, fmt.Errorf("%w: %w", forks.ErrUnsupported, err)
	}
	if err := context.Cause(ctx); err != nil {
		return t, err
	}
	d.needing.RLock()
	defer d.needing.RUnlock()
	if err := d.store.Exists(base); err != nil {
		return t, fmt.Errorf("base %s: %w", base, err)
	}
	dir, _ := d.store.ForkDir(key)
	if _, err := os.Lstat(filepath.Join(dir, "base")); err == nil {
		return t, forks.ErrExists
	}
	record, err := d.readRecord(base)
	if err != nil {
		return t, err
	}
	st, err := d.store.NewStage()
	if err != nil {
		return t, err
	}
	err = d.forkStage(st, key, base)
	if err = errors.Join(err, d.removeStage(ctx, st)); err != nil {
		return t, err
	}
	// Another process may have removed the base before it could see the fork.
	if err := d.store.Exists(base); err != nil {
		return t, errors.Join(fmt.Errorf("base %s: %w", base, err), d.takeAway(ctx, key))
	}
	t = d.tree(key, base)
	t.Warnings = missingDevices(record)
	return t, nil
}

func (d *driver) forkStage(st *layer.Stage, key forks.Key, base forks.ID) error {
	dir, name := d.store.ForkDir(key)
	in, err := st.Mkdir("fork")
	if err != nil {
		return err
	}
	in.Release()
	made := filepath.Join(st.Path, "fork")
	if err := os.Symlink(string(base), filepath.Join(made, "base")); err != nil {
		return err
	}
	step.At("btrfs.fork.staged")
	if err := d.snapshot(filepath.Join(made, name), d.treePath(base), false); err != nil {
		return err
	}
	step.At("btrfs.fork.made")
	if err := d.holds.Publish(key, made, dir); err != nil {
		return err
	}
	step.At("btrfs.fork.placed")
	if key != forks.Work {
		return nil
	}
	return fsat.SyncDir(filepath.Dir(dir))
}
