package env

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

func history(ids ...ID) *meta {
	m := &meta{Version: metaVersion, Kind: Workspace, Backend: "copy", MountAt: "/x", Tags: map[string]ID{}}
	parent := ID("")
	for _, id := range ids {
		m.Nodes = append(m.Nodes, node{ID: id, Parent: parent, Created: time.Now(), Kind: KindCommit})
		parent, m.Head = id, id
	}
	return m
}

func TestResolve(t *testing.T) {
	m := history("aaaa000011112222", "aaaa000033334444", "bbbb000011112222")
	m.Tags["start"] = "aaaa000011112222"
	for ref, want := range map[string]ID{
		"HEAD": "bbbb000011112222", "HEAD~": "aaaa000033334444", "HEAD~1": "aaaa000033334444", "HEAD~2": "aaaa000011112222",
		"HEAD~0": "bbbb000011112222", "start": "aaaa000011112222", "bbbb": "bbbb000011112222",
		"aaaa000011": "aaaa000011112222", "aaaa000011112222": "aaaa000011112222",
	} {
		n, err := m.resolve(ref)
		assert.NilError(t, err, ref)
		assert.Equal(t, n.ID, want, ref)
	}
	for ref, want := range map[string]error{
		"aaaa": ErrAmbiguous, "bbb": ErrNotFound, "": ErrNotFound, "HEAD~3": ErrNotFound, "HEAD~x": ErrNotFound, "HEAD~-1": ErrNotFound,
		"BBBB": ErrNotFound, "../etc": ErrNotFound, "-rf": ErrNotFound, "cccc": ErrNotFound, "head": ErrNotFound,
	} {
		_, err := m.resolve(ref)
		assert.Assert(t, errors.Is(err, want), "%q: %v", ref, err)
		assert.Assert(t, !strings.Contains(err.Error(), "\n"))
	}
}

func TestWhatMayBeATag(t *testing.T) {
	for _, name := range []string{"v1", "release-2.0", "a_b", "abc", "good.enough", "xyz1", strings.Repeat("x", 128)} {
		assert.NilError(t, CheckTag(name), name)
	}
	for _, name := range []string{"", "HEAD", "head", "dead", "deadbeef", "DEAD", "../x", "a/b", "-rf", ".x", "a b", "a\x00b", "a\nb", "a:b", "HEAD~1", strings.Repeat("x", 129)} {
		assert.Assert(t, errors.Is(CheckTag(name), ErrUsage), "%q", name)
	}
}

// A tag that is allowed never hides a snapshot: no tag is also a REF of another
// form.
func TestNoTagLooksLikeAnotherREF(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[A-Za-z0-9._~/-]{1,20}`).Draw(t, "name")
		if CheckTag(name) != nil {
			return
		}
		_, isHead := headOffset(name)
		assert.Assert(t, !isHead && !looksLikeID(name), name)
	})
}

func TestRemoveGivesChildrenToTheParent(t *testing.T) {
	m := history("aaaa000000000000", "bbbb000000000000", "cccc000000000000")
	m.remove("bbbb000000000000")
	assert.Equal(t, len(m.Nodes), 2)
	assert.Equal(t, m.find("cccc000000000000").Parent, ID("aaaa000000000000"))
}

func TestHistoryOfANewerFormatIsRefusedAndKept(t *testing.T) {
	root := t.TempDir()
	m := history("aaaa000000000000")
	m.Version = metaVersion + 1
	_, err := m.write(root)
	assert.NilError(t, err)
	_, err = readMeta(root)
	assert.Assert(t, errors.Is(err, ErrDamaged))
	assert.ErrorContains(t, err, fmt.Sprintf("format %d", metaVersion+1))
}

func TestDamagedHistoryIsNamed(t *testing.T) {
	root := t.TempDir()
	for _, data := range []string{"", "{", `{"version":1}`, `{"version":1,"head":"x","snapshots":[]}`} {
		writeFile(t, root+"/"+metaName, data)
		_, err := readMeta(root)
		assert.Assert(t, errors.Is(err, ErrDamaged), "%q: %v", data, err)
		assert.ErrorContains(t, err, root)
	}
}

func TestJournalKeepsWhatIsNotDone(t *testing.T) {
	root := t.TempDir()
	j, err := openJournal(root, 0, true)
	assert.NilError(t, err)
	n, err := j.begin(intent{Op: "commit", To: "aaaa"})
	assert.NilError(t, err)
	assert.NilError(t, j.end(n))
	p, last, err := readPending(root)
	assert.NilError(t, err)
	assert.Assert(t, p == nil)
	assert.Equal(t, last, 1)
	_, err = j.begin(intent{Op: "checkout", To: "bbbb"})
	assert.NilError(t, err)
	assert.NilError(t, j.f.Close())

	// A line that was cut short counts for nothing, and spoils no other.
	appendFile(t, root+"/"+journalName, `{"n":3,"op":"comm`)
	j, err = openJournal(root, 2, false)
	assert.NilError(t, err)
	p, _, err = readPending(root)
	assert.NilError(t, err)
	assert.Equal(t, p.To, ID("bbbb"))
	assert.NilError(t, j.end(2))
	p, _, err = readPending(root)
	assert.NilError(t, err)
	assert.Assert(t, p == nil)
	assert.NilError(t, j.f.Close())
}
