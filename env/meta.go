package env

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/renameio/v2"

	"github.com/agentenv/agentenv/env/subid"
)

// metaVersion is the newest format of meta.json and of the journal. A binary
// refuses what is newer than it knows. What an environment does not need it does
// not claim, so that older binaries open it: format 2 says that it is in place,
// format 3 that its files have a range of ids.
const (
	metaVersion = metaIDs
	metaPlain   = 1
	metaInPlace = 2
	metaIDs     = 3
)

// The names below a root.
const (
	metaName    = "meta.json"
	lockName    = "agentenv.lock"
	journalName = "journal"
	runsName    = "runs"
	scratchName = "scratch"
	socketName  = "agentenv.sock"
)

// metaTemp begins the name of a history that is being written.
const metaTemp = "." + metaName

// meta is the history, as meta.json holds it. It is read whole and replaced
// whole: whoever reads it sees one state.
type meta struct {
	Version int    `json:"version"`
	Kind    Kind   `json:"kind"`
	Backend string `json:"backend"`
	// MountAt is where a workspace's tree is seen by commands.
	MountAt string `json:"mount_at,omitempty"`
	// Source is the directory that the environment was taken from.
	Source  string   `json:"source,omitempty"`
	Exclude []string `json:"exclude,omitempty"`
	// InPlace says that Source is the work tree.
	InPlace bool `json:"in_place,omitempty"`
	// IDs is the map of the user namespace in which alone the files have their
	// owners, and everything is done.
	IDs  *subid.Map `json:"ids,omitempty"`
	Head ID         `json:"head"`
	// Nodes is in order of creation.
	Nodes []node        `json:"snapshots"`
	Tags  map[string]ID `json:"tags"`
	// Removed has the bytes of the driver's snapshots that were removed and
	// may have to stay, since others build upon them.
	Removed map[ID]int64 `json:"removed,omitempty"`
	// Applied says what was last applied to a directory.
	Applied map[string]applied `json:"applied,omitempty"`

	// file is the meta.json that this was read from; nil if it was not.
	file fs.FileInfo
}

// node is one snapshot of the history.
type node struct {
	ID ID `json:"id"`
	// Store is the driver's snapshot that holds the tree, where it is not ID:
	// a snapshot that changed nothing shares its parent's.
	Store   ID           `json:"store,omitempty"`
	Parent  ID           `json:"parent,omitempty"`
	Message string       `json:"message,omitempty"`
	Created time.Time    `json:"created"`
	Kind    SnapshotKind `json:"kind"`
	Stats   Stats        `json:"stats"`
	// Bytes is the disk space that storing it took.
	Bytes int64 `json:"bytes"`
	// Source is the directory that it was captured from, if it was; Digest
	// names the content of the archive, if it came from one.
	Source string `json:"source,omitempty"`
	Digest string `json:"digest,omitempty"`
}

// store is the driver's snapshot that holds n's tree.
func (n *node) store() ID {
	if n.Store != "" {
		return n.Store
	}
	return n.ID
}

// readMeta reads the history of root.
func readMeta(root string) (*meta, error) {
	path := filepath.Join(root, metaName)
	data, file, err := readWhole(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &Error{Kind: ErrNotFound, Msg: "no environment at " + root, Hint: "make one with `agentenv init --from DIR`, run agentenv in a directory that one was taken from, or name its root with --root"}
	}
	if err != nil {
		return nil, err
	}
	var m meta
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, &Error{Kind: ErrDamaged, Msg: path + " cannot be read", Cause: err, Hint: "the snapshots below " + filepath.Join(root, "nodes") + " are not touched"}
	}
	if m.Version > metaVersion {
		return nil, &Error{Kind: ErrDamaged, Msg: fmt.Sprintf("%s is of format %d and this agentenv knows %d", path, m.Version, metaVersion), Hint: "use the newer agentenv that wrote it"}
	}
	if m.find(m.Head) == nil {
		return nil, &Error{Kind: ErrDamaged, Msg: path + ": HEAD is not one of its snapshots"}
	}
	m.file = file
	return &m, nil
}

// readWhole reads a file and says which one it was.
func readWhole(path string) ([]byte, fs.FileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	data, err := io.ReadAll(f)
	return data, st, err
}

// write replaces meta.json: the file is flushed, renamed into place, and the
// directory flushed, in that order. replaced says whether readers see m: it can
// be true though the flush of the directory failed.
func (m *meta) write(root string) (replaced bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("save the history of %s: %w", root, err)
		}
	}()
	data, err := json.Marshal(m)
	if err != nil {
		return false, err
	}
	step("meta.ready")
	// In root itself, where sweepMeta looks for what a crash leaves.
	f, err := renameio.NewPendingFile(filepath.Join(root, metaName), renameio.WithTempDir(root), renameio.WithPermissions(0o600))
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Cleanup() }() // after the rename it does nothing
	step("meta.made")
	if _, err := f.Write(data); err != nil {
		return false, err
	}
	step("meta.written")
	if err := f.CloseAtomicallyReplace(); err != nil {
		return false, err
	}
	step("meta.renamed")
	err = syncDir(root)
	step("meta.durable")
	return true, err
}

// syncDir flushes a directory's entries.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// find returns the node id, or nil.
func (m *meta) find(id ID) *node {
	for i := len(m.Nodes) - 1; i >= 0; i-- {
		if m.Nodes[i].ID == id {
			return &m.Nodes[i]
		}
	}
	return nil
}

// store returns the driver's snapshot for the node id.
func (m *meta) store(id ID) ID {
	if n := m.find(id); n != nil {
		return n.store()
	}
	return id
}

// withStore returns the newest node whose tree the driver keeps as store, or
// nil.
func (m *meta) withStore(store ID) *node {
	for i := len(m.Nodes) - 1; i >= 0; i-- {
		if m.Nodes[i].store() == store {
			return &m.Nodes[i]
		}
	}
	return nil
}

// stores says which of the driver's snapshots the history needs.
func (m *meta) stores() map[ID]bool {
	out := make(map[ID]bool, len(m.Nodes))
	for i := range m.Nodes {
		out[m.Nodes[i].store()] = true
	}
	return out
}

// snapshot is n as users see it.
func (m *meta) snapshot(n *node) Snapshot {
	s := Snapshot{ID: n.ID, Message: n.Message, Created: n.Created, Kind: n.Kind, Stats: n.Stats, Tags: []string{}, Head: n.ID == m.Head}
	if n.Parent != "" {
		p := n.Parent
		s.Parent = &p
	}
	for name, id := range m.Tags {
		if id == n.ID {
			s.Tags = append(s.Tags, name)
		}
	}
	slices.Sort(s.Tags)
	return s
}

// snapshots is [meta.snapshot] of all, newest first. Tags are gathered once:
// a history may have thousands of both.
func (m *meta) snapshots() []Snapshot {
	tags := make(map[ID][]string, len(m.Tags))
	for name, id := range m.Tags {
		tags[id] = append(tags[id], name)
	}
	bare := *m
	bare.Tags = nil
	out := make([]Snapshot, 0, len(m.Nodes))
	for i := len(m.Nodes) - 1; i >= 0; i-- {
		s := bare.snapshot(&m.Nodes[i])
		if t := tags[s.ID]; t != nil {
			slices.Sort(t)
			s.Tags = t
		}
		out = append(out, s)
	}
	return out
}

// lastFrom returns the last snapshot captured from dir, or nil.
func (m *meta) lastFrom(dir string) *node {
	for i := len(m.Nodes) - 1; i >= 0; i-- {
		if m.Nodes[i].Source == dir {
			return &m.Nodes[i]
		}
	}
	return nil
}

// takenFrom returns the nearest ancestor of id, itself included, that was
// captured from a directory, or nil.
func (m *meta) takenFrom(id ID) *node {
	for n := m.find(id); n != nil; n = m.find(n.Parent) {
		if n.Source != "" {
			return n
		}
	}
	return nil
}

// buildsUpon says whether base is n or an ancestor of it.
func (m *meta) buildsUpon(n, base *node) bool {
	for ; n != nil; n = m.find(n.Parent) {
		if n == base {
			return true
		}
	}
	return false
}

// first returns the oldest ancestor of id.
func (m *meta) first(id ID) *node {
	n := m.find(id)
	for up := m.find(n.Parent); up != nil; up = m.find(n.Parent) {
		n = up
	}
	return n
}

// clone copies m so that a change that cannot be written leaves m as it was.
func (m *meta) clone() *meta {
	c := *m
	c.Nodes = slices.Clone(m.Nodes)
	c.Tags = make(map[string]ID, len(m.Tags))
	for k, v := range m.Tags {
		c.Tags[k] = v
	}
	c.Removed, c.Applied = maps.Clone(m.Removed), maps.Clone(m.Applied)
	return &c
}

// remove takes the node id out and hands its children to its parent. Its
// storage, if no other node has it, counts as removed.
func (m *meta) remove(id ID) {
	n := m.find(id)
	if n == nil {
		return
	}
	parent, store, bytes := n.Parent, n.store(), n.Bytes
	m.Nodes = slices.DeleteFunc(m.Nodes, func(n node) bool { return n.ID == id })
	for i := range m.Nodes {
		if m.Nodes[i].Parent == id {
			m.Nodes[i].Parent = parent
		}
	}
	if other := m.withStore(store); other != nil {
		other.Bytes += bytes // it holds the tree now
		return
	}
	if m.Removed == nil {
		m.Removed = map[ID]int64{}
	}
	m.Removed[store] = bytes
}
