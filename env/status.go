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
	// Supervised is always nil so far: nothing supervises yet.
	Supervised *struct{} `json:"supervised"`
	Snapshots  int       `json:"snapshots"`
	Disk       Disk      `json:"disk"`
	// MountAt is where commands see the tree; Source where it was taken from.
	MountAt  string `json:"mount_at"`
	Source   string `json:"source,omitempty"`
	WorkTree string `json:"work_tree"`
	// WorkTreeMade says whether the work tree is there; if not, the next
	// command that needs it makes it.
	WorkTreeMade bool `json:"work_tree_made"`
	// Interrupted names the operation that a crash cut short; the next command
	// that writes puts it right.
	Interrupted string `json:"interrupted,omitempty"`
}

// Disk is the space an environment takes.
type Disk struct {
	// Bytes is what storing the snapshots took when they were made. The work
	// tree is not counted, nor is what the file system shares.
	Bytes int64 `json:"bytes"`
}

// Status compares the work tree with HEAD and sums up the rest. It writes
// nothing and does not walk the store.
func (e *Env) Status(ctx context.Context) (Status, error) {
	s := Status{
		Root: e.root, Kind: e.meta.Kind, Backend: e.meta.Backend, Head: e.meta.Head,
		Snapshots: len(e.meta.Nodes), MountAt: e.MountAt(), Source: e.meta.Source, WorkTree: e.WorkTree(),
	}
	for _, n := range e.meta.Nodes {
		s.Disk.Bytes += n.Bytes
	}
	if e.interrupted != nil {
		s.Interrupted = e.interrupted.Op
	}
	c, err := e.WorkChanges(ctx)
	s.Changes, s.Dirty = len(c.List), len(c.List) > 0
	_, treeErr := e.workTree()
	s.WorkTreeMade = treeErr == nil
	return s, err
}

// WorkChanges returns what the work tree has changed since HEAD. One that is
// not there, or that a crash left between two states, has changed nothing.
func (e *Env) WorkChanges(ctx context.Context) (forks.Changes, error) {
	if e.interrupted != nil {
		return forks.Changes{}, nil
	}
	if _, err := e.workTree(); isNotFound(err) {
		return forks.Changes{}, nil
	} else if err != nil {
		return forks.Changes{}, err
	}
	c, err := e.driver.Status(ctx, forks.Work)
	return shown(c), err
}
