//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"cmp"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"unsafe"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// Of linux/fiemap.h.
const (
	iocFiemap      = 0xc020660b
	fiemapSync     = 1
	extentLast     = 0x1
	extentInline   = 0x200
	extentShared   = 0x2000
	fiemapHead     = 32
	fiemapExtent   = 56
	fiemapAtATime  = 256
	fiemapNoExtent = 0x2 | 0x4 // of unknown place, or not yet written
)

// extent is where some of a file's bytes lie.
type extent struct {
	physical, length uint64
	flags            uint32
}

// extents lists the extents of the open file fd.
func extents(fd int) ([]extent, error) {
	var found []extent
	buf := make([]uint64, (fiemapHead+fiemapAtATime*fiemapExtent)/8)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&buf[0])), len(buf)*8)
	for start := uint64(0); ; {
		clear(b[:fiemapHead])
		binary.NativeEndian.PutUint64(b[0:], start)
		binary.NativeEndian.PutUint64(b[8:], ^uint64(0)-start)
		binary.NativeEndian.PutUint32(b[16:], fiemapSync)
		binary.NativeEndian.PutUint32(b[24:], fiemapAtATime)
		if err := ioctl(fd, iocFiemap, unsafe.Pointer(&buf[0])); err != nil {
			return nil, os.NewSyscallError("ioctl FIEMAP", err)
		}
		n := int(binary.NativeEndian.Uint32(b[20:]))
		for i := range n {
			e := b[fiemapHead+i*fiemapExtent:]
			x := extent{binary.NativeEndian.Uint64(e[8:]), binary.NativeEndian.Uint64(e[16:]), binary.NativeEndian.Uint32(e[40:])}
			found = append(found, x)
			start = binary.NativeEndian.Uint64(e[0:]) + x.length
			if x.flags&extentLast != 0 {
				return found, nil
			}
		}
		if n == 0 {
			return found, nil
		}
	}
}

// newBytes sums up the extents of the files that were added or changed, and
// that the files before them had not. With unshared, those that something else
// has too are not counted. It is what an ordinary user can find out: of a copy
// that shares its extents with another file of the tree it sees too much.
func newBytes(a, b *side, list []forks.Change, unshared bool) (int64, error) {
	seen := make(map[uint64]bool)
	var sum int64
	for _, c := range list {
		if c.New == nil || c.New.Mode&unix.S_IFMT != unix.S_IFREG || c.New.Size == 0 {
			continue
		}
		var before []extent
		if c.Old != nil && c.Old.Mode&unix.S_IFMT == unix.S_IFREG {
			old, err := a.extents(c.Path)
			if err != nil {
				return 0, err
			}
			before = old
			slices.SortFunc(before, func(x, y extent) int { return cmp.Compare(x.physical, y.physical) })
		}
		now, err := b.extents(c.Path)
		if err != nil {
			return 0, err
		}
		for _, x := range now {
			switch {
			case x.flags&extentInline != 0:
				sum += int64(x.length)
			case x.flags&fiemapNoExtent != 0, unshared && x.flags&extentShared != 0, seen[x.physical], covers(before, x.physical):
			default:
				seen[x.physical] = true
				sum += int64(x.length)
			}
		}
	}
	return sum, nil
}

// covers says whether one of the ordered extents holds the place at.
func covers(ordered []extent, at uint64) bool {
	i, ok := slices.BinarySearchFunc(ordered, at, func(x extent, at uint64) int { return cmp.Compare(x.physical, at) })
	return ok || i > 0 && at < ordered[i-1].physical+ordered[i-1].length
}

// extents lists those of the file at path; none if it is gone.
func (s *side) extents(path string) ([]extent, error) {
	dir, name, err := s.parent(path)
	if err != nil || dir < 0 {
		return nil, err
	}
	defer unix.Close(dir)
	fd, err := trees.Open(dir, name, unix.O_RDONLY)
	if fsat.IsGone(err) || errors.Is(err, fsat.ErrMountPoint) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	found, err := extents(fd)
	if err != nil {
		return nil, &os.PathError{Op: "map", Path: path, Err: err}
	}
	return found, nil
}
