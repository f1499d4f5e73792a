//go:build linux

package layer

import (
	"context"
	"os"

	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// Restorer makes paths of a state in a private directory and puts their
// identities into its nodes.
type Restorer struct {
	*maker
	store *Store
	state *State
}

// Top is a path to be restored with all below it: node as Name in Dir, which
// it holds.
type Top struct {
	Dir  *fsat.Dir
	Name string
	Node uint32
	// Bare leaves the node's own metadata for later, since it will be renamed.
	Bare bool
}

type restoreTask struct {
	in   *fsat.Dir
	name string
	node uint32
	top  bool
	bare bool
}

// Restore makes the whole tree of state as name in the directory dir, which is
// the stage's own, and puts the identities of all paths into its nodes.
func (st *Stage) Restore(ctx context.Context, state *State, dir *fsat.Dir, name string, warn *Warnings) error {
	r, err := st.NewRestorer(state, warn)
	if err != nil {
		return err
	}
	defer r.Close()
	dir.Hold(1)
	if err := r.Run(ctx, []Top{{Dir: dir, Name: name}}); err != nil {
		return err
	}
	return r.Settle()
}

// NewRestorer returns one for state, whose nodes it changes. One is enough for
// an operation: it knows the hard-link groups.
func (st *Stage) NewRestorer(state *State, warn *Warnings) (*Restorer, error) {
	m, err := st.newMaker(warn)
	if err != nil {
		return nil, err
	}
	return newRestorer(m, st.store, state), nil
}

// newRestorer returns one whose files have their group where the caller may
// set it: a plain tree is no layer.
func newRestorer(m *maker, s *Store, state *State) *Restorer {
	m.set.OwnGroup = false
	return &Restorer{maker: m, store: s, state: state}
}

// Close lets go of what the restorer holds open.
func (r *Restorer) Close() { r.close() }

// Run restores the tops, in parallel.
func (r *Restorer) Run(ctx context.Context, tops []Top) error {
	var tasks []*restoreTask
	for _, t := range tops {
		tasks = append(tasks, &restoreTask{in: t.Dir, name: t.Name, node: t.Node, top: true, bare: t.Bare})
	}
	return fsat.Run(ctx, len(r.bufs), tasks, r.task, func(t *restoreTask) { t.in.Release() })
}

// Settle ends the restoring: nothing below changes any more.
func (r *Restorer) Settle() error {
	byLink := make(map[uint32]unix.Stat_t)
	err := r.settleLinks(func(link uint32, st *unix.Stat_t) { byLink[link] = *st })
	if err != nil {
		return err
	}
	if len(byLink) > 0 {
		for i := range r.state.Nodes {
			if st, ok := byLink[r.state.Nodes[i].Link]; ok {
				r.state.Nodes[i].SetIdentity(&st)
			}
		}
	}
	return r.settleLate(func(node uint32, st *unix.Stat_t) { r.state.Nodes[node].SetIdentity(st) })
}

func (r *Restorer) task(worker int, t *restoreTask, push func(*restoreTask)) error {
	defer t.in.Release()
	if !r.state.Nodes[t.node].IsDir() {
		return r.leaf(worker, t.in, t.name, t.node)
	}
	if t.top {
		if err := r.mkdir(t.in, t.name); err != nil {
			return r.fail(t.node, err)
		}
	}
	d, err := r.openMade(t.in, t.name)
	if err != nil {
		return r.fail(t.node, err)
	}
	defer d.Release()
	if err := r.below(worker, t, d, push); err != nil || t.bare {
		return err
	}
	var st unix.Stat_t
	done, err := r.settleDir(d, t.node, r.state.Meta(t.node), func() string { return r.state.Path(t.node) }, &st)
	if err != nil {
		return r.fail(t.node, err)
	}
	if done {
		r.state.Nodes[t.node].SetIdentity(&st)
	}
	return nil
}

// below makes what is in the directory d, the subdirectories empty.
func (r *Restorer) below(worker int, t *restoreTask, d *fsat.Dir, push func(*restoreTask)) error {
	end := r.state.Nodes[t.node].End
	for c := t.node + 1; c < end; c = r.state.Nodes[c].End {
		name := r.state.Name(c)
		if !r.state.Nodes[c].IsDir() {
			if err := r.leaf(worker, d, name, c); err != nil {
				return err
			}
			continue
		}
		if err := r.mkdir(d, name); err != nil {
			return r.fail(c, err)
		}
		d.Hold(1)
		push(&restoreTask{in: d, name: name, node: c})
	}
	return nil
}

func (r *Restorer) fail(node uint32, err error) error {
	return &os.PathError{Op: "restore", Path: r.state.Path(node), Err: err}
}

// leaf makes anything but a directory.
func (r *Restorer) leaf(worker int, in *fsat.Dir, name string, node uint32) error {
	n := &r.state.Nodes[node]
	var st unix.Stat_t
	var err error
	made := true
	switch {
	case !n.IsReg():
		target, _ := r.state.Extra(node)
		meta := r.state.Meta(node)
		made, err = r.special(in, name, target, n, &meta, func() string { return r.state.Path(node) }, &st)
	case n.Link != 0:
		_, err = r.shared(n.Link, in, name, func(in *fsat.Dir, stash string) (bool, error) {
			return true, r.regular(worker, in, stash, node, &st)
		})
	default:
		err = r.regular(worker, in, name, node, &st)
	}
	if err != nil {
		return r.fail(node, err)
	}
	if !made {
		n.Flags |= Absent
		return nil
	}
	n.SetIdentity(&st)
	return nil
}

func (r *Restorer) regular(worker int, in *fsat.Dir, name string, node uint32, st *unix.Stat_t) error {
	n := &r.state.Nodes[node]
	src, err := r.store.OpenFile(r.state.LayerOf(node), r.state.Path(node))
	if err != nil {
		return err
	}
	defer unix.Close(src)
	meta := r.state.Meta(node)
	_, err = r.copier.File(fsat.New{Dir: in.FD, Name: name, Meta: &meta, Size: n.Size}, src, r.bufs[worker], r.set, st)
	return err
}
