//go:build linux

package layer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// fewFiles is up to where a layer's files are flushed one by one, which leaves
// other programs' data alone; above, one syncfs saves a journal commit a file.
const fewFiles = 16

// copyAttempts is how often a file that changes while it is read is read again.
const copyAttempts = 3

// WriteOptions say how a layer is written.
type WriteOptions struct {
	ID, BaseID forks.ID
	// Base is the state that the difference is against; nil for none.
	Base *State
	// Ours, Upper and Access are as in [ScanOptions].
	Ours     bool
	Upper    bool
	Access   fsat.Access
	Progress func(files, bytes int64)
}

// Write stores the difference delta of the tree whose open root is root in the
// stage's directory "node", durably, and returns the difference as stored: a
// file that changed since it was scanned is stored as it is now, one that
// vanished as removed. It is nil if nothing is left of it.
func (st *Stage) Write(ctx context.Context, root int, delta *State, o WriteOptions, warn *Warnings) (*State, int64, error) {
	node, err := st.Mkdir("node")
	if err != nil {
		return nil, 0, err
	}
	defer node.Release()
	m, err := st.newMaker(warn)
	if err != nil {
		return nil, 0, err
	}
	defer m.close()
	w := &writer{WriteOptions: o, maker: m, delta: delta, few: len(delta.Nodes) <= fewFiles}
	if err := w.tree(ctx, root, node); err != nil {
		return nil, 0, err
	}
	if delta, err = w.result(); err != nil || delta == nil {
		return nil, 0, err
	}
	record := EncodeRecord(Header{ID: o.ID, Base: o.BaseID}, delta)
	return delta, w.bytes.Load() + int64(len(record)), w.durable(st, node, record)
}

type writer struct {
	WriteOptions
	*maker
	delta *State
	few   bool
	files atomic.Int64
	bytes atomic.Int64

	mu       sync.Mutex // for what follows
	extras   map[uint32][]byte
	vanished bool
}

// writeDir is a directory of the difference to be stored.
type writeDir struct {
	src, dst *fsat.Dir // what holds it
	name     string
	node     uint32
	base     uint32
	hasBase  bool
}

func (w *writer) tree(ctx context.Context, root int, node *fsat.Dir) error {
	fd, err := w.Access.OpenDir(root, ".")
	if err != nil {
		return &os.PathError{Op: "open", Path: ".", Err: err}
	}
	top := &writeDir{src: fsat.NewDir(fd), dst: node, name: "tree", hasBase: w.Base != nil}
	if err := w.mkdir(node, "tree"); err != nil {
		return err
	}
	node.Hold(1)
	err = fsat.Run(ctx, len(w.bufs), []*writeDir{top}, w.dir, func(t *writeDir) {
		t.src.Release()
		t.dst.Release()
	})
	if err != nil {
		return err
	}
	if err := w.settleLinks(func(uint32, *unix.Stat_t) {}); err != nil {
		return err
	}
	if err := w.settleLate(func(uint32, *unix.Stat_t) {}); err != nil || !w.vanished {
		return err
	}
	return w.mend(node.FD)
}

// mend takes what vanished out of the stored tree, and lets it be missing where
// the base has it.
func (w *writer) mend(node int) error {
	for i := range w.delta.Nodes {
		if w.delta.Nodes[i].Flags&gone == 0 || i == 0 {
			continue
		}
		path := w.delta.Path(uint32(i))
		existed := false
		if w.Base != nil {
			_, existed = w.Base.Find(path)
		}
		if err := w.mendOne(node, uint32(i), existed); err != nil {
			return w.fail("store", uint32(i), err)
		}
	}
	return nil
}

func (w *writer) mendOne(node int, i uint32, existed bool) error {
	up := w.delta.Nodes[i].Parent
	parent := w.delta.Path(up)
	dir, err := openSteps(node, "tree/"+parent)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	restore, err := fsat.AddMode(dir, 0o300)
	if err != nil {
		return err
	}
	defer restore()
	if err := fsat.RemoveAll(context.Background(), dir, w.delta.Name(i)); err != nil {
		return err
	}
	if existed {
		if err := whiteout(&fsat.Dir{FD: dir}, w.delta.Name(i)); err != nil {
			return err
		}
	}
	meta := w.delta.Meta(up)
	if w.delta.Nodes[up].Flags&Through != 0 {
		if b, ok := w.Base.Find(parent); ok {
			meta = w.Base.Meta(b)
		}
	}
	return fsat.SetTimes(dir, &meta)
}

// dir stores one directory.
func (w *writer) dir(worker int, t *writeDir, push func(*writeDir)) error {
	defer t.src.Release()
	defer t.dst.Release()
	name := t.name
	if t.node == 0 {
		name = "."
	}
	fd, err := w.Access.OpenDir(t.src.FD, name)
	if errors.Is(err, fsat.ErrMountPoint) {
		fd, err = -1, nil // an empty directory stands for it
	}
	if fsat.IsGone(err) {
		w.vanish(t.node)
		return nil
	}
	if err != nil {
		return w.fail("open", t.node, err)
	}
	src := fsat.NewDir(fd)
	defer src.Release()
	dst, err := w.openMade(t.dst, t.name)
	if err != nil {
		return w.fail("store", t.node, err)
	}
	defer dst.Release()
	d := &w.delta.Nodes[t.node]
	for c := t.node + 1; c < d.End; c = w.delta.Nodes[c].End {
		if err := w.entry(worker, t, src, dst, c, push); err != nil {
			return err
		}
	}
	return w.settle(t, dst)
}

// settle gives a stored directory its metadata, that of the base if only what
// is below it changed.
func (w *writer) settle(t *writeDir, dst *fsat.Dir) error {
	meta := w.delta.Meta(t.node)
	if w.delta.Nodes[t.node].Flags&Through != 0 {
		meta = w.Base.Meta(t.base)
	}
	meta.Mode &= 0o7777
	var st unix.Stat_t
	if _, err := w.settleDir(dst, t.node, w.layerMeta(t.node, meta), func() string { return w.delta.Path(t.node) }, &st); err != nil {
		return w.fail("store", t.node, err)
	}
	if w.few {
		if err := unix.Fsync(dst.FD); err != nil {
			return w.fail("fsync", t.node, err)
		}
	}
	return nil
}

// layerMeta is layerMeta, and says what it leaves out.
func (w *writer) layerMeta(node uint32, m fsat.Meta) fsat.Meta {
	for _, x := range m.Xattrs {
		if fsat.ForOverlay(x.Name) && !w.Upper {
			w.warn.Add("%s: the attribute %s is an overlay's own: it is kept in the record and left out where the tree is mounted", w.delta.Path(node), x.Name)
		}
	}
	return layerMeta(m)
}

func (w *writer) fail(op string, node uint32, err error) error {
	return &os.PathError{Op: op, Path: w.delta.Path(node), Err: err}
}

// entry stores node c.
func (w *writer) entry(worker int, t *writeDir, src, dst *fsat.Dir, c uint32, push func(*writeDir)) error {
	n := &w.delta.Nodes[c]
	name := w.delta.Name(c)
	var err error
	switch {
	case n.Flags&Removed != 0:
		err = whiteout(dst, name)
	case n.IsDir():
		sub := &writeDir{src: src, dst: dst, name: name, node: c}
		if t.hasBase {
			sub.base, sub.hasBase = w.Base.child(t.base, name)
			sub.hasBase = sub.hasBase && w.Base.Nodes[sub.base].IsDir()
		}
		if err = w.mkdir(dst, name); err != nil {
			break
		}
		src.Hold(1)
		dst.Hold(1)
		push(sub)
	case !n.IsReg():
		var st unix.Stat_t
		target, _ := w.delta.Extra(c)
		meta := w.layerMeta(c, w.delta.Meta(c))
		_, err = w.special(dst, name, target, n, &meta, func() string { return w.delta.Path(c) }, &st)
	default:
		err = w.regular(worker, src, dst, c)
	}
	if err != nil {
		return w.fail("store", c, err)
	}
	return nil
}

// whiteout marks name as removed for an overlay. Where the kernel refuses to
// make one (before 5.8, or in some containers) the record alone says so.
func whiteout(dst *fsat.Dir, name string) error {
	err := unix.Mknodat(dst.FD, name, syscall.S_IFCHR, 0)
	if err == unix.EPERM {
		return nil
	}
	return err
}

// regular stores the file of node c, whichever it is by now.
func (w *writer) regular(worker int, src, dst *fsat.Dir, c uint32) error {
	n := &w.delta.Nodes[c]
	name := w.delta.Name(c)
	fd, err := w.Access.Open(src.FD, name, unix.O_RDONLY)
	if errors.Is(err, fsat.ErrMountPoint) {
		w.warn.Add("%s: is a mount point; what it holds was left out", w.delta.Path(c))
		w.vanish(c)
		return nil
	}
	if fsat.IsGone(err) {
		w.vanish(c)
		return nil
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
		return &os.PathError{Op: "open", Path: w.delta.Path(c), Err: errors.New("permission denied: run as its owner or as root, or exclude it")}
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var ok bool
	if n.Link == 0 {
		ok, err = w.copy(worker, fd, dst, name, c)
	} else {
		ok, err = w.shared(n.Link, dst, name, func(in *fsat.Dir, stash string) (bool, error) {
			return w.copy(worker, fd, in, stash, c)
		})
		if err == nil && ok {
			err = w.describe(fd, c)
		}
	}
	if err == nil && !ok {
		w.vanish(c)
	}
	return err
}

// describe brings node c up to date with the open file.
func (w *writer) describe(fd int, c uint32) error {
	var st unix.Stat_t
	now := time.Now()
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	return w.update(fd, c, &st, now)
}

// update makes node c what the stat and the attributes of the open file say.
func (w *writer) update(fd int, c uint32, st *unix.Stat_t, now time.Time) error {
	xattrs, err := fsat.Xattrs(fd)
	if err != nil {
		return err
	}
	n := &w.delta.Nodes[c]
	fresh := newNode(st)
	if racy(st.Ctim, now) {
		fresh.Flags |= Racy
	}
	if n.identicalTimes(st) {
		fresh.Flags |= n.Flags & Kept
	}
	fresh.Layer, fresh.Link, fresh.Parent, fresh.End = 0, n.Link, n.Parent, n.End
	fresh.name, fresh.nameLen, fresh.extra = n.name, n.nameLen, n.extra
	if n.DiskUID == st.Uid && n.DiskGID == st.Gid {
		fresh.UID, fresh.GID = n.UID, n.GID
	}
	if w.Upper {
		xattrs = withoutOverlay(xattrs)
	}
	if w.Ours {
		_, recorded := w.delta.Extra(c)
		keepXattrs(recorded, &xattrs, w.Upper)
	}
	*n = fresh
	extra := EncodeExtra("", xattrs)
	if string(extra) != string(w.delta.rawExtra(c)) {
		w.mu.Lock()
		if w.extras == nil {
			w.extras = make(map[uint32][]byte)
		}
		w.extras[c] = extra
		w.mu.Unlock()
	}
	return nil
}

// copy stores the open file as name and reads it again while it changes. It
// returns false if what is open is no regular file any more.
func (w *writer) copy(worker, fd int, dst *fsat.Dir, name string, c uint32) (bool, error) {
	for attempt := 1; ; attempt++ {
		var st, stored, after unix.Stat_t
		now := time.Now()
		// See examineFile for why. Files that are clean cost nothing.
		_ = unix.SyncFileRange(fd, 0, 0, flushAll)
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return false, err
		}
		if err := w.update(fd, c, &st, now); err != nil {
			return false, err
		}
		meta := w.layerMeta(c, w.currentMeta(c))
		size, err := w.copier.File(fsat.New{Dir: dst.FD, Name: name, Meta: &meta, Size: st.Size, Live: true}, fd, w.bufs[worker], w.set, &stored)
		if err != nil {
			return false, err
		}
		if err := unix.Fstat(fd, &after); err != nil {
			return false, err
		}
		n := &w.delta.Nodes[c]
		steady := n.identicalTimes(&after) && size == st.Size
		if steady || attempt == copyAttempts {
			if !steady {
				n.Flags |= Racy
			}
			n.Size = size
			return true, w.stored(dst, name, size)
		}
		if err := unix.Unlinkat(dst.FD, name, 0); err != nil {
			return false, err
		}
	}
}

func (n *Node) identicalTimes(st *unix.Stat_t) bool {
	return n.CtimeSec == st.Ctim.Sec && n.CtimeNsec == uint32(st.Ctim.Nsec) &&
		n.MtimeSec == st.Mtim.Sec && n.MtimeNsec == uint32(st.Mtim.Nsec) && n.Size == st.Size
}

// currentMeta is the metadata of node c with its newest attributes.
func (w *writer) currentMeta(c uint32) fsat.Meta {
	meta := w.delta.Meta(c)
	w.mu.Lock()
	extra, ok := w.extras[c]
	w.mu.Unlock()
	if ok {
		_, meta.Xattrs = decodeExtra(extra)
	}
	return meta
}

// stored counts a file, and flushes it if there are few.
func (w *writer) stored(dst *fsat.Dir, name string, size int64) error {
	files, bytes := w.files.Add(1), w.bytes.Add(size)
	if w.Progress != nil {
		w.Progress(files, bytes)
	}
	if !w.few {
		return nil
	}
	fd, err := Access.Open(dst.FD, name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fsync(fd)
}

func (w *writer) vanish(node uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.delta.Nodes[node].Flags |= gone
	w.vanished = true
}

// result is the difference as it was stored.
func (w *writer) result() (*State, error) {
	for c, extra := range w.extras {
		w.delta.Nodes[c].extra = 0
		if len(extra) > 0 {
			w.delta.Nodes[c].extra = w.delta.addExtra(extra)
		}
	}
	w.delta.Layers = []forks.ID{w.ID}
	w.evenLinks()
	if !w.vanished {
		return w.delta, nil
	}
	if w.delta.Nodes[0].Flags&gone != 0 {
		return nil, &os.PathError{Op: "open", Path: ".", Err: unix.ENOENT}
	}
	b := NewBuilder(len(w.delta.Nodes), w.ID)
	w.rebuild(b, 0, 0, 0, w.Base != nil)
	return b.State()
}

// rebuild copies node i without what vanished.
func (w *writer) rebuild(b *Builder, i, parent, base uint32, hasBase bool) {
	n := w.delta.Nodes[i]
	name := w.delta.Name(i)
	if n.Flags&gone != 0 {
		if hasBase {
			b.Add(parent, name, Node{Flags: Removed, Layer: NoLayer}, nil)
		}
		return
	}
	at := b.Add(parent, name, n, w.delta.rawExtra(i))
	for c := i + 1; c < n.End; c = w.delta.Nodes[c].End {
		var below uint32
		ok := hasBase
		if hasBase {
			below, ok = w.Base.child(base, w.delta.Name(c))
		}
		w.rebuild(b, c, at, below, ok)
	}
}

// evenLinks makes the names of one file equal in all but name, also if it
// changed while they were read, and racy if one is. Its size is what was read.
func (w *writer) evenLinks() {
	first := make(map[uint32]uint32)
	for i := range w.delta.Nodes {
		n := &w.delta.Nodes[i]
		if n.Link == 0 || n.Flags&(Removed|gone) != 0 {
			continue
		}
		f, ok := first[n.Link]
		if !ok {
			first[n.Link] = uint32(i)
			continue
		}
		a := &w.delta.Nodes[f]
		a.Flags |= n.Flags & Racy
	}
	for i := range w.delta.Nodes {
		n := &w.delta.Nodes[i]
		f, ok := first[n.Link]
		if n.Link == 0 || !ok || n.Flags&(Removed|gone) != 0 {
			continue
		}
		own := *n
		*n = w.delta.Nodes[f]
		n.Parent, n.End, n.name, n.nameLen = own.Parent, own.End, own.name, own.nameLen
	}
}

// durable writes the record and flushes the layer.
func (w *writer) durable(st *Stage, node *fsat.Dir, record []byte) (err error) {
	path := filepath.Join(st.Path, "node", "record")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	if _, err := f.Write(record); err != nil {
		return err
	}
	if !w.few {
		if err := unix.Syncfs(node.FD); err != nil {
			return &os.PathError{Op: "syncfs", Path: path, Err: err}
		}
		return nil
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := unix.Fsync(node.FD); err != nil {
		return &os.PathError{Op: "fsync", Path: filepath.Dir(path), Err: err}
	}
	return nil
}
