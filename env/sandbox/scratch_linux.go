package sandbox

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// RemoveScratch removes the scratch directory of a command that has ended,
// with everything in it. Directories without permissions, as an overlay leaves
// them, are no obstacle to their owner. A directory that is not there is no
// error.
func RemoveScratch(dir string) error {
	parent, err := unix.Open(filepath.Dir(dir), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		defer unix.Close(parent)
		err = remove(parent, filepath.Base(dir))
	}
	if err != nil {
		return &os.PathError{Op: "remove scratch directory", Path: dir, Err: err}
	}
	return nil
}

// remove removes name of the directory at, never following a link.
func remove(at int, name string) error {
	err := unix.Unlinkat(at, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR && err != unix.EPERM {
		return err
	}
	if unix.Unlinkat(at, name, unix.AT_REMOVEDIR) == nil {
		return nil
	}
	dir, err := openForRemoval(at, name)
	if err != nil {
		return err
	}
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(256)
		for _, n := range names {
			if err := remove(int(dir.Fd()), n); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
		}
		if err != nil {
			return err
		}
	}
}

// openForRemoval opens a directory whose owner may lack every right to it.
func openForRemoval(at int, name string) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(at, name, flags, 0)
	if err == unix.EACCES {
		if err := unix.Fchmodat(at, name, 0o700, 0); err != nil {
			return nil, err
		}
		fd, err = unix.Openat(at, name, flags, 0)
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Fchmod(fd, 0o700); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
