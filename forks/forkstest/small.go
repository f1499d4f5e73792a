//go:build linux

package forkstest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// smallSizes are volumes that are soon full: the least that each mkfs takes,
// or room for what the tests store.
var smallSizes = map[int64][2]string{
	unix.EXT4_SUPER_MAGIC:  {"ext4", "40m"},
	unix.XFS_SUPER_MAGIC:   {"xfs", "300m"},
	unix.BTRFS_SUPER_MAGIC: {"btrfs", "128m"},
	unix.TMPFS_MAGIC:       {"tmpfs", "24m"},
}

// fewFiles are volumes that take few files; those of other file systems take as
// many as there is space for.
var fewFiles = map[int64][2]string{
	unix.EXT4_SUPER_MAGIC: {fewExt4, "40m"},
	unix.TMPFS_MAGIC:      {"tmpfs", "24m,nr_inodes=800"},
}

// small makes a world on a volume that is soon full. An ordinary user can have
// nothing but a tmpfs.
func (w *world) small(sizes map[int64][2]string) *world {
	w.Helper()
	var fs unix.Statfs_t
	assert.NilError(w, unix.Statfs(w.dir, &fs))
	s := &world{T: w.T, b: w.b, ctx: w.ctx}
	kind, ok := sizes[int64(fs.Type)]
	switch {
	case !ok:
		w.Skip("this file system makes as many files as there is space for")
	case os.Geteuid() == 0:
		s.dir = filepath.Join(SmallVolume(w, kind[0], kind[1]), "w")
	case kind[0] == "tmpfs":
		at := filepath.Join(w.dir, "small")
		assert.NilError(w, os.Mkdir(at, 0o755))
		w.mount(order{At: at, Type: "tmpfs", Data: "mode=0755,size=" + kind[1]})
		s.dir = filepath.Join(at, "w")
	default:
		w.Skip("an ordinary user can mount no small volume but a tmpfs")
	}
	assert.NilError(w, os.Mkdir(s.dir, 0o755))
	s.open()
	return s
}

// mount has something mounted until the test ends.
func (w *world) mount(o order) {
	w.Helper()
	err := o.give()
	if errors.Is(err, errNoMounter) {
		w.Skip(err)
	}
	assert.NilError(w, err)
	w.Cleanup(func() { assert.NilError(w, order{At: o.At}.give()) })
}

// free is the space that is left.
func (w *world) free() int64 {
	w.Helper()
	var fs unix.Statfs_t
	fd, err := unix.Open(w.dir, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	assert.NilError(w, err)
	defer unix.Close(fd)
	assert.NilError(w, unix.Syncfs(fd)) // some free late
	assert.NilError(w, unix.Fstatfs(fd, &fs))
	return int64(fs.Bavail) * fs.Bsize
}

// fill leaves about so many bytes free until it is undone.
func (w *world) fill(left int64) (undo func()) {
	w.Helper()
	path := filepath.Join(w.dir, "ballast")
	f, err := os.Create(path)
	assert.NilError(w, err)
	defer f.Close()
	size := w.free() - left
	for size > 0 && unix.Fallocate(int(f.Fd()), 0, 0, size) != nil {
		size -= 64 << 10 // what the file system keeps for itself
	}
	return func() {
		w.Helper()
		assert.NilError(w, os.Remove(path))
		w.free()
	}
}

// fillInodes leaves so many files that can be made, until it is undone.
func (w *world) fillInodes(left int) (undo func()) {
	w.Helper()
	dir := filepath.Join(w.dir, "ballast")
	assert.NilError(w, os.Mkdir(dir, 0o755))
	n := 0
	for ; ; n++ {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(n)), nil, 0o600); err != nil {
			assert.ErrorIs(w, err, unix.ENOSPC)
			break
		}
	}
	for i := range min(left, n) {
		assert.NilError(w, os.Remove(filepath.Join(dir, fmt.Sprint(i))))
	}
	return func() { assert.NilError(w, os.RemoveAll(dir)) }
}

// state is what an operation that fails leaves as it was.
type state struct {
	chapter
	stored map[forks.ID]Manifest
}

func (w *world) state() state {
	w.Helper()
	s := state{chapter: w.chapter(), stored: map[forks.ID]Manifest{}}
	for _, id := range s.ids {
		s.stored[id] = w.stored(id)
	}
	return s
}

// same fails unless the store is as it was; with checkout, the work tree may
// be said to be interrupted instead.
func (w *world) same(was state, checkout bool) {
	w.Helper()
	now := w.state()
	assert.DeepEqual(w, now.ids, was.ids)
	for _, id := range now.ids {
		Equal(w, now.stored[id], was.stored[id])
	}
	assert.Equal(w, len(now.bases), len(was.bases), "%v", now.bases)
	for k, base := range was.bases {
		tree, whole := now.trees[k]
		if !whole && checkout && k == forks.Work {
			continue
		}
		assert.Equal(w, now.bases[k], base)
		Equal(w, tree, was.trees[k])
	}
}
