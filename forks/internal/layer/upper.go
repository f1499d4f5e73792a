//go:build linux

package layer

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
)

// Upper is what a stacked fork was found to have changed.
type Upper struct {
	Stack *Stack
	// Delta is how the fork differs from its base; nil if it does not.
	Delta *State
	// base is the part of the fork's base that can differ.
	base *State
	scan *Scan
	root int // the open upper directory; -1 if there is none
	// spare are the upper's files that are as the layers below have them.
	spare []string
}

// Close lets go of the upper directory.
func (u *Upper) Close() {
	if u.root >= 0 {
		unix.Close(u.root)
	}
}

// ScanUpper compares a stacked fork with its base.
func (s *Store) ScanUpper(ctx context.Context, st *Stack) (u *Upper, err error) {
	if st.bare {
		return &Upper{Stack: st, scan: &Scan{}, root: -1}, nil
	}
	dir := s.stackPath(st.key)
	u = &Upper{Stack: st}
	in, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(in)
	if u.root, err = Access.OpenDir(in, "tree"); err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Join(dir, "tree"), Err: err}
	}
	err = s.reading(func() error {
		u.spare = nil
		return u.compare(ctx)
	})
	if err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

func (u *Upper) compare(ctx context.Context) error {
	s, st := u.Stack.store, u.Stack
	base, err := s.openChain(st.Base)
	if err != nil {
		return LostBase(st.Base, err)
	}
	var lower *chain
	var index *State
	if st.Lower != st.Base {
		if lower, err = s.openChain(st.Lower); err != nil {
			return LostBase(st.Lower, err)
		}
		of, known, err := LoadIndex(s.stackPath(st.key, "index"))
		if err == nil && of == st.Base {
			index = known
		}
	}
	p, err := project(u.root, base, lower, index)
	if err != nil {
		return err
	}
	if u.base, err = p.state(); err != nil {
		return err
	}
	var mu sync.Mutex
	u.scan, err = ScanTree(ctx, u.root, ScanOptions{
		Base: u.base, Trust: index != nil, Ours: true, Upper: true, Access: Access, Groups: p,
		FileXattrs: true, Same: s.SameAsStored(u.base), Shows: p.shows,
		Unchanged: func(dir func() string, name string) {
			if full := join(dir(), name); p.shows(full) {
				mu.Lock()
				defer mu.Unlock()
				u.spare = append(u.spare, full)
			}
		},
	})
	if err != nil {
		return err
	}
	u.Delta = u.scan.Delta
	return nil
}

// Changes lists what differs, and what the user should know.
func (u *Upper) Changes() (c forks.Changes, err error) {
	if u.Delta != nil {
		c.List, _, err = u.changes()
	}
	c.Warnings = u.scan.Warnings.Lines()
	return c, err
}

// LeftOut names a mount point whose files are not looked at.
func (u *Upper) LeftOut(path string) {
	u.scan.Warnings.Add("%s: is a mount point; what is below it was left out", path)
}

// changes also returns the part of the fork's state that was compared. It is
// compared as a whole, so that the names which a hard-link group is left with
// are told of as in [Store.Diff].
func (u *Upper) changes() ([]forks.Change, *State, error) {
	whole, err := Merge(u.base, u.Delta, true)
	if err != nil {
		return nil, nil, err
	}
	list, err := Compare(u.base, whole, false, func(_ *State, _ uint32, _ *State, _ uint32, path string) (bool, error) {
		at, ok := u.Delta.Find(path)
		return ok && u.Delta.Nodes[at].Flags&Kept != 0, nil
	})
	return list, whole, err
}

// prune takes the spare files out of the upper. The directories keep their
// times.
func (u *Upper) prune() error {
	for _, name := range u.spare {
		dir, err := openSteps(u.root, path.Dir(name))
		if err != nil {
			return &os.PathError{Op: "open", Path: path.Dir(name), Err: err}
		}
		err = pruneOne(dir, path.Base(name))
		unix.Close(dir)
		if err != nil {
			return &os.PathError{Op: "remove", Path: name, Err: err}
		}
	}
	return nil
}

func pruneOne(dir int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return err
	}
	err := unix.Unlinkat(dir, name, 0)
	if err == unix.EACCES || err == unix.ENOENT {
		return nil // it may stay: a directory that its owner may not write to
	}
	if err != nil {
		return err
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, st.Mtim}
	return unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", dir), times, 0)
}

// open opens path in the upper directory.
func (u *Upper) open(name string) (int, error) {
	dir, err := openSteps(u.root, path.Dir(name))
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	return Access.Open(dir, path.Base(name), unix.O_RDONLY)
}

// flush makes what the upper holds of the difference durable.
func (u *Upper) flush() (int64, error) {
	var bytes int64
	few := len(u.Delta.Nodes) <= fewFiles
	for i := range u.Delta.Nodes {
		n := &u.Delta.Nodes[i]
		if n.IsReg() && n.Flags&Removed == 0 {
			bytes += n.Size
		}
	}
	if !few {
		if err := unix.Syncfs(u.root); err != nil {
			return 0, os.NewSyscallError("syncfs", err)
		}
		return bytes, nil
	}
	// Files first: the entry of a directory is to lead to a complete one.
	for i := len(u.Delta.Nodes) - 1; i >= 0; i-- {
		n := &u.Delta.Nodes[i]
		if n.Flags&Removed != 0 || !n.IsReg() && !n.IsDir() {
			continue
		}
		fd, err := u.open(u.Delta.Path(uint32(i)))
		if err == nil {
			err = unix.Fsync(fd)
			unix.Close(fd)
		}
		if err != nil {
			return 0, &os.PathError{Op: "fsync", Path: u.Delta.Path(uint32(i)), Err: err}
		}
	}
	return bytes, nil
}
