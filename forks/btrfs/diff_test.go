//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

func lines(list []forks.Change) []string {
	var l []string
	for _, c := range list {
		l = append(l, string(c.Kind)+" "+c.Path)
	}
	return l
}

// ways compares b with a in all ways that there are: by a search (root), by a
// walk that trusts times, and by contents.
func (w *scene) ways(a, b *side, since *info) (all [3][]string) {
	w.Helper()
	for i, in := range []struct {
		since  *info
		onDisk bool
	}{{since, true}, {since, false}, {nil, false}} {
		list, written, err := compare(context.Background(), a, b, in.since, in.onDisk)
		assert.NilError(w, err)
		searched := i == 0 && since != nil && os.Geteuid() == 0
		assert.Equal(w, written >= 0, searched, "way %d", i)
		all[i] = lines(list)
	}
	return all
}

// scene is a store with a work tree.
type scene struct {
	*testing.T
	dir string
	d   *driver
	ids int
}

func newScene(t *testing.T, dir string) *scene {
	s := &scene{T: t, dir: dir}
	d, err := Backend().Open(t.Context(), filepath.Join(dir, "store"))
	assert.NilError(t, err)
	s.d = d.(*driver)
	t.Cleanup(func() { assert.NilError(t, d.Close()) })
	return s
}

func (s *scene) capture(files map[string]string) forks.ID {
	s.Helper()
	src := filepath.Join(s.dir, "src")
	assert.NilError(s, os.MkdirAll(src, 0o755))
	forkstest.Write(s, src, files)
	return s.captureAs(forks.Source{Dir: src}, "")
}

func (s *scene) captureAs(src forks.Source, base forks.ID) forks.ID {
	s.Helper()
	s.ids++
	id := forks.ID(fmt.Sprintf("%04x", s.ids))
	_, err := s.d.Capture(s.Context(), id, base, src)
	assert.NilError(s, err)
	return id
}

func (s *scene) fork(key forks.Key, id forks.ID) string {
	s.Helper()
	t, err := s.d.Fork(s.Context(), key, id, forks.ForkOptions{})
	assert.NilError(s, err)
	return t.Mount.Dir
}

func (s *scene) commit(key forks.Key) (forks.ID, forks.Changes) {
	s.Helper()
	s.ids++
	id := forks.ID(fmt.Sprintf("%04x", s.ids))
	c, err := s.d.Commit(s.Context(), key, id, nil)
	assert.NilError(s, err)
	return id, c
}

func (s *scene) side(id forks.ID) (*side, *info) {
	s.Helper()
	x, err := s.d.side(id)
	assert.NilError(s, err)
	in, err := s.d.since(id)
	assert.NilError(s, err)
	return x, &in
}

// edit makes one random change below dir.
func edit(r *rapid.T, dir string) {
	names := []string{"a", "b", "c", "d/a", "d/b", "d/e/a", "d", "d/e", "f", "f/a", "g"}
	p := func(what string) string { return filepath.Join(dir, rapid.SampledFrom(names).Draw(r, what)) }
	path := p("path")
	// Whether an operation is possible here does not matter.
	switch rapid.IntRange(0, 10).Draw(r, "do") {
	case 0, 1:
		_ = os.WriteFile(path, []byte(rapid.StringN(0, 6, 6).Draw(r, "text")), 0o644)
	case 2:
		_ = os.MkdirAll(path, 0o755)
	case 3:
		_ = os.RemoveAll(path)
	case 4, 5:
		_ = os.Rename(path, p("to"))
	case 6:
		_ = os.Link(path, p("to"))
	case 7:
		_ = os.Chmod(path, os.FileMode(0o600+rapid.IntRange(0, 1).Draw(r, "mode")*0o100))
	case 8:
		_ = os.Symlink(rapid.SampledFrom(names).Draw(r, "target"), path)
	case 9: // other bytes of the same length, and the old times
		if fi, err := os.Lstat(path); err == nil && fi.Mode().IsRegular() {
			_ = os.WriteFile(path, make([]byte, fi.Size()), 0o644)
			_ = os.Chtimes(path, fi.ModTime(), fi.ModTime())
		}
	case 10:
		_ = unix.Setxattr(path, "user.x", []byte(rapid.StringN(1, 2, 2).Draw(r, "value")), 0)
	}
}

// A search, a walk and a comparison of all contents find the same changes,
// between a snapshot and one made of it, between two that were made of it
// apart, and backwards.
func TestWaysAgree(t *testing.T) {
	t.Run("root", func(t *testing.T) { testWaysAgree(t, volume(t)) })
	t.Run("user", func(t *testing.T) {
		if forkstest.AsUser(t, volume(t)) {
			testWaysAgree(t, volume(t))
		}
	})
}

func testWaysAgree(t *testing.T, dir string) {
	s := newScene(t, dir)
	base := s.capture(map[string]string{"a": "1", "b": "22", "d/a": "1", "d/b": "333", "d/e/a": "4", "f/a": "5"})
	a, since := s.side(base)
	defer a.close()
	rapid.Check(t, func(r *rapid.T) {
		s.ids++
		x, y := forks.Key(fmt.Sprint("x", s.ids)), forks.Key(fmt.Sprint("y", s.ids))
		ids := []forks.ID{base}
		for _, key := range []forks.Key{x, y} {
			tree := s.fork(key, base)
			for range rapid.IntRange(1, 8).Draw(r, "edits") {
				edit(r, tree)
			}
			id, _ := s.commit(key)
			if s.d.store.Exists(id) == nil {
				ids = append(ids, id)
			}
		}
		for _, i := range ids {
			for _, j := range ids {
				one, _ := s.side(i)
				two, _ := s.side(j)
				all := s.ways(one, two, since)
				assert.DeepEqual(r, all[0], all[2])
				assert.DeepEqual(r, all[1], all[2])
				one.close()
				two.close()
			}
		}
		assert.NilError(r, s.d.RemoveFork(t.Context(), x))
		assert.NilError(r, s.d.RemoveFork(t.Context(), y))
		for _, id := range ids[1:] {
			assert.NilError(r, s.d.RemoveSnapshot(t.Context(), id))
		}
	})
}

// A store into a page that is mapped and dirty changes no time. The snapshot
// has what was stored before it, and the next one what came after.
func TestMappedStores(t *testing.T) {
	s := newScene(t, volume(t))
	tree := s.fork(forks.Work, s.capture(map[string]string{"f": string(make([]byte, 64<<10))}))
	f, err := os.OpenFile(filepath.Join(tree, "f"), os.O_RDWR, 0)
	assert.NilError(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	assert.NilError(t, err)
	defer func() { assert.NilError(t, unix.Munmap(m)) }()
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // keeps the first page dirty all the time
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				m[i%4096] = byte(i)
			}
		}
	}()
	for i := range 20 {
		m[8192] = byte(i + 1)
		id, c := s.commit(forks.Work)
		assert.DeepEqual(t, lines(c.List), []string{"modified f"})
		b, err := os.ReadFile(filepath.Join(s.d.treePath(id), "f"))
		assert.NilError(t, err)
		assert.Equal(t, b[8192], byte(i+1))
	}
	close(stop)
	<-done
	id, _ := s.commit(forks.Work)
	if s.d.store.Exists(id) != nil { // nothing was left to commit
		at, err := s.d.Tree(forks.Work)
		assert.NilError(t, err)
		id = at.Base
	}
	b, err := os.ReadFile(filepath.Join(s.d.treePath(id), "f"))
	assert.NilError(t, err)
	assert.Assert(t, string(b) == string(m), "the last snapshot is not what the mapping has")
}

// A commit and a checkout take no longer in a large tree than in a small one.
func TestFlat(t *testing.T) {
	times := map[int][2]time.Duration{}
	for _, n := range []int{1000, 20000} {
		s := newScene(t, volume(t))
		src := filepath.Join(s.dir, "src")
		sh(t, s.dir, fmt.Sprintf(`mkdir src; cd src; for d in $(seq 0 99); do mkdir d$d; (cd d$d; seq -f f%%g %d | xargs touch); done`, n/100))
		first := s.captureAs(forks.Source{Dir: src}, "")
		tree := s.fork(forks.Work, first)
		best := [2]time.Duration{time.Hour, time.Hour}
		for i := range 7 {
			assert.NilError(t, os.WriteFile(filepath.Join(tree, "d7", "new"), fmt.Append(nil, i), 0o644))
			begin := time.Now()
			_, c := s.commit(forks.Work)
			best[0] = min(best[0], time.Since(begin))
			assert.Equal(t, len(c.List), 2-min(i, 1), "%v", lines(c.List))
		}
		second, err := s.d.Tree(forks.Work)
		assert.NilError(t, err)
		for i := range 6 {
			begin := time.Now()
			assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, []forks.ID{first, second.Base}[i%2]))
			best[1] = min(best[1], time.Since(begin))
		}
		times[n] = best
	}
	for i, what := range []string{"commit", "checkout"} {
		small, large := times[1000][i], times[20000][i]
		t.Logf("%s: %v with 1,000 files, %v with 20,000", what, small, large)
		assert.Assert(t, large < 4*small+20*time.Millisecond, "%s: %v, and %v with 20 times the files", what, small, large)
	}
}
