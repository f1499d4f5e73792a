//go:build linux

package forkstest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// untilKilled does one thing to the store again and again.
func (a *actor) untilKilled() error {
	op, src := a.args[0], filepath.Join(a.dir, "src")
	for i := 0; ; i++ {
		id := forks.ID(fmt.Sprintf("%08x%08x", os.Getpid(), i))
		var err error
		switch op {
		case "capture":
			_, err = a.d.Capture(a.ctx, id, "", forks.Source{Dir: src})
		case "fork":
			if _, err = a.d.Fork(a.ctx, forks.Key("k"+string(id)), "a0", forks.ForkOptions{Plain: i%3 == 0}); err == nil && i%2 == 0 {
				err = a.d.RemoveFork(a.ctx, forks.Key("k"+string(id)))
			}
		case "commit":
			err = a.commitTwice(id, fmt.Sprint("f", i%40))
		case "checkout":
			err = a.d.Checkout(a.ctx, forks.Work, []forks.ID{"a0", "b0"}[i%2])
		case "remove":
			if _, err = a.d.Capture(a.ctx, id, "a0", forks.Source{Dir: src}); err == nil {
				err = a.d.RemoveSnapshot(a.ctx, id)
			}
		}
		if err != nil {
			return err
		}
	}
}

// commitTwice changes a file of the work tree and commits, while the tree is
// seen and after.
func (a *actor) commitTwice(id forks.ID, name string) error {
	for _, live := range []bool{true, false} {
		dir, hide, err := a.show(forks.Work)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), fmt.Append(nil, id, live), 0o644); err != nil {
			return err
		}
		if live {
			if _, err := a.d.Commit(a.ctx, forks.Work, id+"11", nil); err != nil {
				return err
			}
		}
		if err := hide(); err != nil {
			return err
		}
	}
	_, err := a.d.Commit(a.ctx, forks.Work, id, nil)
	return err
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
	work.sh(`rm -r d1 d2; mkdir d1; for i in 1 2 3 4 5 6 7 8 9; do echo changed >f$i; rm f2$i; ln -s f$i d3/l$i; done; mv d4 d8; echo x >d2`)
	other := work.read()
	_, err = w.d.Commit(w.ctx, forks.Work, "b0", nil)
	assert.NilError(w, err)
	rounds := 2
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		rounds = 40 // 200 in all
	}
	for _, op := range []string{"capture", "fork", "commit", "checkout", "remove"} {
		for range rounds {
			c := w.start("kill", op)
			time.Sleep(time.Duration(5+rand.IntN(60)) * time.Millisecond)
			c.kill()
			w.afterCrash(work, want, other)
		}
	}
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	for _, id := range []forks.ID{"a0", "b0"} {
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	}
	w.empty()
}

func (w *world) afterCrash(work *tree, a, b Manifest) {
	w.Helper()
	w.open()
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.Assert(w, slices.Contains(ids, "a0") && slices.Contains(ids, "b0"))
	for _, id := range ids {
		w.stored(id)
	}
	keys, err := w.d.Forks(w.ctx)
	assert.NilError(w, err)
	for _, k := range keys {
		if k == forks.Work {
			continue
		}
		Equal(w, w.tree(k).read(), a)
		assert.NilError(w, w.d.RemoveFork(w.ctx, k))
	}
	w.checkout(forks.Work, "a0")
	Equal(w, work.read(), a)
	w.clean(forks.Work)
	w.checkout(forks.Work, "b0")
	Equal(w, work.read(), b)
	for _, id := range ids {
		if id != "a0" && id != "b0" {
			assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
		}
	}
	_, err = w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, shell(w, w.store(), `ls tmp; ls nodes | grep -v -x -e a0 -e b0 || true`), "")
}
