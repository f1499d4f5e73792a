//go:build linux

package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// Where the work tree is not mounted, what is written to its path would be lost
// from sight. So something stands there that refuses: as root, whom no mode
// stops, a symlink that leads nowhere, so that neither a file nor a directory
// can be made through it; else a directory that nobody may write to.

// guardText is where the symlink leads: who lists it reads what to do. Its
// first element is never made.
const guardText = "not-mounted/run an agentenv command"

// guard lets the guard stand at the work tree's path, where nothing is mounted.
func (d *driver) guard() error {
	dir, name := d.store.ForkDir(forks.Work)
	in, err := openDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // there is no fork
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(in)
	path := filepath.Join(dir, name)
	if err := vacant(path); err != nil {
		return err
	}
	is, err := os.Lstat(path)
	if err == nil && is.IsDir() == (os.Geteuid() != 0) {
		return nil
	}
	if err := removeGuard(path); err != nil {
		return err
	}
	return placeGuard(in, name)
}

// placeGuard makes the guard in the open directory dir.
func placeGuard(dir int, name string) error {
	var err error
	if os.Geteuid() == 0 {
		err = unix.Symlinkat(guardText, dir, name)
	} else if err = unix.Mkdirat(dir, name, 0o555); err == nil {
		err = unix.Fchmodat(dir, name, 0o555, 0) // whatever the umask
	}
	if err != nil {
		return &os.PathError{Op: "make", Path: name, Err: err}
	}
	return nil
}

func isGuard(path string) bool {
	text, err := os.Readlink(path)
	return err == nil && text == guardText
}

// vacant refuses what somebody made at the work tree's path while it was not
// mounted.
func vacant(path string) error {
	is, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && isGuard(path) {
		return nil
	}
	if err != nil {
		return err
	}
	if is.IsDir() {
		names, err := os.ReadDir(path)
		if err != nil || len(names) == 0 {
			return err
		}
	}
	return fmt.Errorf("%s %w, not the work tree: move it away", path, forks.ErrReplaced)
}

// removeGuard removes a guard of either kind, and nothing else.
func removeGuard(path string) error {
	if dir, err := openDir(path); err == nil {
		_ = fsat.Unlock(dir) // it may have no such flag
		unix.Close(dir)
	}
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func openDir(path string) (int, error) {
	return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

// makeBare makes the directory that the tree is mounted on. After a reboot it
// is there without the tree; then it is to refuse writes, also root's.
func makeBare(path string) error {
	if err := vacant(path); err != nil {
		return err
	}
	if isGuard(path) {
		if err := removeGuard(path); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o555); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	dir, err := openDir(path)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(dir)
	fsat.Lock(dir)
	return nil
}
