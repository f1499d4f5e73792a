//go:build linux

package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// table is one layer's difference, read by path. Node 0 is the root.
type table interface {
	// node returns a node; its Parent is valid, its End is not.
	node(i uint32) (Node, error)
	name(i uint32) (string, error)
	extra(i uint32) ([]byte, error)
	// child finds a name in a directory.
	child(dir uint32, name string) (uint32, bool, error)
	// children lists a directory.
	children(dir uint32) ([]uint32, error)
	// links returns the nodes that have a hard-link group.
	links() ([]uint32, error)
}

// stateTable reads a difference that lies in memory.
type stateTable struct{ s *State }

func (t stateTable) node(i uint32) (Node, error)    { return t.s.Nodes[i], nil }
func (t stateTable) name(i uint32) (string, error)  { return t.s.Name(i), nil }
func (t stateTable) extra(i uint32) ([]byte, error) { return t.s.rawExtra(i), nil }

func (t stateTable) child(dir uint32, name string) (uint32, bool, error) {
	i, ok := t.s.child(dir, name)
	return i, ok, nil
}

func (t stateTable) children(dir uint32) ([]uint32, error) {
	var list []uint32
	for c := dir + 1; c < t.s.Nodes[dir].End; c = t.s.Nodes[c].End {
		list = append(list, c)
	}
	return list, nil
}

func (t stateTable) links() ([]uint32, error) {
	var list []uint32
	for i := range t.s.Nodes {
		if t.s.Nodes[i].Link != 0 {
			list = append(list, uint32(i))
		}
	}
	return list, nil
}

// chain reads a snapshot path by path, without making its whole state: what it
// costs depends on the paths asked for and the number of layers.
type chain struct {
	ids    []forks.ID // the nearest first
	tables []table
}

// spot is a path of a snapshot: its node, and if it is a directory where the
// layers have it, the nearest first.
type spot struct {
	layer int
	at    uint32
	node  Node
	parts []part
}

type part struct {
	layer int
	at    uint32
}

// openChain opens the layers of snapshot id.
func (s *Store) openChain(id forks.ID) (*chain, error) {
	ids, err := s.Chain(id)
	if err != nil {
		return nil, err
	}
	c := &chain{ids: ids}
	for _, id := range ids {
		t, err := s.table(id)
		if err != nil && id != ids[0] && !errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("snapshot %s: %w: its base: %v", ids[0], forks.ErrDamaged, LostBase(id, err))
		}
		if err != nil {
			return nil, err
		}
		c.tables = append(c.tables, t)
	}
	return c, nil
}

func (c *chain) root() (spot, error) {
	var parts []part
	for i := range c.tables {
		parts = append(parts, part{i, 0})
	}
	return c.settle(parts)
}

// settle makes a spot of a directory's parts: its own node is the first that
// is not only passed through.
func (c *chain) settle(parts []part) (spot, error) {
	for _, p := range parts {
		n, err := c.tables[p.layer].node(p.at)
		if err != nil {
			return spot{}, err
		}
		if n.Flags&Through == 0 {
			return spot{layer: p.layer, at: p.at, node: n, parts: parts}, nil
		}
	}
	return spot{}, damaged("a directory that no layer has")
}

// child finds name in the directory d.
func (c *chain) child(d spot, name string) (spot, bool, error) {
	var parts []part
	for _, p := range d.parts {
		t := c.tables[p.layer]
		at, ok, err := t.child(p.at, name)
		if err != nil {
			return spot{}, false, err
		}
		if !ok {
			continue
		}
		n, err := t.node(at)
		if err != nil {
			return spot{}, false, err
		}
		if n.Flags&Removed != 0 {
			break
		}
		if !n.IsDir() {
			if len(parts) == 0 {
				return spot{layer: p.layer, at: at, node: n}, true, nil
			}
			break
		}
		parts = append(parts, part{p.layer, at})
		if n.Flags&Opaque != 0 {
			break
		}
	}
	if len(parts) == 0 {
		return spot{}, false, nil
	}
	s, err := c.settle(parts)
	return s, err == nil, err
}

// names lists the directory d, in byte order.
func (c *chain) names(d spot) ([]string, error) { return c.namesIn(d, func(part) bool { return true }) }

// namesIn lists the names that those parts of d which are wanted mention and
// that are there.
func (c *chain) namesIn(d spot, wanted func(part) bool) ([]string, error) {
	seen := make(map[string]bool)
	for _, p := range d.parts {
		if !wanted(p) {
			continue
		}
		list, err := c.tables[p.layer].children(p.at)
		if err != nil {
			return nil, err
		}
		for _, at := range list {
			name, err := c.tables[p.layer].name(at)
			if err != nil {
				return nil, err
			}
			seen[name] = true
		}
	}
	var there []string
	for _, name := range slices.Sorted(maps.Keys(seen)) {
		_, ok, err := c.child(d, name)
		if err != nil {
			return nil, err
		}
		if ok {
			there = append(there, name)
		}
	}
	return there, nil
}

func (c *chain) extra(s spot) ([]byte, error) { return c.tables[s.layer].extra(s.at) }

// find returns the spot at path.
func (c *chain) find(path string) (spot, bool, error) {
	at, err := c.root()
	if err != nil || path == "." {
		return at, err == nil, err
	}
	for name := range strings.SplitSeq(path, "/") {
		next, ok, err := c.child(at, name)
		if err != nil || !ok {
			return spot{}, false, err
		}
		at = next
	}
	return at, true, nil
}

// maxLink returns a number that no group exceeds.
func (c *chain) maxLink() (uint32, error) {
	var highest uint32
	for _, t := range c.tables {
		list, err := t.links()
		if err != nil {
			return 0, err
		}
		for _, i := range list {
			n, err := t.node(i)
			if err != nil {
				return 0, err
			}
			highest = max(highest, n.Link)
		}
	}
	return highest, nil
}

// groups returns the names of the hard-link groups that are wanted.
func (c *chain) groups(wanted map[uint32]bool) (map[uint32][]string, error) {
	found := make(map[uint32][]string)
	for l, t := range c.tables {
		list, err := t.links()
		if err != nil {
			return nil, err
		}
		for _, i := range list {
			n, err := t.node(i)
			if err != nil {
				return nil, err
			}
			if !wanted[n.Link] {
				continue
			}
			path, err := tablePath(t, i)
			if err != nil {
				return nil, err
			}
			at, ok, err := c.find(path)
			if err != nil {
				return nil, err
			}
			if ok && at.layer == l && at.at == i {
				found[n.Link] = append(found[n.Link], path)
			}
		}
	}
	return found, nil
}

func tablePath(t table, i uint32) (string, error) {
	path := ""
	for i != 0 {
		n, err := t.node(i)
		if err != nil {
			return "", err
		}
		name, err := t.name(i)
		if err != nil {
			return "", err
		}
		if path != "" {
			name += "/" + path
		}
		if n.Parent >= i || len(path) > maxPath {
			return "", damaged("a directory below itself")
		}
		path, i = name, n.Parent
	}
	return path, nil
}

// maxPath bounds the length of a path that is put together from a table.
const maxPath = 1 << 20
