//go:build linux

package forkstest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func testAddRemoveAdd(w *world) {
	_, work := w.work(map[string]string{"other": "o"})
	put := func() {
		work.sh(`printf same >t; touch -d @1000000 t; touch -d @1000000 .`)
	}
	put()
	with := work.read()
	one := w.commit(forks.Work)
	work.sh(`rm t; touch -d @1000000 .`)
	without := work.read()
	two := w.commit(forks.Work)
	put()
	three := w.commit(forks.Work)
	for i, id := range []forks.ID{one, two, three, two, one} {
		w.checkout(forks.Work, id)
		want := with
		if i == 1 || i == 3 {
			want = without
		}
		Equal(w, work.read(), want)
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
		work.sh("rm -rf p\necho " + name + " >mark\n" + make)
		trees[name] = work.read()
		ids[name] = w.commit(forks.Work)
	}
	for from := range kinds {
		for to := range kinds {
			w.checkout(forks.Work, ids[from])
			w.checkout(forks.Work, ids[to])
			Equal(w, work.read(), trees[to])
			// And from what no snapshot holds.
			work.sh("rm -rf p\n" + kinds[from] + "\nif [ -d p ] && [ ! -L p ]; then echo extra >p/extra; fi")
			w.checkout(forks.Work, ids[to])
			Equal(w, work.read(), trees[to])
		}
	}
	w.clean(forks.Work)
	Equal(w, Read(w, outside), untouched)
}

// testPlantedLinks: a directory became a symlink to somewhere else.
func testPlantedLinks(w *world) {
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"hosts": "theirs", "sub/f": "theirs"})
	untouched := Read(w, outside)
	id, work := w.work(map[string]string{"d/hosts": "ok", "d/sub/f": "ok", "e/x": "x"})
	want := work.read()
	work.sh(`rm -r d e; ln -s ` + outside + ` d; ln -s ` + outside + ` e; ln -s ` + outside + `/sub n`)
	edited := work.read()
	second := w.commit(forks.Work)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	w.checkout(forks.Work, second)
	Equal(w, work.read(), edited)
	work.sh(`rm d; mkdir d; ln -s ` + outside + ` d/sub`)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	work.sh(`rm -r d; ln -s ` + outside + ` d`)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	Equal(w, Read(w, outside), untouched)
}

// testSwapping: a directory and a symlink change places all the time.
func testSwapping(w *world) {
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"hosts": "theirs", "sub/f": "theirs"})
	untouched := Read(w, outside)
	id, work := w.work(map[string]string{"d/hosts": "ok", "d/sub/f": "ok"})
	top := work.keep()
	mounted := work.mounted() // and then nobody may be in it over a checkout
	link, dir := filepath.Join(top, "link"), filepath.Join(top, "d")
	shell(w, top, "cp -a d e; rm -r d; mv e d") // so that it is the tree's own, and can be exchanged
	assert.NilError(w, os.Symlink(outside, link))
	stop := background(func(int) { _ = unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE) })
	for range 20 {
		// The tree moves under the driver's hands, so that it may fail; it must
		// not touch what is outside.
		if !mounted {
			_ = w.d.Checkout(w.ctx, forks.Work, id)
		}
		_, _ = w.d.Status(w.ctx, forks.Work)
		_, _ = w.d.Commit(w.ctx, forks.Work, w.id(), nil)
		_ = os.Symlink(outside, link)
		_ = os.WriteFile(filepath.Join(dir, "hosts2"), []byte("x"), 0o644)
		_ = os.Remove(filepath.Join(outside, "hosts2"))
	}
	if mounted {
		stop()
		work.leave()
	}
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	if !mounted {
		stop()
	}
	_ = os.Remove(filepath.Join(outside, "hosts2"))
	got := Read(w, outside)
	untouched["."], got["."] = "", "" // this test itself wrote there
	Equal(w, got, untouched)
}

// testRunningProgram: a program that runs is replaced, not written to.
func testRunningProgram(w *world) {
	_, work := w.work(map[string]string{"f": "x"})
	work.sh(`cp "$(command -v sleep)" s; chmod 755 s`)
	id := w.commit(forks.Work)
	w.attach(work)
	cmd := exec.Command(filepath.Join(work.keep(), "s"), "100")
	assert.NilError(w, cmd.Start())
	end := sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	defer end()
	work.sh(`cp s s2; echo x >>s2; mv s2 s`)
	second := w.commit(forks.Work)
	assert.NilError(w, cmd.Process.Signal(syscall.Signal(0)))
	if work.mounted() {
		end() // nobody may be in such a tree over a checkout
	}
	work.leave()
	for _, to := range []forks.ID{id, second, id} {
		w.checkout(forks.Work, to)
		work.sh(`cmp s "$(command -v sleep)" ` + map[bool]string{true: "", false: "&& exit 1 || true"}[to == id])
	}
	if !work.mounted() {
		assert.NilError(w, cmd.Process.Signal(syscall.Signal(0)))
		assert.Equal(w, shell(w, "/", fmt.Sprintf(`cut -d" " -f3 /proc/%d/stat`, cmd.Process.Pid)), "S\n")
	}
}

// testWorkingDirectory: directories that are in both states keep their inodes.
func testWorkingDirectory(w *world) {
	id, work := w.work(map[string]string{"src/a/f": "x", "src/b": "y"})
	if f := w.d.Features(); f.Mounted || f.Replaced {
		w.Skip("the tree is exchanged as a whole")
	}
	dir := work.keep()
	work.sh(`echo changed >src/a/f; echo n >src/a/n; rm src/b`)
	second := w.commit(forks.Work)
	cmd := exec.Command("sh", "-c", `read x; pwd -P && ls && cat f`)
	cmd.Dir = filepath.Join(dir, "src/a")
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
	assert.Equal(w, out.String(), filepath.Join(dir, "src/a")+"\nf\nx")
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
	want := work.read()
	if work.sh(`chattr +i z 2>/dev/null || echo no`) != "" {
		w.Skip("no immutable files on this file system")
	}
	work.sh(`chattr -i z; echo x >z; echo i >i/im; chattr +i i/im z; echo a >i/ap; chattr +a i/ap; mkdir l; echo x >l/x; chattr +i l`)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
	w.clean(forks.Work)
	work.sh(`mkdir -p l/m; echo x >l/m/f; chattr +i l/m/f l/m l i; chattr +a z`)
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	_, err := w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, shell(w, w.store(), `ls tmp`), "")
}
