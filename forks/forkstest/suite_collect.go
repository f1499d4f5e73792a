//go:build linux

package forkstest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// collect makes snapshots, removes them and sweeps, again and again.
func (a *actor) collect() error {
	say("at work")
	return until(func(i int) error {
		id := forks.ID(fmt.Sprintf("c0%06x", i))
		if _, err := a.d.Capture(a.ctx, id, "", forks.Source{Dir: filepath.Join(a.dir, "src")}); err != nil {
			return err
		}
		if err := a.d.RemoveSnapshot(a.ctx, id); err != nil {
			return err
		}
		_, err := a.d.Sweep(a.ctx)
		return err
	})
}

// testCollectWhileForking: a process collects, another makes forks, works in
// them and removes them, and neither ever fails.
func testCollectWhileForking(w *world) {
	id := w.capture(w.src(map[string]string{"f": "x", "d/g": "y", "d/e/h": "z"}))
	other := w.start("collect")
	assert.Equal(w, other.line(), "at work")
	for i := range 200 {
		key := forks.Key(fmt.Sprint("k", i))
		f := w.fork(key, id)
		if i%10 == 0 {
			assert.Equal(w, f.sh(`cat f d/g d/e/h; echo new >d/n`), "xyz")
			assert.DeepEqual(w, w.status(key), []string{"modified d", "added d/n"})
		}
		assert.NilError(w, w.d.RemoveFork(w.ctx, key))
	}
	other.end()
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	w.empty()
}

// fork makes a fork that nobody but its owner may look into, and waits.
func (a *actor) fork() error {
	if _, err := a.d.Fork(a.ctx, "dead", forks.ID(a.args[0]), forks.ForkOptions{}); err != nil {
		return err
	}
	dir, hide, err := a.show("dead")
	if err != nil {
		return err
	}
	defer func() { _ = hide() }() // it is killed before
	cmd := exec.Command("sh", "-ec", `mkdir -p x/y/z ro/in; echo f >x/y/f; echo f >ro/in/f; echo more >>ro0/f; chmod 000 x/y x f ro0; chmod 555 ro/in ro`)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	say("ready")
	<-ended()
	return nil
}

// testDeadFork: what a process that was killed had left in a fork, with modes
// that forbid everything, goes.
func testDeadFork(w *world) {
	w.work(map[string]string{"f": "x", "ro0/f": "y"}) // the tree can be shown here, or the test skips
	id := w.ids
	w.tree(forks.Work).sh(`true`)
	base := forks.ID(fmt.Sprintf("%08x", id))
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	before := allocated(w, w.store())
	for range 2 {
		other := w.start("fork", string(base))
		assert.Equal(w, other.line(), "ready")
		other.kill()
		w.open()
		keys, err := w.d.Forks(w.ctx)
		assert.NilError(w, err)
		assert.DeepEqual(w, keys, []forks.Key{"dead"})
		assert.NilError(w, w.d.RemoveFork(w.ctx, "dead"))
		_, err = w.d.Sweep(w.ctx)
		assert.NilError(w, err)
		assert.Assert(w, allocated(w, w.store()) <= before+64<<10, "the space did not come back")
	}
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, base))
	w.empty()
}

// testBaseRemoved: a fork whose snapshot is removed is whole as long as it
// lives, and what it kept after it.
func testBaseRemoved(w *world) {
	id, work := w.work(map[string]string{"f": "1", "d/g": "1", "d/h": "1"})
	work.sh(`echo 2 >f; rm d/h`)
	second := w.commit(forks.Work)
	want := work.read()
	f := w.fork("k", second)
	f.keep()
	w.checkout(forks.Work, id)
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, second))
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	_, err := w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	Equal(w, f.read(), want)
	f.leave()
	w.open()
	_, err = w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, len(ids), 0, "%v", ids)
	Equal(w, f.read(), want)
	w.clean("k")
	f.sh(`echo 3 >>f; echo n >d/n`)
	edited := f.read()
	third := w.commit("k")
	assert.NilError(w, w.d.RemoveFork(w.ctx, "k"))
	_, err = w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	assert.Equal(w, w.contents(third, "f"), "2\n3\n")
	Equal(w, w.fork("again", third).read(), edited)
	assert.NilError(w, w.d.RemoveFork(w.ctx, "again"))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, third))
	w.empty()
}

// read reads all that the store has: of each snapshot the files a and b, which
// say the same in each, the differences between neighbours, the work tree's
// state. What was removed meanwhile may be gone; nothing else is an error.
func (a *actor) read() error {
	reads := 0
	say("at work")
	err := until(func(int) error {
		ids, err := a.d.Snapshots(a.ctx)
		if err != nil {
			return err
		}
		for i, id := range ids {
			err := a.sameText(id)
			if err == nil && i > 0 {
				_, err = a.d.Diff(a.ctx, ids[i-1], id)
			}
			if gone(err) {
				continue
			}
			if err != nil {
				return err
			}
			reads++
		}
		if _, err = a.d.Status(a.ctx, forks.Work); err != nil {
			return err
		}
		_, err = a.d.Tree(forks.Work)
		return err
	})
	say("%d", reads)
	return err
}

func gone(err error) bool { return errors.Is(err, forks.ErrNotFound) || errors.Is(err, fs.ErrNotExist) }

// sameText fails unless the files a and b of the snapshot are equal.
func (a *actor) sameText(id forks.ID) error {
	v, err := a.d.View(a.ctx, id)
	if err != nil {
		return err
	}
	defer v.Close()
	var text [2]string
	for i, path := range []string{"a", "b"} {
		f, err := v.Open(path)
		if err != nil {
			return err
		}
		b, err := io.ReadAll(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		text[i] = string(b)
	}
	if text[0] != text[1] || text[0] == "" {
		return fmt.Errorf("half of snapshot %s: %q and %q", id, text[0], text[1])
	}
	return nil
}

// testReaders: a process reads while another commits, checks out and removes.
func testReaders(w *world) {
	id, work := w.work(map[string]string{"a": "0", "b": "0", "d/x": "x"})
	other := w.start("read")
	assert.Equal(w, other.line(), "at work")
	last := id
	for i := range 15 {
		work.in(func(dir string) {
			for _, name := range []string{"a", "b"} {
				assert.NilError(w, os.WriteFile(filepath.Join(dir, name), []byte(fmt.Sprint(i+1)), 0o644))
			}
			_ = os.RemoveAll(filepath.Join(dir, "d"))
			assert.NilError(w, os.MkdirAll(filepath.Join(dir, "d", fmt.Sprint(i)), 0o755))
		})
		next := w.commit(forks.Work)
		w.checkout(forks.Work, last)
		w.checkout(forks.Work, next)
		if i%3 != 0 && last != id {
			assert.NilError(w, w.d.RemoveSnapshot(w.ctx, last))
		}
		last = next
	}
	var reads int
	_, err := fmt.Sscan(other.end(), &reads)
	assert.NilError(w, err)
	assert.Assert(w, reads > 0, "nothing was read")
}
