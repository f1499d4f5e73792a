//go:build linux

package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// racyWindow is how old a ctime must be before it is believed that another
// change would have given another one. File systems stamp with the kernel's
// tick, which is at most 10 ms (CONFIG_HZ=100).
const racyWindow = 10 * time.Millisecond

// coarseWindow is the same for a ctime of a whole second: it is probably of a
// file system that keeps no parts of it, such as ext4 with inodes of 128 bytes,
// or vfat, which keeps every other second.
const coarseWindow = 2 * time.Second

// maxWarnings bounds the warnings of one operation.
const maxWarnings = 50

// ScanOptions say how a tree is compared with a state.
type ScanOptions struct {
	// Base is what the tree is compared with; nil for nothing. Its nodes get
	// the identities of the paths that are found unchanged.
	Base *State
	// Trust: Base is the index of this tree, so that a path with the same
	// identity, size, mtime and mode is not looked at.
	Trust bool
	// Ours: the tree is a fork, in which owners, devices and attributes may
	// be missing that the caller could not set, and stay in the record.
	Ours bool
	// InPlace: the tree is a directory that is made equal to snapshots, in which
	// owners may be missing that the caller could not set.
	InPlace bool
	// Upper: the tree is the upper directory of an overlay. Its whiteouts are
	// what is missing; the overlay's own attributes are none of the tree's.
	Upper bool
	// Shows says whether the base shows through where the tree has nothing; nil
	// if it nowhere does.
	Shows func(path string) bool
	// Unchanged is told of each regular file with one name that is what Base says.
	Unchanged func(dir func() string, name string)
	// Groups knows the hard-link groups of the base, where Base is not all of
	// it; nil if it is.
	Groups Groups
	// Access says how to get at what permissions refuse.
	Access fsat.Access
	// Excluded says whether to leave out a path, given by its directory and
	// its name; nil for none.
	Excluded func(dir string, name string) bool
	// SkipDirs are directories that are left out.
	SkipDirs map[FileID]bool
	// FileXattrs reads the xattrs of changed regular files, too. Who stores
	// them reads them again.
	FileXattrs bool
	// Same compares the bytes of an open file, of the node's size, with those
	// of a node of Base.
	Same func(node uint32, dir func() string, name string, fd int) (bool, error)
	// Progress, if set, is told of the files and bytes seen.
	Progress func(files, bytes int64)
}

// Groups tells of the hard-link groups of a state.
type Groups interface {
	// Size is how many names a group has.
	Size(link uint32) int
	// Highest is a number that no group exceeds.
	Highest() (uint32, error)
}

// FileID tells files apart.
type FileID struct{ Dev, Ino uint64 }

// Scan is what a scan found.
type Scan struct {
	// Delta is how the tree differs from the base; nil if it does not.
	Delta *State
	// Refreshed: identities in the base were brought up to date.
	Refreshed bool
	// Mounts are the mount points that were not entered.
	Mounts   []string
	Warnings Warnings
}

// Warnings collects lines up to a bounded number.
type Warnings struct {
	mu    sync.Mutex
	lines []string
	more  int
}

// Add adds a line.
func (w *Warnings) Add(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.lines) >= maxWarnings {
		w.more++
		return
	}
	w.lines = append(w.lines, fmt.Sprintf(format, args...))
}

// Lines returns what was collected.
func (w *Warnings) Lines() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.more > 0 {
		return append(w.lines[:len(w.lines):len(w.lines)], fmt.Sprintf("and %d more", w.more))
	}
	return w.lines
}

type scanner struct {
	ScanOptions
	scan      *Scan
	workers   []scanWorker
	refreshed atomic.Bool
	files     atomic.Int64
	bytes     atomic.Int64
	mu        sync.Mutex // for scan.Mounts
}

type scanWorker struct {
	list   fsat.List
	linked []linkRef
}

// scanDir is a directory to be read, and then what differs in it.
type scanDir struct {
	in      *fsat.Dir // holds it; nil for the root
	self    *fsat.Dir
	name    string
	up      *scanDir
	base    uint32
	hasBase bool
	// dev and reread: on this device every file is read, since its ctimes say
	// nothing.
	dev    uint64
	reread bool

	kids    []kid
	node    Node
	extra   []byte
	changed bool
	gone    bool
}

// kid is an entry of a directory that may differ.
type kid struct {
	name    string
	node    Node
	extra   []byte
	sub     *scanDir
	base    uint32
	hasBase bool
	changed bool
}

// linkRef is a name of a file that has, or had, several.
type linkRef struct {
	dir  *scanDir
	kid  int
	file FileID
}

func (t *scanDir) path() string {
	if t.up == nil {
		return "."
	}
	return join(t.up.path(), t.name)
}

// ScanTree compares the tree whose open root is root with a state.
func ScanTree(ctx context.Context, root int, o ScanOptions) (*Scan, error) {
	s := &scanner{ScanOptions: o, scan: &Scan{}, workers: make([]scanWorker, fsat.Workers())}
	fd, err := o.Access.OpenDir(root, ".")
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: ".", Err: err}
	}
	top := &scanDir{self: fsat.NewDir(fd), hasBase: o.Base != nil}
	err = fsat.Run(ctx, len(s.workers), []*scanDir{top}, s.dir, func(t *scanDir) {
		if t.in != nil {
			t.in.Release()
		}
	})
	if err != nil {
		return nil, err
	}
	links := s.resolveLinks()
	if err := s.assemble(top, links); err != nil {
		return nil, err
	}
	s.scan.Refreshed = s.refreshed.Load()
	return s.scan, nil
}

// dir reads one directory.
func (s *scanner) dir(worker int, t *scanDir, push func(*scanDir)) error {
	if err := s.open(t); err != nil || t.gone || t.self == nil {
		return err
	}
	defer t.self.Release()
	var st unix.Stat_t
	if err := unix.Fstat(t.self.FD, &st); err != nil {
		return s.fail("stat", t, "", err)
	}
	if s.SkipDirs[FileID{st.Dev, st.Ino}] {
		t.gone = true
		return nil
	}
	if err := s.device(t, &st); err != nil {
		return err
	}
	if err := s.ownNode(t, &st); err != nil {
		return err
	}
	w := &s.workers[worker]
	if err := w.list.Read(t.self.FD); err != nil {
		t.gone = fsat.IsGone(err) // removed after it was opened
		return ignoreIf(t.gone, s.fail("read", t, "", err))
	}
	if s.Progress != nil {
		s.Progress(s.files.Add(int64(w.list.Len())), s.bytes.Load())
	}
	return s.entries(t, w, push)
}

// open opens the directory t. What vanished meanwhile is marked as gone.
func (s *scanner) open(t *scanDir) error {
	if t.in == nil {
		return nil
	}
	defer t.in.Release()
	fd, err := s.Access.OpenDir(t.in.FD, t.name)
	switch {
	case errors.Is(err, fsat.ErrMountPoint):
		return s.mountPoint(t)
	case fsat.IsGone(err):
		t.gone = true
		return nil
	case err != nil:
		return s.fail("open", t, "", err)
	}
	t.self = fsat.NewDir(fd)
	return nil
}

// mountPoint records a mount point: in a fork as what the base has there, in a
// source as an empty directory.
func (s *scanner) mountPoint(t *scanDir) error {
	p := t.path()
	s.mu.Lock()
	s.scan.Mounts = append(s.scan.Mounts, p)
	s.mu.Unlock()
	s.scan.Warnings.Add("%s: is a mount point; what is below it was left out", p)
	if s.Ours && t.hasBase {
		return nil
	}
	var st unix.Stat_t
	if err := s.Access.StatName(t.in.FD, t.name, &st); err != nil {
		t.gone = fsat.IsGone(err)
		return ignoreIf(t.gone, err)
	}
	t.node, t.changed = newNode(&st), true
	if t.hasBase {
		for b := t.base + 1; b < s.Base.Nodes[t.base].End; b = s.Base.Nodes[b].End {
			t.kids = append(t.kids, s.removal(b))
		}
	}
	return nil
}

func ignoreIf(ignore bool, err error) error {
	if ignore {
		return nil
	}
	return err
}

// device finds out whether files must be read to know whether they changed. On
// tmpfs a store through a mapping that was read first, or stored to before,
// changes no time (tried on 6.18), and nothing tells afterwards that there was
// such a mapping.
func (s *scanner) device(t *scanDir, st *unix.Stat_t) error {
	t.dev = st.Dev
	if t.up != nil && t.up.dev == st.Dev {
		t.reread = t.up.reread
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(t.self.FD, &fs); err != nil {
		return s.fail("statfs", t, "", err)
	}
	t.reread = fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC
	return nil
}

func newNode(st *unix.Stat_t) Node {
	n := Node{
		Mode: uint16(st.Mode), UID: st.Uid, GID: st.Gid, DiskUID: st.Uid, DiskGID: st.Gid,
		MtimeSec: st.Mtim.Sec, MtimeNsec: uint32(st.Mtim.Nsec), Layer: NoLayer,
	}
	n.SetIdentity(st)
	switch {
	case n.IsReg():
		n.Size, n.Layer = st.Size, 0
	case n.IsLnk():
		n.Size = st.Size
	case n.IsDev():
		n.Size = int64(st.Rdev)
	}
	return n
}

// identical says that the path was not changed since the node was made.
func (n *Node) identical(st *unix.Stat_t) bool {
	return n.Ino == st.Ino && n.CtimeSec == st.Ctim.Sec && n.CtimeNsec == uint32(st.Ctim.Nsec) &&
		n.Flags&(Racy|Absent) == 0 && uint32(n.Mode) == st.Mode &&
		n.DiskUID == st.Uid && n.DiskGID == st.Gid &&
		(n.IsDir() || n.MtimeSec == st.Mtim.Sec && n.MtimeNsec == uint32(st.Mtim.Nsec) && (!n.IsReg() || n.Size == st.Size))
}

// Unwritten says whether st is of the file that the node was made of, and that
// nobody wrote to it since. The ctime does not tell: it changes when another
// name of the file comes or goes.
func (n *Node) Unwritten(st *unix.Stat_t) bool {
	return n.Ino == st.Ino && n.MtimeSec == st.Mtim.Sec && n.MtimeNsec == uint32(st.Mtim.Nsec) && (!n.IsReg() || n.Size == st.Size)
}

// racy says whether a change after now could leave the ctime as it is.
func racy(ctim unix.Timespec, now time.Time) bool {
	window := racyWindow
	if ctim.Nsec == 0 {
		window = coarseWindow
	}
	return time.Unix(ctim.Sec, ctim.Nsec).Add(window).After(now)
}

// MarkRacy notes which paths of a tree that is handed over now were made so
// late that a change which follows could leave their ctime as it is.
func (s *State) MarkRacy(now time.Time) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if racy(unix.Timespec{Sec: n.CtimeSec, Nsec: int64(n.CtimeNsec)}, now) {
			n.Flags |= Racy
		}
	}
}

// ownNode finds out whether the directory itself changed.
func (s *scanner) ownNode(t *scanDir, st *unix.Stat_t) error {
	if t.hasBase && s.Trust && s.Base.Nodes[t.base].identical(st) {
		return nil
	}
	now := time.Now()
	xattrs, err := fsat.Xattrs(t.self.FD)
	if err != nil {
		return s.fail("read the attributes of", t, "", err)
	}
	k := kid{node: newNode(st), base: t.base, hasBase: t.hasBase, changed: true}
	s.finish(&k, st, "", xattrs, now)
	t.node, t.extra, t.changed = k.node, k.extra, k.changed
	return nil
}

// finish completes k, whose bytes are those of its base (or differ, which the
// caller then says): it decides whether k differs in anything else, and if not
// gives the base the identity that was found.
func (s *scanner) finish(k *kid, st *unix.Stat_t, target string, xattrs []Xattr, now time.Time) {
	if racy(st.Ctim, now) {
		k.node.Flags |= Racy
	}
	if s.Upper {
		xattrs = withoutOverlay(xattrs)
	}
	if k.hasBase {
		s.keepRecorded(k, &xattrs)
	}
	k.extra = EncodeExtra(target, xattrs)
	if k.hasBase && s.sameMeta(k) && bytes.Equal(k.extra, s.Base.rawExtra(k.base)) {
		k.changed = false
		s.refresh(k)
	}
}

// keepRecorded gives k the owner and attributes that its base has in the
// record and that the caller could not set on disk.
func (s *scanner) keepRecorded(k *kid, xattrs *[]Xattr) {
	if s.InPlace {
		keepOwner(&k.node, &s.Base.Nodes[k.base])
		return
	}
	if !s.Ours {
		return
	}
	b := &s.Base.Nodes[k.base]
	root := os.Geteuid() == 0
	if !root || s.Upper {
		_, recorded := s.Base.Extra(k.base)
		keepXattrs(recorded, xattrs, s.Upper)
	}
	if root && fsat.Mapped(b.UID, b.GID) {
		return
	}
	expected := k.node.UID == b.DiskUID && k.node.GID == b.DiskGID
	if !s.Trust || b.Ino == 0 {
		expected = k.node.UID == uint32(os.Geteuid())
	}
	if expected {
		k.node.UID, k.node.GID = b.UID, b.GID
	}
}

// keepXattrs adds the recorded attributes that the caller could not set on
// disk, and in an overlay's upper those that only the overlay may have there.
func keepXattrs(recorded []Xattr, xattrs *[]Xattr, upper bool) {
	root := os.Geteuid() == 0
	for _, x := range recorded {
		lost := !root && fsat.Privileged(x.Name) || upper && fsat.ForOverlay(x.Name)
		if lost && !hasXattr(*xattrs, x.Name) {
			*xattrs = append(*xattrs, x)
		}
	}
}

// withoutOverlay leaves out the attributes that an overlay keeps for itself.
func withoutOverlay(xattrs []Xattr) []Xattr {
	return slices.DeleteFunc(xattrs, func(x Xattr) bool { return fsat.ForOverlay(x.Name) })
}

func hasXattr(xattrs []Xattr, name string) bool {
	for _, x := range xattrs {
		if x.Name == name {
			return true
		}
	}
	return false
}

// sameMeta compares what a stat tells, owners as recorded.
func (s *scanner) sameMeta(k *kid) bool {
	n, b := &k.node, &s.Base.Nodes[k.base]
	return n.Mode == b.Mode && n.UID == b.UID && n.GID == b.GID && n.Size == b.Size &&
		n.MtimeSec == b.MtimeSec && n.MtimeNsec == b.MtimeNsec
}

// refresh takes over k's identity: the path is what the base says.
func (s *scanner) refresh(k *kid) {
	s.Base.Nodes[k.base].KeepIdentity(&k.node)
	if !s.refreshed.Load() {
		s.refreshed.Store(true)
	}
}

// entries compares the names in t with the base's.
func (s *scanner) entries(t *scanDir, w *scanWorker, push func(*scanDir)) error {
	b, bend := uint32(0), uint32(0)
	if t.hasBase {
		b, bend = t.base+1, s.Base.Nodes[t.base].End
	}
	dir := ""
	if s.Excluded != nil {
		dir = t.path()
	}
	for i := range w.list.Len() {
		name := w.list.Name(i)
		for b < bend && s.Base.Name(b) < string(name) {
			s.missing(t, b)
			b = s.Base.Nodes[b].End
		}
		k := kid{base: b, hasBase: b < bend && s.Base.Name(b) == string(name)}
		if k.hasBase {
			b = s.Base.Nodes[b].End
		}
		if s.Excluded != nil && s.Excluded(dir, string(name)) {
			if k.hasBase {
				s.missing(t, k.base)
			}
			continue
		}
		if err := s.entry(t, w, i, k, push); err != nil {
			return err
		}
	}
	for ; b < bend; b = s.Base.Nodes[b].End {
		s.missing(t, b)
	}
	return nil
}

// missing records that the base's node b is not in the tree.
func (s *scanner) missing(t *scanDir, b uint32) {
	if s.Shows == nil || !s.Shows(join(t.path(), s.Base.Name(b))) {
		s.remove(t, b)
	}
}

func (s *scanner) remove(t *scanDir, b uint32) {
	if s.Base.Nodes[b].Flags&Absent == 0 && (!s.Ours || !s.Base.Nodes[b].IsDev() || os.Geteuid() == 0) {
		t.kids = append(t.kids, s.removal(b))
	}
}

func (s *scanner) removal(b uint32) kid {
	return kid{name: s.Base.Name(b), node: Node{Flags: Removed, Layer: NoLayer}, base: b, hasBase: true, changed: true}
}

// entry compares name i of the directory that was read.
func (s *scanner) entry(t *scanDir, w *scanWorker, i int, k kid, push func(*scanDir)) error {
	var st unix.Stat_t
	isDir := w.list.Type(i) == unix.DT_DIR
	if !isDir {
		err := s.Access.Stat(t.self.FD, w.list.Ptr(i), &st)
		if fsat.IsGone(err) {
			if k.hasBase {
				s.missing(t, k.base)
			}
			return nil
		}
		if err != nil {
			return s.fail("stat", t, string(w.list.Name(i)), err)
		}
		isDir = st.Mode&unix.S_IFMT == unix.S_IFDIR
	}
	if isDir {
		sub := &scanDir{in: t.self, name: string(w.list.Name(i)), up: t, base: k.base}
		sub.hasBase = k.hasBase && s.Base.Nodes[k.base].IsDir()
		k.name, k.sub = sub.name, sub
		t.kids = append(t.kids, k)
		t.self.Hold(1)
		push(sub)
		return nil
	}
	if s.Upper && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
		if k.hasBase {
			s.remove(t, k.base)
		}
		return nil
	}
	if k.hasBase && s.Trust && s.Base.Nodes[k.base].identical(&st) && !(t.reread && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size > 0) {
		s.identical(t, w, k, &st)
		return nil
	}
	k.name = string(w.list.Name(i))
	return s.examine(t, w, k, &st)
}

// identical passes over a path that did not change. One of several names of a
// file still counts: another may have to be looked at, and then all are needed
// to tell whether the group is what it was.
func (s *scanner) identical(t *scanDir, w *scanWorker, k kid, st *unix.Stat_t) {
	b := &s.Base.Nodes[k.base]
	if b.Link == 0 {
		return
	}
	k.name, k.node, k.extra = s.Base.Name(k.base), newNode(st), s.Base.rawExtra(k.base)
	k.node.UID, k.node.GID = b.UID, b.GID
	w.linked = append(w.linked, linkRef{t, len(t.kids), FileID{st.Dev, st.Ino}})
	t.kids = append(t.kids, k)
}

// examine looks at a path that is new or may have changed.
func (s *scanner) examine(t *scanDir, w *scanWorker, k kid, st *unix.Stat_t) error {
	now := time.Now()
	k.node, k.changed = newNode(st), true
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		s.bytes.Add(st.Size)
		err = s.examineFile(t, &k, st, now)
	case unix.S_IFLNK:
		var target string
		if target, err = s.Access.Readlink(t.self.FD, k.name); err == nil {
			k.node.Size = int64(len(target))
			err = s.examineOther(t, &k, st, target, now)
		}
	case unix.S_IFCHR:
		if st.Rdev == 0 {
			return s.fail("capture", t, k.name, fmt.Errorf("%w: a character device 0/0, which an overlay takes for a deletion: remove or exclude it", forks.ErrUnkeepable))
		}
		err = s.examineOther(t, &k, st, "", now)
	default:
		err = s.examineOther(t, &k, st, "", now)
	}
	if fsat.IsGone(err) {
		if k.hasBase {
			s.missing(t, k.base)
		}
		return nil
	}
	if err != nil {
		return s.fail("read", t, k.name, err)
	}
	wasLinked := k.hasBase && s.Base.Nodes[k.base].Link != 0
	linked := k.node.IsReg() && (st.Nlink > 1 || wasLinked)
	if linked {
		w.linked = append(w.linked, linkRef{t, len(t.kids), FileID{st.Dev, st.Ino}})
	}
	if k.changed || linked {
		t.kids = append(t.kids, k)
	} else if s.Unchanged != nil && k.node.IsReg() {
		s.Unchanged(t.path, k.name)
	}
	return nil
}

func (s *scanner) examineOther(t *scanDir, k *kid, st *unix.Stat_t, target string, now time.Time) error {
	xattrs, err := s.Access.Xattrs(t.self.FD, k.name)
	if err != nil {
		return err
	}
	s.finish(k, st, target, xattrs, now)
	return nil
}

// examineFile reads a file only where everything else is the same.
func (s *scanner) examineFile(t *scanDir, k *kid, st *unix.Stat_t, now time.Time) error {
	compare := k.hasBase && s.Base.Nodes[k.base].IsReg()
	if compare {
		probe := *k
		s.keepRecorded(&probe, new([]Xattr))
		compare = s.sameMeta(&probe)
	}
	if !compare {
		var xattrs []Xattr
		if s.FileXattrs {
			var err error
			if xattrs, err = s.Access.Xattrs(t.self.FD, k.name); err != nil {
				return err
			}
		}
		s.finish(k, st, "", xattrs, now)
		k.changed = true
		return nil
	}
	fd, err := s.Access.Open(t.self.FD, k.name, unix.O_RDONLY)
	if errors.Is(err, fsat.ErrMountPoint) {
		s.scan.Warnings.Add("%s: is a mount point; what it holds was left out", join(t.path(), k.name))
		k.changed = false
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// Pages that are written out are mapped read-only again, so that the next
	// store through a mapping changes the times.
	_ = unix.SyncFileRange(fd, 0, 0, flushAll)
	if err := unix.Fstat(fd, st); err != nil {
		return err
	}
	k.node = newNode(st)
	same, err := s.Same(k.base, t.path, k.name, fd)
	if err != nil {
		return err
	}
	xattrs, err := fsat.Xattrs(fd)
	if err != nil {
		return err
	}
	if same {
		s.finish(k, st, "", xattrs, now)
	}
	return nil
}

const flushAll = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER

func (s *scanner) fail(op string, t *scanDir, name string, err error) error {
	p := t.path()
	if name != "" {
		p = path.Join(p, name)
	}
	if errors.Is(err, unix.EACCES) {
		err = fmt.Errorf("%w: run as its owner or as root, or exclude it", err)
	}
	return &os.PathError{Op: op, Path: p, Err: err}
}
