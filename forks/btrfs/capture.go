//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	library "github.com/containerd/btrfs/v2"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// keptSources is how many snapshots keep the index of the directory they were
// captured from: it is as large as the list of its files.
const keptSources = 4

func (d *driver) Capture(ctx context.Context, id, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap("capture", id, &err)
	if err := d.store.Available(id); err != nil {
		return c, err
	}
	d.needing.RLock()
	defer d.needing.RUnlock()
	root, err := layer.OpenSource(src.Dir)
	if err != nil {
		return c, err
	}
	defer unix.Close(root)
	if err := layer.Finished(root, src.Dir); err != nil {
		return c, err
	}
	index, scan, err := d.scan(ctx, root, base, src)
	if err != nil {
		return c, err
	}
	st, err := d.store.NewStage()
	if err != nil {
		return c, err
	}
	k := &capture{driver: d, st: st, id: id, base: base, src: src, index: index, scan: scan}
	c, err = k.run(ctx, root)
	return c, errors.Join(err, d.removeStage(ctx, st))
}

// Compare returns what the directory has changed against snapshot base.
func (d *driver) Compare(ctx context.Context, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	defer wrap("compare", base, &err)
	d.needing.RLock()
	defer d.needing.RUnlock()
	root, err := layer.OpenSource(src.Dir)
	if err != nil {
		return c, err
	}
	defer unix.Close(root)
	index, scan, err := d.scan(ctx, root, base, src)
	if err != nil {
		return c, err
	}
	if scan.Delta != nil {
		c.List, err = layer.Changes(index, scan.Delta)
	}
	if scan.Refreshed {
		saveIndex(src, base, index)
	}
	c.Warnings = scan.Warnings.Lines()
	return c, err
}

// scan compares the open source directory with base, or takes all of it if
// there is none. index is what it was compared with.
func (d *driver) scan(ctx context.Context, root int, base forks.ID, src forks.Source) (index *layer.State, scan *layer.Scan, err error) {
	trust := false
	if base != "" {
		if err := d.store.Exists(base); err != nil {
			return nil, nil, fmt.Errorf("base %s: %w", base, err)
		}
		if index, trust, err = d.sourceIndex(ctx, base, src.Index); err != nil {
			return nil, nil, err
		}
	}
	scan, err = d.store.ScanSource(ctx, root, index, trust, src)
	return index, scan, err
}

// sourceIndex returns the state of snapshot base with what is known of the
// directory: from the index that the caller keeps, or from the one that was
// kept when base was captured.
func (d *driver) sourceIndex(ctx context.Context, base forks.ID, path string) (*layer.State, bool, error) {
	if path != "" {
		if of, index, err := layer.LoadIndex(path); err == nil && of == base {
			return index, true, nil
		} else if err == nil && d.store.Exists(of) == nil {
			return d.otherIndex(ctx, base, of, index)
		}
	}
	of, index, err := layer.LoadIndex(filepath.Join(d.store.NodePath(base), "source"))
	if err == nil && of == base {
		return index, true, nil
	}
	state, err := d.state(base)
	return state, false, err
}

// otherIndex makes an index for base of one for another snapshot: what is the
// same in both is known, the rest is not.
func (d *driver) otherIndex(ctx context.Context, base, of forks.ID, index *layer.State) (*layer.State, bool, error) {
	state, err := d.state(base)
	if err != nil {
		return nil, false, err
	}
	differ, err := d.diff(ctx, of, base)
	if err != nil {
		return nil, false, err
	}
	changed := make(map[string]bool)
	for _, c := range differ {
		changed[c.Path] = true
	}
	at := uint32(0)
	for i := range state.Nodes {
		path := state.Path(uint32(i))
		// Both stand in the order of a walk.
		for at < uint32(len(index.Nodes)) && inWalk(index.Path(at), path) < 0 {
			at++
		}
		if at < uint32(len(index.Nodes)) && !changed[path] && index.Path(at) == path {
			state.Nodes[i].KeepIdentity(&index.Nodes[at])
		}
	}
	return state, true, nil
}

// saveIndex keeps what is known of the source, where the caller wants it. It is
// a cache: what hinders it is no error.
func saveIndex(src forks.Source, id forks.ID, index *layer.State) {
	if src.Index == "" || src.IndexReadOnly {
		return
	}
	tmp := src.Index + ".new"
	_ = os.Remove(tmp) // of one that was cut short
	if layer.SaveIndex(tmp, id, index) != nil || os.Rename(tmp, src.Index) != nil {
		_ = os.Remove(tmp)
	}
}

// capture is one run of [driver.Capture].
type capture struct {
	*driver
	st       *layer.Stage
	id, base forks.ID
	src      forks.Source
	index    *layer.State
	scan     *layer.Scan
	whole    *layer.State // the source as it was captured, if that is known
}

func (k *capture) run(ctx context.Context, root int) (c forks.Changes, err error) {
	in, err := k.st.Mkdir("node")
	if err != nil {
		return c, err
	}
	in.Release()
	tree := filepath.Join(k.st.Path, "node", "tree")
	if k.base == "" {
		k.making.Lock()
		err = library.SubvolCreate(tree)
		k.making.Unlock()
	} else {
		err = k.snapshot(tree, k.treePath(k.base), false)
	}
	if err != nil {
		return c, err
	}
	step.At("btrfs.capture.begun")
	fd, err := openTree(tree)
	if err != nil {
		return c, err
	}
	defer unix.Close(fd)
	w, err := k.write(ctx, root, fd)
	if err != nil {
		return c, err
	}
	step.At("btrfs.capture.written")
	b := &side{root: fd, record: w.record}
	if c, err = k.changes(ctx, w, root, b); err != nil {
		return c, err
	}
	if err := k.seal(fd, w); err != nil {
		return c, err
	}
	step.At("btrfs.capture.sealed")
	if err := k.st.Publish(k.id, k.base); err != nil {
		return c, err
	}
	step.At("btrfs.capture.placed")
	if k.whole != nil {
		saveIndex(k.src, k.id, k.whole)
	}
	k.dropOldSources()
	return c, nil
}

// changes lists what the new tree has against the base. Where the source was
// changed while it was read, the tree tells what it was then, not the scan.
func (k *capture) changes(ctx context.Context, w *writer, root int, b *side) (c forks.Changes, err error) {
	if k.base != "" {
		return k.against(ctx, b)
	}
	c.Warnings = k.scan.Warnings.Lines()
	c.Bytes = w.blocks.Load()
	if sameFS(root, b.root) {
		c.Bytes = w.inline.Load() // all else is shared
	}
	if !w.unsteady.Load() {
		c.List, err = layer.Changes(nil, k.scan.Delta)
		return c, err
	}
	err = b.walk(func(_ int, _ *found, e *forks.Entry) error {
		c.List = append(c.List, forks.Change{Path: e.Path, Kind: forks.Added, New: e})
		return context.Cause(ctx)
	})
	slices.SortFunc(c.List, byPath)
	return c, err
}

// against compares the new tree with the base.
func (k *capture) against(ctx context.Context, b *side) (c forks.Changes, err error) {
	in, err := k.since(k.base)
	if err != nil {
		return c, err
	}
	a, err := k.side(k.base)
	if err != nil {
		return c, err
	}
	defer a.close()
	if err := unix.Syncfs(b.root); err != nil {
		return c, os.NewSyscallError("syncfs", err)
	}
	if c.List, _, err = compare(ctx, a, b, &in, true); err != nil {
		return c, err
	}
	c.Warnings = k.scan.Warnings.Lines()
	c.Bytes, err = newBytes(a, b, c.List, true)
	return c, err
}

// seal writes what stands beside the tree, and makes all of it durable and the
// tree read-only.
func (k *capture) seal(fd int, w *writer) error {
	node := filepath.Join(k.st.Path, "node")
	if !w.record.empty() {
		b, err := w.record.encode()
		if err != nil {
			return err
		}
		if err := writeDurable(filepath.Join(node, "record"), b); err != nil {
			return err
		}
	}
	if !w.vanished.Load() { // an index must not have what the tree has not
		if err := k.know(node); err != nil {
			return err
		}
	}
	if err := setReadOnly(fd, true); err != nil {
		return err
	}
	if err := unix.Syncfs(fd); err != nil {
		return &os.PathError{Op: "syncfs", Path: node, Err: err}
	}
	s, err := subvolInfo(fd)
	if err != nil {
		return err
	}
	in := info{Base: k.base, Sealed: time.Now().UnixNano(), Generation: s.generation}
	if err := os.Symlink(in.String(), filepath.Join(node, "info")); err != nil {
		return err
	}
	return fsat.SyncDir(node)
}

// know finds out what the source was, and keeps it beside the tree unless the
// caller keeps it elsewhere.
func (k *capture) know(node string) (err error) {
	k.whole = k.scan.Delta
	switch {
	case k.whole == nil:
		k.whole = k.index
	case k.index != nil:
		if k.whole, err = layer.Merge(k.index, k.whole, true); err != nil {
			return err
		}
	}
	for i := range k.whole.Layers { // this snapshot has all files
		k.whole.Layers[i] = k.id
	}
	if k.src.Index != "" {
		return nil
	}
	return layer.SaveIndex(filepath.Join(node, "source"), k.id, k.whole)
}

// dropOldSources keeps the newest indexes only.
func (d *driver) dropOldSources() {
	paths, err := filepath.Glob(filepath.Join(d.store.NodePath("*"), "source"))
	if err != nil || len(paths) <= keptSources {
		return
	}
	age := func(p string) int64 {
		fi, err := os.Lstat(p)
		if err != nil {
			return 0
		}
		return fi.ModTime().UnixNano()
	}
	slices.SortFunc(paths, func(a, b string) int { return int(min(max(age(b)-age(a), -1), 1)) })
	for _, p := range paths[keptSources:] {
		_ = os.Remove(p) // a cache
	}
}
