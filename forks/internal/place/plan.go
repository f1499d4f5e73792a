//go:build linux

package place

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

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
	// alone: it stays as it is, with all below it: it is excluded or on another
	// file system, or someone changed it meanwhile (edited). ownMeta: the latter
	// is so of a directory's mode, owner or attributes.
	alone, edited, ownMeta bool
	looked                 *unix.Statx_t // what a file was, last

	// Of directories: what it was when it was first opened; private says that
	// it has a private directory, and opened that its mode was changed to work
	// in it.
	seen, private, opened bool
	was                   unix.Stat_t
	// made is the name that what is new has in its private directory; inStage
	// says that this is the stage.
	made    string
	inStage bool
	ours    unix.Stat_t // what was made, where it was put
	bin     *bin        // of a directory: what is moved aside in its private one
}

func isDir(e *forks.Entry) bool { return e != nil && e.Mode&unix.S_IFMT == unix.S_IFDIR }
func isReg(e *forks.Entry) bool { return e != nil && e.Mode&unix.S_IFMT == unix.S_IFREG }

// stays says that the item is a directory and will be one.
func (it *item) stays() bool { return !it.listed || isDir(it.now) && isDir(it.then) }

// plan makes the tree of items of what the directory has changed against the
// snapshot, less mine, which is in no snapshot.
func (r *replacer) plan(found []forks.Change, mine map[string]forks.Change) (err error) {
	if r.excluded, _, err = layer.Exclusions(r.src); err != nil {
		return err
	}
	r.top = &item{name: ".", path: "."}
	r.items = map[string]*item{".": r.top}
	items := r.items
	var get func(p string) *item
	get = func(p string) *item {
		if it := items[p]; it != nil {
			return it
		}
		up := get(path.Dir(p))
		it := &item{name: path.Base(p), path: p}
		it.alone = up.alone || r.excluded != nil && r.excluded(up.path, it.name)
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
		if m, ok := mine[c.Path]; ok {
			r.keepMine(it, m)
		}
		r.list = append(r.list, forks.Change{Path: c.Path, Kind: kinds[c.Kind], Old: c.New, New: c.Old})
	}
	return nil
}

// keepMine leaves alone what differs from the snapshot that holds the state. A
// directory in which names came or went is one like any other.
func (r *replacer) keepMine(it *item, m forks.Change) {
	if !isDir(m.Old) || !isDir(m.New) {
		r.keep(it)
		for up := path.Dir(it.path); m.New != nil && up != "."; up = path.Dir(up) {
			if over := r.items[up]; over.listed && over.then != nil && !isDir(over.then) {
				r.keep(over)
			}
		}
		return
	}
	if m.Old.Mode != m.New.Mode || m.Old.UID != m.New.UID || m.Old.GID != m.New.GID || !maps.Equal(m.Old.Xattrs, m.New.Xattrs) {
		it.ownMeta = true
		r.keptPaths = append(r.keptPaths, it.path)
	}
}

// keep leaves an item as someone made it.
func (r *replacer) keep(it *item) {
	if !it.alone {
		it.alone, it.edited = true, true
		r.keptPaths = append(r.keptPaths, it.path)
	}
}

// nameKept says what was kept.
func (r *replacer) nameKept() {
	paths := slices.DeleteFunc(r.keptPaths, r.withinKept)
	slices.Sort(paths)
	r.name(slices.Compact(paths), "was changed meanwhile, and is kept as it is: no snapshot holds it yet")
}

// withinKept says whether a path lies in a directory that is kept.
func (r *replacer) withinKept(p string) bool {
	for p = path.Dir(p); p != "."; p = path.Dir(p) {
		if up := r.items[p]; up != nil && up.edited {
			return true
		}
	}
	return false
}

// name warns of paths for one reason.
func (r *replacer) name(paths []string, why string) {
	for _, p := range paths[:min(len(paths), maxNamed)] {
		r.warnings = append(r.warnings, p+": "+why)
	}
	if more := len(paths) - maxNamed; more > 0 {
		r.warnings = append(r.warnings, fmt.Sprintf("and %d more: %s", more, why))
	}
}

// nameExcluded says what the snapshot has, and the one that holds the present
// state has not, that is not brought because it is excluded.
func (r *replacer) nameExcluded(ctx context.Context, from Reader, id forks.ID) error {
	if r.excluded == nil || r.src.Held == "" {
		return nil
	}
	differ, err := from.Diff(ctx, r.src.Held, id)
	if err != nil {
		return err
	}
	var paths []string
	last := ""
	for _, c := range differ.List {
		under := last != "" && strings.HasPrefix(c.Path, last+"/")
		if c.New != nil && !under && r.excludes(c.Path) {
			paths, last = append(paths, c.Path), c.Path
		}
	}
	r.name(paths, "is excluded here, so what the snapshot has of it stays in the snapshot alone")
	return nil
}

// excludes says whether a path or what it lies in is excluded.
func (r *replacer) excludes(p string) bool {
	for ; p != "."; p = path.Dir(p) {
		if r.excluded(path.Dir(p), path.Base(p)) {
			return true
		}
	}
	return false
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
		if kid.alone {
			continue
		}
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
		r.keep(kid)
		return nil
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
	if kid.listed && !sameAs(&stx, kid.now) {
		r.keep(kid)
		return nil
	}
	if stx.Mode&unix.S_IFMT != unix.S_IFDIR {
		kid.looked = &stx
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
		name := string(l.Name(i))
		if !known[name] && it.kid(name) == nil && (r.excluded == nil || !r.excluded(it.path, name)) {
			r.keep(it) // someone made it just now
			return nil
		}
		if !known[name] {
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
		if kid.edited {
			r.keep(it)
			return nil
		}
	}
	return nil
}

// kid returns the item of a name in the directory, or nil.
func (it *item) kid(name string) *item {
	if i := slices.IndexFunc(it.kids, func(k *item) bool { return k.name == name }); i >= 0 {
		return it.kids[i]
	}
	return nil
}

// sameAs says whether a path is what the comparison saw.
func sameAs(stx *unix.Statx_t, e *forks.Entry) bool {
	return same(e, uint32(stx.Mode), int64(stx.Size), stx.Mtime.Sec, int64(stx.Mtime.Nsec))
}

// same says so of a file by its mode, size and mtime, of a directory by its
// type: names come and go in it while Replace is at work.
func same(e *forks.Entry, mode uint32, size, sec, nsec int64) bool {
	if isDir(e) {
		return mode&unix.S_IFMT == unix.S_IFDIR
	}
	return mode == e.Mode && (!isReg(e) || size == e.Size) && sec == e.Mtime.Unix() && nsec == int64(e.Mtime.Nanosecond())
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
