package env

import (
	"context"

	"github.com/agentenv/agentenv/forks"
)

// Status is what `agentenv status` tells, in the form of CONTRACT §5.
type Status struct {
	Root    string `json:"root"`
	Kind    Kind   `json:"kind"`
	Backend string `json:"backend"`
	// Isolation is the level that the machine's settings allow; only running a
	// command tells for certain.
	Isolation string `json:"isolation"`
	Head      ID     `json:"head"`
	Dirty     bool   `json:"dirty"`
	Changes   int    `json:"changes"`
	// Changed are those changes.
	Changed []forks.Change `json:"-"`
	// Supervised is always nil so far: nothing supervises yet.
	Supervised *struct{} `json:"supervised"`
	Snapshots  int       `json:"snapshots"`
	Disk       Disk      `json:"disk"`
	// MountAt is where commands see the tree; Source where it was taken from.
	MountAt  string `json:"mount_at"`
	Source   string `json:"source,omitempty"`
	WorkTree string `json:"work_tree"`
	// WorkTreeSeen says where the work tree can be seen now: its path, or
	// [SeenInside]; empty if it is not made.
	WorkTreeSeen string `json:"work_tree_seen"`
	// InPlace: Source is the work tree.
	InPlace bool `json:"in_place,omitempty"`
	// IDs is how many user ids there are in a system that has a range of them.
	IDs int64 `json:"ids,omitempty"`
	// WorkTreeMade says whether the work tree is there; if not, the next
	// command that needs it makes it.
	WorkTreeMade bool `json:"work_tree_made"`
	// Interrupted names the operation that a crash cut short; the next command
	// that writes puts it right.
	Interrupted string `json:"interrupted,omitempty"`
	// Damaged says which snapshot is damaged, so that the work tree cannot be
	// compared with HEAD. Dirty is true then: nobody knows.
	Damaged string `json:"damaged,omitempty"`
}

// SeenInside says that the work tree is mounted only where commands run.
const SeenInside = "inside exec"

// Disk is the space an environment takes.
type Disk struct {
	// Bytes is what storing the snapshots took when they were made, also of
	// those that were deleted and that others build upon. The work tree is not
	// counted, nor is what the file system shares.
	Bytes int64 `json:"bytes"`
}

// Status compares the work tree with HEAD and sums up the rest. It writes
// nothing and does not walk the store.
func (e *Env) Status(ctx context.Context) (Status, error) {
	c, err := e.WorkChanges(ctx) // first: for a reader it may find a newer history
	s := Status{
		Root: e.root, Kind: e.meta.Kind, Backend: e.meta.Backend, Head: e.meta.Head,
		Snapshots: len(e.meta.Nodes), MountAt: e.MountAt(), Source: e.meta.Source, WorkTree: e.WorkTree(), InPlace: e.meta.InPlace,
	}
	if e.meta.IDs != nil {
		s.IDs = e.meta.IDs.Size()
	}
	for _, n := range e.meta.Nodes {
		s.Disk.Bytes += n.Bytes
	}
	for id, bytes := range e.meta.Removed {
		if exists(e.nodePath(id)) {
			s.Disk.Bytes += bytes
		}
	}
	if e.interrupted != nil {
		s.Interrupted = e.interrupted.Op
	}
	s.Changed, s.Changes, s.Dirty = c.List, len(c.List), len(c.List) > 0
	if isDamaged(err) {
		s.Damaged, s.Dirty, err = err.Error(), true, nil
	}
	tree, treeErr := e.workTree()
	s.WorkTreeMade = treeErr == nil
	switch {
	case treeErr != nil:
	case tree.Mount.Overlay != nil:
		s.WorkTreeSeen = SeenInside
	default:
		s.WorkTreeSeen = s.WorkTree
	}
	return s, err
}

// WorkChanges returns what the work tree has changed since HEAD. One that is
// not there, or that a crash left between two states, has changed nothing.
func (e *Env) WorkChanges(ctx context.Context) (forks.Changes, error) {
	return e.steady(ctx, func() (forks.Changes, error) { return e.workChanges(ctx) })
}

func (e *Env) workChanges(ctx context.Context) (forks.Changes, error) {
	if e.interrupted != nil {
		return forks.Changes{}, nil
	}
	if _, err := e.workTree(); isNotFound(err) {
		if p, ok := e.driver.(*inPlace); ok && p.check() == nil { // another directory at its place
			c, err := p.Compare(ctx, e.meta.store(e.meta.Head), p.source)
			return shown(c), err
		}
		return forks.Changes{}, nil
	} else if err != nil {
		return forks.Changes{}, err
	}
	c, err := e.driver.Status(ctx, forks.Work)
	return shown(c), err
}
