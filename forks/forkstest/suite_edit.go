//go:build linux

package forkstest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// shell runs a script in dir.
func shell(t testing.TB, dir, script string) string {
	t.Helper()
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, "%s\n%s", script, out)
	return string(out)
}

func hasTool(name string) bool {
	_, err := exec.LookPath(name)
	return err == nil
}

func withUmask(mask int, fn func()) {
	old := syscall.Umask(mask)
	defer syscall.Umask(old)
	fn()
}

// allocated is what du says of dir.
func allocated(t testing.TB, dir string) int64 {
	t.Helper()
	var kib int64
	_, err := fmt.Sscan(shell(t, dir, "du -sk . | cut -f1"), &kib)
	assert.NilError(t, err)
	return kib << 10
}

// testSameTimes: an edit that leaves size and mtime as they were, made at once
// after a commit, is seen.
func testSameTimes(w *world) {
	_, work := w.work(map[string]string{"f": "0000"})
	path := filepath.Join(work, "f")
	at := time.Unix(1600000000, 0)
	for i := range 20 {
		assert.NilError(w, os.WriteFile(path, fmt.Appendf(nil, "%04d", 2*i+1), 0o644))
		setTime(w, path, at)
		id := w.commit(forks.Work)
		assert.NilError(w, os.WriteFile(path, fmt.Appendf(nil, "%04d", 2*i+2), 0o644))
		setTime(w, path, at)
		assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
		w.checkout(forks.Work, id)
		assert.NilError(w, os.WriteFile(path, []byte("xxxx"), 0o644))
		setTime(w, path, at)
		assert.DeepEqual(w, w.status(forks.Work), []string{"modified f"})
	}
}

// testMmap: a store through a mapping that was written to before the commit.
func testMmap(w *world) {
	_, work := w.work(map[string]string{"f": strings.Repeat("a", 64<<10)})
	f, err := os.OpenFile(filepath.Join(work, "f"), os.O_RDWR, 0)
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

// testIsolation: no edit in a tree shows in a snapshot or another tree.
func testIsolation(w *world) {
	id, work := w.work(map[string]string{"f": "v1", "d/g": "v1"})
	want := Read(w, work)
	other := w.fork("other", id)
	shell(w, work, `printf 2 | dd of=f conv=notrunc 2>/dev/null; echo x >>d/g; chmod 600 f; touch -d @9 d/g`)
	if unix.Setxattr(filepath.Join(work, "f"), "user.x", []byte("x"), 0) == nil {
		w.Log("with an attribute")
	}
	Equal(w, Read(w, other), want)
	Equal(w, Read(w, w.fork("third", id)), want)
	second := w.commit(forks.Work)
	edited := Read(w, work)
	shell(w, work, `printf 3 | dd of=f conv=notrunc 2>/dev/null; echo y >>d/g; chmod 640 f`)
	Equal(w, Read(w, w.fork("fourth", second)), edited)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
}

func testAddRemoveAdd(w *world) {
	_, work := w.work(map[string]string{"other": "o"})
	put := func() {
		shell(w, work, `printf same >t; touch -d @1000000 t; touch -d @1000000 .`)
	}
	put()
	with := Read(w, work)
	one := w.commit(forks.Work)
	shell(w, work, `rm t; touch -d @1000000 .`)
	without := Read(w, work)
	two := w.commit(forks.Work)
	put()
	three := w.commit(forks.Work)
	for i, id := range []forks.ID{one, two, three, two, one} {
		w.checkout(forks.Work, id)
		want := with
		if i == 1 || i == 3 {
			want = without
		}
		Equal(w, Read(w, work), want)
	}
	c, err := w.d.Diff(w.ctx, one, three)
	assert.NilError(w, err)
	assert.DeepEqual(w, lines(c), []string(nil))
}

// testTypes: each type of path becomes each other one, and back.
func testTypes(w *world) {
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"keep": "x"})
	untouched := Read(w, outside)
	kinds := map[string]string{
		"file": `echo file >p`, "dir": `mkdir p; echo in >p/f; mkdir p/sub; echo x >p/sub/y`, "empty": `mkdir p`,
		"link": `ln -s ` + outside + ` p`, "fifo": `mkfifo p`, "none": ``,
	}
	_, work := w.work(map[string]string{"p": "first"})
	ids := make(map[string]forks.ID)
	trees := make(map[string]Manifest)
	for name, make := range kinds {
		shell(w, work, "rm -rf p\necho "+name+" >mark\n"+make)
		trees[name] = Read(w, work)
		ids[name] = w.commit(forks.Work)
	}
	for from := range kinds {
		for to := range kinds {
			w.checkout(forks.Work, ids[from])
			w.checkout(forks.Work, ids[to])
			Equal(w, Read(w, work), trees[to])
			// And from what no snapshot holds.
			shell(w, work, "rm -rf p\n"+kinds[from]+"\nif [ -d p ] && [ ! -L p ]; then echo extra >p/extra; fi")
			w.checkout(forks.Work, ids[to])
			Equal(w, Read(w, work), trees[to])
		}
	}
	w.clean(forks.Work)
	Equal(w, Read(w, outside), untouched)
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
	ids, trees := []forks.ID{first}, []Manifest{Read(w, work)}
	for _, s := range states {
		shell(w, work, s.script)
		trees = append(trees, Read(w, work))
		ids = append(ids, w.commit(forks.Work))
		w.clean(forks.Work)
	}
	for i := range ids {
		for _, j := range []int{(i + 1) % len(ids), (i + 4) % len(ids)} {
			w.checkout(forks.Work, ids[i])
			w.checkout(forks.Work, ids[j])
			Equal(w, Read(w, work), trees[j])
			w.clean(forks.Work)
		}
		Equal(w, Read(w, w.fork(forks.Key(fmt.Sprint("f", i)), ids[i])), trees[i])
	}
	var st unix.Stat_t
	w.checkout(forks.Work, first)
	assert.NilError(w, unix.Stat(filepath.Join(work, "three"), &st))
	assert.Equal(w, int(st.Nlink), 3)
}

func testReadOnlyDirs(w *world) {
	src := w.src(map[string]string{"d/f": "x", "d/sub/g": "y"})
	shell(w, src, `chmod 555 d/sub d`)
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	want := Read(w, work)
	shell(w, work, `chmod 755 d; rm d/f; echo new >d/n; chmod 755 d/sub; echo z >d/sub/g; chmod 555 d/sub d`)
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified d", "removed d/f", "added d/n", "modified d/sub/g"})
	second := w.commit(forks.Work)
	edited := Read(w, work)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, work), edited)
	shell(w, work, `chmod 755 d d/sub; rm -r d; echo file >d`)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, work), edited)
	shell(w, work, `mkdir -p new/ro/deep; echo x >new/ro/deep/f; chmod 555 new/ro/deep new/ro new`)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, work), edited)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
}

// testUnreadable: modes that forbid even the owner to look.
func testUnreadable(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, true)
	want := Read(w, src)
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	Equal(w, Read(w, work), want)
	assert.Equal(w, w.contents(id, "modes/d000/sub/f"), "secret")
	w.clean(forks.Work)
	shell(w, work, `chmod 700 modes/d000; echo changed >modes/d000/sub/f; echo n >modes/d000/new; chmod 000 modes/d000; mkdir -p x/y; chmod 000 x/y`)
	edited := Read(w, work)
	second := w.commit(forks.Work)
	Equal(w, Read(w, work), edited)
	assert.Equal(w, w.contents(second, "modes/d000/sub/f"), "changed\n")
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
	shell(w, work, `chmod 700 modes/d000; cat modes/d000/sub/f | grep -x secret; test ! -e modes/d000/new`)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, work), edited)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, second))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	w.empty()
}

// empty fails if the store holds anything.
func (w *world) empty() {
	w.Helper()
	_, err := w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	out := shell(w, w.store(), `find nodes forks tmp work -mindepth 1 2>/dev/null || true`)
	assert.Equal(w, out, "")
}

// testRunningProgram: a program that runs is replaced, not written to.
func testRunningProgram(w *world) {
	_, work := w.work(map[string]string{"f": "x"})
	shell(w, work, `cp "$(command -v sleep)" s; chmod 755 s`)
	id := w.commit(forks.Work)
	cmd := exec.Command(filepath.Join(work, "s"), "100")
	assert.NilError(w, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	shell(w, work, `cp s s2; echo x >>s2; mv s2 s`)
	second := w.commit(forks.Work)
	w.checkout(forks.Work, id)
	w.checkout(forks.Work, second)
	w.checkout(forks.Work, id)
	shell(w, work, `cmp s "$(command -v sleep)"`)
	assert.NilError(w, cmd.Process.Signal(syscall.Signal(0)))
}

// testWorkingDirectory: directories that are in both states keep their inodes.
func testWorkingDirectory(w *world) {
	id, work := w.work(map[string]string{"src/a/f": "x", "src/b": "y"})
	shell(w, work, `echo changed >src/a/f; echo n >src/a/n; rm src/b`)
	second := w.commit(forks.Work)
	cmd := exec.Command("sh", "-c", `read x; pwd -P && ls && cat f`)
	cmd.Dir = filepath.Join(work, "src/a")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	stdin, err := cmd.StdinPipe()
	assert.NilError(w, err)
	assert.NilError(w, cmd.Start())
	w.checkout(forks.Work, id)
	w.checkout(forks.Work, second)
	w.checkout(forks.Work, id)
	assert.NilError(w, stdin.Close())
	assert.NilError(w, cmd.Wait(), out.String())
	assert.Equal(w, out.String(), filepath.Join(work, "src/a")+"\nf\nx")
}

// testLocked: immutable and append-only files.
func testLocked(w *world) {
	if os.Geteuid() != 0 {
		w.Skip("chattr needs root")
	}
	if !hasTool("chattr") {
		w.Skip("chattr is missing (package e2fsprogs)")
	}
	id, work := w.work(map[string]string{"z": "0", "i/keep": "k"})
	want := Read(w, work)
	if exec.Command("chattr", "+i", filepath.Join(work, "z")).Run() != nil {
		w.Skip("no immutable files on this file system")
	}
	shell(w, work, `chattr -i z; echo x >z; echo i >i/im; chattr +i i/im z; echo a >i/ap; chattr +a i/ap; mkdir l; echo x >l/x; chattr +i l`)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
	w.clean(forks.Work)
	shell(w, work, `mkdir -p l/m; echo x >l/m/f; chattr +i l/m/f l/m l i; chattr +a z`)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	_, err := w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, shell(w, w.store(), `ls tmp`), "")
}
