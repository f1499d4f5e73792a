//go:build linux

package layer

import (
	"os"
	"slices"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// What is kept of a directory that snapshots are taken of again and again, and
// that is made equal to snapshots ([forks.Source.Index]), is the state that it
// was last seen in, each file with the layer that has its bytes. A call that
// compares it with a snapshot believes this of every path for which both say
// the same; all others it looks at.

// replaceSuffix makes the name of an index into that of the note that a Replace
// is at work or was cut short.
const replaceSuffix = ".replacing"

// leftoverPrefix starts the name of the directories in which a Replace makes
// new files beside those which they are to replace.
const leftoverPrefix = ".agentenv-"

// LeftoverName is the name of these directories where there is no index.
const LeftoverName = leftoverPrefix + "replace"

// Leftover is the name of the directories that a Replace makes for itself while
// it is at work, or left when it was cut short; "" if there are none.
func Leftover(index string) string {
	if index == "" {
		return ""
	}
	token, err := os.ReadFile(index + replaceSuffix)
	if err != nil || len(token) == 0 {
		return ""
	}
	return leftoverPrefix + string(token)
}

// NoteReplace notes durably that directories named after the token may be left
// from now on, and returns their name.
func NoteReplace(index, token string) (string, error) {
	f, err := os.OpenFile(index+replaceSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return "", err
	}
	_, err = f.WriteString(token)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	return leftoverPrefix + token, err
}

// EndReplace takes the note away.
func EndReplace(index string) error {
	err := os.Remove(index + replaceSuffix)
	if os.IsNotExist(err) {
		return nil
	}
	return err
}

// knownState returns the state of a snapshot with the identities that are known
// of the source, and whether there are any.
func (s *Store) knownState(id forks.ID, src forks.Source) (*State, bool, error) {
	if src.Index == "" {
		return s.sourceState(id)
	}
	_, known, err := LoadIndex(src.Index)
	if err != nil {
		return s.sourceState(id)
	}
	state, err := s.State(id)
	if err != nil {
		return nil, false, err
	}
	state = state.Clone()
	for i := range state.Nodes {
		state.Nodes[i].Ino = 0 // what it was elsewhere says nothing here
	}
	k := &knower{state: state, known: known}
	k.groups = [2]map[uint32]string{linkNames(state), linkNames(known)}
	k.dir(0, 0)
	return state, true, nil
}

// linkNames maps each hard-link group to its names.
func linkNames(s *State) map[uint32]string {
	lists := make(map[uint32][]string)
	for i := range s.Nodes {
		if l := s.Nodes[i].Link; l != 0 {
			lists[l] = append(lists[l], s.Path(uint32(i)))
		}
	}
	names := make(map[uint32]string, len(lists))
	for l, list := range lists {
		names[l] = strings.Join(list, "\x00")
	}
	return names
}

// knower gives the nodes of a state the identities of another state's.
type knower struct {
	state, known *State
	groups       [2]map[uint32]string
}

// dir does so for the directory a of the state, which is b of the other, and
// for all below it. What is not known of a path gets no identity.
func (k *knower) dir(a, b uint32) {
	if SameMeta(k.state, a, k.known, b) {
		k.state.Nodes[a].KeepIdentity(&k.known.Nodes[b])
	}
	ac, aend := a+1, k.state.Nodes[a].End
	bc, bend := b+1, k.known.Nodes[b].End
	for ac < aend && bc < bend {
		switch x, y := k.state.Name(ac), k.known.Name(bc); {
		case x < y:
			ac = k.state.Nodes[ac].End
		case y < x:
			bc = k.known.Nodes[bc].End
		default:
			if k.state.Nodes[ac].IsDir() && k.known.Nodes[bc].IsDir() {
				k.dir(ac, bc)
			} else if k.same(ac, bc) {
				k.state.Nodes[ac].KeepIdentity(&k.known.Nodes[bc])
			}
			ac, bc = k.state.Nodes[ac].End, k.known.Nodes[bc].End
		}
	}
}

// same says whether two paths that are no directories are the same. A file
// whose bytes are in no layer was not stored, and its attributes not read.
func (k *knower) same(a, b uint32) bool {
	x, y := &k.state.Nodes[a], &k.known.Nodes[b]
	if x.IsReg() && (k.known.LayerOf(b) == "" || k.state.LayerOf(a) != k.known.LayerOf(b)) {
		return false
	}
	return SameMeta(k.state, a, k.known, b) && k.groups[0][x.Link] == k.groups[1][y.Link]
}

// knowMore keeps what a comparison with base found out about the source.
func (s *Store) knowMore(src forks.Source, scan *Scan, base *State) error {
	if src.Index == "" || scan.Delta == nil && !scan.Refreshed {
		return nil
	}
	whole := base
	if scan.Delta != nil {
		var err error
		if whole, err = Merge(base, scan.Delta, true); err != nil {
			return err
		}
	}
	saveKnown(src, whole)
	return nil
}

// saveKnown keeps the state that a source is in. It is a cache: what cannot be
// written is found out again.
func saveKnown(src forks.Source, state *State) {
	if src.Index == "" || src.IndexReadOnly {
		return
	}
	tmp := src.Index + ".new"
	_ = os.Remove(tmp) // of one that was cut short
	err := SaveIndex(tmp, "", state)
	if err == nil {
		err = os.Rename(tmp, src.Index)
	}
	if err != nil {
		_ = os.Remove(tmp)
	}
}

// keepOwner gives the node of a file that is the caller's own the owner and the
// group that its base has, as far as the caller could not have given them.
func keepOwner(n, base *Node) {
	uid := uint32(os.Geteuid())
	if uid == 0 || n.UID != uid {
		return
	}
	n.UID = base.UID
	if n.GID == base.GID || base.GID == uint32(os.Getegid()) {
		return
	}
	if groups, err := os.Getgroups(); err == nil && !slices.Contains(groups, int(base.GID)) {
		n.GID = base.GID
	}
}

// keepUnseen takes out of what a scan of a source found against base that paths
// are gone which the source leaves out, since nobody looked whether they are
// there, and that directories changed which are mount points now: what they
// show is another file system's.
func (scan *Scan) keepUnseen(base *State, excluded func(dir, name string) bool) error {
	delta := scan.Delta
	if delta == nil || base == nil || excluded == nil && len(scan.Mounts) == 0 {
		return nil
	}
	unseen := func(dir, name string, removed bool) bool {
		if removed {
			return excluded != nil && excluded(dir, name)
		}
		path := join(dir, name)
		if !slices.Contains(scan.Mounts, path) {
			return false
		}
		was, ok := base.Find(path)
		return ok && base.Nodes[was].IsDir()
	}
	b := NewBuilder(len(delta.Nodes), delta.Layers...)
	var copyDir func(d, parent uint32, path string)
	copyDir = func(d, parent uint32, path string) {
		for c := d + 1; c < delta.Nodes[d].End; c = delta.Nodes[c].End {
			name := delta.Name(c)
			if !unseen(path, name, delta.Nodes[c].Flags&Removed != 0) {
				copyDir(c, b.Add(parent, name, delta.Nodes[c], delta.rawExtra(c)), join(path, name))
			}
		}
	}
	copyDir(0, b.Add(0, "", delta.Nodes[0], delta.rawExtra(0)), ".")
	if len(b.s.Nodes) == len(delta.Nodes) {
		return nil
	}
	var err error
	if scan.Delta, err = b.State(); err == nil && !slices.ContainsFunc(scan.Delta.Nodes, func(n Node) bool { return n.Flags&Through == 0 }) {
		scan.Delta = nil
	}
	return err
}
