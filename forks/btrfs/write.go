//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"golang.org/x/sys/unix"
)

// copyAttempts is how often a file that changes while it is read is read again.
const copyAttempts = 3

// flushAll writes a file's dirty pages out and waits: then the next store
// through a mapping changes the file's times.
const flushAll = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER

// writer brings what a scan of the source found into the new tree, which is
// empty or a snapshot of the base.
type writer struct {
	*capture
	access fsat.Access
	delta  *layer.State
	set    fsat.Setter
	bufs   [][]byte
	files  atomic.Int64
	bytes  atomic.Int64
	// blocks is the disk space of the files made, inline that of those so small
	// that they lie in the tree of inodes and cannot be shared.
	blocks, inline atomic.Int64
	// unsteady: the source was changed while it was read; vanished: some of it
	// went.
	unsteady, vanished atomic.Bool
	// stash is a directory in the new tree with the first name of each group of
	// hard links; it is there while the tree is written.
	stash     *fsat.Dir
	stashName string

	mu     sync.Mutex
	record *recorded
	groups map[uint32]*group
	late   []lateDir
}

// group is a hard-link group that is being made.
type group struct {
	mu   sync.Mutex
	made bool
}

// lateDir is a directory whose mode keeps its own maker from what is below.
type lateDir struct {
	dir  *fsat.Dir
	node uint32
	meta fsat.Meta
}

// writeDir is a directory to be written.
type writeDir struct {
	src, dst *fsat.Dir // what holds it
	name     string
	node     uint32
}

// maxInline is the mount option max_inline's default.
const maxInline = 2048

// write brings the new tree, whose root is open, up to the source.
func (k *capture) write(ctx context.Context, root, tree int) (*writer, error) {
	w := &writer{capture: k, access: fsat.Access{CrossMounts: k.src.CrossFilesystems}, delta: k.scan.Delta,
		set: fsat.NewSetter(), groups: make(map[uint32]*group)}
	w.set.Fresh = k.base == ""
	var err error
	if k.base != "" {
		if w.record, err = k.readRecord(k.base); err != nil {
			return nil, err
		}
	}
	if w.record == nil {
		w.record = newRecorded()
	}
	if w.delta == nil {
		return w, nil
	}
	w.bufs = make([][]byte, fsat.Workers())
	for i := range w.bufs {
		w.bufs[i] = make([]byte, fsat.BufferSize)
	}
	if err := w.run(ctx, root, tree); err != nil {
		return nil, fmt.Errorf("%s: %w", k.src.Dir, err)
	}
	return w, nil
}

func (w *writer) run(ctx context.Context, root, tree int) error {
	src, err := w.access.OpenDir(root, ".")
	if err != nil {
		return &os.PathError{Op: "open", Path: ".", Err: err}
	}
	dst, err := unix.FcntlInt(uintptr(tree), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		unix.Close(src)
		return err
	}
	if err := w.makeStash(tree); err != nil {
		return err
	}
	defer w.close()
	top := &writeDir{src: fsat.NewDir(src), dst: fsat.NewDir(dst), name: "."}
	err = fsat.Run(ctx, len(w.bufs), []*writeDir{top}, w.dir, func(t *writeDir) {
		t.src.Release()
		t.dst.Release()
	})
	if err != nil {
		return err
	}
	if err := fsat.RemoveAll(ctx, tree, w.stashName); err != nil {
		return err
	}
	return w.settleLate()
}

// makeStash makes the stash under a name that nobody has.
func (w *writer) makeStash(tree int) error {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	w.stashName = ".agentenv-" + hex.EncodeToString(b)
	if err := unix.Mkdirat(tree, w.stashName, 0o700); err != nil {
		return &os.PathError{Op: "mkdir", Path: w.stashName, Err: err}
	}
	fd, err := trees.OpenDir(tree, w.stashName)
	if err != nil {
		return &os.PathError{Op: "open", Path: w.stashName, Err: err}
	}
	w.stash = fsat.NewDir(fd)
	return nil
}

func (w *writer) close() {
	w.stash.Release()
	for _, l := range w.late {
		l.dir.Release()
	}
}

func (w *writer) fail(op string, node uint32, err error) error {
	return &os.PathError{Op: op, Path: w.delta.Path(node), Err: err}
}

// dir writes one directory.
func (w *writer) dir(worker int, t *writeDir, push func(*writeDir)) error {
	defer t.src.Release()
	defer t.dst.Release()
	fd, err := w.access.OpenDir(t.src.FD, t.name)
	if errors.Is(err, fsat.ErrMountPoint) {
		fd, err = -1, nil // an empty directory stands for it
	}
	if fsat.IsGone(err) {
		w.vanish()
		return fsat.RemoveAll(context.Background(), t.dst.FD, t.name)
	}
	if err != nil {
		return w.fail("open", t.node, err)
	}
	src := fsat.NewDir(fd)
	defer src.Release()
	open, err := fsat.OpenWritable(t.dst.FD, t.name)
	if err != nil {
		return w.fail("store", t.node, err)
	}
	dst := fsat.NewDir(open)
	defer dst.Release()
	meta, err := w.dirMeta(dst, t.node)
	if err != nil {
		return w.fail("store", t.node, err)
	}
	for c := t.node + 1; c < w.delta.Nodes[t.node].End; c = w.delta.Nodes[c].End {
		if err := w.entry(worker, src, dst, c, push); err != nil {
			return err
		}
	}
	return w.settleDir(dst, t.node, meta)
}

// dirMeta is what a directory is to have in the end: where only what is below
// it changed, what the base has.
func (w *writer) dirMeta(dst *fsat.Dir, node uint32) (fsat.Meta, error) {
	if w.delta.Nodes[node].Flags&layer.Through == 0 {
		return w.delta.Meta(node), nil
	}
	i := uint32(0)
	if node != 0 {
		var ok bool
		if i, ok = w.index.Find(w.delta.Path(node)); !ok {
			return fsat.Meta{}, fmt.Errorf("%w: the index of the source does not fit it", os.ErrInvalid)
		}
	}
	return w.index.Meta(i), nil
}

// settleDir gives a directory, all of whose entries are there, its metadata;
// the root, and one whose mode would shut the writer out, later.
func (w *writer) settleDir(d *fsat.Dir, node uint32, meta fsat.Meta) error {
	if node == 0 || !w.set.Root() && meta.Mode&0o300 != 0o300 {
		d.Hold(1)
		w.mu.Lock()
		w.late = append(w.late, lateDir{d, node, meta})
		w.mu.Unlock()
		return nil
	}
	return w.finishDir(d.FD, node, meta)
}

func (w *writer) finishDir(fd int, node uint32, meta fsat.Meta) error {
	var st unix.Stat_t
	if err := w.set.FD(fd, &meta, &st); err != nil {
		return w.fail("store", node, err)
	}
	w.keep(fd, "", &st, &meta)
	return nil
}

// settleLate does what settleDir put off, the deepest first.
func (w *writer) settleLate() error {
	slices.SortFunc(w.late, func(a, b lateDir) int { return int(b.node) - int(a.node) })
	for _, l := range w.late {
		if err := w.finishDir(l.dir.FD, l.node, l.meta); err != nil {
			return err
		}
	}
	return nil
}

// keep puts into the record what the disk did not take. The path is name in
// the open directory fd, or fd itself.
func (w *writer) keep(fd int, name string, st *unix.Stat_t, meta *fsat.Meta) {
	if w.set.Root() {
		return
	}
	r := inodeRecord{Ino: st.Ino, Birth: birth(fd, name), UID: meta.UID, GID: meta.GID, DiskUID: st.Uid, DiskGID: st.Gid}
	for _, x := range meta.Xattrs {
		if fsat.Privileged(x.Name) {
			r.Xattrs = append(r.Xattrs, xattr{[]byte(x.Name), []byte(x.Value)})
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if r.UID == r.DiskUID && r.GID == r.DiskGID && len(r.Xattrs) == 0 {
		delete(w.record.inodes, st.Ino)
		return
	}
	w.record.inodes[st.Ino] = r
}

// entry writes node c.
func (w *writer) entry(worker int, src, dst *fsat.Dir, c uint32, push func(*writeDir)) error {
	n := &w.delta.Nodes[c]
	name := w.delta.Name(c)
	if err := w.clear(dst, name, n); err != nil {
		return w.fail("store", c, err)
	}
	var err error
	switch {
	case n.Flags&layer.Removed != 0:
	case n.IsDir():
		err = unix.Mkdirat(dst.FD, name, 0o700)
		if err == unix.EEXIST {
			err = nil
		}
		if err == nil {
			src.Hold(1)
			dst.Hold(1)
			push(&writeDir{src: src, dst: dst, name: name, node: c})
		}
	case n.IsReg():
		err = w.regular(worker, src, dst, c)
	default:
		err = w.special(dst, c)
	}
	if err != nil {
		return w.fail("store", c, err)
	}
	return nil
}

// clear takes away what the base has at name, unless it is a directory that
// stays one.
func (w *writer) clear(dst *fsat.Dir, name string, n *layer.Node) error {
	if w.base == "" {
		return nil
	}
	if len(w.record.devices) > 0 {
		var st unix.Stat_t
		if err := unix.Fstat(dst.FD, &st); err != nil {
			return err
		}
		w.mu.Lock()
		delete(w.record.devices[st.Ino], name)
		w.mu.Unlock()
	}
	var st unix.Stat_t
	err := unix.Fstatat(dst.FD, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT || err == nil && n.IsDir() && n.Flags&layer.Removed == 0 && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	if err != nil {
		return err
	}
	return fsat.RemoveAll(context.Background(), dst.FD, name)
}

// special makes a symlink, FIFO, socket or device; what this user may not make
// goes into the record.
func (w *writer) special(dst *fsat.Dir, c uint32) error {
	n := &w.delta.Nodes[c]
	name, meta := w.delta.Name(c), w.delta.Meta(c)
	target, _ := w.delta.Extra(c)
	var err error
	switch {
	case n.IsLnk():
		err = unix.Symlinkat(target, dst.FD, name)
	case n.IsDev():
		err = unix.Mknodat(dst.FD, name, uint32(n.Mode), int(n.Size))
		if err == unix.EPERM {
			return w.keepDevice(dst, c, &meta)
		}
	default:
		err = unix.Mknodat(dst.FD, name, uint32(n.Mode), 0)
	}
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := w.set.At(dst.FD, name, &meta, &st); err != nil {
		return err
	}
	w.keep(dst.FD, name, &st, &meta)
	return nil
}

func (w *writer) keepDevice(dst *fsat.Dir, c uint32, meta *fsat.Meta) error {
	n := &w.delta.Nodes[c]
	var st unix.Stat_t
	if err := unix.Fstat(dst.FD, &st); err != nil {
		return err
	}
	w.scan.Warnings.Add("%s: a device, which only root can make; it is kept in the record and left out of forks", w.delta.Path(c))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.record.addDevice(deviceRecord{
		Dir: st.Ino, Name: []byte(w.delta.Name(c)), Mode: uint32(n.Mode), Rdev: uint64(n.Size), UID: meta.UID, GID: meta.GID,
		MtimeSec: meta.MtimeSec, MtimeNsec: meta.MtimeNsec, Xattrs: toRecord(meta.Xattrs),
	})
	return nil
}

// regular stores the file of node c, whichever it is by now. One that vanished
// is left out.
func (w *writer) regular(worker int, src, dst *fsat.Dir, c uint32) error {
	n := &w.delta.Nodes[c]
	name := w.delta.Name(c)
	fd, err := w.access.Open(src.FD, name, unix.O_RDONLY)
	switch {
	case errors.Is(err, fsat.ErrMountPoint):
		w.scan.Warnings.Add("%s: is a mount point; what it holds was left out", w.delta.Path(c))
		w.vanish()
		return nil
	case fsat.IsGone(err):
		w.vanish()
		return nil
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		return errors.New("permission denied: run as its owner or as root, or exclude it")
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	if n.Link == 0 {
		return w.copy(worker, fd, dst, name, c)
	}
	w.mu.Lock()
	g := w.groups[n.Link]
	if g == nil {
		g = &group{}
		w.groups[n.Link] = g
	}
	w.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	stash := strconv.FormatUint(uint64(n.Link), 10)
	if !g.made {
		if err := w.copy(worker, fd, w.stash, stash, c); err != nil {
			return err
		}
		g.made = true
	}
	err = unix.Linkat(w.stash.FD, stash, dst.FD, name, 0)
	if err == unix.ENOENT {
		return nil // what was open was no file any more
	}
	return err
}

// copy stores the open file as name and reads it again while it changes.
func (w *writer) copy(worker, fd int, dst *fsat.Dir, name string, c uint32) error {
	n := &w.delta.Nodes[c]
	for attempt := 1; ; attempt++ {
		var before, stored, after unix.Stat_t
		_ = unix.SyncFileRange(fd, 0, 0, flushAll) // costs nothing where all is clean
		if err := unix.Fstat(fd, &before); err != nil {
			return err
		}
		if before.Mode&unix.S_IFMT != unix.S_IFREG {
			w.vanish()
			return nil
		}
		meta, err := w.fileMeta(fd, c, &before)
		if err != nil {
			return err
		}
		size, err := w.copier.File(fsat.New{Dir: dst.FD, Name: name, Meta: &meta, Size: before.Size, Live: true}, fd, w.bufs[worker], w.set, &stored)
		if err != nil {
			return err
		}
		if err := unix.Fstat(fd, &after); err != nil {
			return err
		}
		steady := before.Ctim == after.Ctim && before.Mtim == after.Mtim && before.Size == after.Size && size == before.Size
		if steady || attempt == copyAttempts {
			if !steady {
				n.Flags |= layer.Racy
				w.unsteady.Store(true)
			}
			w.keep(dst.FD, name, &stored, &meta)
			w.count(size, &stored)
			return nil
		}
		if err := unix.Unlinkat(dst.FD, name, 0); err != nil {
			return err
		}
	}
}

func (w *writer) vanish() {
	w.unsteady.Store(true)
	w.vanished.Store(true)
}

func (w *writer) count(size int64, st *unix.Stat_t) {
	files, bytes := w.files.Add(1), w.bytes.Add(size)
	w.blocks.Add(st.Blocks * 512)
	if size <= maxInline {
		w.inline.Add(size)
	}
	if w.src.Progress != nil {
		w.src.Progress(files, bytes)
	}
}

// fileMeta is the metadata of an open file: what the scan found, unless it
// changed since.
func (w *writer) fileMeta(fd int, c uint32, st *unix.Stat_t) (fsat.Meta, error) {
	n := &w.delta.Nodes[c]
	meta := w.delta.Meta(c)
	same := n.Ino == st.Ino && n.CtimeSec == st.Ctim.Sec && n.CtimeNsec == uint32(st.Ctim.Nsec)
	if same && n.Flags&layer.Racy == 0 {
		return meta, nil
	}
	n.Flags |= layer.Racy
	xattrs, err := fsat.Xattrs(fd)
	if err != nil {
		return meta, err
	}
	owned := n.DiskUID == st.Uid && n.DiskGID == st.Gid
	fresh := fsat.Meta{Mode: st.Mode, UID: st.Uid, GID: st.Gid, MtimeSec: st.Mtim.Sec, MtimeNsec: uint32(st.Mtim.Nsec), Xattrs: xattrs}
	if owned {
		fresh.UID, fresh.GID = meta.UID, meta.GID
	}
	if !same || !slices.Equal(fresh.Xattrs, meta.Xattrs) {
		w.unsteady.Store(true)
	}
	return fresh, nil
}
