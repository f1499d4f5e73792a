//go:build linux

package layer

import (
	"math"

	"github.com/agentenv/agentenv/forks"
)

// Merge returns base with the changes of delta. If base is itself a difference
// (whole is false), the result is the difference that has the effect of both.
func Merge(base, delta *State, whole bool) (*State, error) {
	if uint64(len(base.heap))+uint64(len(delta.heap)) > math.MaxUint32 {
		return nil, damaged("a tree with more than 4 GiB of names")
	}
	m := &merger{base: base, delta: delta, whole: whole}
	m.out.Nodes = make([]Node, 0, len(base.Nodes)+len(delta.Nodes))
	m.out.heap = append(append(make([]byte, 0, len(base.heap)+len(delta.heap)), base.heap...), delta.heap...)
	m.out.Layers = append(append([]forks.ID{}, base.Layers...), delta.Layers...)
	if len(base.Nodes) == 0 || len(delta.Nodes) == 0 {
		return nil, damaged("a state without a root")
	}
	if err := m.both(0, 0, 0, false); err != nil {
		return nil, err
	}
	m.out.setEnds()
	return &m.out, nil
}

type merger struct {
	base, delta *State
	whole       bool
	out         State
}

// dir merges what is below the directories b and d, which are node parent of
// the result; hidden says that nothing below the result's base shows.
func (m *merger) dir(b, d, parent uint32, hidden bool) error {
	bc, bend := b+1, m.base.Nodes[b].End
	dc, dend := d+1, m.delta.Nodes[d].End
	for bc < bend || dc < dend {
		switch {
		case dc >= dend || bc < bend && m.base.Name(bc) < m.delta.Name(dc):
			m.copyBase(bc, parent)
			bc = m.base.Nodes[bc].End
		case bc >= bend || m.delta.Name(dc) < m.base.Name(bc):
			if err := m.copyDelta(dc, parent, hidden); err != nil {
				return err
			}
			dc = m.delta.Nodes[dc].End
		default:
			if err := m.both(bc, dc, parent, hidden); err != nil {
				return err
			}
			bc, dc = m.base.Nodes[bc].End, m.delta.Nodes[dc].End
		}
	}
	return nil
}

func (m *merger) both(b, d, parent uint32, hidden bool) error {
	bn, dn := &m.base.Nodes[b], &m.delta.Nodes[d]
	below := bn.Flags&Removed == 0 && bn.IsDir()
	if !dn.IsDir() || dn.Flags&Opaque != 0 || dn.Flags&Removed != 0 {
		return m.copyDelta(d, parent, hidden)
	}
	if !below {
		if dn.Flags&Through != 0 {
			return damaged("a directory that the base has not: " + m.delta.Path(d))
		}
		at := len(m.out.Nodes)
		if err := m.copyDelta(d, parent, hidden); err != nil {
			return err
		}
		if !m.whole && !hidden {
			m.out.Nodes[at].Flags |= Opaque
		}
		return nil
	}
	n := m.shifted(d)
	if dn.Flags&Through != 0 {
		n = *bn
	}
	n.Flags |= bn.Flags & Opaque
	at := m.add(n, parent)
	return m.dir(b, d, at, hidden || n.Flags&Opaque != 0)
}

// copyBase appends the subtree b of the base as it is.
func (m *merger) copyBase(b, parent uint32) {
	at := uint32(len(m.out.Nodes))
	m.out.Nodes = append(m.out.Nodes, m.base.Nodes[b:m.base.Nodes[b].End]...)
	for i := range m.out.Nodes[at+1:] {
		m.out.Nodes[at+1+uint32(i)].Parent += at - b
	}
	m.out.Nodes[at].Parent = parent
}

// copyDelta appends the subtree d of the difference; there is nothing below it
// in the base that shows.
func (m *merger) copyDelta(d, parent uint32, hidden bool) error {
	dn := &m.delta.Nodes[d]
	if dn.Flags&Removed != 0 && (m.whole || hidden) {
		return nil
	}
	if dn.Flags&Through != 0 && m.whole {
		return damaged("a directory that the base has not: " + m.delta.Path(d))
	}
	n := m.shifted(d)
	if m.whole {
		n.Flags &^= Opaque
	}
	at := m.add(n, parent)
	for c := d + 1; c < dn.End; c = m.delta.Nodes[c].End {
		if err := m.copyDelta(c, at, hidden || dn.Flags&Opaque != 0); err != nil {
			return err
		}
	}
	return nil
}

func (m *merger) add(n Node, parent uint32) uint32 {
	n.Parent = parent
	m.out.Nodes = append(m.out.Nodes, n)
	return uint32(len(m.out.Nodes) - 1)
}

// shifted returns node d with its references moved to the result's tables.
func (m *merger) shifted(d uint32) Node {
	n := m.delta.Nodes[d]
	n.name += uint32(len(m.base.heap))
	if n.extra != 0 {
		n.extra += uint32(len(m.base.heap))
	}
	if n.Layer != NoLayer {
		n.Layer += uint32(len(m.base.Layers))
	}
	n.Flags &^= Kept
	return n
}

// Fold merges a chain of differences, the oldest first, the first of which is
// a whole state. Pairs are merged, so that a long chain of small differences
// does not cost its length times the size of the whole.
func Fold(chain []*State) (*State, error) {
	if len(chain) == 1 {
		return chain[0], nil
	}
	deltas := chain[1:]
	for len(deltas) > 1 {
		var next []*State
		for i := 0; i+1 < len(deltas); i += 2 {
			m, err := Merge(deltas[i], deltas[i+1], false)
			if err != nil {
				return nil, err
			}
			next = append(next, m)
		}
		if len(deltas)%2 == 1 {
			next = append(next, deltas[len(deltas)-1])
		}
		deltas = next
	}
	return Merge(chain[0], deltas[0], true)
}
