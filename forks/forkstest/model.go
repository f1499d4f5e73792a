//go:build linux

package forkstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

// testRandom does random edits, commits, checkouts and forks and compares every
// state with a model: for each snapshot the tree as it was read when it was
// made, for each fork the snapshot that it must be told apart from.
func testRandom(w *world) {
	steps := 0
	rapid.Check(w.T, func(r *rapid.T) {
		steps++
		m := newModel(w, r, filepath.Join(w.dir, fmt.Sprint("run", steps)))
		defer m.close()
		for range rapid.IntRange(3, 14).Draw(r, "steps") {
			m.step(r)
		}
		m.all(r)
	})
}

type model struct {
	w     *world
	d     forks.Driver
	dir   string
	saved map[forks.ID]Manifest
	ids   []forks.ID
	forks []modelFork
}

type modelFork struct {
	key  forks.Key
	base forks.ID
}

func newModel(w *world, r *rapid.T, dir string) *model {
	d, err := w.b.Open(w.ctx, filepath.Join(dir, "store"))
	assert.NilError(r, err)
	src := filepath.Join(dir, "src")
	assert.NilError(r, os.MkdirAll(src, 0o755))
	m := &model{w: w, d: d, dir: dir, saved: map[forks.ID]Manifest{}}
	for range rapid.IntRange(0, 25).Draw(r, "first edits") {
		edit(r, src)
	}
	id := m.newID()
	_, err = d.Capture(w.ctx, id, "", forks.Source{Dir: src})
	assert.NilError(r, err)
	m.saved[id] = Read(w.T, src)
	m.fork(r, forks.Work, id)
	return m
}

func (m *model) close() {
	for _, f := range m.forks {
		_ = m.d.Detach(m.w.ctx, f.key) // where a test failed, anything may
	}
	_ = m.d.Close()
	_ = os.RemoveAll(m.dir)
}

func (m *model) newID() forks.ID {
	id := forks.ID(fmt.Sprintf("%04x", len(m.ids)+1))
	m.ids = append(m.ids, id)
	return id
}

func (m *model) fork(r *rapid.T, key forks.Key, id forks.ID) {
	plain := rapid.IntRange(0, 3).Draw(r, "plain") == 0
	tree, err := m.d.Fork(m.w.ctx, key, id, forks.ForkOptions{Plain: plain})
	assert.NilError(r, err)
	assert.Assert(r, !plain || tree.Mount.Overlay == nil)
	m.forks = append(m.forks, modelFork{key, id})
	m.equal(r, key, m.saved[id])
}

// in shows a fork while fn runs, and says whether it is mounted for that.
func (m *model) in(r *rapid.T, key forks.Key, fn func(dir string, mounted bool)) {
	tree, err := m.d.Tree(key)
	assert.NilError(r, err)
	dir, hide, err := show(m.w.ctx, m.d, key, filepath.Join(m.dir, "seen"))
	if errors.Is(err, errNoMounter) {
		m.w.Skip(err)
	}
	assert.NilError(r, err)
	defer func() { assert.NilError(r, hide()) }()
	fn(dir, tree.Mount.Overlay != nil)
}

func (m *model) read(r *rapid.T, key forks.Key) (now Manifest) {
	m.in(r, key, func(dir string, _ bool) { now = Read(m.w.T, dir) })
	return now
}

func (m *model) equal(r *rapid.T, key forks.Key, want Manifest) {
	got := m.read(r, key)
	if diff := Differences(want, got); len(diff) > 0 {
		r.Fatalf("%s is not what it was: %q\n want %s\n got  %s", key, diff, want[diff[0]], got[diff[0]])
	}
}

func (m *model) step(r *rapid.T) {
	f := &m.forks[rapid.IntRange(0, len(m.forks)-1).Draw(r, "fork")]
	var seen, now Manifest
	m.in(r, f.key, func(dir string, mounted bool) {
		edits := rapid.IntRange(0, 6).Draw(r, "edits")
		for range edits {
			edit(r, dir)
		}
		seen = Read(m.w.T, dir)
		if mounted && os.Geteuid() != 0 {
			seen = nil
		}
	})
	live := rapid.Bool().Draw(r, "live")
	m.in(r, f.key, func(dir string, _ bool) {
		now = Read(m.w.T, dir)
		if live {
			m.commit(r, f, now)
		}
	})
	m.equal(r, f.key, now)
	// A tree that was unmounted is as it was seen, but for this: in a user
	// namespace, where an overlay cannot remember inodes of lower files, a name
	// that is linked to one shows another inode than that until the tree is
	// mounted anew.
	if seen != nil {
		m.equal(r, f.key, seen)
	}
	switch rapid.IntRange(0, 6).Draw(r, "operation") {
	case 0, 1:
		m.commit(r, f, now)
	case 2:
		assert.NilError(r, m.d.Detach(m.w.ctx, f.key))
		m.equal(r, f.key, now)
		m.commit(r, f, now)
	case 3, 4:
		id := rapid.SampledFrom(m.ids).Draw(r, "id")
		assert.NilError(r, m.d.Checkout(m.w.ctx, f.key, id))
		f.base = id
		m.equal(r, f.key, m.saved[id])
		m.status(r, f, m.saved[id])
	case 5:
		if len(m.forks) < 4 {
			m.fork(r, forks.Key(fmt.Sprint("k", len(m.forks))), rapid.SampledFrom(m.ids).Draw(r, "id"))
		}
	case 6:
		_, err := m.d.Attach(m.w.ctx, f.key)
		if errors.Is(err, forks.ErrUnsupported) {
			return
		}
		assert.NilError(r, err)
		m.equal(r, f.key, now)
	}
}

// status compares what the driver says with the model.
func (m *model) status(r *rapid.T, f *modelFork, now Manifest) []string {
	c, err := m.d.Status(m.w.ctx, f.key)
	assert.NilError(r, err)
	var got []string
	for _, ch := range c.List {
		got = append(got, ch.Path)
	}
	want := Differences(m.saved[f.base], now)
	if !slices.Equal(got, want) {
		r.Fatalf("status of %s against %s: %q, want %q", f.key, f.base, got, want)
	}
	return want
}

func (m *model) commit(r *rapid.T, f *modelFork, now Manifest) {
	want := m.status(r, f, now)
	id := m.newID()
	c, err := m.d.Commit(m.w.ctx, f.key, id, nil)
	assert.NilError(r, err)
	var got []string
	for _, ch := range c.List {
		got = append(got, ch.Path)
	}
	if !slices.Equal(got, want) {
		r.Fatalf("commit of %s against %s: %q, want %q", f.key, f.base, got, want)
	}
	if len(want) == 0 {
		m.ids = m.ids[:len(m.ids)-1]
		return
	}
	m.saved[id] = now
	f.base = id
	m.status(r, f, now)
}

// all forks every snapshot and compares each with the one before.
func (m *model) all(r *rapid.T) {
	for i, id := range m.ids {
		key := forks.Key(fmt.Sprint("all", i))
		_, err := m.d.Fork(m.w.ctx, key, id, forks.ForkOptions{})
		assert.NilError(r, err)
		m.equal(r, key, m.saved[id])
		assert.NilError(r, m.d.RemoveFork(m.w.ctx, key))
		if i == 0 {
			continue
		}
		c, err := m.d.Diff(m.w.ctx, m.ids[i-1], id)
		assert.NilError(r, err)
		var got []string
		for _, ch := range c.List {
			got = append(got, ch.Path)
		}
		if want := Differences(m.saved[m.ids[i-1]], m.saved[id]); !slices.Equal(got, want) {
			r.Fatalf("diff of %s and %s: %q, want %q", m.ids[i-1], id, got, want)
		}
	}
}

// edit changes one thing below dir; what cannot be done is left.
func edit(r *rapid.T, dir string) {
	names := []string{"a", "b", "c", "d", "a-", "a.b"}
	depth := rapid.IntRange(1, 3).Draw(r, "depth")
	path := func() string {
		p := dir
		for range depth {
			p = filepath.Join(p, rapid.SampledFrom(names).Draw(r, "name"))
		}
		return p
	}
	p := path()
	switch rapid.SampledFrom(strings.Fields("write write append mkdir mkdir remove rename chmod symlink link link fifo time xattr same")).Draw(r, "edit") {
	case "write":
		put(p, os.O_CREATE|os.O_TRUNC, rapid.StringN(0, 20, -1).Draw(r, "content"))
	case "append":
		put(p, os.O_APPEND, "x")
	case "mkdir":
		_ = os.MkdirAll(p, 0o755)
	case "remove":
		// RemoveAll opens the parent, and would wait if that is a FIFO.
		if fi, err := os.Stat(filepath.Dir(p)); err == nil && fi.IsDir() {
			_ = os.RemoveAll(p)
		}
	case "rename":
		to := path()
		if err := os.Rename(p, to); errors.Is(err, unix.EXDEV) {
			// A directory of an overlay's lower layers: by a copy, as everybody does.
			_ = exec.Command("mv", "-T", p, to).Run()
		}
	case "chmod":
		if fi, err := os.Lstat(p); err == nil && fi.Mode()&os.ModeSymlink == 0 {
			_ = os.Chmod(p, os.FileMode(rapid.SampledFrom([]int{0o700, 0o755, 0o644, 0o750}).Draw(r, "mode"))|0o100*b2i(fi.IsDir()))
		}
	case "symlink":
		_ = os.Symlink(rapid.SampledFrom([]string{"a", "../b", "gone"}).Draw(r, "target"), p)
	case "link":
		_ = os.Link(p, path())
	case "fifo":
		_ = unix.Mkfifo(p, 0o600)
	case "time":
		ts := unix.NsecToTimespec(time.Unix(rapid.Int64Range(-1000, 1e9).Draw(r, "time"), 5).UnixNano())
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	case "xattr":
		_ = unix.Lsetxattr(p, "user.x", []byte(rapid.SampledFrom([]string{"1", "2"}).Draw(r, "value")), 0)
	case "same":
		sameTimes(p)
	}
}

// put writes to a regular file; opening a FIFO for writing would wait.
func put(p string, flags int, content string) {
	if f, err := os.OpenFile(p, flags|os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644); err == nil {
		_, _ = f.WriteString(content)
		_ = f.Close()
	}
}

func b2i(b bool) os.FileMode {
	if b {
		return 1
	}
	return 0
}

// sameTimes changes a file's first byte and nothing that stat shows but ctime.
func sameTimes(p string) {
	var st unix.Stat_t
	if unix.Lstat(p, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size == 0 {
		return
	}
	f, err := os.OpenFile(p, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer f.Close()
	var b [1]byte
	_, _ = f.ReadAt(b[:], 0)
	b[0] ^= 1
	_, _ = f.WriteAt(b[:], 0)
	ts := []unix.Timespec{st.Mtim, st.Mtim}
	_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, ts, 0)
}
