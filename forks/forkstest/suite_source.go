//go:build linux

package forkstest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// testSourceUntouched: capturing changes nothing, not even a ctime.
func testSourceUntouched(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, !withoutNamespaces())
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
		Equal(w, w.fork(key, id).read(), Read(w, src))
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
	dir := work.keep()
	stop := background(func(i int) {
		p := filepath.Join(dir, fmt.Sprintf("tmp.%d", i%7))
		_ = os.WriteFile(p, []byte("x"), 0o600)
		q := filepath.Join(dir, fmt.Sprintf("sub%d", i%5))
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
		_, err = w.d.Capture(w.ctx, w.id(), "", forks.Source{Dir: dir})
		assert.NilError(w, err)
	}
	stop()
	want := work.read()
	id := w.id()
	c, err := w.d.Commit(w.ctx, forks.Work, id, nil)
	assert.NilError(w, err)
	if len(c.List) == 0 {
		tree, err := w.d.Tree(forks.Work)
		assert.NilError(w, err)
		id = tree.Base
	}
	Equal(w, w.fork("k", id).read(), want)
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

	dir := work.keep()
	unmountWork := mount(dir)
	defer unmountWork()
	work.sh(`echo y >>f`)
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
	second := w.commit(forks.Work)
	assert.Equal(w, w.contents(second, "m/hidden"), "h")
	if work.mounted() {
		return // such a tree is unmounted, with all below it, before a checkout
	}
	if err = w.d.Checkout(w.ctx, forks.Work, id0); err != nil { // nothing at the mount points differs
		assert.ErrorContains(w, err, "is a mount point")
		shell(w, dir, `printf x >f`)
	}
	err = w.d.Checkout(w.ctx, forks.Work, id)
	assert.ErrorContains(w, err, ": is a mount point")
	assert.Equal(w, work.sh(`cat f m/in bind/theirs`), "xxt")
	assert.ErrorContains(w, w.d.RemoveFork(w.ctx, forks.Work), "unmount it first")
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
	assert.ErrorIs(w, err, forks.ErrUnkeepable)
	_, err = w.d.Capture(w.ctx, "aaaa", "", forks.Source{Dir: src, Exclude: []string{"zero"}})
	assert.NilError(w, err)
}
