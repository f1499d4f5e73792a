//go:build linux

package fsat

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Dir is an open directory that closes when its last holder lets go.
type Dir struct {
	FD   int
	refs atomic.Int32
}

// NewDir wraps fd; the caller holds it once.
func NewDir(fd int) *Dir {
	d := &Dir{FD: fd}
	d.refs.Store(1)
	return d
}

// Hold adds n holders.
func (d *Dir) Hold(n int) { d.refs.Add(int32(n)) }

// Release takes one holder away.
func (d *Dir) Release() {
	if d.refs.Add(-1) == 0 {
		unix.Close(d.FD)
	}
}

// ErrMountPoint is returned where a path is a mount point and the caller did
// not ask to enter those.
var ErrMountPoint = errors.New("is a mount point")

// Access says how far to go where permissions refuse to read what the caller
// owns. A helper process in a user namespace is always tried.
type Access struct {
	// Chmod: where user namespaces are refused, change modes for a moment.
	Chmod bool
	// CrossMounts enters mount points.
	CrossMounts bool
}

// OpenDir opens the directory name in dir for reading.
func (a Access) OpenDir(dir int, name string) (int, error) {
	return a.Open(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
}

// Open opens name, one element, in dir. Symlinks are not followed. The caller
// knows that name is a regular file or a directory; if it has become something
// else, opening it does not block.
func (a Access) Open(dir int, name string, flags int) (int, error) {
	flags |= unix.O_NOFOLLOW | unix.O_CLOEXEC
	atime := 0
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NONBLOCK | unix.O_NOCTTY
		atime = unix.O_NOATIME
	}
	fd, err := a.open(dir, name, flags|atime)
	if err == unix.EPERM {
		fd, err = a.open(dir, name, flags)
	}
	if err == unix.EACCES {
		fd, err = a.openOwned(dir, name, flags)
	}
	if err == unix.EXDEV {
		return -1, ErrMountPoint
	}
	return fd, explain(err)
}

func (a Access) open(dir int, name string, flags int) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags), Resolve: unix.RESOLVE_NO_SYMLINKS}
	if !a.CrossMounts {
		how.Resolve |= unix.RESOLVE_NO_XDEV
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		if err != unix.EINTR && err != unix.EAGAIN {
			return fd, err
		}
	}
}

// openOwned opens what permissions refuse and the caller may yet be owner of.
func (a Access) openOwned(dir int, name string, flags int) (int, error) {
	if os.Geteuid() == 0 {
		return -1, unix.EACCES
	}
	fd, err := helperOpen(dir, name, flags, a.CrossMounts)
	if !errors.Is(err, errNoHelper) || !a.Chmod {
		return fd, err
	}
	return a.openByChmod(dir, name, flags)
}

// chmodding serialises the moments in which modes are not what they should be.
var chmodding sync.Mutex

func (a Access) openByChmod(dir int, name string, flags int) (fd int, err error) {
	chmodding.Lock()
	defer chmodding.Unlock()
	restoreDir, err := AddMode(dir, 0o700)
	if err != nil {
		return -1, unix.EACCES
	}
	defer restoreDir()
	fd, err = a.open(dir, name, flags)
	if err != unix.EACCES {
		return fd, err
	}
	path, err := a.open(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(path)
	restore, err := AddMode(path, 0o700)
	if err != nil {
		return -1, unix.EACCES
	}
	defer restore()
	return a.open(dir, name, flags)
}

// AddMode sets mode bits on what fd (O_PATH allowed) stands for and returns
// what undoes it.
func AddMode(fd int, bits uint32) (func(), error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&bits == bits {
		return func() {}, nil
	}
	if err := ChmodFD(fd, st.Mode&0o7777|bits); err != nil {
		return nil, err
	}
	return func() { _ = ChmodFD(fd, st.Mode&0o7777) }, nil
}

// ChmodFD changes the mode of what fd stands for, also when it was opened with
// O_PATH, which fchmod refuses.
func ChmodFD(fd int, mode uint32) error {
	return unix.Chmod(procPath(fd), mode)
}

func procPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// Stat is fstatat of the NUL-terminated name, not following a symlink.
func (a Access) Stat(dir int, name *byte, st *unix.Stat_t) error {
	for {
		_, _, e := unix.Syscall6(unix.SYS_NEWFSTATAT, uintptr(dir), uintptr(unsafe.Pointer(name)),
			uintptr(unsafe.Pointer(st)), unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, 0)
		switch e {
		case 0:
			return nil
		case unix.EINTR:
			continue
		case unix.EACCES:
			fd, err := a.openOwned(dir, unix.BytePtrToString(name), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Fstat(fd, st)
		}
		return e
	}
}

// StatName is Stat for a string.
func (a Access) StatName(dir int, name string, st *unix.Stat_t) error {
	p, err := unix.BytePtrFromString(name)
	if err != nil {
		return err
	}
	return a.Stat(dir, p, st)
}

// Readlink returns the target of the symlink name.
func (a Access) Readlink(dir int, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, buf)
	if err == unix.EACCES {
		var fd int
		if fd, err = a.openOwned(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC); err != nil {
			return "", err
		}
		defer unix.Close(fd)
		n, err = unix.Readlinkat(fd, "", buf)
	}
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// explain adds to errors that are the environment's what to do about them.
func explain(err error) error {
	switch err {
	case unix.EMFILE, unix.ENFILE:
		return fmt.Errorf("%w: raise the limit of open files (ulimit -n)", err)
	}
	return err
}

// IsGone says that err means the path is not there (any more), or has become
// something else between two calls.
func IsGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) ||
		errors.Is(err, unix.ESTALE) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV)
}
