package env_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"pgregory.net/rapid"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// TestAnySequenceGivesTheModelsStates does random edits, commits, checkouts
// and tournaments, and compares every state with what the file system said of
// it when it was made. The manifests are the model.
func TestAnySequenceGivesTheModelsStates(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := newMachine(t.TempDir(), rt)
		defer m.close()
		rt.Repeat(map[string]func(*rapid.T){
			"edit":       m.edit,
			"commit":     m.commit,
			"checkout":   m.checkout,
			"tournament": m.tournament,
			"delete":     m.delete,
			"reopen":     func(*rapid.T) { m.reopen() },
		})
	})
}

type machine struct {
	t    assert.TestingT
	dir  string
	env  *env.Env
	tree string
	// states has the manifest of every snapshot by its id.
	states map[env.ID]string
}

// options are those of an environment whose trees all stand on the host, where
// this test reads and edits them. The drivers' own suite does the like for the
// others.
func options() env.Options { return optionsFor("copy") }

func newMachine(tmp string, t *rapid.T) *machine {
	dir, err := os.MkdirTemp(tmp, "")
	assert.NilError(t, err)
	src := filepath.Join(dir, "src")
	assert.NilError(t, os.Mkdir(src, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(src, "keep"), []byte("1"), 0o644))
	for range rapid.IntRange(0, 8).Draw(t, "edits before") {
		editTree(t, src)
	}
	e, err := env.Init(context.Background(), filepath.Join(dir, "root"), env.InitOptions{From: src}, options())
	assert.NilError(t, err)
	m := &machine{t: t, dir: dir, env: e, tree: e.WorkTree(), states: map[env.ID]string{}}
	m.states[e.Head().ID] = manifest(t, src)
	m.check()
	return m
}

func (m *machine) close() {
	assert.NilError(m.t, m.env.Close())
	assert.NilError(m.t, os.RemoveAll(m.dir))
}

// check compares the work tree with HEAD's state.
func (m *machine) check() {
	assert.Equal(m.t, manifest(m.t, m.tree), m.states[m.env.Head().ID])
}

func (m *machine) edit(rt *rapid.T) {
	for range rapid.IntRange(1, 6).Draw(rt, "edits") {
		editTree(rt, m.tree)
	}
}

func (m *machine) commit(*rapid.T) {
	now := manifest(m.t, m.tree)
	s, _, err := m.env.Commit(context.Background(), "", false)
	assert.NilError(m.t, err)
	if old, ok := m.states[s.ID]; ok {
		assert.Equal(m.t, now, old) // said that nothing changed
	}
	m.states[s.ID] = now
	m.check()
}

func (m *machine) checkout(rt *rapid.T) {
	id := m.anySnapshot(rt)
	before := manifest(m.t, m.tree)
	res, err := m.env.Checkout(context.Background(), string(id), false)
	assert.NilError(m.t, err)
	if res.Saved != nil {
		m.states[*res.Saved] = before
	}
	m.check()
	assert.Equal(m.t, m.env.Head().ID, id)
}

func (m *machine) anySnapshot(rt *rapid.T) env.ID {
	log := m.env.Log()
	return log[rapid.IntRange(0, len(log)-1).Draw(rt, "snapshot")].ID
}

// tournament edits forks of a snapshot and promotes one, or none.
func (m *machine) tournament(rt *rapid.T) {
	ctx := context.Background()
	work := manifest(m.t, m.tree)
	saved, err := m.env.SaveWork(ctx, "")
	assert.NilError(m.t, err)
	if saved != nil {
		m.states[saved.ID] = work
	}
	base := m.anySnapshot(rt)
	n := rapid.IntRange(1, 3).Draw(rt, "candidates")
	winner := rapid.IntRange(0, n).Draw(rt, "winner") // n is nobody
	for i := range n {
		f, err := m.env.Fork(ctx, forks.Key(fmt.Sprintf("c%d", i)), base, sandbox.LevelProcess)
		assert.NilError(m.t, err)
		tree := f.Tree().Mount.Dir
		assert.Equal(m.t, manifest(m.t, tree), m.states[base])
		for range rapid.IntRange(0, 4).Draw(rt, "edits") {
			editTree(rt, tree)
		}
		state := manifest(m.t, tree)
		fr, err := f.Freeze(ctx, base)
		assert.NilError(m.t, err)
		test, err := m.env.ForkFrozen(ctx, "test", fr, sandbox.LevelProcess)
		assert.NilError(m.t, err)
		assert.Equal(m.t, manifest(m.t, test.Tree().Mount.Dir), state)
		assert.NilError(m.t, test.Remove(ctx))
		assert.NilError(m.t, f.Remove(ctx))
		if i != winner {
			assert.NilError(m.t, m.env.Drop(ctx, fr))
			continue
		}
		head, _, err := m.env.Promote(ctx, fr, "")
		assert.NilError(m.t, err)
		m.states[head.ID] = state
	}
	m.check()
}

func (m *machine) delete(rt *rapid.T) {
	s, err := m.env.Resolve(string(m.anySnapshot(rt)))
	assert.NilError(m.t, err)
	if s.Head {
		return
	}
	_, err = m.env.Delete(context.Background(), string(s.ID))
	assert.NilError(m.t, err)
	delete(m.states, s.ID)
}

func (m *machine) reopen() {
	before := manifest(m.t, m.tree)
	assert.NilError(m.t, m.env.Close())
	e, err := env.Lock(context.Background(), filepath.Join(m.dir, "root"), "test", options())
	assert.NilError(m.t, err)
	m.env = e
	assert.Equal(m.t, manifest(m.t, m.tree), before)
	assert.Equal(m.t, len(e.Log()), len(m.states))
}

// within says whether the real path p is in the tree.
func within(root, p string) bool {
	root, err := filepath.EvalSymlinks(root)
	return err == nil && (p == root || strings.HasPrefix(p, root+"/"))
}

// writeNoFollow writes a file, if it is none: a symlink in its place may lead
// out of the tree, and what is there is not this test's.
func writeNoFollow(path, content string) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return
	}
	_, _ = f.WriteString(content)
	_ = f.Close()
}

// editTree changes one thing in a tree, by plain system calls. It follows no
// symlink.
func editTree(rt *rapid.T, root string) {
	names := []string{"a", "b", "c", "d/a", "d/b", "d/e/a", "d/e/b", "e/a", "first"}
	name := func(label string) string {
		return filepath.Join(root, rapid.SampledFrom(names).Draw(rt, label))
	}
	p := name("path")
	_ = os.MkdirAll(filepath.Dir(p), 0o755) // a file may be in the way, and then nothing happens
	if real, err := filepath.EvalSymlinks(filepath.Dir(p)); err != nil || !within(root, real) {
		return
	}
	switch rapid.IntRange(0, 10).Draw(rt, "kind") {
	case 0, 1, 2:
		writeNoFollow(p, rapid.StringN(0, 20, 60).Draw(rt, "content"))
	case 3:
		_ = os.RemoveAll(p)
	case 4:
		_ = os.RemoveAll(filepath.Join(root, rapid.SampledFrom([]string{"d", "e", "d/e"}).Draw(rt, "dir")))
	case 5:
		_ = os.Link(p, name("link"))
	case 6:
		_ = os.Remove(p)
		_ = os.Symlink(rapid.SampledFrom([]string{"a", "../gone", "/nonexistent/x", "d"}).Draw(rt, "target"), p)
	case 7:
		_ = os.Rename(p, name("to"))
	case 8:
		if st, err := os.Lstat(p); err == nil && st.Mode()&os.ModeSymlink == 0 {
			_ = os.Chmod(p, os.FileMode(rapid.SampledFrom([]uint32{0o600, 0o644, 0o755, 0o4755, 0o1777}).Draw(rt, "mode")))
		}
	case 9:
		ts := []unix.Timespec{{Sec: 1, Nsec: 2}, {Sec: rapid.Int64Range(-2e9, 4e9).Draw(rt, "sec"), Nsec: rapid.Int64Range(0, 999999999).Draw(rt, "nsec")}}
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, ts, unix.AT_SYMLINK_NOFOLLOW)
	case 10:
		_ = unix.Lsetxattr(p, "user.note", []byte(rapid.SampledFrom([]string{"x", "yy", ""}).Draw(rt, "value")), 0)
	}
}

// The commit after a rapid rewrite of a file, within one tick of the clock, has
// the second content.
func TestRewriteWithinATickIsSeen(t *testing.T) {
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	assert.NilError(t, os.Mkdir(src, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(src, "f"), []byte("0000"), 0o644))
	e, err := env.Init(context.Background(), filepath.Join(dir, "root"), env.InitOptions{From: src}, options())
	assert.NilError(t, err)
	defer e.Close()
	f := filepath.Join(e.WorkTree(), "f")
	end := time.Now().Add(2 * time.Second)
	for i := 1; time.Now().Before(end); i++ {
		want := fmt.Sprintf("%04d", i%10000)
		assert.NilError(t, os.WriteFile(f, []byte(want), 0o644))
		s, created, err := e.Commit(context.Background(), "", false)
		assert.NilError(t, err)
		assert.Assert(t, created, "round %d: the change was not seen", i)
		v, err := e.View(context.Background(), s.ID)
		assert.NilError(t, err)
		r, err := v.Open("f")
		assert.NilError(t, err)
		got := make([]byte, 4)
		_, err = r.Read(got)
		assert.NilError(t, err)
		assert.Equal(t, string(got), want)
		assert.NilError(t, r.Close())
		assert.NilError(t, v.Close())
	}
	assert.Assert(t, slices.ContainsFunc(e.Log(), func(s env.Snapshot) bool { return s.Head }))
}
