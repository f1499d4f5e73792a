//go:build linux

package layer

import (
	"encoding/binary"
	"fmt"
	"math"
	"sort"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// Flags of a [Node].
const (
	// Removed: the base has the path and this state has not.
	Removed uint8 = 1 << iota
	// Through: a directory that did not change, on the way to one that did.
	Through
	// Opaque: a directory that hides what the base has below it.
	Opaque
	// Racy: the identity was taken so soon after the last change that another
	// change could leave it the same.
	Racy
	// Absent: the path is in the record and could not be made on disk.
	Absent
	// Kept: the file's bytes are those of the base; other things changed.
	Kept
	// gone: the path vanished while it was being stored.
	gone
)

// NoLayer is the Layer of a node whose bytes are in no layer.
const NoLayer = math.MaxUint32

// Node is one path of a [State]. It holds no pointers, so that a state of any
// size costs the garbage collector nothing, and its layout in memory is that of
// the index on disk.
type Node struct {
	// Size is a file's length, the length of a symlink's target, the device
	// number of a device, and 0 for everything else.
	Size     int64
	MtimeSec int64
	// Ino and Ctime are the identity of the path in the tree that the state
	// is the index of.
	Ino      uint64
	CtimeSec int64

	CtimeNsec, MtimeNsec uint32
	UID, GID             uint32
	// DiskUID and DiskGID are the owners that the tree has; they differ from
	// UID and GID where the caller could not set them.
	DiskUID, DiskGID uint32
	// Parent is the index of the directory; End is the index after the last
	// node below this one.
	Parent, End uint32
	name, extra uint32
	// Link is the hard-link group, 0 for none.
	Link uint32
	// Layer is the index in State.Layers of the layer with the file's bytes.
	Layer   uint32
	Mode    uint16
	nameLen uint8
	Flags   uint8
	_       uint32
}

// IsDir and IsReg say what the node is.
func (n *Node) IsDir() bool { return n.Mode&syscall.S_IFMT == syscall.S_IFDIR }
func (n *Node) IsReg() bool { return n.Mode&syscall.S_IFMT == syscall.S_IFREG }

// IsLnk says whether the node is a symlink.
func (n *Node) IsLnk() bool { return n.Mode&syscall.S_IFMT == syscall.S_IFLNK }

// IsDev says whether the node is a block or character device.
func (n *Node) IsDev() bool {
	t := n.Mode & syscall.S_IFMT
	return t == syscall.S_IFBLK || t == syscall.S_IFCHR
}

// SetIdentity takes over what tells whether the path changes from now on.
func (n *Node) SetIdentity(st *unix.Stat_t) {
	n.Ino, n.CtimeSec, n.CtimeNsec = st.Ino, st.Ctim.Sec, uint32(st.Ctim.Nsec)
	n.DiskUID, n.DiskGID = st.Uid, st.Gid
	n.Flags &^= Racy | Absent
}

// KeepIdentity takes over the identity of another node for the same path.
func (n *Node) KeepIdentity(o *Node) {
	n.Ino, n.CtimeSec, n.CtimeNsec = o.Ino, o.CtimeSec, o.CtimeNsec
	n.DiskUID, n.DiskGID = o.DiskUID, o.DiskGID
	n.Flags = n.Flags&^(Racy|Absent) | o.Flags&(Racy|Absent)
}

// State is a tree without its file contents, or the difference of one against
// another. Its nodes stand in the order of a walk: a directory before what is
// below it, names in byte order. Node 0 is the root.
type State struct {
	Nodes  []Node
	Layers []forks.ID
	heap   []byte
}

// Name returns the last element of the path of node i; "" for the root.
func (s *State) Name(i uint32) string {
	n := &s.Nodes[i]
	if n.nameLen == 0 {
		return ""
	}
	return unsafe.String(&s.heap[n.name], int(n.nameLen))
}

// Path returns the path of node i relative to the root, which is ".".
func (s *State) Path(i uint32) string {
	if i == 0 {
		return "."
	}
	size := 0
	for j := i; j != 0; j = s.Nodes[j].Parent {
		size += int(s.Nodes[j].nameLen) + 1
	}
	b := make([]byte, size-1)
	end := size - 1
	for j := i; j != 0; j = s.Nodes[j].Parent {
		name := s.Name(j)
		copy(b[end-len(name):], name)
		end -= len(name) + 1
		if end >= 0 {
			b[end] = '/'
		}
	}
	return string(b)
}

// Find returns the node at path, or false.
func (s *State) Find(path string) (uint32, bool) {
	if len(s.Nodes) == 0 {
		return 0, false
	}
	at := uint32(0)
	if path == "." || path == "" {
		return 0, true
	}
	for name := range strings.SplitSeq(path, "/") {
		next, ok := s.child(at, name)
		if !ok {
			return 0, false
		}
		at = next
	}
	return at, true
}

func (s *State) child(dir uint32, name string) (uint32, bool) {
	for c := dir + 1; c < s.Nodes[dir].End; c = s.Nodes[c].End {
		if s.Name(c) == name {
			return c, true
		}
	}
	return 0, false
}

// LayerOf returns the layer that holds the bytes of node i; "" if none does.
func (s *State) LayerOf(i uint32) forks.ID {
	if l := s.Nodes[i].Layer; l != NoLayer {
		return s.Layers[l]
	}
	return ""
}

// Extra returns what only some nodes have, in its encoded and canonical form.
func (s *State) rawExtra(i uint32) []byte {
	at := s.Nodes[i].extra
	if at == 0 {
		return nil
	}
	size, n := binary.Uvarint(s.heap[at:])
	return s.heap[int(at)+n : int(at)+n+int(size)]
}

// Extra returns the symlink target and the xattrs of node i.
func (s *State) Extra(i uint32) (target string, xattrs []Xattr) {
	return decodeExtra(s.rawExtra(i))
}

// Entry describes node i, whose path the caller knows.
func (s *State) Entry(i uint32, path string) forks.Entry {
	n := &s.Nodes[i]
	e := forks.Entry{
		Path: path, Mode: uint32(n.Mode), UID: n.UID, GID: n.GID, Size: n.Size,
		Mtime: time.Unix(n.MtimeSec, int64(n.MtimeNsec)), Link: uint64(n.Link),
	}
	if n.IsDev() {
		e.Size, e.Rdev = 0, uint64(n.Size)
	}
	target, xattrs := s.Extra(i)
	e.Target = target
	if len(xattrs) > 0 {
		e.Xattrs = make(map[string]string, len(xattrs))
		for _, x := range xattrs {
			e.Xattrs[x.Name] = x.Value
		}
	}
	return e
}

// Xattr is one extended attribute.
type Xattr = fsat.Xattr

// EncodeExtra gives the canonical form of a symlink target and xattrs: nil if
// there are neither.
func EncodeExtra(target string, xattrs []Xattr) []byte {
	if target == "" && len(xattrs) == 0 {
		return nil
	}
	sort.Slice(xattrs, func(i, j int) bool { return xattrs[i].Name < xattrs[j].Name })
	b := appendString(nil, target)
	for _, x := range xattrs {
		b = appendString(b, x.Name)
		b = appendString(b, x.Value)
	}
	return b
}

func decodeExtra(b []byte) (target string, xattrs []Xattr) {
	if len(b) == 0 {
		return "", nil
	}
	r := reader{buf: b}
	target = r.string()
	for r.err == nil && r.at < len(b) {
		xattrs = append(xattrs, Xattr{Name: r.string(), Value: r.string()})
	}
	return target, xattrs
}

func appendString(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// Builder makes a [State] node by node, in the order of a walk.
type Builder struct{ s State }

// NewBuilder returns a builder of a state whose files lie in the given layers.
func NewBuilder(size int, layers ...forks.ID) *Builder {
	return &Builder{s: State{Nodes: make([]Node, 0, size), heap: make([]byte, 1, 16*size+1), Layers: layers}}
}

// Add appends a node with the fields of n and returns its index. The first
// node is the root.
func (b *Builder) Add(parent uint32, name string, n Node, extra []byte) uint32 {
	n.Parent, n.nameLen, n.extra = parent, uint8(len(name)), 0
	n.name = uint32(len(b.s.heap))
	b.s.heap = append(b.s.heap, name...)
	if len(extra) > 0 {
		n.extra = b.s.addExtra(extra)
	}
	b.s.Nodes = append(b.s.Nodes, n)
	return uint32(len(b.s.Nodes) - 1)
}

func (s *State) addExtra(extra []byte) uint32 {
	at := uint32(len(s.heap))
	s.heap = binary.AppendUvarint(s.heap, uint64(len(extra)))
	s.heap = append(s.heap, extra...)
	return at
}

// State ends the building.
func (b *Builder) State() (*State, error) {
	if uint64(len(b.s.heap)) > math.MaxUint32 || uint64(len(b.s.Nodes)) > math.MaxUint32 {
		return nil, fmt.Errorf("%w: a tree with more than 4 GiB of names", forks.ErrUnsupported)
	}
	b.s.setEnds()
	return &b.s, nil
}

func (s *State) setEnds() {
	for i := range s.Nodes {
		s.Nodes[i].End = uint32(i) + 1
	}
	for i := len(s.Nodes) - 1; i > 0; i-- {
		p := &s.Nodes[s.Nodes[i].Parent]
		p.End = max(p.End, s.Nodes[i].End)
	}
}
