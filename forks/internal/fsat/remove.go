//go:build linux

package fsat

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// RemoveAll removes name in the directory dir with all below it. It follows no
// symlink, and stops with an error at a mount point. Modes that forbid it are
// changed, immutable flags cleared where the caller may. What is not there is
// no error.
func RemoveAll(ctx context.Context, dir int, name string) error {
	err := unlink(dir, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR && err != unix.EPERM && err != unix.EACCES {
		return &os.PathError{Op: "remove", Path: name, Err: err}
	}
	fd, err := unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return explain(err)
	}
	r := remover{lists: make([]List, Workers())}
	top := &removal{name: name, in: NewDir(fd)}
	return Run(ctx, Workers(), []*removal{top}, r.dir, func(t *removal) { t.in.Release() })
}

type remover struct{ lists []List }

// removal is a directory to be removed; it goes when its last subdirectory has.
type removal struct {
	name string
	in   *Dir // holds the directory; released when this one is gone
	up   *removal
	self *Dir
	left atomic.Int32
}

func (t *removal) path() string {
	if t.up == nil {
		return t.name
	}
	return t.up.path() + "/" + t.name
}

func (r *remover) dir(worker int, t *removal, push func(*removal)) error {
	fd, err := OpenWritable(t.in.FD, t.name)
	if errors.Is(err, unix.ENOENT) {
		return t.done()
	}
	if errors.Is(err, unix.ENOTDIR) {
		if err := unlink(t.in.FD, t.name, 0); err != nil {
			return t.fail(err)
		}
		return t.done()
	}
	if err != nil {
		return t.fail(err)
	}
	t.self = NewDir(fd)
	t.left.Store(1)
	l := &r.lists[worker]
	if err := l.Read(fd); err != nil {
		return t.fail(err)
	}
	for i := range l.Len() {
		name := string(l.Name(i))
		if l.Type(i) != unix.DT_DIR {
			err := unlink(fd, name, 0)
			if err == nil || err == unix.ENOENT {
				continue
			}
			if err != unix.EISDIR {
				return t.fail(fmt.Errorf("%s: %w", name, err))
			}
		}
		t.self.Hold(1)
		t.left.Add(1)
		push(&removal{name: name, in: t.self, up: t})
	}
	return t.leave()
}

// leave is called when one thing below t is gone.
func (t *removal) leave() error {
	if t.left.Add(-1) > 0 {
		return nil
	}
	t.self.Release()
	if err := unlink(t.in.FD, t.name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return t.fail(err)
	}
	return t.done()
}

func (t *removal) done() error {
	t.in.Release()
	if t.up != nil {
		return t.up.leave()
	}
	return nil
}

func (t *removal) fail(err error) error {
	if errors.Is(err, unix.EBUSY) {
		err = ErrMountPoint
	}
	return &os.PathError{Op: "remove", Path: t.path(), Err: err}
}

// OpenWritable opens a directory so that its entries can be removed.
func OpenWritable(dir int, name string) (int, error) {
	var a Access
	var st unix.Stat_t
	flags := unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := a.open(dir, name, flags|unix.O_RDONLY)
	if err == nil && os.Geteuid() != 0 {
		if err = unix.Fstat(fd, &st); err == nil && st.Mode&0o700 != 0o700 {
			err = unix.Fchmod(fd, 0o700)
		}
		if err != nil {
			unix.Close(fd)
		}
	}
	if err == unix.EACCES {
		if fd, err = a.open(dir, name, flags|unix.O_PATH); err != nil {
			return -1, err
		}
		err = ChmodFD(fd, 0o700)
		unix.Close(fd)
		if err == nil {
			fd, err = a.open(dir, name, flags|unix.O_RDONLY)
		}
	}
	if err == unix.EXDEV {
		err = ErrMountPoint
	}
	return fd, explain(err)
}

// unlink removes one name; if flags forbid it, they are cleared first.
func unlink(dir int, name string, flags int) error {
	err := unix.Unlinkat(dir, name, flags)
	if err != unix.EPERM || os.Geteuid() != 0 {
		return err
	}
	if UnlockAt(dir, name) != nil {
		return err
	}
	return unix.Unlinkat(dir, name, flags)
}

// UnlockAt clears the immutable and append-only flags of the directory dir and
// of name in it, if that is a regular file or a directory.
func UnlockAt(dir int, name string) error {
	err := unix.EPERM
	if Locked(dir, "") && Unlock(dir) == nil {
		err = 0
	}
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || !Locked(dir, name) {
		return errOrNil(err)
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFDIR {
		return errOrNil(err)
	}
	fd, e := Access{}.open(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC)
	if e != nil {
		return e
	}
	defer unix.Close(fd)
	return Unlock(fd)
}

func errOrNil(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

// DiskUsageAt returns the bytes allocated to name in dir and to all below it,
// as far as it can be read. Of a file with several names each counts its share.
func DiskUsageAt(dir int, name string) int64 {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return 0
	}
	size := st.Blocks * 512
	if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		size /= int64(st.Nlink)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return size
	}
	fd, err := Access{Chmod: true}.OpenDir(dir, name)
	if err != nil {
		return size
	}
	defer unix.Close(fd)
	var l List
	if l.Read(fd) != nil {
		return size
	}
	for i := range l.Len() {
		size += DiskUsageAt(fd, string(l.Name(i)))
	}
	return size
}
