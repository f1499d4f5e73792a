//go:build linux

package layer

import (
	"math"
	"syscall"
)

// group is the names of one file.
type group struct {
	refs []linkRef
	link uint32
	// numbered: link is decided
	numbered bool
}

// stateGroups are the hard-link groups of a whole state.
type stateGroups struct {
	sizes   map[uint32]int
	highest uint32
}

func newStateGroups(s *State) stateGroups {
	g := stateGroups{sizes: make(map[uint32]int)}
	if s == nil {
		return g
	}
	for i := range s.Nodes {
		if l := s.Nodes[i].Link; l != 0 {
			g.sizes[l]++
			g.highest = max(g.highest, l)
		}
	}
	return g
}

func (g stateGroups) Size(link uint32) int     { return g.sizes[link] }
func (g stateGroups) Highest() (uint32, error) { return g.highest, nil }

// resolveLinks finds the names of each file that may have several, and drops
// the groups that are what they were.
func (s *scanner) resolveLinks() map[FileID]*group {
	groups := make(map[FileID]*group)
	for i := range s.workers {
		for _, r := range s.workers[i].linked {
			g := groups[r.file]
			if g == nil {
				g = &group{}
				groups[r.file] = g
			}
			g.refs = append(g.refs, r)
		}
	}
	if len(groups) == 0 {
		return nil
	}
	if s.Groups == nil {
		s.Groups = newStateGroups(s.Base)
	}
	for file, g := range groups {
		s.resolve(g)
		if !g.numbered && len(g.refs) == 1 {
			delete(groups, file)
		}
	}
	return groups
}

func (s *scanner) resolve(g *group) {
	same, changed := true, false
	was := s.baseLink(g.refs[0])
	for _, r := range g.refs {
		same = same && s.baseLink(r) == was
		changed = changed || r.dir.kids[r.kid].changed
	}
	if was == 0 {
		same = len(g.refs) == 1
	} else {
		same = same && s.Groups.Size(was) == len(g.refs)
	}
	if same {
		g.link, g.numbered = was, true
	}
	for _, r := range g.refs {
		k := &r.dir.kids[r.kid]
		if !k.changed {
			k.node.Flags |= Kept
		}
		k.changed = changed || !same
	}
}

// baseLink returns the group that the name was of, or a number that no group
// has if it was not there.
func (s *scanner) baseLink(r linkRef) uint32 {
	k := &r.dir.kids[r.kid]
	if !k.hasBase || !s.Base.Nodes[k.base].IsReg() {
		return math.MaxUint32
	}
	return s.Base.Nodes[k.base].Link
}

// assemble makes the difference from what the directories found.
func (s *scanner) assemble(top *scanDir, links map[FileID]*group) error {
	next := uint32(0)
	number := make(map[*scanDir]map[int]uint32)
	for _, g := range links {
		if len(g.refs) < 2 {
			continue
		}
		if !g.numbered {
			if next == 0 {
				highest, err := s.Groups.Highest()
				if err != nil {
					return err
				}
				next = highest + 1
			}
			g.link = next
			next++
		}
		for _, r := range g.refs {
			if number[r.dir] == nil {
				number[r.dir] = make(map[int]uint32)
			}
			number[r.dir][r.kid] = g.link
		}
	}
	for d, m := range number {
		for i, link := range m {
			d.kids[i].node.Link = link
		}
	}
	if !top.differs() {
		return nil
	}
	b := NewBuilder(1024, "")
	top.build(b, 0, "")
	var err error
	s.scan.Delta, err = b.State()
	return err
}

// differs says whether anything at or below t differs, and drops the rest.
func (t *scanDir) differs() bool {
	kept := t.kids[:0]
	for _, k := range t.kids {
		if k.sub != nil {
			k = k.resolveDir()
		}
		if k.changed {
			kept = append(kept, k)
		}
	}
	t.kids = kept
	return t.changed || len(t.kids) > 0
}

// resolveDir says what became of a directory that was to be read.
func (k kid) resolveDir() kid {
	t := k.sub
	switch {
	case !t.gone:
		k.changed = t.differs()
	case k.hasBase:
		k.sub, k.changed = nil, true
		k.node = Node{Flags: Removed, Layer: NoLayer}
	default:
		k.changed = false
	}
	return k
}

// build appends what differs at and below t. Bytes lie in no layer yet.
func (t *scanDir) build(b *Builder, parent uint32, name string) {
	n := t.node
	if !t.changed {
		n = Node{Mode: syscall.S_IFDIR, Flags: Through, Layer: NoLayer}
	}
	at := b.Add(parent, name, n, t.extra)
	for i := range t.kids {
		k := &t.kids[i]
		if k.sub != nil {
			k.sub.build(b, at, k.name)
			continue
		}
		b.Add(at, k.name, k.node, k.extra)
	}
	t.kids = nil
}
