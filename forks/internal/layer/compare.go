//go:build linux

package layer

import (
	"bytes"
	"sort"
	"syscall"

	"github.com/agentenv/agentenv/forks"
)

// SameBytes compares the contents of the regular files at nodes i of a and j
// of b, which have the same size and lie in different layers.
type SameBytes func(a *State, i uint32, b *State, j uint32, path string) (bool, error)

// Compare lists the paths that differ between the states a and b. A path is
// the same if its type, mode, owner, mtime, xattrs, target or device number,
// bytes and hard-link group are; a group is known by the first of its names.
// With sparse, b is a difference against a: what it leaves out is the same.
func Compare(a, b *State, sparse bool, same SameBytes) ([]forks.Change, error) {
	c := &comparer{a: a, b: b, sparse: sparse, same: same}
	c.leadA, c.leadB = leaders(a), leaders(b)
	if err := c.both(0, 0, "."); err != nil {
		return nil, err
	}
	sort.Slice(c.list, func(i, j int) bool { return c.list[i].Path < c.list[j].Path })
	return c.list, nil
}

type comparer struct {
	a, b         *State
	sparse       bool
	same         SameBytes
	leadA, leadB map[uint32]uint32
	list         []forks.Change
}

// leaders maps each hard-link group to the first of its names.
func leaders(s *State) map[uint32]uint32 {
	var m map[uint32]uint32
	for i := range s.Nodes {
		if l := s.Nodes[i].Link; l != 0 {
			if m == nil {
				m = make(map[uint32]uint32)
			}
			if _, ok := m[l]; !ok {
				m[l] = uint32(i)
			}
		}
	}
	return m
}

func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

func (c *comparer) dir(a, b uint32, path string) error {
	ac, aend := a+1, c.a.Nodes[a].End
	bc, bend := b+1, c.b.Nodes[b].End
	for ac < aend || bc < bend {
		switch {
		case bc >= bend || ac < aend && c.a.Name(ac) < c.b.Name(bc):
			if !c.sparse {
				c.all(c.a, ac, join(path, c.a.Name(ac)), forks.Removed)
			}
			ac = c.a.Nodes[ac].End
		case ac >= aend || c.b.Name(bc) < c.a.Name(ac):
			c.all(c.b, bc, join(path, c.b.Name(bc)), forks.Added)
			bc = c.b.Nodes[bc].End
		default:
			if err := c.both(ac, bc, join(path, c.a.Name(ac))); err != nil {
				return err
			}
			ac, bc = c.a.Nodes[ac].End, c.b.Nodes[bc].End
		}
	}
	return nil
}

func (c *comparer) both(a, b uint32, path string) error {
	an, bn := &c.a.Nodes[a], &c.b.Nodes[b]
	if bn.Flags&Removed != 0 {
		c.all(c.a, a, path, forks.Removed)
		return nil
	}
	if bn.Flags&Through != 0 {
		return c.dir(a, b, path)
	}
	if an.Mode&syscall.S_IFMT != bn.Mode&syscall.S_IFMT {
		c.put(forks.Type, path, a, b)
		c.below(c.a, a, path, forks.Removed)
		c.below(c.b, b, path, forks.Added)
		return nil
	}
	equal := SameMeta(c.a, a, c.b, b) && c.sameLink(a, b)
	if equal && an.IsReg() && an.Size > 0 && bn.Flags&Kept == 0 && c.a.LayerOf(a) != c.b.LayerOf(b) {
		var err error
		if equal, err = c.same(c.a, a, c.b, b, path); err != nil {
			return err
		}
	}
	if !equal {
		c.put(forks.Modified, path, a, b)
	}
	if an.IsDir() {
		return c.dir(a, b, path)
	}
	return nil
}

// SameMeta says whether two nodes of the same type have the same properties,
// bytes and hard-link group aside.
func SameMeta(a *State, i uint32, b *State, j uint32) bool {
	x, y := &a.Nodes[i], &b.Nodes[j]
	return x.Mode == y.Mode && x.UID == y.UID && x.GID == y.GID && x.Size == y.Size &&
		x.MtimeSec == y.MtimeSec && x.MtimeNsec == y.MtimeNsec &&
		bytes.Equal(a.rawExtra(i), b.rawExtra(j))
}

func (c *comparer) sameLink(a, b uint32) bool {
	la, lb := c.a.Nodes[a].Link, c.b.Nodes[b].Link
	if la == 0 && lb == 0 {
		return true
	}
	return c.leader(c.a, c.leadA, la, a) == c.leader(c.b, c.leadB, lb, b)
}

func (c *comparer) leader(s *State, lead map[uint32]uint32, link, self uint32) string {
	if link == 0 {
		return s.Path(self)
	}
	return s.Path(lead[link])
}

func (c *comparer) put(kind forks.ChangeKind, path string, a, b uint32) {
	before, after := c.a.Entry(a, path), c.b.Entry(b, path)
	c.list = append(c.list, forks.Change{Path: path, Kind: kind, Old: &before, New: &after})
}

// all lists node i of s and everything below it as added or removed.
func (c *comparer) all(s *State, i uint32, path string, kind forks.ChangeKind) {
	if s.Nodes[i].Flags&Removed != 0 {
		return
	}
	e := s.Entry(i, path)
	ch := forks.Change{Path: path, Kind: kind}
	if kind == forks.Added {
		ch.New = &e
	} else {
		ch.Old = &e
	}
	c.list = append(c.list, ch)
	c.below(s, i, path, kind)
}

func (c *comparer) below(s *State, i uint32, path string, kind forks.ChangeKind) {
	for n := i + 1; n < s.Nodes[i].End; n = s.Nodes[n].End {
		c.all(s, n, join(path, s.Name(n)), kind)
	}
}
