// Package hold keeps a fork from being used or removed by two processes at
// once. What a process holds is a flock on the fork's directory; it ends with
// the last process that has the open directory, so nothing is ever left locked.
package hold

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
)

// patience is how long to wait for a fork that another process holds. After a
// kill -9 of that process, what ran in the fork is killed by its init, which
// takes milliseconds.
const patience = 3 * time.Second

// Table holds the forks of one driver. The zero value holds none; it is safe
// for use by several goroutines.
type Table struct {
	mu   sync.Mutex
	held map[forks.Key]*held
}

type held struct {
	dir  *os.File
	uses int
}

// Made takes over the open directory of a fork that was made in private. It
// takes the lock before anybody else can see the directory.
func (t *Table) Made(key forks.Key, dir *os.File) error {
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return os.NewSyscallError("flock", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held == nil {
		t.held = make(map[forks.Key]*held)
	}
	t.held[key] = &held{dir: dir}
	return nil
}

// Publish gives a fork that was made in the directory made its place, dir; it
// is held before it is seen there.
func (t *Table) Publish(key forks.Key, made, dir string) error {
	lock, err := os.Open(made)
	if err != nil {
		return err
	}
	if err := t.Made(key, lock); err != nil {
		return errors.Join(err, lock.Close())
	}
	err = os.Rename(made, dir)
	if err != nil {
		t.Drop(key)
	}
	if errors.Is(err, unix.ENOTEMPTY) {
		err = forks.ErrExists
	}
	return err
}

// Take holds the fork key, whose directory is path. It waits for another
// process to let go, and gives up with [forks.ErrInUse].
func (t *Table) Take(ctx context.Context, key forks.Key, path string) error {
	end := time.Now().Add(patience)
	for {
		err := t.Try(key, path)
		if !errors.Is(err, forks.ErrInUse) || time.Now().After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Try is Take without waiting.
func (t *Table) Try(key forks.Key, path string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.held[key] != nil {
		return nil
	}
	for {
		dir, err := open(path)
		if err == nil {
			if t.held == nil {
				t.held = make(map[forks.Key]*held)
			}
			t.held[key] = &held{dir: dir}
			return nil
		}
		if !errors.Is(err, errReplaced) {
			return err
		}
	}
}

var errReplaced = errors.New("replaced meanwhile")

// open opens and locks the directory path, which is still at path then.
func open(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, forks.ErrNotFound
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	dir := os.NewFile(uintptr(fd), path)
	err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		err = forks.ErrInUse
	}
	if err == nil {
		var was, is unix.Stat_t
		if unix.Fstat(fd, &was) != nil || unix.Lstat(path, &is) != nil || was.Ino != is.Ino || was.Dev != is.Dev {
			err = errReplaced
		}
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// Use takes the fork key and counts one more use of it until release.
func (t *Table) Use(ctx context.Context, key forks.Key, path string) (file *os.File, release func(), err error) {
	if err := t.Take(ctx, key, path); err != nil {
		return nil, nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.held[key]
	if h == nil {
		return nil, nil, forks.ErrNotFound
	}
	h.uses++
	return h.dir, sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		h.uses--
	}), nil
}

// InUse says whether a use of this process lasts.
func (t *Table) InUse(key forks.Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.held[key]
	return h != nil && h.uses > 0
}

// Drop lets go of the fork key.
func (t *Table) Drop(key forks.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.held[key]; h != nil {
		_ = h.dir.Close() // only read
		delete(t.held, key)
	}
}

// Close lets go of all forks.
func (t *Table) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, h := range t.held {
		_ = h.dir.Close() // only read
		delete(t.held, key)
	}
}
