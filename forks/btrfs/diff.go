//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// racyWindow is how much older than a snapshot a ctime must be before it is
// believed that a change that followed would have given another one: the tick
// of the kernel's clock is at most 10 ms (CONFIG_HZ=100).
const racyWindow = 10 * time.Millisecond

// comparison finds how the tree b differs from the tree a. What both have from
// a snapshot that they come from is known in one of two ways: by a search for
// the inodes that later transactions changed, whose cost is that of the
// changes, or by a walk of both trees that compares what a stat tells.
type comparison struct {
	ctx  context.Context
	a, b *side
	// changed has the inodes that changed on either side; nil for a walk.
	// rewritten has those of them whose bytes did.
	changed, rewritten map[uint64]bool
	// within has, by directory, the names that lead to what changed.
	within map[uint64]map[string]bool
	// trusted is the ctime, in ns, before which two inodes with the same
	// number and the same times are one; 0 if that is never so.
	trusted int64

	dev uint64 // of b
	// nests: b has subvolumes in it, which a directory tells by their own
	// numbers, not by an inode's.
	nests  bool
	list   []forks.Change
	listed map[string]bool
	links  [2]linkNames
	bufs   [2][]byte
}

// linkNames are the names of the files of one side that have several.
type linkNames struct {
	names   map[uint64][]string
	touched map[uint64]bool
}

// compare lists how b differs from a. since is what both come from; nil if
// nothing is known of that. written is the disk space of b's extents that are
// newer; -1 where there was no search, to which both must be on disk.
func compare(ctx context.Context, a, b *side, since *info, onDisk bool) (list []forks.Change, written int64, err error) {
	c := &comparison{ctx: ctx, a: a, b: b, listed: make(map[string]bool)}
	for i := range c.links {
		c.links[i] = linkNames{make(map[uint64][]string), make(map[uint64]bool)}
		c.bufs[i] = make([]byte, fsat.BufferSize)
	}
	written = -1
	if since != nil {
		c.trusted = since.Sealed - racyWindow.Nanoseconds()
		if onDisk {
			if written, err = c.search(since.Generation); err != nil {
				return nil, 0, err
			}
		}
	}
	inner, err := nested(b.root)
	if err != nil {
		return nil, 0, err
	}
	c.nests = len(inner) > 0
	if err := c.top(); err != nil {
		return nil, 0, err
	}
	if err := c.linked(); err != nil {
		return nil, 0, err
	}
	for _, s := range []*side{a, b} {
		if err := s.alive(); err != nil {
			return nil, 0, err
		}
	}
	slices.SortFunc(c.list, byPath)
	return c.list, written, nil
}

func byPath(x, y forks.Change) int { return strings.Compare(x.Path, y.Path) }

// search finds what changed on either side, and the bytes that b has more on
// disk; it leaves changed nil where the caller may not search.
func (c *comparison) search(since uint64) (int64, error) {
	x, err := changedSince(c.a.root, since)
	if errors.Is(err, unix.EPERM) {
		return -1, nil
	}
	if err != nil {
		return 0, err
	}
	y, err := changedSince(c.b.root, since)
	if err != nil {
		return 0, err
	}
	c.within = make(map[uint64]map[string]bool)
	for _, s := range []struct {
		side    *side
		changed map[uint64]bool
	}{{c.a, x.inodes}, {c.b, y.inodes}} {
		seen := make(map[uint64]bool)
		for ino := range s.changed {
			if err := c.lead(s.side.root, ino, seen); err != nil {
				return 0, err
			}
		}
	}
	c.changed, c.rewritten = y.inodes, y.rewritten
	maps.Copy(c.changed, x.inodes)
	maps.Copy(c.rewritten, x.rewritten)
	return y.bytes, nil
}

// newer is what later transactions did.
type newer struct {
	inodes    map[uint64]bool // whatever of them changed, times of access included
	rewritten map[uint64]bool // of these, those that have new extents
	bytes     int64           // of the new extents
}

// changedSince searches the subvolume of fd for what transactions after since
// did.
func changedSince(fd int, since uint64) (newer, error) {
	const last = ^uint64(255) // BTRFS_LAST_FREE_OBJECTID
	n := newer{inodes: make(map[uint64]bool), rewritten: make(map[uint64]bool)}
	extents := make(map[uint64]bool)
	err := search(fd, rootDir, last, since+1, func(i item) error {
		switch i.kind {
		case inodeItem: // the second word of struct btrfs_inode_item is transid
			if word(i.data, 8) > since {
				n.inodes[i.object] = true
			}
		case extentData: // struct btrfs_file_extent_item
			if word(i.data, 0) <= since {
				break
			}
			n.rewritten[i.object] = true
			if i.data[20] == 0 { // inline
				n.bytes += int64(len(i.data) - 21)
			} else if at := word(i.data, 21); at != 0 && !extents[at] {
				extents[at] = true
				n.bytes += int64(word(i.data, 29))
			}
		}
		return nil
	})
	return n, err
}

// lead notes, from the root on, the names that lead to an inode.
func (c *comparison) lead(root int, ino uint64, seen map[uint64]bool) error {
	if seen[ino] || ino == rootDir {
		return nil
	}
	seen[ino] = true
	refs, err := refs(root, ino)
	if err != nil {
		return err
	}
	for _, r := range refs {
		if c.within[r.dir] == nil {
			c.within[r.dir] = make(map[string]bool)
		}
		c.within[r.dir][r.name] = true
		if err := c.lead(root, r.dir, seen); err != nil {
			return err
		}
	}
	return nil
}

// ref is a name of an inode.
type ref struct {
	dir  uint64
	name string
}

// refs searches for the names of an inode.
func refs(fd int, ino uint64) ([]ref, error) {
	var found []ref
	err := search(fd, ino, ino, 0, func(i item) error {
		b := i.data
		for i.kind == inodeRef && len(b) >= 10 { // index, length, name
			n := 10 + int(short(b, 8))
			found = append(found, ref{i.offset, string(b[10:n])})
			b = b[n:]
		}
		for i.kind == inodeExtref && len(b) >= 18 { // directory, index, length, name
			n := 18 + int(short(b, 16))
			found = append(found, ref{word(b, 0), string(b[18:n])})
			b = b[n:]
		}
		return nil
	})
	return found, err
}

func (c *comparison) top() error {
	fa, ea, err := c.a.top()
	if err != nil {
		return err
	}
	fb, eb, err := c.b.top()
	if err != nil {
		return err
	}
	c.dev = fb.st.Dev
	if !sameMeta(ea, eb) {
		c.put(forks.Modified, ".", ea, eb)
	}
	return c.dir(c.a.root, c.b.root, fa, fb, ".", false)
}

// dir compares what is in two open directories. In a foreign one, which is of
// a nested subvolume, inode numbers say nothing.
func (c *comparison) dir(da, db int, fa, fb *found, path string, foreign bool) error {
	if err := context.Cause(c.ctx); err != nil {
		return err
	}
	names, err := c.candidates(da, db, fa, fb, path, foreign)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := c.name(da, db, name, join(path, name), foreign); err != nil {
			return err
		}
	}
	return nil
}

// candidates are the names in two directories that may differ.
func (c *comparison) candidates(da, db int, fa, fb *found, path string, foreign bool) ([]string, error) {
	if !foreign && c.known(fa, fb) {
		return slices.Sorted(maps.Keys(c.within[fb.st.Ino])), nil
	}
	before, err := c.a.names(da, path)
	if err != nil {
		return nil, err
	}
	after, err := c.b.names(db, path)
	if err != nil {
		return nil, err
	}
	var names []string
	for i, j := 0, 0; i < len(before) || j < len(after); {
		switch {
		case j == len(after) || i < len(before) && before[i].name < after[j].name:
			names = append(names, before[i].name)
			i++
		case i == len(before) || after[j].name < before[i].name:
			names = append(names, after[j].name)
			j++
		default:
			if foreign || !c.untouched(before[i].ino, after[j].ino) {
				names = append(names, before[i].name)
			}
			i, j = i+1, j+1
		}
	}
	return names, nil
}

// untouched says that a search tells of two inodes that they are one, and that
// nothing changed below it.
func (c *comparison) untouched(a, b uint64) bool {
	return c.changed != nil && !c.nests && a != 0 && a == b && !c.changed[a] && c.within[a] == nil
}

// known says that a search tells that two inodes are the same.
func (c *comparison) known(fa, fb *found) bool {
	return c.changed != nil && fa.device == nil && fb.device == nil && fa.st.Ino == fb.st.Ino && !c.changed[fb.st.Ino]
}

// name compares what is at name on both sides.
func (c *comparison) name(da, db int, name, path string, foreign bool) error {
	fa, err := c.a.stat(da, name)
	if err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	fb, err := c.b.stat(db, name)
	if err != nil {
		return &os.PathError{Op: "stat", Path: path, Err: err}
	}
	switch {
	case fa == nil && fb == nil:
		return nil
	case fb == nil:
		return c.all(c.a, da, name, path, forks.Removed)
	case fa == nil:
		return c.all(c.b, db, name, path, forks.Added)
	}
	foreign = foreign || fb.device == nil && fb.st.Dev != c.dev
	c.note(0, fa, path)
	if !foreign {
		c.note(1, fb, path)
	}
	if !foreign && (c.known(fa, fb) || c.unchanged(fa, fb)) {
		if !fb.isDir() || c.known(fa, fb) && c.within[fb.st.Ino] == nil {
			return nil
		}
		return c.sub(da, db, fa, fb, path, false)
	}
	if isMount(db, fb) {
		return nil // what the tree has below it is not to be seen
	}
	return c.both(da, db, fa, fb, path, foreign)
}

// unchanged says that both are one inode that was not changed since both sides
// had it from the same snapshot. To read a file changes its inode; but where a
// search found that it was written to, its times do not count.
func (c *comparison) unchanged(fa, fb *found) bool {
	if fa.device != nil && fb.device != nil {
		return fa.st == fb.st
	}
	x, y := &fa.st, &fb.st
	return fa.device == nil && fb.device == nil && x.Ino == y.Ino && !c.rewritten[x.Ino] &&
		x.Ctim == y.Ctim && x.Mtim == y.Mtim && x.Size == y.Size && x.Mode == y.Mode && x.Uid == y.Uid && x.Gid == y.Gid &&
		time.Unix(y.Ctim.Sec, y.Ctim.Nsec).UnixNano() < c.trusted
}

// isMount says whether something is mounted there.
func isMount(dir int, f *found) bool {
	if f.device != nil || f.kind() == unix.S_IFLNK {
		return false
	}
	fd, err := trees.Open(dir, f.name, unix.O_PATH)
	if err == nil {
		unix.Close(fd)
	}
	return errors.Is(err, fsat.ErrMountPoint)
}

// both compares two paths that are not known to be the same.
func (c *comparison) both(da, db int, fa, fb *found, path string, foreign bool) error {
	ea, err := c.a.entry(da, fa, path)
	if err != nil {
		return err
	}
	eb, err := c.b.entry(db, fb, path)
	if err != nil {
		return err
	}
	switch {
	case ea == nil:
		return nil
	case eb == nil: // it went meanwhile
		return c.all(c.a, da, fa.name, path, forks.Removed)
	case fa.kind() != fb.kind():
		c.put(forks.Type, path, ea, eb)
		if err := c.below(c.a, da, fa, path, forks.Removed); err != nil {
			return err
		}
		return c.below(c.b, db, fb, path, forks.Added)
	}
	c.touch(0, fa)
	if !foreign {
		c.touch(1, fb)
	}
	same := sameMeta(ea, eb)
	if same && fa.isReg() && fa.st.Size > 0 {
		if same, err = c.sameBytes(da, db, fa, path); err != nil {
			return err
		}
	}
	if !same {
		c.put(forks.Modified, path, ea, eb)
	}
	if !fa.isDir() {
		return nil
	}
	return c.sub(da, db, fa, fb, path, foreign)
}

// sub compares two directories of the same name.
func (c *comparison) sub(da, db int, fa, fb *found, path string, foreign bool) error {
	sa, err := c.a.open(da, fa.name, path)
	if err != nil || sa < 0 {
		return err
	}
	defer unix.Close(sa)
	sb, err := c.b.open(db, fb.name, path)
	if err != nil || sb < 0 {
		return err
	}
	defer unix.Close(sb)
	return c.dir(sa, sb, fa, fb, path, foreign)
}

func sameMeta(a, b *forks.Entry) bool {
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID && a.Size == b.Size && a.Rdev == b.Rdev &&
		a.Mtime.Equal(b.Mtime) && a.Target == b.Target && maps.Equal(a.Xattrs, b.Xattrs)
}

// sameBytes compares two files of the same size.
func (c *comparison) sameBytes(da, db int, fa *found, path string) (bool, error) {
	x, err := trees.Open(da, fa.name, unix.O_RDONLY)
	if err != nil {
		return false, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(x)
	y, err := trees.Open(db, fa.name, unix.O_RDONLY)
	if fsat.IsGone(err) {
		return false, nil
	}
	if err != nil {
		return false, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(y)
	same, err := fsat.Same(x, y, fa.st.Size, c.bufs[0], c.bufs[1])
	if err != nil {
		return false, &os.PathError{Op: "compare", Path: path, Err: err}
	}
	return same, nil
}

func (c *comparison) put(kind forks.ChangeKind, path string, a, b *forks.Entry) {
	c.list = append(c.list, forks.Change{Path: path, Kind: kind, Old: a, New: b})
	c.listed[path] = true
}

// all lists what is at path, and below it, as added or removed.
func (c *comparison) all(s *side, dir int, name, path string, kind forks.ChangeKind) error {
	return s.walkOne(dir, name, path, func(_ int, f *found, e *forks.Entry) error {
		if err := context.Cause(c.ctx); err != nil {
			return err
		}
		if kind == forks.Added {
			c.put(kind, e.Path, nil, e)
			if f.st.Dev == c.dev {
				c.note(1, f, e.Path)
				c.touch(1, f)
			}
		} else {
			c.put(kind, e.Path, e, nil)
			c.note(0, f, e.Path)
			c.touch(0, f)
		}
		return nil
	})
}

func (c *comparison) below(s *side, dir int, f *found, path string, kind forks.ChangeKind) error {
	if !f.isDir() {
		return nil
	}
	sub, err := s.open(dir, f.name, path)
	if err != nil || sub < 0 {
		return err
	}
	defer unix.Close(sub)
	names, err := s.names(sub, path)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := c.all(s, sub, n.name, join(path, n.name), kind); err != nil {
			return err
		}
	}
	return nil
}

// What is on disk is little-endian and not aligned.
func word(b []byte, at int) uint64  { return binary.LittleEndian.Uint64(b[at:]) }
func short(b []byte, at int) uint16 { return binary.LittleEndian.Uint16(b[at:]) }
