//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"golang.org/x/sys/unix"
)

// side is a tree that is read: a subvolume, and the record that goes with it.
// It is used by one goroutine.
type side struct {
	root   int
	record *recorded
	// frozen: it is a snapshot, read-only until it is about to be removed.
	frozen bool
	list   fsat.List
}

func (s *side) close() { unix.Close(s.root) }

// alive returns an error if the tree was removed: then what was read of it may
// be half of it. A tree that is being removed is writable before.
func (s *side) alive() error {
	if _, err := subvolInfo(s.root); err != nil {
		return err
	}
	var flags uint64
	if err := ioctl(s.root, iocSubvolGetFlags, unsafe.Pointer(&flags)); err != nil {
		return os.NewSyscallError("ioctl SUBVOL_GETFLAGS", err)
	}
	if s.frozen && flags&subvolReadOnly == 0 {
		return fmt.Errorf("%w: it was removed meanwhile", forks.ErrNotFound)
	}
	return nil
}

// found is one path of a side; device is set if it is in the record alone.
type found struct {
	name   string
	st     unix.Stat_t
	device *deviceRecord
}

func (f *found) kind() uint32 { return f.st.Mode & unix.S_IFMT }
func (f *found) isDir() bool  { return f.kind() == unix.S_IFDIR }
func (f *found) isReg() bool  { return f.kind() == unix.S_IFREG }

// open opens the directory name in dir; -1 without an error if it is gone or
// is a mount point.
func (s *side) open(dir int, name, path string) (int, error) {
	fd, err := trees.OpenDir(dir, name)
	switch {
	case errors.Is(err, fsat.ErrMountPoint) || fsat.IsGone(err):
		return -1, nil
	case err != nil:
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// named is a name in a directory, with the inode that the directory says.
type named struct {
	name string
	ino  uint64
}

// names lists the open directory dir, in byte order.
func (s *side) names(dir int, path string) ([]named, error) {
	if _, err := unix.Seek(dir, 0, 0); err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	if err := s.list.Read(dir); err != nil {
		if fsat.IsGone(err) {
			return nil, nil
		}
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	names := make([]named, s.list.Len())
	for i := range names {
		names[i] = named{string(s.list.Name(i)), s.list.Ino(i)}
	}
	if s.record == nil || len(s.record.devices) == 0 {
		return names, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	for name := range s.record.devicesIn(st.Ino) {
		at, ok := slices.BinarySearchFunc(names, name, func(n named, name string) int { return strings.Compare(n.name, name) })
		if !ok {
			names = slices.Insert(names, at, named{name: name})
		}
	}
	return names, nil
}

// stat returns what is at name in dir; nil if nothing is.
func (s *side) stat(dir int, name string) (*found, error) {
	f := &found{name: name}
	err := trees.StatName(dir, name, &f.st)
	if err == nil {
		return f, nil
	}
	if !fsat.IsGone(err) {
		return nil, err
	}
	if s.record == nil || len(s.record.devices) == 0 {
		return nil, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return nil, err
	}
	d, ok := s.record.devicesIn(st.Ino)[name]
	if !ok {
		return nil, nil
	}
	f.device = &d
	f.st = unix.Stat_t{Mode: d.Mode, Rdev: d.Rdev, Uid: d.UID, Gid: d.GID, Nlink: 1}
	f.st.Mtim = unix.Timespec{Sec: d.MtimeSec, Nsec: int64(d.MtimeNsec)}
	return f, nil
}

// entry describes what was found at path; nil if it is gone by now.
func (s *side) entry(dir int, f *found, path string) (*forks.Entry, error) {
	e := &forks.Entry{
		Path: path, Mode: f.st.Mode, UID: f.st.Uid, GID: f.st.Gid,
		Mtime: time.Unix(f.st.Mtim.Sec, f.st.Mtim.Nsec),
	}
	if f.device != nil {
		e.Rdev = f.st.Rdev
		for _, x := range f.device.Xattrs {
			setXattr(e, string(x.Name), string(x.Value))
		}
		return e, nil
	}
	var err error
	switch f.kind() {
	case unix.S_IFREG:
		e.Size = f.st.Size
		if f.st.Nlink > 1 {
			e.Link = f.st.Ino
		}
	case unix.S_IFLNK:
		if e.Target, err = trees.Readlink(dir, f.name); err == nil {
			e.Size = int64(len(e.Target))
		}
	case unix.S_IFBLK, unix.S_IFCHR:
		e.Rdev = f.st.Rdev
	}
	if err == nil {
		err = s.attributes(dir, f, e)
	}
	if fsat.IsGone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	return e, nil
}

// attributes reads the xattrs, and what the record has instead of the disk.
func (s *side) attributes(dir int, f *found, e *forks.Entry) error {
	xattrs, err := trees.Xattrs(dir, f.name)
	if err != nil {
		return err
	}
	for _, x := range xattrs {
		setXattr(e, x.Name, x.Value)
	}
	r, ok := s.record.inode(f.st.Ino)
	if !ok || r.Birth != birth(dir, f.name) {
		return nil
	}
	if r.DiskUID == f.st.Uid && r.DiskGID == f.st.Gid {
		e.UID, e.GID = r.UID, r.GID
	}
	for _, x := range r.Xattrs {
		if _, ok := e.Xattrs[string(x.Name)]; !ok {
			setXattr(e, string(x.Name), string(x.Value))
		}
	}
	return nil
}

func setXattr(e *forks.Entry, name, value string) {
	if e.Xattrs == nil {
		e.Xattrs = make(map[string]string)
	}
	e.Xattrs[name] = value
}

// top describes the tree's own root.
func (s *side) top() (*found, *forks.Entry, error) {
	f := &found{name: "."}
	if err := unix.Fstat(s.root, &f.st); err != nil {
		return nil, nil, &os.PathError{Op: "stat", Path: ".", Err: err}
	}
	e, err := s.entry(s.root, f, ".")
	return f, e, err
}

// parent opens the directory that holds path, and returns the last element;
// -1 without an error if it is not there.
func (s *side) parent(path string) (int, string, error) {
	at, err := unix.FcntlInt(uintptr(s.root), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1, "", err
	}
	for {
		name, rest, more := strings.Cut(path, "/")
		if !more {
			return at, name, nil
		}
		next, err := s.open(at, name, path)
		unix.Close(at)
		if err != nil || next < 0 {
			return -1, "", err
		}
		at, path = next, rest
	}
}

// lookup returns what is at path, with the open directory that holds it, which
// the caller closes; found is nil if nothing is.
func (s *side) lookup(path string) (dir int, f *found, err error) {
	if path == "." || path == "" {
		f, _, err := s.top()
		if err != nil {
			return -1, nil, err
		}
		dir, err := unix.FcntlInt(uintptr(s.root), unix.F_DUPFD_CLOEXEC, 3)
		return dir, f, err
	}
	dir, name, err := s.parent(path)
	if err != nil || dir < 0 {
		return -1, nil, err
	}
	if name == "" || name == "." || name == ".." {
		return dir, nil, nil
	}
	f, err = s.stat(dir, name)
	return dir, f, err
}

// walk calls fn for everything in the tree, parents first, names in byte order.
func (s *side) walk(fn func(dir int, f *found, e *forks.Entry) error) error {
	f, e, err := s.top()
	if err != nil {
		return err
	}
	err = fn(s.root, f, e)
	if err == forks.SkipDir {
		return nil
	}
	if err != nil {
		return err
	}
	return s.walkDir(s.root, ".", fn)
}

func (s *side) walkDir(dir int, path string, fn func(dir int, f *found, e *forks.Entry) error) error {
	names, err := s.names(dir, path)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := s.walkOne(dir, n.name, join(path, n.name), fn); err != nil {
			return err
		}
	}
	return nil
}

func (s *side) walkOne(dir int, name, path string, fn func(dir int, f *found, e *forks.Entry) error) error {
	f, err := s.stat(dir, name)
	if err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if f == nil {
		return nil
	}
	e, err := s.entry(dir, f, path)
	if err != nil || e == nil {
		return err
	}
	err = fn(dir, f, e)
	if err == forks.SkipDir {
		return nil
	}
	if err != nil || !f.isDir() {
		return err
	}
	sub, err := s.open(dir, name, path)
	if err != nil || sub < 0 {
		return err
	}
	defer unix.Close(sub)
	return s.walkDir(sub, path, fn)
}

func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// state makes of the tree, which is that of snapshot id, what package layer
// works with.
func (s *side) state(id forks.ID) (*layer.State, error) {
	b := layer.NewBuilder(1024, id)
	at := map[string]uint32{}
	links := map[uint64]uint32{}
	err := s.walk(func(_ int, f *found, e *forks.Entry) error {
		n := layer.Node{
			Size: e.Size, Mode: uint16(e.Mode), UID: e.UID, GID: e.GID, DiskUID: f.st.Uid, DiskGID: f.st.Gid,
			MtimeSec: f.st.Mtim.Sec, MtimeNsec: uint32(f.st.Mtim.Nsec), Layer: layer.NoLayer,
		}
		switch f.kind() {
		case unix.S_IFREG:
			n.Layer = 0
		case unix.S_IFBLK, unix.S_IFCHR:
			n.Size = int64(e.Rdev)
		}
		if e.Link != 0 {
			if links[e.Link] == 0 {
				links[e.Link] = uint32(len(links) + 1)
			}
			n.Link = links[e.Link]
		}
		var xattrs []fsat.Xattr
		for name, value := range e.Xattrs {
			xattrs = append(xattrs, fsat.Xattr{Name: name, Value: value})
		}
		dir, name := splitPath(e.Path)
		i := b.Add(at[dir], name, n, layer.EncodeExtra(e.Target, xattrs))
		if f.isDir() {
			at[e.Path] = i
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	return b.State()
}

// splitPath returns the directory and the last element; of the root, "" both.
func splitPath(path string) (dir, name string) {
	if path == "." {
		return "", ""
	}
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i], path[i+1:]
	}
	return ".", path
}
