//go:build linux

package forkstest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// testErrors: each failure is an Error of the right kind, and changes nothing.
func testErrors(w *world) {
	id, work := w.work(map[string]string{"f": "x"})
	want := work.read()
	check := func(err error, target error) {
		w.Helper()
		var fe *forks.Error
		assert.Assert(w, errors.As(err, &fe), "%v is no *forks.Error", err)
		assert.ErrorIs(w, err, target)
		assert.Assert(w, !strings.Contains(err.Error(), "\n"))
	}
	_, err := w.d.Capture(w.ctx, "ffff", "", forks.Source{Dir: filepath.Join(w.dir, "gone")})
	check(err, os.ErrNotExist)
	_, err = w.d.Capture(w.ctx, "ffff", "", forks.Source{Dir: filepath.Join(w.dir, "src", "f")})
	assert.ErrorContains(w, err, "not a directory")
	_, err = w.d.Capture(w.ctx, id, "", forks.Source{Dir: filepath.Join(w.dir, "src")})
	check(err, forks.ErrExists)
	_, err = w.d.Capture(w.ctx, "ffff", "eeee", forks.Source{Dir: filepath.Join(w.dir, "src")})
	check(err, forks.ErrNotFound)
	_, err = w.d.Fork(w.ctx, forks.Work, id, forks.ForkOptions{})
	check(err, forks.ErrExists)
	_, err = w.d.Fork(w.ctx, "k", "eeee", forks.ForkOptions{})
	check(err, forks.ErrNotFound)
	_, err = w.d.Tree("k")
	check(err, forks.ErrNotFound)
	_, err = w.d.Status(w.ctx, "k")
	check(err, forks.ErrNotFound)
	_, err = w.d.Commit(w.ctx, "k", "ffff", nil)
	check(err, forks.ErrNotFound)
	check(w.d.Checkout(w.ctx, "k", id), forks.ErrNotFound)
	check(w.d.Checkout(w.ctx, forks.Work, "eeee"), forks.ErrNotFound)
	_, err = w.d.View(w.ctx, "eeee")
	check(err, forks.ErrNotFound)
	_, err = w.d.Diff(w.ctx, id, "eeee")
	check(err, forks.ErrNotFound)
	assert.NilError(w, w.d.RemoveFork(w.ctx, "k"))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, "eeee"))
	Equal(w, work.read(), want)
	w.clean(forks.Work)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, ids, []forks.ID{id})
}

// testNames: ids and keys lead nowhere.
func testNames(w *world) {
	id, _ := w.work(map[string]string{"f": "x"})
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"keep": "x"})
	for _, bad := range []string{"", "..", "../../outside", "a/b", "/etc", "-rf", "A", "x\x00", ".hidden", strings.Repeat("a", 300)} {
		_, err := w.d.Fork(w.ctx, forks.Key(bad), id, forks.ForkOptions{})
		assert.Assert(w, err != nil || bad == "-rf", "%q", bad)
		if bad != "a" {
			_, err = w.d.Capture(w.ctx, forks.ID(bad), "", forks.Source{Dir: outside})
			assert.Assert(w, err != nil, "%q", bad)
		}
		_, err = w.d.Tree(forks.Key(bad))
		assert.Assert(w, err != nil || bad == "-rf", "%q", bad)
		assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Key(bad)))
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, forks.ID(bad)))
	}
	_, err := os.Stat(filepath.Join(outside, "keep"))
	assert.NilError(w, err)
}

// testStatusExact: Status, Commit and Diff tell exactly what changed.
func testStatusExact(w *world) {
	a, work := w.work(map[string]string{"same": "s", "edit": "1", "mode": "m", "gone": "g", "d/x": "x", "d/y/z": "z", "type": "t"})
	work.sh(`echo 22 >edit; chmod 600 mode; rm gone; rm -r d/y; rm type; mkdir type; echo n >type/in; ln -s x new; touch -d @1 .; touch -d @1 d`)
	want := []string{"modified .", "modified d", "removed d/y", "removed d/y/z", "modified edit", "removed gone", "modified mode", "added new", "type type", "added type/in"}
	assert.DeepEqual(w, w.status(forks.Work), want)
	assert.DeepEqual(w, w.status(forks.Work), want)
	b := w.id()
	c, err := w.d.Commit(w.ctx, forks.Work, b, nil)
	assert.NilError(w, err)
	assert.DeepEqual(w, lines(c), want)
	for _, ch := range c.List {
		assert.Equal(w, ch.Old == nil, ch.Kind == forks.Added)
		assert.Equal(w, ch.New == nil, ch.Kind == forks.Removed)
	}
	w.clean(forks.Work)
	c, err = w.d.Diff(w.ctx, a, b)
	assert.NilError(w, err)
	assert.DeepEqual(w, lines(c), want)
	c, err = w.d.Diff(w.ctx, b, a)
	assert.NilError(w, err)
	assert.Equal(w, len(c.List), len(want))
}

// testNoChange: a commit without changes makes nothing, also where times of
// inodes moved but nothing else did.
func testNoChange(w *world) {
	_, work := w.work(map[string]string{"f": "x", "d/g": "y"})
	work.sh(`t=$(stat -c %y .); chmod 600 f; chmod 644 f; ln d/g h; rm h; touch -d "$t" .`)
	w.clean(forks.Work)
	c, err := w.d.Commit(w.ctx, forks.Work, "bbbb", nil)
	assert.NilError(w, err)
	assert.Equal(w, len(c.List), 0)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	for _, id := range ids {
		assert.Assert(w, id != "bbbb")
	}
}

// testSameTimes: an edit that leaves size and mtime as they were, made at once
// after a commit, is seen.
func testSameTimes(w *world) {
	_, work := w.work(map[string]string{"f": "0000"})
	put := func(dir, text string) {
		path := filepath.Join(dir, "f")
		assert.NilError(w, os.WriteFile(path, []byte(text), 0o644))
		setTime(w, path, time.Unix(1600000000, 0))
	}
	for i := range 8 {
		dir := work.keep()
		put(dir, fmt.Sprintf("%04d", 2*i+1))
		id := w.commit(forks.Work)
		put(dir, fmt.Sprintf("%04d", 2*i+2))
		assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
		work.leave()
		assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
		w.checkout(forks.Work, id)
		work.in(func(dir string) { put(dir, "xxxx") })
		assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
	}
}

// testMmap: a store through a mapping that was written to before the commit.
func testMmap(w *world) {
	_, work := w.work(map[string]string{"f": strings.Repeat("a", 64<<10)})
	f, err := os.OpenFile(filepath.Join(work.keep(), "f"), os.O_RDWR, 0)
	assert.NilError(w, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	assert.NilError(w, err)
	defer func() { assert.NilError(w, unix.Munmap(m)) }()
	for i := range 3 {
		m[0], m[20000] = byte('b'+i), byte('b'+i)
		id := w.commit(forks.Work)
		time.Sleep(20 * time.Millisecond)
		m[1], m[30000] = byte('c'+i), byte('c'+i)
		assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
		second := w.commit(forks.Work)
		assert.Assert(w, w.contents(id, "f") != w.contents(second, "f"))
		assert.Equal(w, w.contents(second, "f"), string(m))
	}
}

// testView: a snapshot read without a fork.
func testView(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, false)
	id := w.capture(src)
	v, err := w.d.View(w.ctx, id)
	assert.NilError(w, err)
	defer v.Close()
	want := Read(w, src)
	seen := map[string]bool{}
	last := ""
	assert.NilError(w, v.Walk(func(e forks.Entry) error {
		seen[e.Path] = true
		assert.Assert(w, want[e.Path] != "", "%q is not in the tree", e.Path)
		head := fmt.Sprintf("%o %d:%d %d.%09d ", e.Mode, e.UID, e.GID, e.Mtime.Unix(), e.Mtime.Nanosecond())
		assert.Assert(w, strings.HasPrefix(want[e.Path], head), "%q: %s, want %s", e.Path, head, want[e.Path])
		parent := filepath.Dir(e.Path)
		assert.Assert(w, e.Path == "." || seen[parent], "%q comes before its parent", e.Path)
		last = e.Path
		return nil
	}))
	assert.Equal(w, len(seen), len(want), "%s", last)
	count := 0
	assert.NilError(w, v.Walk(func(e forks.Entry) error {
		count++
		if e.Path == "." {
			return nil
		}
		return forks.SkipDir
	}))
	top, err := os.ReadDir(src)
	assert.NilError(w, err)
	assert.Equal(w, count, len(top)+1)
	stop := errors.New("stop")
	assert.ErrorIs(w, v.Walk(func(forks.Entry) error { return stop }), stop)
	f, err := v.Open("plain")
	assert.NilError(w, err)
	defer f.Close()
	_, err = f.Seek(2, io.SeekStart)
	assert.NilError(w, err)
	b, err := io.ReadAll(f)
	assert.NilError(w, err)
	assert.Equal(w, string(b), "ain")
	one, err := v.Lookup("links/a/one")
	assert.NilError(w, err)
	three, err := v.Lookup("three")
	assert.NilError(w, err)
	assert.Assert(w, one.Link != 0 && one.Link == three.Link)
	_, err = v.Lookup("plain/x")
	assert.ErrorIs(w, err, forks.ErrNotFound)
	for _, path := range []string{"pipe", "names", "abs"} {
		_, err = v.Open(path)
		assert.Assert(w, err != nil, "%s was opened", path)
	}
}

// testApply: what changed goes to another directory, or nothing does.
func testApply(w *world) {
	files := map[string]string{"edit": "1", "gone": "g", "d/x": "x", "d/y": "y", "same": "s", "type": "t", "run": "#!/bin/sh\n"}
	a, work := w.work(files)
	work.sh(`echo 2 >edit; rm gone; rm -r d; mkdir -p n/m; echo new >n/m/f; ln n/m/f n/link; ln -s edit l; rm type; mkdir type; echo in >type/f; chmod 755 run`)
	want := work.read()
	b := w.commit(forks.Work)
	target := filepath.Join(w.dir, "src")
	apply := func(o forks.ApplyOptions) forks.ApplyResult {
		w.Helper()
		r, err := w.d.Apply(w.ctx, a, b, target, o)
		assert.NilError(w, err)
		return r
	}
	before := Read(w, target)
	r := apply(forks.ApplyOptions{Check: true})
	assert.Equal(w, len(r.Conflicts), 0, "%v", r.Conflicts)
	assert.Assert(w, len(r.Applied) >= 10, "%v", r.Applied)
	Equal(w, Read(w, target), before)

	shell(w, target, `echo theirs >edit; echo mine >n`)
	conflicted := Read(w, target)
	r = apply(forks.ApplyOptions{})
	assert.DeepEqual(w, r.Conflicts, []string{"edit", "n", "n/link", "n/m", "n/m/f"})
	assert.Equal(w, len(r.Applied), 0)
	Equal(w, Read(w, target), conflicted)

	shell(w, target, `printf 1 >edit; rm n; touch d/untracked`)
	r = apply(forks.ApplyOptions{Skip: func(p string) bool { return p == "run" }})
	assert.Equal(w, len(r.Conflicts), 0, "%v", r.Conflicts)
	assert.Equal(w, len(r.Warnings), 1, "%v", r.Warnings)
	shell(w, target, `test ! -x run; rm -r d`)
	apply(forks.ApplyOptions{})
	got := Read(w, target)
	got["."], want["."] = "", "" // the times of directories that both sides wrote to
	Equal(w, got, want)
	r = apply(forks.ApplyOptions{})
	assert.Equal(w, len(r.Applied)+len(r.Conflicts), 0, "%v", r)

	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"m/f": "theirs"})
	untouched := Read(w, outside)
	shell(w, target, `rm -r n; ln -s `+outside+` n`)
	r = apply(forks.ApplyOptions{})
	assert.Assert(w, len(r.Conflicts) > 0)
	Equal(w, Read(w, outside), untouched)
}

// cancelWork ends a checkout and a commit on their way.
func (w *world) cancelWork(id forks.ID) {
	w.Helper()
	work := w.fork(forks.Work, id)
	want := work.read()
	edit := `rm -r d1 d2; for i in 3 4 5; do echo more >>d$i/f$i; mkdir d$i/new; done; touch -d @1000 .`
	for i := range 8 {
		work.sh(edit)
		edited := work.read()
		ctx, cancel := context.WithTimeout(w.ctx, time.Duration(i)*time.Millisecond)
		_, err := w.d.Commit(ctx, forks.Work, "bbbb", nil)
		cancel()
		Equal(w, work.read(), edited)
		if err == nil {
			w.clean(forks.Work)
		} else {
			assert.Assert(w, len(w.status(forks.Work)) > 0)
		}
		ctx, cancel = context.WithTimeout(w.ctx, time.Duration(i)*time.Millisecond)
		failed := w.d.Checkout(ctx, forks.Work, id)
		cancel()
		if f, e := w.d.Tree(forks.Work); failed != nil && e == nil && !f.Interrupted {
			Equal(w, work.read(), edited)
		}
		w.checkout(forks.Work, id)
		Equal(w, work.read(), want)
		if err == nil {
			assert.NilError(w, w.d.RemoveSnapshot(w.ctx, "bbbb"))
		}
	}
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
}

// testReopen: another process finds everything as it was left.
func testReopen(w *world) {
	a, work := w.work(map[string]string{"f": "1"})
	place, err := w.d.Tree(forks.Work)
	assert.NilError(w, err)
	work.sh(`echo 2 >f`)
	w.open()
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
	b := w.commit(forks.Work)
	w.fork("k", a)
	w.open()
	w.clean(forks.Work)
	w.clean("k")
	tree, err := w.d.Tree(forks.Work)
	assert.NilError(w, err)
	assert.Equal(w, tree.Base, b)
	assert.Equal(w, tree.Mount.Dir, place.Mount.Dir)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, ids, []forks.ID{a, b})
	keys, err := w.d.Forks(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, keys, []forks.Key{forks.Work, "k"})
}

// testCancel: a context that ends leaves nothing behind.
func testCancel(w *world) {
	files := map[string]string{}
	for i := range 300 {
		files[fmt.Sprintf("d%d/f%d", i%30, i)] = strings.Repeat("x", 5000)
	}
	src := w.src(files)
	for i := range 8 {
		ctx, cancel := context.WithTimeout(w.ctx, time.Duration(i)*time.Millisecond)
		_, err := w.d.Capture(ctx, "aaaa", "", forks.Source{Dir: src})
		cancel()
		if err == nil {
			assert.NilError(w, w.d.RemoveSnapshot(w.ctx, "aaaa"))
		} else {
			assert.ErrorIs(w, err, context.DeadlineExceeded)
		}
	}
	id := w.capture(src)
	for i := range 8 {
		ctx, cancel := context.WithTimeout(w.ctx, time.Duration(i)*time.Millisecond)
		_, err := w.d.Fork(ctx, "k", id, forks.ForkOptions{})
		cancel()
		if err == nil {
			assert.NilError(w, w.d.RemoveFork(w.ctx, "k"))
		}
	}
	w.cancelWork(id)
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	assert.Equal(w, shell(w, w.store(), `ls tmp nodes forks | grep -v : | grep . || true`), "")
}
