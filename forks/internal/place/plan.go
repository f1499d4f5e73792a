//go:build linux

package place

import (
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
)

// item is a path that must change, or a directory on the way to one.
type item struct {
	name, path string
	// listed: it is to become then, which is nil for nothing; it is now.
	listed    bool
	now, then *forks.Entry
	kids      []*item
	// alone: it is excluded or on another file system, and stays as it is.
	alone bool

	// Of directories: what it was when it was first opened; private says that
	// it has a private directory, and opened that its mode was changed to work
	// in it.
	seen, private, opened bool
	was                   unix.Stat_t
	// made is the name that what is new has in its private directory; inStage
	// says that this is the stage.
	made    string
	inStage bool
}

func isDir(e *forks.Entry) bool { return e != nil && e.Mode&unix.S_IFMT == unix.S_IFDIR }
func isReg(e *forks.Entry) bool { return e != nil && e.Mode&unix.S_IFMT == unix.S_IFREG }

// stays says that the item is a directory and will be one.
func (it *item) stays() bool { return !it.listed || isDir(it.now) && isDir(it.then) }

// plan makes the tree of items of what the directory has changed against the
// snapshot.
func (r *replacer) plan(found []forks.Change) error {
	excluded, _, err := layer.Exclusions(r.src)
	if err != nil {
		return err
	}
	r.top = &item{name: ".", path: "."}
	items := map[string]*item{".": r.top}
	var get func(p string) *item
	get = func(p string) *item {
		if it := items[p]; it != nil {
			return it
		}
		up := get(path.Dir(p))
		it := &item{name: path.Base(p), path: p}
		it.alone = up.alone || excluded != nil && excluded(up.path, it.name)
		if !it.alone {
			up.kids = append(up.kids, it)
		}
		items[p] = it
		return it
	}
	kinds := map[forks.ChangeKind]forks.ChangeKind{forks.Added: forks.Removed, forks.Removed: forks.Added, forks.Modified: forks.Modified, forks.Type: forks.Type}
	for _, c := range found {
		it := get(c.Path)
		if it.alone {
			continue
		}
		it.listed, it.now, it.then = true, c.New, c.Old
		r.list = append(r.list, forks.Change{Path: c.Path, Kind: kinds[c.Kind], Old: c.New, New: c.Old})
	}
	return nil
}

// at opens a directory of the plan, calls fn and closes it.
func (r *replacer) at(parent int, it *item, fn func(fd int) error) error {
	fd, err := r.open(parent, it)
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			return err
		}
		return &os.PathError{Op: "open", Path: it.path, Err: err}
	}
	defer unix.Close(fd)
	return fn(fd)
}

// open opens a directory so that what is in it can be changed. What it was is
// kept with the item.
func (r *replacer) open(parent int, it *item) (int, error) {
	path, err := r.access.Open(parent, it.name, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	defer unix.Close(path)
	var st unix.Stat_t
	if err := unix.Fstat(path, &st); err != nil {
		return -1, err
	}
	if !it.seen {
		it.seen, it.was = true, st
	}
	if !r.old.Root() && st.Mode&0o700 != 0o700 && st.Uid == uint32(os.Geteuid()) {
		if err := fsat.ChmodFD(path, st.Mode&0o7777|0o700); err != nil {
			return -1, err
		}
		it.opened = true
	}
	return r.access.OpenDir(path, ".")
}

// check refuses, before anything changes, what could not be done, and finds
// what must be left alone. fd is the directory it.
func (r *replacer) check(fd int, it *item) error {
	changes := it.listed
	for _, kid := range it.kids {
		if err := r.checkKid(fd, kid); err != nil {
			return err
		}
		changes = changes || kid.listed && !kid.alone
	}
	if !changes {
		return nil
	}
	if fsat.Locked(fd, "") {
		return lockedError(it.path)
	}
	return r.checkRights(fd, it)
}

func (r *replacer) checkKid(fd int, kid *item) error {
	if kid.listed && kid.now == nil {
		return nil
	}
	var stx unix.Statx_t
	err := unix.Statx(fd, kid.name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS, &stx)
	if err == unix.ENOENT {
		return nil // whoever removed it meanwhile did part of the work, or is found out
	}
	if err != nil {
		return &os.PathError{Op: "stat", Path: kid.path, Err: err}
	}
	if stx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && !r.src.CrossFilesystems {
		return r.leave(kid)
	}
	if kid.listed && stx.Attributes&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND) != 0 {
		return lockedError(kid.path)
	}
	if stx.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil
	}
	return r.at(fd, kid, func(sub int) error {
		if err := r.check(sub, kid); err != nil {
			return err
		}
		if kid.listed && kid.then != nil && !isDir(kid.then) {
			return r.checkEmptied(sub, kid)
		}
		return nil
	})
}

// leave leaves a mount point alone, with all below it.
func (r *replacer) leave(kid *item) error {
	if kid.listed && kid.then != nil && kid.now.Mode&unix.S_IFMT != kid.then.Mode&unix.S_IFMT {
		return &os.PathError{Op: "replace", Path: kid.path, Err: errors.New("is a mount point, and something else must take its place: unmount it first")}
	}
	kid.alone = true
	if kid.listed {
		r.warn(fmt.Sprintf("%s: is a mount point, and is left as it is", kid.path))
	}
	return nil
}

// checkEmptied refuses a directory that must give way and holds something that
// must not.
func (r *replacer) checkEmptied(fd int, it *item) error {
	known := make(map[string]bool)
	for _, kid := range it.kids {
		known[kid.name] = kid.listed && !kid.alone
	}
	var l fsat.List
	if err := l.Read(fd); err != nil {
		return &os.PathError{Op: "read", Path: it.path, Err: err}
	}
	for i := range l.Len() {
		if name := string(l.Name(i)); !known[name] {
			return &os.PathError{Op: "replace", Path: it.path, Err: fmt.Errorf("is a directory in whose place something else must come, and it holds %s, which must stay: move that away first", name)}
		}
	}
	for _, kid := range it.kids {
		if !isDir(kid.now) {
			continue
		}
		if err := r.at(fd, kid, func(sub int) error { return r.checkEmptied(sub, kid) }); err != nil {
			return err
		}
	}
	return nil
}

func lockedError(path string) error {
	return &os.PathError{Op: "replace", Path: path, Err: errors.New("is immutable or append-only: chattr -i -a it first")}
}

// checkRights refuses a directory in which an ordinary user may not do what is
// to be done.
func (r *replacer) checkRights(fd int, it *item) error {
	euid := uint32(os.Geteuid())
	if r.old.Root() || it.was.Uid == euid {
		return nil
	}
	for _, kid := range it.kids {
		if !kid.listed || kid.alone || kid.stays() {
			continue
		}
		if err := unix.Faccessat(fd, ".", unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
			return &os.PathError{Op: "replace", Path: kid.path, Err: fmt.Errorf("its directory belongs to another user: %w", err)}
		}
		var st unix.Stat_t
		if it.was.Mode&unix.S_ISVTX != 0 && unix.Fstatat(fd, kid.name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Uid != euid {
			return &os.PathError{Op: "replace", Path: kid.path, Err: fmt.Errorf("it belongs to another user, and its directory is sticky: %w", unix.EPERM)}
		}
	}
	return nil
}
