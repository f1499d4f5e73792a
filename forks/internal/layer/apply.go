//go:build linux

package layer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// applyName is the directory, in the one that is applied to, where new files
// are made before they are put in place. A flock says that its maker lives.
const applyName = ".agentenv-apply"

// Apply brings what changed from one snapshot to another into a directory; see
// [forks.Driver].
//
// A path is in the way if its type, mode or bytes are neither what they were in
// the one snapshot nor what they are in the other; where the attributes or, for
// root, the owner changed, those too. Times are not. A directory that is to be
// removed and holds more than the snapshot knew stays, with a warning.
func (s *Store) Apply(ctx context.Context, from, to forks.ID, dir string, o forks.ApplyOptions) (forks.ApplyResult, error) {
	changes, err := s.Diff(from, to)
	if err != nil {
		return forks.ApplyResult{}, err
	}
	var states [2]*State
	for i, id := range []forks.ID{from, to} {
		if states[i], err = s.State(id); err != nil {
			return forks.ApplyResult{}, err
		}
	}
	return s.ApplyStates(ctx, states[0], states[1], changes.List, dir, o)
}

// ApplyStates is [Store.Apply] for a driver that describes its snapshots by
// states of its own: changes is how they differ, and the store, which needs no
// records, opens the files.
func (s *Store) ApplyStates(ctx context.Context, from, to *State, changes []forks.Change, dir string, o forks.ApplyOptions) (forks.ApplyResult, error) {
	a := &applier{store: s, set: fsat.NewSetter(), from: from, to: to}
	var err error
	if a.root, err = openSource(dir); err != nil {
		return forks.ApplyResult{}, err
	}
	defer unix.Close(a.root)
	for _, c := range changes {
		if o.Skip != nil && o.Skip(c.Path) {
			continue
		}
		if err := a.check(c); err != nil {
			return forks.ApplyResult{}, sourceError(dir, err)
		}
	}
	r := forks.ApplyResult{Conflicts: a.conflicts}
	for _, c := range a.todo {
		r.Applied = append(r.Applied, c.Path)
	}
	if !o.Check && len(r.Conflicts) == 0 && (len(a.todo) > 0 || unfinishedApply(a.root)) {
		err = sourceError(dir, a.run(ctx))
	}
	if len(r.Conflicts) > 0 {
		r.Applied = nil
	}
	r.Warnings = a.warn.Lines()
	return r, err
}

// unfinishedApply says whether the open directory has what an apply leaves that
// is at work or was cut short.
func unfinishedApply(dir int) bool {
	var st unix.Stat_t
	return unix.Fstatat(dir, applyName, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
}

type applier struct {
	store     *Store
	from, to  *State
	root      int
	set       fsat.Setter
	warn      Warnings
	todo      []doing
	conflicts []string
}

// doing is a change to make, and what was at its path when that was decided;
// the inode is 0 if nothing was, or nothing that a file's content could be lost
// of.
type doing struct {
	forks.Change
	seen Node
}

// errEdited: someone wrote to a path after it was found to be free to change.
var errEdited = errors.New("it was changed by someone else meanwhile; what came before it in the list is applied")

// errBlocked: a directory on the way is something else.
var errBlocked = errors.New("not a directory")

// parent opens the directory that holds path; nil without an error if it is
// not there.
func (a *applier) parent(path string) (*fsat.Dir, string, error) {
	at, err := unix.FcntlInt(uintptr(a.root), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, "", err
	}
	for {
		name, rest, more := strings.Cut(path, "/")
		if !more {
			return fsat.NewDir(at), name, nil
		}
		next, err := fsat.Access{CrossMounts: true}.Open(at, name, unix.O_RDONLY|unix.O_DIRECTORY)
		unix.Close(at)
		switch {
		case errors.Is(err, unix.ENOENT):
			return nil, "", nil
		case errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP):
			return nil, "", errBlocked
		case err != nil:
			return nil, "", err
		}
		at, path = next, rest
	}
}

// check sorts a change into what is to be done and what is in the way.
func (a *applier) check(c forks.Change) error {
	there, old, now, seen, err := a.compare(c)
	if errors.Is(err, errBlocked) {
		a.sort(doing{c, seen}, c.New == nil, a.makesWay(c.Path))
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "compare", Path: c.Path, Err: err}
	}
	switch {
	case c.New == nil && !there, there && now:
	case c.Old == nil && !there, there && old:
		a.sort(doing{c, seen}, false, true)
	default:
		a.sort(doing{c, seen}, false, false)
	}
	return nil
}

// makesWay says whether something above path will become a directory.
func (a *applier) makesWay(path string) bool {
	return slices.ContainsFunc(a.todo, func(c doing) bool {
		return c.Kind == forks.Type && strings.HasPrefix(path, c.Path+"/")
	})
}

func (a *applier) sort(c doing, done, free bool) {
	switch {
	case done:
	case free:
		a.todo = append(a.todo, c)
	default:
		a.conflicts = append(a.conflicts, c.Path)
	}
}

// compare says whether the path is there, as it was and as it will be, and
// which file it is.
func (a *applier) compare(c forks.Change) (there, old, now bool, seen Node, err error) {
	d, name, err := a.parent(c.Path)
	if err != nil || d == nil {
		return false, false, false, seen, err
	}
	defer d.Release()
	var st unix.Stat_t
	if c.Path == "." {
		err = unix.Fstat(d.FD, &st)
	} else {
		err = fsat.Access{}.StatName(d.FD, name, &st)
	}
	if errors.Is(err, unix.ENOENT) {
		return false, false, false, seen, nil
	}
	if err != nil {
		return false, false, false, seen, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		seen = newNode(&st)
	}
	if now, err = a.matches(d.FD, name, &st, c, c.New, a.to); err != nil {
		return true, false, false, seen, err
	}
	old, err = a.matches(d.FD, name, &st, c, c.Old, a.from)
	if err == nil && old && c.Kind == forks.Type && c.Old.Mode&unix.S_IFMT == unix.S_IFDIR {
		node, _ := a.from.Find(c.Path)
		old, err = a.onlyKnown(d.FD, name, node)
	}
	return true, old, now, seen, err
}

// unedited refuses a file that is not the one that was compared.
func unedited(dir int, name string, seen *Node) error {
	if seen.Ino == 0 {
		return nil
	}
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && !seen.Unwritten(&st) {
		return errEdited
	}
	return nil
}

// matches says whether what is at name is the entry e of state s.
func (a *applier) matches(dir int, name string, st *unix.Stat_t, c forks.Change, e *forks.Entry, s *State) (bool, error) {
	if e == nil || st.Mode&unix.S_IFMT != e.Mode&unix.S_IFMT {
		return false, nil
	}
	link := st.Mode&unix.S_IFMT == unix.S_IFLNK
	if !link && st.Mode&0o7777 != e.Mode&0o7777 {
		return false, nil
	}
	if c.Old != nil && c.New != nil {
		if a.set.Root() && (c.Old.UID != c.New.UID || c.Old.GID != c.New.GID) && (st.Uid != e.UID || st.Gid != e.GID) {
			return false, nil
		}
		if !maps.Equal(c.Old.Xattrs, c.New.Xattrs) {
			if ok, err := a.sameXattrs(dir, name, e); !ok || err != nil {
				return false, err
			}
		}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		target, err := fsat.Access{}.Readlink(dir, name)
		return target == e.Target, err
	case unix.S_IFBLK, unix.S_IFCHR:
		return st.Rdev == e.Rdev, nil
	case unix.S_IFREG:
		return a.sameBytes(dir, name, st, e, s)
	}
	return true, nil
}

func (a *applier) sameXattrs(dir int, name string, e *forks.Entry) (bool, error) {
	have, err := fsat.Access{}.Xattrs(dir, name)
	if err != nil {
		return false, err
	}
	count := 0
	for _, x := range have {
		if fsat.Privileged(x.Name) && !a.set.Root() {
			continue
		}
		if v, ok := e.Xattrs[x.Name]; !ok || v != x.Value {
			return false, nil
		}
		count++
	}
	for n := range e.Xattrs {
		if fsat.Privileged(n) && !a.set.Root() {
			count++
		}
	}
	return count == len(e.Xattrs), nil
}

func (a *applier) sameBytes(dir int, name string, st *unix.Stat_t, e *forks.Entry, s *State) (bool, error) {
	if st.Size != e.Size {
		return false, nil
	}
	fd, err := fsat.Access{CrossMounts: true}.Open(dir, name, unix.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	i, _ := s.Find(e.Path)
	return a.store.SameAsStored(s)(i, func() string { return dirOf(e.Path) }, baseOf(e.Path), fd)
}

func dirOf(path string) string {
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i]
	}
	return "."
}

func baseOf(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

// onlyKnown says whether the directory, node of the first snapshot, holds
// nothing at any depth that the snapshot had not.
func (a *applier) onlyKnown(dir int, name string, node uint32) (bool, error) {
	fd, err := fsat.Access{}.OpenDir(dir, name)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var l fsat.List
	if err := l.Read(fd); err != nil {
		return false, err
	}
	for i := range l.Len() {
		child, ok := a.from.child(node, string(l.Name(i)))
		if !ok {
			return false, nil
		}
		if l.Type(i) != unix.DT_DIR || !a.from.Nodes[child].IsDir() {
			continue // what became of it is compared by its own name
		}
		if ok, err := a.onlyKnown(fd, string(l.Name(i)), child); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

// run writes: first all that is new, out of sight; then what is to go, the
// deepest first; then what is new is put in place; then directories get their
// metadata, the deepest first.
func (a *applier) run(ctx context.Context) error {
	tmp, err := a.lockTemp(ctx)
	if err != nil {
		return err
	}
	err = a.write(ctx, tmp)
	remove := fsat.RemoveAll(context.WithoutCancel(ctx), a.root, applyName)
	tmp.Release()
	return errors.Join(err, remove)
}

func (a *applier) lockTemp(ctx context.Context) (*fsat.Dir, error) {
	for range 2 {
		err := unix.Mkdirat(a.root, applyName, 0o700)
		if err != nil && err != unix.EEXIST {
			return nil, err
		}
		made := err == nil
		fd, err := fsat.Access{}.OpenDir(a.root, applyName)
		if err != nil {
			return nil, err
		}
		if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("another apply is at work in this directory: %w", unix.EBUSY)
		}
		if made {
			for _, acl := range []string{fsat.ACLDefault, fsat.ACLAccess} {
				_ = unix.Fremovexattr(fd, acl) // mostly there is none
			}
			return fsat.NewDir(fd), unix.Fchmod(fd, 0o700)
		}
		err = fsat.RemoveAll(ctx, a.root, applyName) // of one that was cut short
		unix.Close(fd)
		if err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%s: %w", applyName, unix.EEXIST)
}

func (a *applier) write(ctx context.Context, tmp *fsat.Dir) error {
	if err := a.makeNew(ctx, tmp); err != nil {
		return err
	}
	for _, c := range slices.Backward(a.todo) {
		if c.New == nil {
			if err := a.remove(c); err != nil {
				return &os.PathError{Op: "remove", Path: c.Path, Err: err}
			}
		}
	}
	for i, c := range a.todo {
		if c.New == nil {
			continue
		}
		if err := a.place(tmp.FD, i, c); err != nil {
			return &os.PathError{Op: "write", Path: c.Path, Err: err}
		}
	}
	for _, c := range slices.Backward(a.todo) {
		if c.New != nil && c.New.Mode&unix.S_IFMT == unix.S_IFDIR {
			if err := a.settle(c); err != nil {
				return &os.PathError{Op: "write", Path: c.Path, Err: err}
			}
		}
	}
	return nil
}

// makeNew makes all that is no directory, named by its place in the list.
func (a *applier) makeNew(ctx context.Context, tmp *fsat.Dir) error {
	if err := unix.Mkdirat(tmp.FD, "links", 0o700); err != nil {
		return err
	}
	fd, err := fsat.Access{}.OpenDir(tmp.FD, "links")
	if err != nil {
		return err
	}
	// A copier of its own: the directory may lie on another file system.
	r := newRestorer(newMaker(fsat.NewDir(fd), new(fsat.Copier), &a.warn), a.store, a.to.Clone())
	defer r.Close()
	var tops []Top
	for i, c := range a.todo {
		if c.New == nil || c.New.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		node, _ := a.to.Find(c.Path)
		tmp.Hold(1)
		tops = append(tops, Top{Dir: tmp, Name: strconv.Itoa(i), Node: node})
	}
	if err := r.Run(ctx, tops); err != nil {
		return err
	}
	return r.Settle()
}

func (a *applier) remove(c doing) error {
	d, name, err := a.parent(c.Path)
	if err != nil || d == nil {
		return err
	}
	defer d.Release()
	flags := 0
	if c.Old.Mode&unix.S_IFMT == unix.S_IFDIR {
		flags = unix.AT_REMOVEDIR
	}
	if err := unedited(d.FD, name, &c.seen); err != nil {
		return err
	}
	err = a.writing(d.FD, func() error { return unix.Unlinkat(d.FD, name, flags) })
	switch err {
	case unix.ENOENT:
		return nil
	case unix.ENOTEMPTY, unix.EEXIST:
		a.warn.Add("%s: not removed, it holds more than the snapshot did", c.Path)
		return nil
	}
	return err
}

// writing does fn, which changes names in the open directory; one that its
// owner made read-only is writable meanwhile.
func (a *applier) writing(dir int, fn func() error) error {
	err := fn()
	if err != unix.EACCES || a.set.Root() {
		return err
	}
	var st unix.Stat_t
	if unix.Fstat(dir, &st) != nil || unix.Fchmod(dir, st.Mode&0o7777|0o700) != nil {
		return err
	}
	return errors.Join(fn(), unix.Fchmod(dir, st.Mode&0o7777))
}

// place puts what was made as number i where it belongs.
func (a *applier) place(tmp, i int, c doing) error {
	if c.Path == "." {
		return nil
	}
	d, name, err := a.parent(c.Path)
	if err != nil {
		return err
	}
	if d == nil {
		return unix.ENOENT
	}
	defer d.Release()
	if err := unedited(d.FD, name, &c.seen); err != nil {
		return err
	}
	return a.writing(d.FD, func() error { return placeIn(d.FD, name, tmp, i, c.Change) })
}

func placeIn(dir int, name string, tmp, i int, c forks.Change) error {
	if c.Kind == forks.Type && c.Old.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
			return err
		}
	}
	if c.New.Mode&unix.S_IFMT == unix.S_IFDIR {
		if c.Kind == forks.Modified {
			return nil
		}
		if c.Kind == forks.Type {
			if err := unix.Unlinkat(dir, name, 0); err != nil && err != unix.ENOENT {
				return err
			}
		}
		return unix.Mkdirat(dir, name, 0o700)
	}
	var err error = unix.EINVAL
	if c.Old == nil {
		err = unix.Renameat2(tmp, strconv.Itoa(i), dir, name, unix.RENAME_NOREPLACE)
	}
	switch err {
	case unix.EEXIST:
		return errEdited
	case unix.EINVAL: // something is to be replaced, or the flag is not known here
		err = unix.Renameat(tmp, strconv.Itoa(i), dir, name)
	}
	if err == unix.ENOENT {
		return nil // it could not be made, which a warning says
	}
	return err
}

// settle gives a directory the metadata of the second snapshot.
func (a *applier) settle(c doing) error {
	d, name, err := a.parent(c.Path)
	if err != nil || d == nil {
		return err
	}
	defer d.Release()
	if c.Path == "." {
		name = "."
	}
	fd, err := fsat.OpenWritable(d.FD, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	node, _ := a.to.Find(c.Path)
	meta := a.to.Meta(node)
	var st unix.Stat_t
	return a.set.FD(fd, &meta, &st)
}
