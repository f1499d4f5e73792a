//go:build linux

package forkstest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// testSourceUntouched: capturing changes nothing, not even a ctime.
func testSourceUntouched(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, true)
	stat := func() string {
		return shell(w, src, `find . -printf '%P %i %m %C@ %T@ %s %n\n' 2>/dev/null | sort || true`)
	}
	before := stat()
	id := w.capture(src)
	_, err := w.d.Capture(w.ctx, "aaaa", id, forks.Source{Dir: src})
	assert.NilError(w, err)
	assert.Equal(w, stat(), before)
}

// testSourceAgain: a directory is captured again upon its last snapshot.
func testSourceAgain(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, false)
	base := w.capture(src)
	edits := []string{
		``, `echo more >>plain; rm empty; rm -r names`, `mkdir -p names/new; echo x >names/new/f; ln three names/third`,
		`rm -r links; chmod 700 modes; echo same >times/ns; touch -d @1 times/ns`, `mv times moved`, `touch -d @77 plain`,
	}
	for i, edit := range edits {
		shell(w, src, edit)
		if i == 3 {
			w.open() // and by another process
		}
		id := w.id()
		c, err := w.d.Capture(w.ctx, id, base, forks.Source{Dir: src})
		assert.NilError(w, err)
		assert.Equal(w, len(c.List) == 0, edit == "", "%q: %v", edit, lines(c))
		d, err := w.d.Diff(w.ctx, base, id)
		assert.NilError(w, err)
		assert.DeepEqual(w, lines(d), lines(c))
		key := forks.Key(fmt.Sprint("k", i))
		Equal(w, Read(w, w.fork(key, id)), Read(w, src))
		assert.NilError(w, w.d.RemoveFork(w.ctx, key))
		base = id
	}
}

// testExclude: what is left out, by pattern, by path, and the store itself.
func testExclude(w *world) {
	Write(w, w.dir, map[string]string{"keep": "k", "a/cache/x": "x", "a/b.log": "l", "b.log": "l", "deep/only/f": "f", "skip/me": "s", "tmp/proc/f": "kept", "lock": "l"})
	id := w.id()
	_, err := w.d.Capture(w.ctx, id, "", forks.Source{
		Dir: w.dir, Exclude: []string{"cache", "*.log", "deep/*", "/nothing/"}, Skip: []string{filepath.Join(w.dir, "skip"), filepath.Join(w.dir, "lock")},
	})
	assert.NilError(w, err)
	v, err := w.d.View(w.ctx, id)
	assert.NilError(w, err)
	defer v.Close()
	var paths []string
	assert.NilError(w, v.Walk(func(e forks.Entry) error { paths = append(paths, e.Path); return nil }))
	assert.DeepEqual(w, paths, []string{".", "a", "deep", "keep", "tmp", "tmp/proc", "tmp/proc/f"})
	_, err = w.d.Capture(w.ctx, "ffff", "", forks.Source{Dir: w.dir, Exclude: []string{"[a"}})
	assert.ErrorContains(w, err, "[a")
}

// background runs fn again and again until the returned function is called.
func background(fn func(i int)) (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			default:
				fn(i)
			}
		}
	})
	return func() { close(end); wg.Wait() }
}

// testVanishing: paths come and go, and change their type, while they are read.
func testVanishing(w *world) {
	_, work := w.work(map[string]string{"steady": "s", "d/f": "x"})
	stop := background(func(i int) {
		p := filepath.Join(work, fmt.Sprintf("tmp.%d", i%7))
		_ = os.WriteFile(p, []byte("x"), 0o600)
		q := filepath.Join(work, fmt.Sprintf("sub%d", i%5))
		_ = os.Mkdir(q, 0o700)
		_ = os.WriteFile(filepath.Join(q, "f"), []byte("y"), 0o600)
		_ = os.RemoveAll(q)
		_ = os.Symlink("steady", q)
		_ = os.Remove(q)
		_ = os.Remove(p)
	})
	for range 30 {
		_, err := w.d.Status(w.ctx, forks.Work)
		assert.NilError(w, err)
		_, err = w.d.Commit(w.ctx, forks.Work, w.id(), nil)
		assert.NilError(w, err)
		_, err = w.d.Capture(w.ctx, w.id(), "", forks.Source{Dir: work})
		assert.NilError(w, err)
	}
	stop()
	want := Read(w, work)
	id := w.id()
	c, err := w.d.Commit(w.ctx, forks.Work, id, nil)
	assert.NilError(w, err)
	if len(c.List) == 0 {
		tree, err := w.d.Tree(forks.Work)
		assert.NilError(w, err)
		id = tree.Base
	}
	Equal(w, Read(w, w.fork("k", id)), want)
}

// testPlantedLinks: a directory became a symlink to somewhere else.
func testPlantedLinks(w *world) {
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"hosts": "theirs", "sub/f": "theirs"})
	untouched := Read(w, outside)
	id, work := w.work(map[string]string{"d/hosts": "ok", "d/sub/f": "ok", "e/x": "x"})
	want := Read(w, work)
	shell(w, work, `rm -r d e; ln -s `+outside+` d; ln -s `+outside+` e; ln -s `+outside+`/sub n`)
	edited := Read(w, work)
	second := w.commit(forks.Work)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, work), edited)
	shell(w, work, `rm d; mkdir d; ln -s `+outside+` d/sub`)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
	shell(w, work, `rm -r d; ln -s `+outside+` d`)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	Equal(w, Read(w, outside), untouched)
}

// testSwapping: a directory and a symlink change places all the time.
func testSwapping(w *world) {
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"hosts": "theirs", "sub/f": "theirs"})
	untouched := Read(w, outside)
	id, work := w.work(map[string]string{"d/hosts": "ok", "d/sub/f": "ok"})
	link, dir := filepath.Join(work, "link"), filepath.Join(work, "d")
	assert.NilError(w, os.Symlink(outside, link))
	stop := background(func(int) { _ = unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE) })
	for range 20 {
		// The tree moves under the driver's hands, so that it may fail; it must
		// not touch what is outside.
		_ = w.d.Checkout(w.ctx, forks.Work, id)
		_, _ = w.d.Status(w.ctx, forks.Work)
		_, _ = w.d.Commit(w.ctx, forks.Work, w.id(), nil)
		_ = os.Symlink(outside, link)
		_ = os.WriteFile(filepath.Join(dir, "hosts2"), []byte("x"), 0o644)
		_ = os.Remove(filepath.Join(outside, "hosts2"))
	}
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	stop()
	_ = os.Remove(filepath.Join(outside, "hosts2"))
	got := Read(w, outside)
	untouched["."], got["."] = "", "" // this test itself wrote there
	Equal(w, got, untouched)
}

// testMounts: what other file systems hold below a tree is neither taken in nor
// touched, and is named.
func testMounts(w *world) {
	if os.Geteuid() != 0 {
		w.Skip("mounting needs root")
	}
	src := w.src(map[string]string{"m/hidden": "h", "bind/": "", "f": "x"})
	foreign := filepath.Join(w.dir, "foreign")
	Write(w, foreign, map[string]string{"theirs": "t"})
	id0 := w.capture(src)
	work := w.fork(forks.Work, id0)
	mount := func(dir string) func() {
		assert.NilError(w, unix.Mount("t", filepath.Join(dir, "m"), "tmpfs", 0, ""))
		Write(w, filepath.Join(dir, "m"), map[string]string{"in": "x"})
		assert.NilError(w, unix.Mount(foreign, filepath.Join(dir, "bind"), "", unix.MS_BIND, ""))
		return func() {
			_ = unix.Unmount(filepath.Join(dir, "m"), unix.MNT_DETACH)
			_ = unix.Unmount(filepath.Join(dir, "bind"), unix.MNT_DETACH)
		}
	}
	unmount := mount(src)
	defer unmount()
	id := w.id()
	c, err := w.d.Capture(w.ctx, id, "", forks.Source{Dir: src})
	assert.NilError(w, err)
	assert.Equal(w, len(c.Warnings), 2, "%v", c.Warnings)
	for _, m := range []string{"m", "bind"} {
		assert.Assert(w, strings.Contains(strings.Join(c.Warnings, "\n"), m+": is a mount point"))
	}
	all := w.id()
	_, err = w.d.Capture(w.ctx, all, "", forks.Source{Dir: src, CrossFilesystems: true})
	assert.NilError(w, err)
	assert.Equal(w, w.contents(all, "m/in"), "x")
	assert.Equal(w, w.contents(all, "bind/theirs"), "t")
	v, err := w.d.View(w.ctx, id)
	assert.NilError(w, err)
	_, err = v.Lookup("m/in")
	assert.ErrorIs(w, err, forks.ErrNotFound)

	unmountWork := mount(work)
	defer unmountWork()
	shell(w, work, `echo y >>f`)
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
	second := w.commit(forks.Work)
	assert.Equal(w, w.contents(second, "m/hidden"), "h")
	w.checkout(forks.Work, id0) // nothing at the mount points differs
	err = w.d.Checkout(w.ctx, forks.Work, id)
	assert.ErrorContains(w, err, ": is a mount point")
	assert.Equal(w, shell(w, work, `cat f m/in bind/theirs`), "xxt")
	assert.ErrorContains(w, w.d.RemoveFork(w.ctx, forks.Work), "mount point")
	assert.Equal(w, shell(w, foreign, `cat theirs`), "t")
	shell(w, w.dir, `grep " $PWD/store/" /proc/mounts | cut -d" " -f2 | xargs -r umount`)
	_, err = w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, shell(w, foreign, `cat theirs`), "t")
}

// testForeignFile: a file that the caller may not read is named.
func testForeignFile(w *world) {
	if os.Geteuid() == 0 {
		w.Skip("root reads everything; the run as an ordinary user has this test")
	}
	src := w.src(map[string]string{"f": "x"})
	if exec.Command("cp", "-a", "/etc/shadow", src).Run() == nil {
		w.Fatal("an ordinary user could read /etc/shadow")
	}
	// A directory of root's, seen through a source that holds it.
	_, err := w.d.Capture(w.ctx, "aaaa", "", forks.Source{Dir: "/proc/1", Exclude: []string{"task", "net", "map_files"}})
	assert.ErrorContains(w, err, "/proc/1/")
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, len(ids), 0)
}

// testWhiteout: a real 0/0 character device is refused by name.
func testWhiteout(w *world) {
	src := w.src(map[string]string{"f": "x", "d/": ""})
	if err := unix.Mknod(filepath.Join(src, "d/zero"), unix.S_IFCHR|0o600, 0); err != nil {
		w.Skip("a 0/0 character device cannot be made here: ", err)
	}
	_, err := w.d.Capture(w.ctx, "aaaa", "", forks.Source{Dir: src})
	assert.ErrorContains(w, err, "d/zero")
	_, err = w.d.Capture(w.ctx, "aaaa", "", forks.Source{Dir: src, Exclude: []string{"zero"}})
	assert.NilError(w, err)
}

// testRemoveSnapshot: what others build upon stays until the last of them goes.
func testRemoveSnapshot(w *world) {
	a, work := w.work(map[string]string{"f": "1", "g": "1"})
	var ids []forks.ID
	var trees []Manifest
	for i := range 6 {
		shell(w, work, fmt.Sprintf("echo %d >>f; touch new%d", i, i))
		trees = append(trees, Read(w, work))
		ids = append(ids, w.commit(forks.Work))
	}
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, a))
	for _, i := range []int{0, 2, 4} {
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, ids[i]))
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, ids[i]))
	}
	left, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, left, []forks.ID{ids[1], ids[3], ids[5]})
	_, err = w.d.View(w.ctx, ids[0])
	assert.ErrorIs(w, err, forks.ErrNotFound)
	for _, i := range []int{1, 3, 5, 1} {
		w.checkout(forks.Work, ids[i])
		Equal(w, Read(w, work), trees[i])
	}
	w.open()
	for _, i := range []int{5, 3, 1} {
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, ids[i]))
	}
	w.clean(forks.Work) // its base is still there for it
	shell(w, work, `echo more >>g`)
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified g"})
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	w.empty()
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
	shell(w, work, `echo 2 >edit; rm gone; rm -r d; mkdir -p n/m; echo new >n/m/f; ln n/m/f n/link; ln -s edit l; rm type; mkdir type; echo in >type/f; chmod 755 run`)
	want := Read(w, work)
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

// testTextBusy: programs in forks start while other forks are being made.
func testTextBusy(w *world) {
	src := w.src(nil)
	program, err := exec.LookPath("true")
	assert.NilError(w, err)
	shell(w, src, `for i in 1 2 3 4 5 6 7 8; do cp `+program+` tool$i; done; printf '#!/bin/sh\n' >script; chmod 755 script`)
	id := w.capture(src)
	var wg sync.WaitGroup
	failures := make(chan error, 1000)
	for g := range 4 {
		wg.Go(func() {
			for i := range 8 {
				key := forks.Key(fmt.Sprintf("k%d-%d", g, i))
				tree, err := w.d.Fork(w.ctx, key, id, forks.ForkOptions{})
				if err != nil {
					failures <- err
					return
				}
				for _, tool := range []string{"tool1", "tool8", "script"} {
					if err := exec.Command(filepath.Join(tree.Mount.Dir, tool)).Run(); err != nil {
						failures <- err
					}
				}
				if err := w.d.RemoveFork(w.ctx, key); err != nil {
					failures <- err
				}
			}
		})
	}
	wg.Wait()
	close(failures)
	for err := range failures {
		w.Error(err)
	}
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
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	assert.Equal(w, shell(w, w.store(), `ls tmp nodes forks | grep -v : | grep . || true`), "")
}

// testReopen: another process finds everything as it was left.
func testReopen(w *world) {
	a, work := w.work(map[string]string{"f": "1"})
	shell(w, work, `echo 2 >f`)
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
	assert.Equal(w, tree.Mount.Dir, work)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, ids, []forks.ID{a, b})
	keys, err := w.d.Forks(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, keys, []forks.Key{forks.Work, "k"})
}
