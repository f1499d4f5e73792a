package env

import (
	"time"

	"github.com/agentenv/agentenv/forks"
)

// ID names a snapshot.
type ID = forks.ID

// Kind says what a tree is and so how commands run in it.
type Kind string

// The kinds of environment, as CONTRACT §1 defines them.
const (
	// Rootfs: the tree is a whole system; commands have it as /.
	Rootfs Kind = "rootfs"
	// Workspace: the tree is a directory; commands see it at its own path
	// over the host's system.
	Workspace Kind = "workspace"
)

// SnapshotKind says what made a snapshot.
type SnapshotKind string

// The kinds of snapshot that there are so far, as CONTRACT §5 lists them.
const (
	KindInit       SnapshotKind = "init"
	KindCommit     SnapshotKind = "commit"
	KindExec       SnapshotKind = "exec"
	KindSync       SnapshotKind = "sync"
	KindSaved      SnapshotKind = "saved"
	KindTournament SnapshotKind = "tournament"
)

// Snapshot is one node of the history, in the form of CONTRACT §5.
type Snapshot struct {
	ID ID `json:"id"`
	// Parent is nil for the first snapshot.
	Parent  *ID          `json:"parent"`
	Message string       `json:"message"`
	Created time.Time    `json:"created"`
	Kind    SnapshotKind `json:"kind"`
	Tags    []string     `json:"tags"`
	Head    bool         `json:"head"`
	Stats   Stats        `json:"stats"`
}

// Stats counts the paths that differ from the parent.
type Stats struct {
	Added    int `json:"added"`
	Modified int `json:"modified"`
	Removed  int `json:"removed"`
}

// Total is the number of paths that differ.
func (s Stats) Total() int { return s.Added + s.Modified + s.Removed }

// statsOf counts the changes that are shown; a change of type counts as
// modified.
func statsOf(c forks.Changes) Stats {
	var s Stats
	for _, ch := range shown(c).List {
		switch ch.Kind {
		case forks.Added:
			s.Added++
		case forks.Removed:
			s.Removed++
		default:
			s.Modified++
		}
	}
	return s
}
