//go:build linux

package forkstest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// use uses the fork of the first argument until it is killed. With a second
// argument a process of its own has the file as well, and outlives it.
func (a *actor) use() error {
	file, _, err := a.d.Use(a.ctx, forks.Key(a.args[0]))
	if err != nil {
		return err
	}
	if len(a.args) > 1 {
		cmd := exec.Command("sleep", "100")
		cmd.ExtraFiles = []*os.File{file}
		if err := cmd.Start(); err != nil {
			return err
		}
		say("%d", cmd.Process.Pid)
	}
	say("using")
	<-ended()
	return nil
}

// testInUse: what another process uses can be neither used nor removed, and is
// free once all who have it open are dead.
func testInUse(w *world) {
	id, work := w.work(map[string]string{"f": "x"})
	w.fork("k", id)
	want := work.read()
	for _, key := range []forks.Key{forks.Work, "k"} {
		w.open() // no use of this process lasts
		other := w.start("use", string(key))
		assert.Equal(w, other.line(), "using")
		var fe *forks.Error
		err := w.d.RemoveFork(w.ctx, key)
		assert.ErrorIs(w, err, forks.ErrInUse)
		assert.Assert(w, errors.As(err, &fe))
		soon, cancel := context.WithTimeout(w.ctx, 50*time.Millisecond)
		_, _, err = w.d.Use(soon, key)
		cancel()
		assert.Assert(w, errors.Is(err, forks.ErrInUse) || errors.Is(err, context.DeadlineExceeded), "%v", err)
		if key == "k" {
			_, _, err = w.d.Use(w.ctx, key)
			assert.ErrorIs(w, err, forks.ErrInUse)
		}
		other.kill()
		Equal(w, w.tree(key).read(), want)
	}
	w.inheritedUse("k")
	Equal(w, w.tree("k").read(), want)
	assert.NilError(w, w.d.RemoveFork(w.ctx, "k"))
	_, err := w.d.Tree("k")
	assert.ErrorIs(w, err, forks.ErrNotFound)
}

// inheritedUse: a use lasts as long as any process has its file, and who wants
// the fork waits for one that is just ending.
func (w *world) inheritedUse(key forks.Key) {
	w.Helper()
	w.open()
	other := w.start("use", string(key), "and a process")
	var pid int
	_, err := fmt.Sscan(other.line(), &pid)
	assert.NilError(w, err)
	process, err := os.FindProcess(pid)
	assert.NilError(w, err)
	defer func() { _ = process.Kill() }() // it may be dead
	assert.Equal(w, other.line(), "using")
	other.kill()
	assert.ErrorIs(w, w.d.RemoveFork(w.ctx, key), forks.ErrInUse)
	time.AfterFunc(100*time.Millisecond, func() { _ = process.Kill() })
	_, release, err := w.d.Use(w.ctx, key)
	assert.NilError(w, err)
	release()
}

// testSelfUse: the process that uses a fork commits it while it does.
func testSelfUse(w *world) {
	_, work := w.work(map[string]string{"f": "x", "d/g": "y"})
	_, release, err := w.d.Use(w.ctx, forks.Work)
	assert.NilError(w, err)
	_, again, err := w.d.Use(w.ctx, forks.Work)
	assert.NilError(w, err)
	work.sh(`echo 1 >f; rm -r d; mkdir d`)
	first := w.commit(forks.Work)
	want := work.read()
	release()
	release() // is no harm
	work.sh(`echo 2 >f`)
	w.commit(forks.Work)
	again()
	work.sh(`echo 3 >f; touch d/new`)
	edited := work.read()
	third := w.commit(forks.Work)
	Equal(w, work.read(), edited)
	Equal(w, w.fork("first", first).read(), want)
	Equal(w, w.fork("third", third).read(), edited)
}

// testAttached: a tree that stands on the host, from one process to the next.
func testAttached(w *world) {
	id, work := w.work(map[string]string{"f": "x", "d/g": "y"})
	want := work.read()
	if !w.attach(work) {
		w.Skip("this user cannot make a mounted tree stand on the host")
	}
	place, err := w.d.Attach(w.ctx, forks.Work) // is no error
	assert.NilError(w, err)
	dir := place.Mount.Dir
	assert.Equal(w, dir, filepath.Join(w.store(), "work/current"))
	assert.Assert(w, place.Mount.Overlay == nil)
	Equal(w, Read(w, dir), want)
	shell(w, dir, `echo 1 >f; rm -r d; mkdir d; touch d/new`)
	edited := Read(w, dir)
	second := w.commit(forks.Work)
	w.open()
	w.clean(forks.Work)
	Equal(w, Read(w, dir), edited)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, dir), want)
	shell(w, dir, `echo lost >f`)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, dir), edited)
	for range 2 {
		assert.NilError(w, w.d.Detach(w.ctx, forks.Work))
	}
	Equal(w, work.read(), edited)
	w.clean(forks.Work)
	work.sh(`echo 2 >f`)
	third := w.commit(forks.Work)
	edited = work.read()
	assert.Assert(w, w.attach(work))
	Equal(w, Read(w, dir), edited)
	assert.Equal(w, w.contents(third, "f"), "2\n")
	assert.NilError(w, w.d.Detach(w.ctx, forks.Work))
	if work.mounted() {
		// What is written where the tree is not must not be swallowed.
		assert.Assert(w, os.WriteFile(filepath.Join(dir, "lost"), []byte("x"), 0o644) != nil, "the bare directory takes what is written to it")
	}
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
}
