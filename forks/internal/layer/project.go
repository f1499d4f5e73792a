//go:build linux

package layer

import (
	"errors"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// projection is the part of a snapshot that an overlay's upper directory can
// have changed: the paths that the upper has, those that an opaque directory or
// a whiteout of it hides, and all names of the hard-link groups among them.
// Compared with the upper it gives the difference, at a cost that does not
// depend on the size of the snapshot.
//
// The upper may lie over an older snapshot than the one it is compared with:
// then it holds also what the commits in between took from it, and what they
// have and the upper lost is projected, too.
type projection struct {
	base  *chain
	lower *chain // the snapshot below the upper; nil if it is base
	index *State // identities of what the upper had; nil for none
	// merged holds the directories in which the lower shows through.
	merged map[string]bool
	groups map[uint32][]string
	top    *projected
}

// projected is a path of a projection.
type projected struct {
	node  Node
	extra []byte
	kids  map[string]*projected
}

// project reads the names in the open upper directory root.
func project(root int, base, lower *chain, index *State) (*projection, error) {
	p := &projection{base: base, lower: lower, index: index, merged: make(map[string]bool)}
	top, err := base.root()
	if err != nil {
		return nil, err
	}
	under := &top
	if lower != nil {
		s, err := lower.root()
		if err != nil {
			return nil, err
		}
		under = &s
	}
	if p.top, err = p.take(top); err != nil {
		return nil, err
	}
	fd, err := Access.OpenDir(root, ".")
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := p.dir(fd, ".", p.top, top, under); err != nil {
		return nil, err
	}
	return p, p.addGroups()
}

// take makes a projected path of a spot.
func (p *projection) take(s spot) (*projected, error) {
	extra, err := p.base.extra(s)
	if err != nil {
		return nil, err
	}
	t := &projected{node: s.node, extra: extra}
	t.node.Flags = 0
	t.node.Layer = NoLayer
	if t.node.IsReg() {
		t.node.Layer = uint32(s.layer)
	}
	t.node.Ino = 0
	return t, nil
}

// dir projects what the upper's directory fd can have changed in at. under is
// what shows through from the lower snapshot, nil if nothing does.
func (p *projection) dir(fd int, name string, to *projected, at spot, under *spot) error {
	var list fsat.List
	if err := list.Read(fd); err != nil && !fsat.IsGone(err) {
		return &os.PathError{Op: "read", Path: name, Err: err}
	}
	if under != nil {
		p.merged[name] = true
	}
	isDir := make(map[string]bool, list.Len())
	for i := range list.Len() {
		isDir[string(list.Name(i))] = list.Type(i) == unix.DT_DIR
	}
	names, err := p.names(isDir, at, under)
	if err != nil {
		return err
	}
	return p.children(to, at, names, func(n string, kid *projected, s spot) error {
		if isDir[n] {
			return p.sub(fd, n, join(name, n), kid, s, under)
		}
		return p.whole(kid, s)
	})
}

// children projects those of the names that the base has in at, and lets dir
// see to the directories among them.
func (p *projection) children(to *projected, at spot, names []string, dir func(name string, kid *projected, s spot) error) error {
	to.kids = make(map[string]*projected, len(names))
	for _, n := range names {
		s, ok, err := p.base.child(at, n)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		kid, err := p.take(s)
		if err != nil {
			return err
		}
		to.kids[n] = kid
		if !s.node.IsDir() {
			continue
		}
		if err := dir(n, kid, s); err != nil {
			return err
		}
	}
	return nil
}

// names are those that can differ in a directory of which the upper has the
// names in upper.
func (p *projection) names(upper map[string]bool, at spot, under *spot) ([]string, error) {
	if under == nil {
		return p.base.names(at)
	}
	names := slices.Collect(maps.Keys(upper))
	if p.lower == nil {
		return names, nil
	}
	// What commits since then have, and neither the upper nor the lower has,
	// the upper lost.
	since, err := p.base.namesIn(at, func(q part) bool { return !slices.Contains(p.lower.ids, p.base.ids[q.layer]) })
	if err != nil {
		return nil, err
	}
	for _, n := range since {
		if _, ok := upper[n]; ok {
			continue
		}
		_, shows, err := p.lower.child(*under, n)
		if err != nil {
			return nil, err
		}
		if !shows {
			names = append(names, n)
		}
	}
	return names, nil
}

// sub projects a directory that both the upper and the snapshot have.
func (p *projection) sub(in int, n, name string, to *projected, at spot, under *spot) error {
	fd, err := Access.OpenDir(in, n)
	if fsat.IsGone(err) || errors.Is(err, fsat.ErrMountPoint) {
		return p.whole(to, at)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var below *spot
	if under != nil {
		hides, err := opaque(fd)
		if err != nil {
			return &os.PathError{Op: "read the attributes of", Path: name, Err: err}
		}
		if !hides {
			if below, err = p.below(*under, at, n); err != nil {
				return err
			}
		}
	}
	return p.dir(fd, name, to, at, below)
}

// below is the lower snapshot's directory n in under; nil if it has none.
func (p *projection) below(under, at spot, n string) (*spot, error) {
	if p.lower == nil {
		return &at, nil
	}
	s, ok, err := p.lower.child(under, n)
	if err != nil || !ok || !s.node.IsDir() {
		return nil, err
	}
	return &s, nil
}

// opaque says whether the overlay directory fd hides what is below it. An owner
// without the right to read a directory may not read its attributes either.
func opaque(fd int) (bool, error) {
	is, err := readOpaque(fd)
	if err != unix.EACCES {
		return is, err
	}
	restore, err := fsat.AddMode(fd, 0o400)
	if err != nil {
		return false, err
	}
	defer restore()
	return readOpaque(fd)
}

func readOpaque(fd int) (bool, error) {
	var b [8]byte
	n, err := unix.Fgetxattr(fd, opaqueMark, b[:])
	if err == unix.ENODATA || err == unix.ENOTSUP {
		return false, nil
	}
	return err == nil && string(b[:n]) == "y", err
}

// whole projects everything below at: the upper has nothing of it.
func (p *projection) whole(to *projected, at spot) error {
	names, err := p.base.names(at)
	if err != nil {
		return err
	}
	return p.children(to, at, names, func(_ string, kid *projected, s spot) error { return p.whole(kid, s) })
}

// addGroups adds the other names of the hard-link groups.
func (p *projection) addGroups() error {
	wanted := make(map[uint32]bool)
	p.top.each(func(t *projected) {
		if t.node.Link != 0 {
			wanted[t.node.Link] = true
		}
	})
	if len(wanted) == 0 {
		return nil
	}
	var err error
	if p.groups, err = p.base.groups(wanted); err != nil {
		return err
	}
	for _, names := range p.groups {
		for _, name := range names {
			if err := p.addPath(name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *projected) each(fn func(*projected)) {
	fn(t)
	for _, k := range t.kids {
		k.each(fn)
	}
}

// addPath adds a path that is not in the upper.
func (p *projection) addPath(name string) error {
	at, err := p.base.root()
	if err != nil {
		return err
	}
	t := p.top
	for n := range strings.SplitSeq(name, "/") {
		var ok bool
		if at, ok, err = p.base.child(at, n); err != nil || !ok {
			return err
		}
		kid := t.kids[n]
		if kid == nil {
			if kid, err = p.take(at); err != nil {
				return err
			}
			kid.node.Flags |= Absent
			if t.kids == nil {
				t.kids = make(map[string]*projected)
			}
			t.kids[n] = kid
		}
		t = kid
	}
	return nil
}

// Size and Highest are [Groups].
func (p *projection) Size(link uint32) int { return len(p.groups[link]) }

// Highest is the highest number of a group of the snapshot.
func (p *projection) Highest() (uint32, error) { return p.base.maxLink() }

// state is the projection as a state.
func (p *projection) state() (*State, error) {
	b := NewBuilder(256, p.base.ids...)
	var index uint32
	p.build(b, p.top, 0, "", index, p.index != nil)
	return b.State()
}

func (p *projection) build(b *Builder, t *projected, parent uint32, name string, known uint32, ok bool) {
	n := t.node
	if ok {
		if k := &p.index.Nodes[known]; k.Flags&Absent == 0 && n.Flags&Absent == 0 {
			n.KeepIdentity(k)
		}
	}
	at := b.Add(parent, name, n, t.extra)
	for _, k := range slices.Sorted(maps.Keys(t.kids)) {
		var next uint32
		found := ok
		if ok {
			next, found = p.index.child(known, k)
		}
		p.build(b, t.kids[k], at, k, next, found)
	}
}

// shows says whether the lower's file would show if the upper had not its own.
func (p *projection) shows(name string) bool {
	return p.lower == nil && p.merged[path.Dir(name)]
}
