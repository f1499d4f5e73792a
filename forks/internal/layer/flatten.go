//go:build linux

package layer

import (
	"context"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// minSaved is how many layers a flattening saves at least, so that it comes
// once in so many snapshots.
const minSaved = 8

// Shorten keeps the number of layers of a snapshot within [MaxLayers]. The
// stage's "node" is complete and stored against base. If base has as many
// layers as a mount takes, the nearest of them are merged into the node, which
// is then stored against the nearest that was left out; that one is returned.
// No existing layer changes, so nobody who uses one need be asked.
//
// state, if not nil, is the node's whole state: what it says of where bytes lie
// is brought up to date.
func (st *Stage) Shorten(ctx context.Context, id, base forks.ID, state *State) (forks.ID, error) {
	if base == "" {
		return base, nil
	}
	chain, err := st.store.Chain(base)
	if err != nil || len(chain) < MaxLayers {
		return base, err
	}
	deltas := make([]*State, len(chain))
	for i := range chain[:len(chain)-1] {
		if _, deltas[i], err = st.store.readRecord(chain[i]); err != nil {
			return "", err
		}
	}
	n := cheapest(deltas[:len(chain)-1], len(chain)+1-MaxLayers)
	if err := st.flatten(ctx, id, chain, deltas, n); err != nil {
		return "", err
	}
	if state != nil {
		for i, l := range state.Layers {
			if slices.Contains(chain[:n], l) {
				state.Layers[i] = id
			}
		}
	}
	return chain[n], nil
}

// cheapest returns how many of the layers, the nearest first, are merged at
// the fewest bytes a layer that is saved; at least need of them.
func cheapest(deltas []*State, need int) int {
	best, least := 0, 0.0
	var bytes float64
	for i, d := range deltas {
		for j := range d.Nodes {
			bytes += 256 // what a path costs besides its bytes: an inode
			if d.Nodes[j].IsReg() {
				bytes += float64(d.Nodes[j].Size)
			}
		}
		n := i + 1
		if n < max(minSaved, need) && n < len(deltas) {
			continue
		}
		if cost := bytes / float64(n); best == 0 || cost < least {
			best, least = n, cost
		}
	}
	return best
}

// flatten replaces the stage's node by one that also has the n nearest layers
// of the chain.
func (st *Stage) flatten(ctx context.Context, id forks.ID, chain []forks.ID, deltas []*State, n int) error {
	own := filepath.Join(st.Path, "own")
	if err := os.Rename(filepath.Join(st.Path, "node"), own); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(own, "record"))
	if err != nil {
		return err
	}
	_, merged, err := DecodeRecord(b)
	if err != nil {
		return err
	}
	for _, d := range deltas[:n] {
		if merged, err = Merge(d, merged, false); err != nil {
			return err
		}
	}
	return st.store.reading(func() error {
		under, err := st.store.openChain(chain[n])
		if err != nil {
			return err
		}
		root, err := under.root()
		if err != nil {
			return err
		}
		if merged, err = withoutVoid(merged, under, &root); err != nil {
			return err
		}
		for _, left := range []string{"node", "merged-links"} {
			if err := fsat.RemoveAll(ctx, st.FD, left); err != nil {
				return err
			}
		}
		return st.writeMerged(ctx, Header{ID: id, Base: chain[n]}, merged, under)
	})
}

// withoutVoid leaves out of a merged difference the removals of what the chain
// under it does not show: of names that came and went in the layers that were
// merged. An overlay shows such a whiteout as a name that cannot be opened
// where the directory is in no other layer.
func withoutVoid(merged *State, under *chain, root *spot) (*State, error) {
	b := NewBuilder(len(merged.Nodes), merged.Layers...)
	var add func(c, parent uint32, at *spot) error
	add = func(c, parent uint32, at *spot) error {
		n := merged.Nodes[c]
		if n.Flags&Removed != 0 && at == nil {
			return nil
		}
		to := b.Add(parent, merged.Name(c), n, merged.rawExtra(c))
		if at != nil && (!at.node.IsDir() || n.Flags&Opaque != 0) {
			at = nil
		}
		for k := c + 1; k < n.End; k = merged.Nodes[k].End {
			var below *spot
			if at != nil {
				s, ok, err := under.child(*at, merged.Name(k))
				if err != nil {
					return err
				}
				if ok {
					below = &s
				}
			}
			if err := add(k, to, below); err != nil {
				return err
			}
		}
		return nil
	}
	if err := add(0, 0, root); err != nil {
		return nil, err
	}
	return b.State()
}

// writeMerged stores a difference whose bytes lie in layers of the store, and
// where it is the difference's own in the stage's "own", as the node.
func (st *Stage) writeMerged(ctx context.Context, h Header, merged *State, under *chain) error {
	node, err := st.Mkdir("node")
	if err != nil {
		return err
	}
	defer node.Release()
	links, err := st.Mkdir("merged-links")
	if err != nil {
		return err
	}
	own, err := unix.Open(filepath.Join(st.Path, "own", "tree"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(own)
	f := &flattener{maker: newMaker(links, &st.store.Copier, &Warnings{}), store: st.store, id: h.ID, own: own, merged: merged, under: under}
	defer f.close()
	if err := f.mkdir(node, "tree"); err != nil {
		return err
	}
	root, err := under.root()
	if err != nil {
		return err
	}
	node.Hold(1)
	top := &mergedDir{in: node, name: "tree", under: &root}
	if err := fsat.Run(ctx, len(f.bufs), []*mergedDir{top}, f.dir, func(t *mergedDir) { t.in.Release() }); err != nil {
		return err
	}
	if err := f.settleLinks(func(uint32, *unix.Stat_t) {}); err != nil {
		return err
	}
	if err := f.settleLate(func(uint32, *unix.Stat_t) {}); err != nil {
		return err
	}
	if err := writeDurably(filepath.Join(st.Path, "node", "record"), EncodeRecord(h, merged)); err != nil {
		return err
	}
	if err := unix.Syncfs(node.FD); err != nil {
		return &os.PathError{Op: "syncfs", Path: st.Path, Err: err}
	}
	return nil
}

type flattener struct {
	*maker
	store  *Store
	id     forks.ID
	own    int // the open tree of the difference's own layer
	merged *State
	under  *chain // what the merged difference is against
}

// mergedDir is a directory to be stored; under is the directory that it is
// stored against, nil if there is none.
type mergedDir struct {
	in    *fsat.Dir
	name  string
	node  uint32
	under *spot
}

func (f *flattener) fail(node uint32, err error) error {
	return &os.PathError{Op: "flatten", Path: f.merged.Path(node), Err: err}
}

func (f *flattener) dir(worker int, t *mergedDir, push func(*mergedDir)) error {
	defer t.in.Release()
	d, err := f.openMade(t.in, t.name)
	if err != nil {
		return f.fail(t.node, err)
	}
	defer d.Release()
	for c := t.node + 1; c < f.merged.Nodes[t.node].End; c = f.merged.Nodes[c].End {
		if err := f.entry(worker, t, d, c, push); err != nil {
			return f.fail(c, err)
		}
	}
	meta := f.merged.Meta(t.node)
	if f.merged.Nodes[t.node].Flags&Through != 0 {
		if meta, err = f.metaUnder(t); err != nil {
			return f.fail(t.node, err)
		}
	}
	meta = layerMeta(meta)
	meta.Mode &= 0o7777
	if f.merged.Nodes[t.node].Flags&Opaque != 0 {
		meta.Xattrs = append(meta.Xattrs, Xattr{Name: opaqueMark, Value: "y"})
		// While its owner may write to it; who sets its mode keeps the mark.
		if err := unix.Fsetxattr(d.FD, opaqueMark, []byte("y"), 0); err != nil {
			return f.fail(t.node, err)
		}
	}
	var st unix.Stat_t
	if _, err := f.settleDir(d, t.node, meta, func() string { return f.merged.Path(t.node) }, &st); err != nil {
		return f.fail(t.node, err)
	}
	return nil
}

// metaUnder is the metadata of a directory that is only passed through.
func (f *flattener) metaUnder(t *mergedDir) (fsat.Meta, error) {
	if t.under == nil {
		return fsat.Meta{}, damaged("a directory that the base has not")
	}
	extra, err := f.under.extra(*t.under)
	if err != nil {
		return fsat.Meta{}, err
	}
	_, xattrs := decodeExtra(extra)
	n := &t.under.node
	return fsat.Meta{Mode: uint32(n.Mode), UID: n.UID, GID: n.GID, MtimeSec: n.MtimeSec, MtimeNsec: n.MtimeNsec, Xattrs: xattrs}, nil
}

func (f *flattener) entry(worker int, t *mergedDir, in *fsat.Dir, c uint32, push func(*mergedDir)) error {
	n := &f.merged.Nodes[c]
	name := f.merged.Name(c)
	switch {
	case n.Flags&Removed != 0:
		return whiteout(in, name)
	case n.IsDir():
		sub := &mergedDir{in: in, name: name, node: c}
		if t.under != nil {
			s, ok, err := f.under.child(*t.under, name)
			if err != nil {
				return err
			}
			if ok && s.node.IsDir() {
				sub.under = &s
			}
		}
		if err := f.mkdir(in, name); err != nil {
			return err
		}
		in.Hold(1)
		push(sub)
		return nil
	case !n.IsReg():
		target, _ := f.merged.Extra(c)
		meta := layerMeta(f.merged.Meta(c))
		var st unix.Stat_t
		_, err := f.special(in, name, target, n, &meta, func() string { return f.merged.Path(c) }, &st)
		return err
	case n.Link != 0:
		_, err := f.shared(n.Link, in, name, func(in *fsat.Dir, stash string) (bool, error) {
			return true, f.regular(worker, in, stash, c)
		})
		return err
	}
	return f.regular(worker, in, name, c)
}

func (f *flattener) regular(worker int, in *fsat.Dir, name string, c uint32) error {
	path := f.merged.Path(c)
	var src int
	var err error
	if layer := f.merged.LayerOf(c); layer == f.id {
		src, err = openSteps(f.own, path)
	} else {
		src, err = f.store.OpenFile(layer, path)
	}
	if err != nil {
		return err
	}
	defer unix.Close(src)
	meta := layerMeta(f.merged.Meta(c))
	var st unix.Stat_t
	_, err = f.copier.File(fsat.New{Dir: in.FD, Name: name, Meta: &meta, Size: f.merged.Nodes[c].Size}, src, f.bufs[worker], f.set, &st)
	return err
}

// opaqueMark is the attribute by which an overlay knows that a directory hides
// what is below it.
const opaqueMark = "user.overlay.opaque"
