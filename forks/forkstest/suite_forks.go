//go:build linux

package forkstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// testIsolation: no edit in a tree shows in a snapshot or another tree.
func testIsolation(w *world) {
	id, work := w.work(map[string]string{"f": "v1", "d/g": "v1"})
	want := work.read()
	other := w.fork("other", id)
	work.sh(`printf 2 | dd of=f conv=notrunc 2>/dev/null; echo x >>d/g; chmod 600 f; touch -d @9 d/g`)
	work.in(func(dir string) {
		if unix.Setxattr(filepath.Join(dir, "f"), "user.x", []byte("x"), 0) == nil {
			w.Log("with an attribute")
		}
	})
	Equal(w, other.read(), want)
	Equal(w, w.fork("third", id).read(), want)
	second := w.commit(forks.Work)
	edited := work.read()
	work.sh(`printf 3 | dd of=f conv=notrunc 2>/dev/null; echo y >>d/g; chmod 640 f`)
	Equal(w, w.fork("fourth", second).read(), edited)
	w.checkout(forks.Work, id)
	Equal(w, work.read(), want)
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
				if err := w.runForked(key, id, "tool1", "tool8", "script"); err != nil {
					failures <- err
					return
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

// runForked runs programs of a snapshot in a fork.
func (w *world) runForked(key forks.Key, id forks.ID, programs ...string) error {
	if _, err := w.d.Fork(w.ctx, key, id, forks.ForkOptions{}); err != nil {
		return err
	}
	dir, hide, err := show(w.ctx, w.d, key, w.seen())
	if errors.Is(err, errNoMounter) {
		return w.d.RemoveFork(w.ctx, key) // all the rest is said by others
	}
	if err != nil {
		return err
	}
	for _, p := range programs {
		err = errors.Join(err, exec.Command(filepath.Join(dir, p)).Run())
	}
	return errors.Join(err, hide(), w.d.RemoveFork(w.ctx, key))
}

// testRemade: what is deleted stays deleted, a directory that is made again has
// nothing of the old one, and hard links stay what they were seen to be, also
// for another process.
func testRemade(w *world) {
	src := w.src(map[string]string{"a": "a", "d/old": "o", "d/sub/older": "o", "e/f/g": "g", "hl1": "v1", "keep": "k"})
	shell(w, src, `ln hl1 hl2; ln hl1 e/hl3`)
	id := w.capture(src)
	for _, live := range []bool{false, true} {
		key := forks.Key(fmt.Sprint("k-", live))
		f := w.fork(key, id)
		if live {
			f.keep()
		}
		f.sh(`rm a; rm -rf d; mkdir d; touch d/new; echo x >>hl1; rm -r e/f; mkdir -p e/f/g; cmp hl1 hl2 || true`)
		want := f.read()
		kept := w.commit(key)
		f.sh(`rm -r d; mkdir d; touch a d/newer`) // once more, on what was just kept
		second := f.read()
		more := w.commit(key)
		if live {
			f.leave()
		}
		Equal(w, f.read(), second)
		w.clean(key)
		w.open()
		got := w.fork("got-"+key, kept)
		Equal(w, got.read(), want)
		assert.Equal(w, got.sh(`ls d; test ! -e a; ls e/f/g`), "new\n")
		assert.Equal(w, w.fork("more-"+key, more).sh(`ls d`), "newer\n")
		assert.Equal(w, w.contents(kept, "hl1"), "v1x\n")
	}
}

// testMany: 64 forks at once, each a world of its own.
func testMany(w *world) {
	files := map[string]string{"f": "base"}
	for i := range 40 {
		files[fmt.Sprintf("d%d/f%d", i%5, i)] = "x"
	}
	id := w.capture(w.src(files))
	const n = 64
	key := func(i int) forks.Key { return forks.Key(fmt.Sprint("k", i)) }
	together(w, n, func(i int) error {
		if _, err := w.d.Fork(w.ctx, key(i), id, forks.ForkOptions{}); err != nil {
			return err
		}
		dir, hide, err := show(w.ctx, w.d, key(i), w.seen())
		if err != nil {
			return err
		}
		err = os.WriteFile(filepath.Join(dir, "f"), []byte(key(i)), 0o644)
		return errors.Join(err, hide())
	})
	keys, err := w.d.Forks(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, len(keys), n)
	for i := range n {
		assert.Equal(w, w.tree(key(i)).sh(`cat f; ls d*/* | wc -l`), string(key(i))+"40\n")
	}
	ids := make([]forks.ID, n)
	for i := range n {
		ids[i] = w.id()
	}
	together(w, n, func(i int) error {
		if i%2 == 0 {
			if _, err := w.d.Commit(w.ctx, key(i), ids[i], nil); err != nil {
				return err
			}
		}
		return w.d.RemoveFork(w.ctx, key(i))
	})
	for i := 0; i < n; i += 2 {
		assert.Equal(w, w.contents(ids[i], "f"), string(key(i)))
	}
}

// together runs fn n times at once.
func together(w *world, n int, fn func(i int) error) {
	w.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = fn(i) })
	}
	wg.Wait()
	err := errors.Join(errs...)
	if errors.Is(err, errNoMounter) {
		w.Skip(err)
	}
	assert.NilError(w, err)
}

// testPlain: a fork that is a directory, whatever the others are.
func testPlain(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, false)
	want := Read(w, src)
	id := w.capture(src)
	place, err := w.d.Fork(w.ctx, "plain", id, forks.ForkOptions{Plain: true})
	assert.NilError(w, err)
	assert.Assert(w, place.Mount.Overlay == nil)
	Equal(w, Read(w, place.Mount.Dir), want)
	w.clean("plain")
	assert.Assert(w, allocated(w, w.dir) < 64<<20, "the sparse file became dense")
	shell(w, place.Mount.Dir, `echo more >>plain; rm -r names; mkdir names; touch names/new; mv links moved; ln three four; rm pipe; mkdir pipe`)
	edited := Read(w, place.Mount.Dir)
	second := w.commit("plain")
	w.clean("plain")
	Equal(w, w.fork("other", second).read(), edited)
	w.checkout("plain", id)
	Equal(w, w.tree("plain").read(), want)
	w.checkout("plain", second)
	Equal(w, w.tree("plain").read(), edited)
	w.open()
	w.clean("plain")
	Equal(w, w.tree("plain").read(), edited)
	Equal(w, Read(w, src), want)
	assert.NilError(w, w.d.RemoveFork(w.ctx, "plain"))
}
