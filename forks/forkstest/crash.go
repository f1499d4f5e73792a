//go:build linux

package forkstest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/moby/sys/reexec"
	"gotest.tools/v3/assert"
)

// crashBackend is what the children that are killed use.
var crashBackend forks.Backend

const crashName = "forkstest-crash"

func init() { reexec.Register(crashName, crashMain) }

// crashMain changes a store until it is killed: it is given the store, the
// directory to capture, and what to do.
func crashMain() {
	store, src, op := os.Args[1], os.Args[2], os.Args[3]
	ctx := context.Background()
	d, err := crashBackend.Open(ctx, store)
	exitOn(err)
	for i := 0; ; i++ {
		id := forks.ID(fmt.Sprintf("%08x%08x", os.Getpid(), i))
		switch op {
		case "capture":
			_, err = d.Capture(ctx, id, "", forks.Source{Dir: src})
		case "fork":
			if _, err = d.Fork(ctx, forks.Key("k"+string(id)), "a0", forks.ForkOptions{}); err == nil && i%2 == 0 {
				err = d.RemoveFork(ctx, forks.Key("k"+string(id)))
			}
		case "commit":
			tree, e := d.Tree(forks.Work)
			exitOn(e)
			exitOn(os.WriteFile(filepath.Join(tree.Mount.Dir, fmt.Sprint("f", i%40)), []byte(id), 0o644))
			_, err = d.Commit(ctx, forks.Work, id, nil)
		case "checkout":
			err = d.Checkout(ctx, forks.Work, []forks.ID{"a0", "b0"}[i%2])
		case "remove":
			if _, err = d.Capture(ctx, id, "a0", forks.Source{Dir: src}); err == nil {
				err = d.RemoveSnapshot(ctx, id)
			}
		}
		exitOn(err)
	}
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// testCrash kills processes that change the store at random moments. What is
// listed afterwards is complete, the work tree can be checked out, and Sweep
// leaves nothing that no snapshot or fork needs.
func testCrash(w *world) {
	files := map[string]string{}
	for i := range 60 {
		files[fmt.Sprintf("d%d/f%d", i%7, i)] = fmt.Sprint(i, "content")
		files[fmt.Sprint("f", i)] = "x"
	}
	src := w.src(files)
	_, err := w.d.Capture(w.ctx, "a0", "", forks.Source{Dir: src})
	assert.NilError(w, err)
	want := Read(w, src)
	work := w.fork(forks.Work, "a0")
	shell(w, work, `rm -r d1 d2; mkdir d1; for i in 1 2 3 4 5 6 7 8 9; do echo changed >f$i; rm f2$i; ln -s f$i d3/l$i; done; mv d4 d8; echo x >d2`)
	other := Read(w, work)
	_, err = w.d.Commit(w.ctx, forks.Work, "b0", nil)
	assert.NilError(w, err)
	rounds := 2
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		rounds = 100
	}
	for _, op := range []string{"capture", "fork", "commit", "checkout", "remove"} {
		for range rounds {
			w.killed(op, src, time.Duration(5+rand.IntN(60))*time.Millisecond)
			w.afterCrash(work, want, other)
		}
	}
}

// killed runs a child and kills it after a while.
func (w *world) killed(op, src string, after time.Duration) {
	w.Helper()
	cmd := exec.Command(reexec.Self())
	cmd.Args = []string{crashName, w.store(), src, op}
	cmd.Env = os.Environ()
	var out errBuffer
	cmd.Stderr = &out
	assert.NilError(w, cmd.Start())
	time.Sleep(after)
	assert.NilError(w, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	assert.Equal(w, string(out), "", "%s failed", op)
}

type errBuffer []byte

func (b *errBuffer) Write(p []byte) (int, error) {
	*b = append(*b, p...)
	return len(p), nil
}

func (w *world) afterCrash(work string, a, b Manifest) {
	w.Helper()
	w.open()
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.Assert(w, slices.Contains(ids, "a0") && slices.Contains(ids, "b0"))
	for _, id := range ids {
		w.wholeSnapshot(id)
	}
	keys, err := w.d.Forks(w.ctx)
	assert.NilError(w, err)
	for _, k := range keys {
		if k == forks.Work {
			continue
		}
		tree, err := w.d.Tree(k)
		assert.NilError(w, err)
		Equal(w, Read(w, tree.Mount.Dir), a)
		assert.NilError(w, w.d.RemoveFork(w.ctx, k))
	}
	w.checkout(forks.Work, "a0")
	Equal(w, Read(w, work), a)
	w.clean(forks.Work)
	w.checkout(forks.Work, "b0")
	Equal(w, Read(w, work), b)
	for _, id := range ids {
		if id != "a0" && id != "b0" {
			assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
		}
	}
	_, err = w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, shell(w, w.store(), `ls tmp; ls forks; ls nodes | grep -v -x -e a0 -e b0 || true`), "")
}

// wholeSnapshot reads everything that a snapshot has.
func (w *world) wholeSnapshot(id forks.ID) {
	w.Helper()
	v, err := w.d.View(w.ctx, id)
	assert.NilError(w, err)
	defer v.Close()
	assert.NilError(w, v.Walk(func(e forks.Entry) error {
		if e.Mode&0o170000 == 0o100000 {
			assert.Equal(w, int64(len(w.contents(id, e.Path))), e.Size)
		}
		return nil
	}))
}
