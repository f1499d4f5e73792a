//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// work is a fork that is compared with its base.
type work struct {
	dir, name string
	base      forks.ID
	info      info
	a, b      *side
}

func (w *work) close() {
	w.a.close()
	w.b.close()
}

func (d *driver) openWork(key forks.Key) (*work, error) {
	w := &work{}
	w.dir, w.name = d.store.ForkDir(key)
	var err error
	if w.base, err = d.forkBase(key); err != nil {
		return nil, err
	}
	if w.info, err = d.since(w.base); err != nil {
		return nil, layer.LostBase(w.base, err)
	}
	if w.a, err = d.side(w.base); err != nil {
		return nil, layer.LostBase(w.base, err)
	}
	root, err := openTree(filepath.Join(w.dir, w.name))
	if err != nil {
		w.a.close()
		return nil, err
	}
	w.b = &side{root: root, record: w.a.record}
	return w, nil
}

// patience is how long to wait until everybody's data is on disk, which tells
// quickly what changed. Where that takes longer, a walk is quicker.
const patience = 300 * time.Millisecond

// flushed writes out what the file system of fd has in memory: what was written
// to a file shows in its inode on disk only then. It returns false if that
// takes too long; it goes on then.
func flushed(fd int) bool {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return false
	}
	done := make(chan error, 1)
	go func() {
		err := unix.Syncfs(own)
		unix.Close(own)
		done <- err
	}()
	select {
	case err := <-done:
		return err == nil
	case <-time.After(patience):
		return false
	}
}

// unchanged says that no transaction changed the tree since it was its base.
// What is not on disk is not seen: see [flushed].
func (w *work) unchanged() (bool, error) {
	s, err := subvolInfo(w.b.root)
	if err != nil {
		return false, err
	}
	return s.generation <= max(w.info.Generation, s.made), nil
}

// readAttempts is how often a fork is looked at anew that another process
// changes meanwhile.
const readAttempts = 20

func (d *driver) Status(ctx context.Context, key forks.Key) (c forks.Changes, err error) {
	defer wrap("status", key, &err)
	for attempt := 1; ; attempt++ {
		was, err := d.forkBase(key)
		if err != nil {
			return c, err
		}
		var tree uint64
		c, tree, err = d.status(ctx, key)
		is, e := d.forkBase(key)
		if e != nil || is == was && d.device(key) == tree || attempt == readAttempts {
			return c, errors.Join(err, e)
		}
	}
}

// device is that of the fork's tree, which no two subvolumes share.
func (d *driver) device(key forks.Key) uint64 {
	var st unix.Stat_t
	dir, name := d.store.ForkDir(key)
	_ = unix.Lstat(filepath.Join(dir, name), &st) // 0 is none's
	return st.Dev
}

// status also returns which tree it looked at.
func (d *driver) status(ctx context.Context, key forks.Key) (c forks.Changes, tree uint64, err error) {
	d.needing.RLock()
	defer d.needing.RUnlock()
	w, err := d.openWork(key)
	if err != nil {
		return c, 0, err
	}
	defer w.close()
	var st unix.Stat_t
	if err := unix.Fstat(w.b.root, &st); err != nil {
		return c, 0, os.NewSyscallError("fstat", err)
	}
	onDisk := flushed(w.b.root)
	if onDisk {
		if same, err := w.unchanged(); same || err != nil {
			return c, st.Dev, err
		}
	}
	if c.List, _, err = compare(ctx, w.a, w.b, &w.info, onDisk); err != nil {
		return c, st.Dev, err
	}
	var warn layer.Warnings
	err = w.leftOut(&warn)
	inner, e := nested(w.b.root)
	for _, n := range inner {
		warn.Add("%s: %s", n, nestedWhy)
	}
	c.Warnings = warn.Lines()
	return c, st.Dev, errors.Join(err, e)
}

// leftOut names what other file systems hold below the tree.
func (w *work) leftOut(warn *layer.Warnings) error {
	mounts, err := mountsIn(filepath.Join(w.dir, w.name))
	for _, m := range mounts {
		warn.Add("%s: is a mount point; what is below it was left out", m)
	}
	return err
}

const nestedWhy = "is a btrfs subvolume of its own, which a snapshot would leave empty: put a directory in its place (cp -a it, btrfs subvolume delete it)"

func (d *driver) Commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (c forks.Changes, err error) {
	defer wrap("commit", id, &err)
	if err := d.store.Available(id); err != nil {
		return c, err
	}
	c, err = d.commit(ctx, key, id, intent)
	if err != nil || len(c.List) == 0 {
		return c, err
	}
	return c, d.collect(ctx)
}

func (d *driver) commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (c forks.Changes, err error) {
	d.needing.RLock()
	defer d.needing.RUnlock()
	w, err := d.openWork(key)
	if err != nil {
		return c, err
	}
	defer w.close()
	if os.Geteuid() != 0 && flushed(w.b.root) { // to make a snapshot in vain is dear without the right to delete it
		if same, err := w.unchanged(); same || err != nil {
			return c, err
		}
	}
	st, err := d.store.NewStage()
	if err != nil {
		return c, err
	}
	c, err = d.commitStage(ctx, st, w, id, intent)
	if err != nil || len(c.List) == 0 {
		err = errors.Join(err, setForkBase(w.dir, string(w.base)))
	}
	return c, errors.Join(err, d.removeStage(ctx, st))
}

func (d *driver) commitStage(ctx context.Context, st *layer.Stage, w *work, id forks.ID, intent func() error) (c forks.Changes, err error) {
	b, err := d.freeze(st, w, id)
	if err != nil {
		return c, err
	}
	defer b.close()
	if c.List, c.Bytes, err = compare(ctx, w.a, b, &w.info, true); err != nil {
		return c, err
	}
	if len(c.List) == 0 {
		return forks.Changes{}, nil
	}
	if c.Bytes < 0 {
		if c.Bytes, err = newBytes(w.a, b, c.List, false); err != nil {
			return c, err
		}
	}
	var warn layer.Warnings
	if err := w.leftOut(&warn); err != nil {
		return c, err
	}
	c.Warnings = warn.Lines()
	if intent != nil {
		if err := intent(); err != nil {
			return c, err
		}
	}
	step.At("btrfs.commit.made")
	if err := st.Publish(id, w.base); err != nil {
		return c, err
	}
	step.At("btrfs.commit.placed")
	return c, setForkBase(w.dir, string(id))
}

// freeze makes a snapshot of the fork in the stage, with what stands beside it,
// and lets the fork's base link say what is to come. The snapshot is a commit of
// a transaction that has all of that: it is durable then.
func (d *driver) freeze(st *layer.Stage, w *work, id forks.ID) (*side, error) {
	in := info{Base: w.base, Sealed: time.Now().UnixNano()}
	made, err := st.Mkdir("node")
	if err != nil {
		return nil, err
	}
	made.Release()
	node := filepath.Join(st.Path, "node")
	if err := os.Symlink(in.String(), filepath.Join(node, "info")); err != nil {
		return nil, err
	}
	if err := d.passRecord(w.base, node); err != nil {
		return nil, err
	}
	step.At("btrfs.commit.staged")
	if err := setForkBase(w.dir, string(w.base)+"+"+string(id)); err != nil {
		return nil, err
	}
	step.At("btrfs.commit.announced")
	tree := filepath.Join(node, "tree")
	if err := d.snapshot(tree, filepath.Join(w.dir, w.name), true); err != nil {
		return nil, err
	}
	step.At("btrfs.commit.frozen")
	inner, err := nested(w.b.root)
	if err != nil {
		return nil, err
	}
	if len(inner) > 0 {
		return nil, fmt.Errorf("%s: %w: it %s", inner[0], forks.ErrUnkeepable, nestedWhy)
	}
	root, err := openTree(tree)
	if err != nil {
		return nil, err
	}
	return &side{root: root, record: w.a.record, frozen: true}, nil
}

// passRecord gives a snapshot the record of its base: inodes that went are no
// harm in it.
func (d *driver) passRecord(base forks.ID, node string) error {
	err := os.Link(filepath.Join(d.store.NodePath(base), "record"), filepath.Join(node, "record"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (d *driver) Checkout(ctx context.Context, key forks.Key, id forks.ID) (err error) {
	defer wrap("checkout", id, &err)
	if err := d.checkout(ctx, key, id); err != nil {
		return err
	}
	return d.collect(ctx)
}

// checkout makes a snapshot beside the tree, lets the two change places, and
// deletes the old one. At each moment the base link says, with the tree itself,
// what the tree is.
func (d *driver) checkout(ctx context.Context, key forks.Key, id forks.ID) error {
	d.needing.RLock()
	defer d.needing.RUnlock()
	if err := d.store.Exists(id); err != nil {
		return err
	}
	base, err := d.forkBase(key)
	if err != nil || base == id && d.untouched(key) {
		return err
	}
	dir, name := d.store.ForkDir(key)
	if err := unmounted(filepath.Join(dir, name)); err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := d.removeTree(ctx, dir, nextName); err != nil {
		return err
	}
	next := filepath.Join(dir, nextName)
	if err := d.snapshot(next, d.treePath(id), false); err != nil {
		return err
	}
	step.At("btrfs.checkout.made")
	uuid, err := d.treeUUID(next)
	if err != nil {
		return err
	}
	if err := setForkBase(dir, strings.Join([]string{string(base), uuid, string(id)}, ":")); err != nil {
		return err
	}
	step.At("btrfs.checkout.announced")
	return d.exchange(ctx, key, id)
}

// untouched says whether it is known at once that the fork is its base still.
func (d *driver) untouched(key forks.Key) bool {
	w, err := d.openWork(key)
	if err != nil {
		return false
	}
	defer w.close()
	if !flushed(w.b.root) {
		return false
	}
	same, err := w.unchanged()
	return same && err == nil
}

// nextName is the name, beside a fork's tree, of the tree that is to be put in
// its place, and then of the one that was.
const nextName = "next"

func (d *driver) exchange(ctx context.Context, key forks.Key, id forks.ID) error {
	dir, name := d.store.ForkDir(key)
	tree, next := filepath.Join(dir, name), filepath.Join(dir, nextName)
	err := unix.Renameat2(unix.AT_FDCWD, next, unix.AT_FDCWD, tree, unix.RENAME_EXCHANGE)
	if err != nil {
		return &os.PathError{Op: "exchange", Path: tree, Err: err}
	}
	step.At("btrfs.checkout.exchanged")
	if err := setForkBase(dir, string(id)); err != nil {
		return err
	}
	if err := fsat.SyncDir(dir); err != nil {
		return err
	}
	step.At("btrfs.checkout.settled")
	d.warn(key, leftBehind(next))
	// The checkout is done. What cannot be deleted now, Sweep finds.
	_ = d.removeTree(ctx, dir, nextName)
	return nil
}
