//go:build linux

package forkstest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// testFidelity: every property survives capture, fork, commit and checkout.
func testFidelity(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, false)
	want := Read(w, src)
	first := w.capture(src)
	work := w.fork(forks.Work, first)
	Equal(w, work.read(), want)
	w.clean(forks.Work)
	assert.Assert(w, allocated(w, w.dir) < 64<<20, "the sparse file became dense")

	work.sh(`chmod -R u+rwX . && find . -mindepth 1 -maxdepth 1 -exec rm -rf {} + && echo other >plain && touch -d @5 .`)
	emptied := work.read()
	second := w.commit(forks.Work)
	w.checkout(forks.Work, first)
	Equal(w, work.read(), want)
	w.clean(forks.Work)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), emptied)
	w.checkout(forks.Work, first)
	Equal(w, work.read(), want)
	Equal(w, w.fork("again", first).read(), want)
	Equal(w, w.fork("other", second).read(), emptied)

	// What an edit inside everything leaves is stored and restored as well.
	work.sh(`for f in $(find . -type f -name '[a-z]*' -size -100k ! -name 'ln*' | head -20); do echo more >>"$f" || true; done; mkdir -p n/e; ln -f three n/four; mv links moved; chmod 700 modes`)
	edited := work.read()
	third := w.commit(forks.Work)
	w.clean(forks.Work)
	Equal(w, w.fork("third", third).read(), edited)
	w.checkout(forks.Work, first)
	Equal(w, work.read(), want)
	for _, key := range []forks.Key{"again", "other", "third", forks.Work} {
		assert.NilError(w, w.d.RemoveFork(w.ctx, key))
	}
}

// testUmask: neither the umask nor a default ACL above the store shows.
func testUmask(w *world) {
	if hasTool("setfacl") {
		shell(w, w.dir, fmt.Sprintf(`setfacl -m d:u:%d:rwX,d:o::--- . 2>/dev/null || true`, aclUser()))
	}
	src := filepath.Join(w.dir, "src")
	assert.NilError(w, os.Mkdir(src, 0o755))
	if hasTool("setfacl") {
		shell(w, src, `setfacl -b -k .`)
	}
	Write(w, src, map[string]string{"a/b": "x", "exec": "x"})
	shell(w, src, `chmod 777 a; chmod 666 a/b; chmod 755 exec; ln -s x l`)
	want := Read(w, src)
	withUmask(0o077, func() {
		id := w.capture(src)
		work := w.fork(forks.Work, id)
		Equal(w, work.read(), want)
		work.sh(`rm -r a exec`)
		w.commit(forks.Work)
		w.checkout(forks.Work, id)
		Equal(w, work.read(), want)
	})
	fi, err := os.Stat(w.store())
	assert.NilError(w, err)
	assert.Equal(w, fi.Mode().Perm(), os.FileMode(0o700))
}

func testEmpty(w *world) {
	src := w.src(nil)
	want := Read(w, src)
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	Equal(w, work.read(), want)
	w.clean(forks.Work)
	work.sh(`echo x >f`)
	w.commit(forks.Work)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
}

// testHardLinks: groups are kept as they change, and stay within one tree.
func testHardLinks(w *world) {
	src := w.src(map[string]string{"a/one": "v1", "b/": "", "single": "s"})
	shell(w, src, `ln a/one b/two; ln a/one three`)
	first := w.capture(src)
	work := w.fork(forks.Work, first)
	states := []struct{ script string }{
		{`echo v2 >>b/two`}, {`ln three four`}, {`rm a/one`}, {`cp three t; mv t three`}, {`ln single b/single; rm four`},
		{`mv single moved`}, {`rm -r b; touch x`}, {`ln x y; ln moved z; ln -f x three`}, {`ln -f z x`},
	}
	ids, trees := []forks.ID{first}, []Manifest{work.read()}
	for _, s := range states {
		work.sh(s.script)
		trees = append(trees, work.read())
		ids = append(ids, w.commit(forks.Work))
		w.clean(forks.Work)
	}
	for i := range ids {
		for _, j := range []int{(i + 1) % len(ids), (i + 4) % len(ids)} {
			w.checkout(forks.Work, ids[i])
			w.checkout(forks.Work, ids[j])
			Equal(w, work.read(), trees[j])
			w.clean(forks.Work)
		}
		Equal(w, w.fork(forks.Key(fmt.Sprint("f", i)), ids[i]).read(), trees[i])
	}
	w.checkout(forks.Work, first)
	assert.Equal(w, work.sh(`stat -c %h three`), "3\n")
}

func testReadOnlyDirs(w *world) {
	src := w.src(map[string]string{"d/f": "x", "d/sub/g": "y"})
	shell(w, src, `chmod 555 d/sub d`)
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	want := work.read()
	work.sh(`chmod 755 d; rm d/f; echo new >d/n; chmod 755 d/sub; echo z >d/sub/g; chmod 555 d/sub d`)
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified d", "removed d/f", "added d/n", "modified d/sub/g"})
	second := w.commit(forks.Work)
	edited := work.read()
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), edited)
	work.sh(`chmod 755 d d/sub; rm -r d; echo file >d`)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), edited)
	work.sh(`mkdir -p new/ro/deep; echo x >new/ro/deep/f; chmod 555 new/ro/deep new/ro new`)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), edited)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
}

// testUnreadable: modes that forbid even the owner to look.
func testUnreadable(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, true)
	if withoutNamespaces() {
		_, err := w.d.Capture(w.ctx, w.id(), "", forks.Source{Dir: src})
		assert.ErrorContains(w, err, "modes/")
		w.Skip("what even its owner may not read is read in a user namespace: ", os.Getenv(noMounter))
	}
	want := Read(w, src)
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	Equal(w, work.read(), want)
	assert.Equal(w, w.contents(id, "modes/d000/sub/f"), "secret")
	w.clean(forks.Work)
	work.sh(`chmod 700 modes/d000; echo changed >modes/d000/sub/f; echo n >modes/d000/new; chmod 000 modes/d000; mkdir -p x/y; chmod 000 x/y`)
	edited := work.read()
	second := w.commit(forks.Work)
	Equal(w, work.read(), edited)
	assert.Equal(w, w.contents(second, "modes/d000/sub/f"), "changed\n")
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	work.sh(`chmod 700 modes/d000; cat modes/d000/sub/f | grep -x secret; test ! -e modes/d000/new`)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), edited)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, second))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	w.empty()
}

// testSparse: a write in the middle of a file that is nearly all holes costs
// what was written, in the tree, in the store and in each fork.
func testSparse(w *world) {
	src := w.src(nil)
	sparse(w, filepath.Join(src, "image"))
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	want := work.read()
	for i := range 3 {
		work.sh(fmt.Sprintf(`printf middle%d | dd of=image bs=1 seek=%d conv=notrunc 2>/dev/null`, i, (i+1)*100<<20))
		w.commit(forks.Work)
	}
	edited := work.read()
	read := `dd if=image bs=1 skip=$((100<<20)) count=7 2>/dev/null; tail -c 4 image; head -c 4 image`
	assert.Equal(w, work.sh(read), "middle0tailhead")
	tree, err := w.d.Tree(forks.Work)
	assert.NilError(w, err)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	last := w.fork("last", tree.Base)
	Equal(w, last.read(), edited)
	assert.Equal(w, last.sh(read), "middle0tailhead")
	assert.Assert(w, allocated(w, w.dir) < 16<<20, "the sparse file became dense")
}

// testLongNames: names as long as names can be, of everything, changed and
// restored.
func testLongNames(w *world) {
	src := w.src(nil)
	names := []string{strings.Repeat("n", 243), strings.Repeat("n", 250), strings.Repeat("n", 255), strings.Repeat("é", 127) + "e"}
	files := map[string]string{}
	for _, n := range names {
		files[n] = "x"
		files["d/"+n+"/"+n] = "y"
		files["e/"+n+"/"] = ""
	}
	Write(w, src, files)
	for _, n := range names {
		assert.NilError(w, os.Symlink(n, filepath.Join(src, "e", n, n)))
	}
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	want := work.read()
	Equal(w, want, Read(w, src))
	work.sh(`for f in nnn* é*; do echo more >>"$f"; done; for d in d/*; do rm -r "$d"; echo file >"$d"; done; for l in e/*/*; do rm "$l"; mkdir "$l"; touch "$l/in"; done`)
	edited := work.read()
	second := w.commit(forks.Work)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), edited)
	w.clean(forks.Work)
}

// testOverlayMarks: a tree with the attributes that an overlay keeps for itself
// is either stored as it is or not without a word; in no case do they act.
func testOverlayMarks(w *world) {
	src := w.src(map[string]string{"d/f": "x", "e/g": "y", "w": ""})
	for path, name := range map[string]string{"d": "user.overlay.opaque", "e": "user.overlay.redirect", "w": "user.overlay.whiteout"} {
		if err := unix.Setxattr(filepath.Join(src, path), name, []byte("y"), 0); err != nil {
			w.Skip("no user attributes on this file system")
		}
	}
	id := w.id()
	c, err := w.d.Capture(w.ctx, id, "", forks.Source{Dir: src})
	if err != nil {
		assert.ErrorContains(w, err, "user.overlay.")
		return
	}
	work := w.fork(forks.Work, id)
	got := work.read()
	if len(Differences(Read(w, src), got)) > 0 {
		assert.Assert(w, strings.Contains(strings.Join(c.Warnings, "\n"), "user.overlay."), "%v", c.Warnings)
	}
	assert.Equal(w, work.sh(`cat d/f e/g; test -f w`), "xy")
	w.clean(forks.Work)
	work.sh(`echo 1 >d/n; echo 2 >e/n; echo 3 >w`)
	second := w.commit(forks.Work)
	assert.Equal(w, w.fork("k", second).sh(`cat d/f e/g w d/n`), "xy3\n1\n")
}
