//go:build linux

package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

func (d *driver) plainTree(key forks.Key, base forks.ID) forks.Tree {
	dir, name := d.store.ForkDir(key)
	return forks.Tree{Key: key, Base: base, Mount: forks.Mount{Dir: filepath.Join(dir, name)}}
}

func (d *driver) forkPlain(ctx context.Context, key forks.Key, base forks.ID) (t forks.Tree, err error) {
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
	if err := d.holds.Publish(key, made, dir); err != nil {
		return forks.Tree{}, err
	}
	t := d.plainTree(key, base)
	t.Warnings = warn.Lines()
	return t, nil
}

// scan compares a plain fork with its base.
func (d *driver) scan(ctx context.Context, key forks.Key, xattrs bool) (f *plain, err error) {
	f = &plain{}
	f.dir, f.name = d.store.ForkDir(key)
	if f.base, f.settled, err = d.store.ForkBase(key); err != nil {
		return nil, err
	}
	if f.index, f.trust, err = d.store.ForkState(key, f.base, f.settled); err != nil {
		return nil, err
	}
	if err := d.compare(ctx, f, xattrs); err != nil {
		return nil, err
	}
	if !f.settled {
		f.scan.Warnings.Add("a checkout of this tree was cut short: it is neither %s nor what was to be checked out", f.base)
	}
	return f, nil
}

// scanAnew is scan where nothing is known of the fork, as its base is damaged:
// all that it holds counts as new. It is to become snapshot next.
func (d *driver) scanAnew(ctx context.Context, key forks.Key, next forks.ID) (*plain, error) {
	f := &plain{base: next, index: layer.EmptyState()}
	f.dir, f.name = d.store.ForkDir(key)
	return f, d.compare(ctx, f, true)
}

// compare compares the tree with the index of f.
func (d *driver) compare(ctx context.Context, f *plain, xattrs bool) error {
	path := filepath.Join(f.dir, f.name)
	parent, err := unix.Open(f.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: f.dir, Err: err}
	}
	defer unix.Close(parent)
	access := layer.Access
	access.CrossMounts = true // the tree itself may be a mount point
	if f.root, err = access.OpenDir(parent, f.name); err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f.scan, err = layer.ScanTree(ctx, f.root, layer.ScanOptions{
		Base: f.index, Trust: f.trust, Ours: true, Access: layer.Access,
		FileXattrs: xattrs, Same: d.store.SameAsStored(f.index),
	})
	if err != nil {
		f.close()
	}
	return err
}

// plain is a plain fork that was compared with its base.
type plain struct {
	dir, name string
	base      forks.ID
	settled   bool
	index     *layer.State
	trust     bool
	root      int
	scan      *layer.Scan
}

func (f *plain) close() { unix.Close(f.root) }

func (d *driver) statusPlain(ctx context.Context, key forks.Key) (c forks.Changes, err error) {
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

func (d *driver) commitPlain(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (c forks.Changes, err error) {
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
	return c, errors.Join(err, st.Remove(ctx))
}

func (d *driver) commitStage(ctx context.Context, st *layer.Stage, f *plain, id forks.ID, intent func() error) (c forks.Changes, err error) {
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
	whole, err := layer.Merge(f.index, delta, true)
	if err != nil {
		return c, err
	}
	base, err := st.Shorten(ctx, id, f.base, whole)
	if err != nil {
		return c, err
	}
	if err := st.MakeForkBase(id, whole); err != nil {
		return c, err
	}
	step.At("plain.commit.complete")
	if intent != nil {
		if err := intent(); err != nil {
			return c, err
		}
	}
	step.At("plain.commit.intent")
	if err := st.Publish(id, base); err != nil {
		return c, err
	}
	step.At("plain.commit.placed")
	return c, st.PlaceForkBase(f.dir)
}

// settleUnchanged keeps what a scan without changes found out.
func (d *driver) settleUnchanged(st *layer.Stage, f *plain) error {
	if err := st.SaveForkIndex(f.dir, f.base, f.index); err != nil {
		return err
	}
	if f.settled {
		return nil
	}
	return st.SetForkBase(f.dir, f.base, true)
}
