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
	var sizes map[uint32]int
	if s.Base != nil {
		sizes = make(map[uint32]int)
		for i := range s.Base.Nodes {
			if l := s.Base.Nodes[i].Link; l != 0 {
				sizes[l]++
			}
		}
	}
	for file, g := range groups {
		s.resolve(g, sizes)
		if !g.numbered && len(g.refs) == 1 {
			delete(groups, file)
		}
	}
	return groups
}

func (s *scanner) resolve(g *group, sizes map[uint32]int) {
	same, changed := true, false
	was := s.baseLink(g.refs[0])
	for _, r := range g.refs {
		same = same && s.baseLink(r) == was
		changed = changed || r.dir.kids[r.kid].changed
	}
	if was == 0 {
		same = len(g.refs) == 1
	} else {
		same = same && sizes[was] == len(g.refs)
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
	next := uint32(1)
	if s.Base != nil {
		next += s.Base.maxLink()
	}
	number := make(map[*scanDir]map[int]uint32)
	for _, g := range links {
		if len(g.refs) < 2 {
			continue
		}
		if !g.numbered {
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
