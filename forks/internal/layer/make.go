//go:build linux

package layer

import (
	"fmt"
	"os"
	"sort"
	"strconv"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// maker is what storing a layer and making a fork share: they make paths in a
// private directory, in parallel, as layers have them.
type maker struct {
	copier *fsat.Copier
	set    fsat.Setter
	links  *fsat.Dir // the first name of each hard-link group, by number
	warn   *Warnings
	bufs   [][]byte

	mu     sync.Mutex
	groups map[uint32]*sharedFile
	late   []lateDir
}

// sharedFile is a hard-link group that is being made.
type sharedFile struct {
	mu         sync.Mutex
	made, gone bool
}

// lateDir is a directory whose mode keeps its own maker from what is below.
type lateDir struct {
	dir  *fsat.Dir
	node uint32
	path func() string
	meta fsat.Meta
}

func newMaker(links *fsat.Dir, copier *fsat.Copier, warn *Warnings) *maker {
	m := &maker{
		copier: copier, set: fsat.NewSetter(), links: links, warn: warn,
		bufs: make([][]byte, fsat.Workers()), groups: make(map[uint32]*sharedFile),
	}
	m.set.Fresh, m.set.OwnGroup = true, true
	for i := range m.bufs {
		m.bufs[i] = make([]byte, fsat.BufferSize)
	}
	return m
}

// newMaker returns one that works in the stage.
func (st *Stage) newMaker(warn *Warnings) (*maker, error) {
	links, err := st.Mkdir("links")
	if err != nil {
		return nil, err
	}
	return newMaker(links, &st.store.Copier, warn), nil
}

func (m *maker) close() {
	m.links.Release()
	for _, l := range m.late {
		l.dir.Release()
	}
}

// Meta returns the metadata of node i.
func (s *State) Meta(i uint32) fsat.Meta {
	n := &s.Nodes[i]
	_, xattrs := s.Extra(i)
	return fsat.Meta{Mode: uint32(n.Mode), UID: n.UID, GID: n.GID, MtimeSec: n.MtimeSec, MtimeNsec: n.MtimeNsec, Xattrs: xattrs}
}

// mkdir makes the directory name. All subdirectories are made before their
// parent gets its times; what is in them comes later.
func (m *maker) mkdir(in *fsat.Dir, name string) error { return unix.Mkdirat(in.FD, name, 0o700) }

// openMade opens a directory that was made by mkdir.
func (m *maker) openMade(in *fsat.Dir, name string) (*fsat.Dir, error) {
	fd, err := fsat.Access{}.OpenDir(in.FD, name)
	if err != nil {
		return nil, err
	}
	return fsat.NewDir(fd), nil
}

// special makes a symlink, FIFO, socket or device. It returns false, with a
// warning, if the caller may not.
func (m *maker) special(in *fsat.Dir, name, target string, n *Node, meta *fsat.Meta, path func() string, st *unix.Stat_t) (bool, error) {
	var err error
	switch {
	case n.IsLnk():
		err = unix.Symlinkat(target, in.FD, name)
	case n.IsDev():
		err = unix.Mknodat(in.FD, name, uint32(n.Mode), int(n.Size))
		if err == unix.EPERM {
			m.warn.Add("%s: a device, which only root can make; it is kept in the record and left out here", path())
			return false, nil
		}
	default:
		err = unix.Mknodat(in.FD, name, uint32(n.Mode), 0)
	}
	if err != nil {
		return false, err
	}
	return true, m.set.At(in.FD, name, meta, st)
}

// shared makes name a further name of hard-link group link, whose file is made
// by first when the first of them comes.
func (m *maker) shared(link uint32, in *fsat.Dir, name string, first func(in *fsat.Dir, name string) (bool, error)) (bool, error) {
	m.mu.Lock()
	g := m.groups[link]
	if g == nil {
		g = &sharedFile{}
		m.groups[link] = g
	}
	m.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gone {
		return false, nil
	}
	stash := strconv.FormatUint(uint64(link), 10)
	if !g.made {
		ok, err := first(m.links, stash)
		g.gone = !ok
		if err != nil || !ok {
			return false, err
		}
		g.made = true
	}
	return true, unix.Linkat(m.links.FD, stash, in.FD, name, 0)
}

// settleLinks takes away the additional names and tells the final stats.
func (m *maker) settleLinks(tell func(link uint32, st *unix.Stat_t)) error {
	for link, g := range m.groups {
		if !g.made {
			continue
		}
		name := strconv.FormatUint(uint64(link), 10)
		fd, err := unix.Openat(m.links.FD, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Unlinkat(m.links.FD, name, 0)
			var st unix.Stat_t
			if err == nil {
				err = unix.Fstat(fd, &st)
			}
			unix.Close(fd)
			tell(link, &st)
		}
		if err != nil {
			return fmt.Errorf("hard link: %w", err)
		}
	}
	return nil
}

// settleDir gives a directory, all of whose entries are there, its metadata;
// if that would shut out the maker, later.
func (m *maker) settleDir(d *fsat.Dir, node uint32, meta fsat.Meta, path func() string, st *unix.Stat_t) (bool, error) {
	if !m.set.Root() && meta.Mode&0o300 != 0o300 {
		d.Hold(1)
		m.mu.Lock()
		m.late = append(m.late, lateDir{d, node, path, meta})
		m.mu.Unlock()
		return false, nil
	}
	return true, m.set.FD(d.FD, &meta, st)
}

// settleLate does what settleDir put off, the deepest first.
func (m *maker) settleLate(tell func(node uint32, st *unix.Stat_t)) error {
	sort.Slice(m.late, func(i, j int) bool { return m.late[i].node > m.late[j].node })
	for i := range m.late {
		l := &m.late[i]
		var st unix.Stat_t
		if err := m.set.FD(l.dir.FD, &l.meta, &st); err != nil {
			return &os.PathError{Op: "make", Path: l.path(), Err: err}
		}
		tell(l.node, &st)
	}
	return nil
}

// layerMeta leaves out what an overlay would take for its own.
func layerMeta(m fsat.Meta) fsat.Meta {
	var kept []Xattr
	for _, x := range m.Xattrs {
		if !fsat.ForOverlay(x.Name) {
			kept = append(kept, x)
		}
	}
	m.Xattrs = kept
	return m
}

// EmptyState is what a first snapshot is compared with.
func EmptyState() *State { return &State{Nodes: []Node{{Mode: unix.S_IFDIR, End: 1}}, heap: []byte{0}} }

// Changes lists how delta, which a scan found, differs from base; base may be
// nil, then everything is added. A file of the difference has other bytes
// unless the scan says that they were kept.
func Changes(base, delta *State) ([]forks.Change, error) {
	if base != nil {
		return Compare(base, delta, true, func(*State, uint32, *State, uint32, string) (bool, error) { return false, nil })
	}
	c := &comparer{a: EmptyState(), b: delta}
	c.all(delta, 0, ".", forks.Added)
	sort.Slice(c.list, func(i, j int) bool { return c.list[i].Path < c.list[j].Path })
	return c.list, nil
}

// SameStored is a [SameBytes] for states of this store. Bytes that are in no
// layer of it differ from those that are.
func (s *Store) SameStored(a *State, i uint32, b *State, j uint32, path string) (bool, error) {
	la, lb := a.LayerOf(i), b.LayerOf(j)
	if la == "" || lb == "" {
		return false, nil
	}
	x, err := s.OpenFile(la, path)
	if err != nil {
		return false, err
	}
	defer unix.Close(x)
	y, err := s.OpenFile(lb, path)
	if err != nil {
		return false, err
	}
	defer unix.Close(y)
	bufX, bufY := buffers.Get().(*[]byte), buffers.Get().(*[]byte)
	defer buffers.Put(bufX)
	defer buffers.Put(bufY)
	return fsat.Same(x, y, a.Nodes[i].Size, *bufX, *bufY)
}

// buffers are for comparing files.
var buffers = sync.Pool{New: func() any { b := make([]byte, fsat.BufferSize); return &b }}
