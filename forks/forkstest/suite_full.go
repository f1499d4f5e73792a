//go:build linux

package forkstest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// attempt is an operation that may fail for lack of something.
type attempt struct {
	name string
	do   func() error
	// undo takes back what do did.
	undo func() error
	// prepare is done before there is a lack.
	prepare func()
	// checkout says that a work tree which is said to be interrupted is what a
	// failure may leave.
	checkout bool
}

// attempts are operations on a store with snapshots a0 and b0 and the work tree
// at b0, edited. Sources and targets that are not of the store are in outside.
func (w *world) attempts(outside string) []attempt {
	work := w.tree(forks.Work)
	target := filepath.Join(w.dir, "target")
	edit := func(name string) func() {
		return func() {
			work.in(func(dir string) {
				Write(w, dir, map[string]string{name: strings.Repeat(name, 100<<10)})
				setTime(w, dir, time.Unix(2000, 0))
			})
		}
	}
	fork := func(key forks.Key, plain bool) attempt {
		return attempt{
			name: "fork " + string(key),
			do: func() error {
				_, err := w.d.Fork(w.ctx, key, "b0", forks.ForkOptions{Plain: plain})
				return err
			},
			undo: func() error { return w.d.RemoveFork(w.ctx, key) },
		}
	}
	return []attempt{
		{name: "capture", do: func() error {
			_, err := w.d.Capture(w.ctx, "c0", "", forks.Source{Dir: outside})
			return err
		}, undo: func() error { return w.d.RemoveSnapshot(w.ctx, "c0") }},
		fork("k", false), fork("plain", true),
		{name: "replace", do: func() error {
			_, err := w.d.Replace(w.ctx, "b0", forks.Source{Dir: target})
			return err
		}, undo: func() error { return script(target, `rm -rf ..?* .[!.]* * && echo old >f && touch -d @1 f .`) }},
		{name: "commit while seen", prepare: edit("one"), do: func() error {
			_, hide, err := show(w.ctx, w.d, forks.Work, w.seen())
			if err != nil {
				return &forks.Error{Op: "show", Err: err} // to mount takes space too
			}
			_, err = w.d.Commit(w.ctx, forks.Work, "e0", nil)
			return errors.Join(err, hide())
		}},
		{name: "commit", prepare: edit("two"), do: func() error {
			_, err := w.d.Commit(w.ctx, forks.Work, "d0", nil)
			return err
		}},
		{name: "check out", checkout: true, do: func() error { return w.d.Checkout(w.ctx, forks.Work, "a0") }},
		{name: "check out back", checkout: true, do: func() error { return w.d.Checkout(w.ctx, forks.Work, "b0") }},
	}
}

// filled makes the store that the attempts want: a0 is large, b0 is not.
func (w *world) filled(outside string) {
	w.Helper()
	random := rand.NewChaCha8([32]byte{1})
	text := func() string {
		b := make([]byte, 50<<10)
		_, _ = random.Read(b)
		return string(b)
	}
	files := map[string]string{}
	for i := range 24 {
		files[fmt.Sprintf("d%d/f%d", i%4, i)] = text()
	}
	Write(w, outside, files)
	_, err := w.d.Capture(w.ctx, "a0", "", forks.Source{Dir: outside})
	assert.NilError(w, err)
	work := w.fork(forks.Work, "a0")
	work.sh(`rm -r d1 d2; echo b >d0/f0; mkdir n; echo n >n/n; touch -d @1000 .`)
	_, err = w.d.Commit(w.ctx, forks.Work, "b0", nil)
	assert.NilError(w, err)
	work.in(func(dir string) {
		for i := range 10 {
			Write(w, dir, map[string]string{fmt.Sprint("new/f", i): text()})
		}
		setTime(w, dir, time.Unix(2000, 0))
	})
	Write(w, w.dir, map[string]string{"target/f": "old\n"})
}

// tried does an attempt while something lacks: lack makes it so, and what it
// returns ends it. An attempt that fails says why with one of wants, and all is
// as it was.
func (w *world) tried(a attempt, lack func() (undo func()), wants ...error) (failed bool) {
	w.Helper()
	if a.prepare != nil {
		a.prepare()
	}
	was := w.state()
	undo := lack()
	err := a.do()
	undo()
	if err == nil {
		return false
	}
	var fe *forks.Error
	assert.Assert(w, errors.As(err, &fe), "%s: %v is no *forks.Error", a.name, err)
	known := false
	for _, want := range wants {
		known = known || errors.Is(err, want)
	}
	assert.Assert(w, known, "%s: %v", a.name, err)
	assert.Assert(w, !strings.Contains(err.Error(), "\n"), "%q", err)
	w.same(was, a.checkout)
	return true
}

// lacking does every attempt under each lack, the worst first, and once more
// where even the last made it fail. It returns how often they failed.
func (w *world) lacking(outside string, wants []error, lacks ...func() (undo func())) (failures int) {
	w.Helper()
	for _, a := range w.attempts(outside) {
		for i, lack := range lacks {
			before := w.free()
			if w.tried(a, lack, wants...) {
				failures++
				_, err := w.d.Sweep(w.ctx)
				assert.NilError(w, err)
				lost := before - w.free()
				assert.Assert(w, lost <= slack, "%s: %d bytes did not come back", a.name, lost)
				if i < len(lacks)-1 {
					continue
				}
				assert.NilError(w, a.do(), a.name)
			}
			if a.undo == nil {
				break // it is done, and the next can be tried
			}
			assert.NilError(w, a.undo(), a.name)
		}
	}
	return failures
}

// testNoSpace: with no space left, at several sizes, each operation does its
// work or fails with the store as it was, leaves nothing, and works when there
// is space again.
func testNoSpace(w *world) {
	outside := filepath.Join(w.dir, "outside")
	s := w.small(smallSizes)
	s.filled(outside)
	left := func(size int64) func() func() { return func() func() { return s.fill(size) } }
	failures := s.lacking(outside, []error{unix.ENOSPC, unix.EDQUOT}, left(0), left(40<<10), left(300<<10), left(1<<20))
	assert.Assert(w, failures > 0, "there was space enough for everything")
	s.whole()
}

// testNoInodes is testNoSpace where no more files can be made.
func testNoInodes(w *world) {
	outside := filepath.Join(w.dir, "outside")
	s := w.small(fewFiles)
	s.filled(outside)
	left := func(files int) func() func() { return func() func() { return s.fillInodes(files) } }
	failures := s.lacking(outside, []error{unix.ENOSPC, unix.EDQUOT}, left(0), left(2), left(9))
	assert.Assert(w, failures > 0, "there were files enough for everything")
	s.whole()
}

// slack is what a file system may keep for its own tables, and what an index
// that was saved takes.
const slack = 2 << 20

// whole: after all that failed, every snapshot can be had.
func (w *world) whole() {
	w.Helper()
	w.open()
	for id, m := range w.state().stored {
		w.checkout(forks.Work, id)
		w.clean(forks.Work)
		Equal(w, w.stored(id), m)
	}
}

// testReadOnly: on a file system that was made read-only everything can be read
// and nothing is half done.
func testReadOnly(w *world) {
	outside := filepath.Join(w.dir, "outside")
	s := &world{T: w.T, b: w.b, ctx: w.ctx, dir: filepath.Join(w.dir, "ro")}
	assert.NilError(w, os.Mkdir(s.dir, 0o755))
	w.mount(order{At: s.dir, Source: s.dir, Flags: unix.MS_BIND})
	s.open()
	s.filled(outside)
	attempts := s.attempts(outside)
	for _, a := range attempts {
		if a.prepare != nil {
			a.prepare()
		}
	}
	was := s.state()
	w.remount(s.dir, unix.MS_RDONLY)
	defer w.remount(s.dir, 0) // so that what the tests made can be removed
	s.open()
	ids, err := s.d.Snapshots(s.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, ids, was.ids)
	for _, id := range ids {
		Equal(w, s.stored(id), was.stored[id])
	}
	_, err = s.d.Diff(s.ctx, "a0", "b0")
	assert.NilError(w, err)
	assert.Assert(w, len(s.status(forks.Work)) > 0)
	for _, a := range attempts {
		if a.name == "commit while seen" {
			continue // it cannot be mounted so
		}
		err := a.do()
		assert.ErrorIs(w, err, unix.EROFS, a.name)
	}
	assert.ErrorIs(w, s.d.RemoveFork(s.ctx, forks.Work), unix.EROFS)
	assert.ErrorIs(w, s.d.RemoveSnapshot(s.ctx, "a0"), unix.EROFS)
	w.remount(s.dir, 0)
	s.open()
	s.same(was, false)
	for _, a := range attempts {
		if a.prepare != nil {
			a.prepare()
		}
		assert.NilError(w, a.do(), a.name)
	}
	s.whole()
}

func (w *world) remount(dir string, flags uintptr) {
	w.Helper()
	assert.NilError(w, order{At: dir, Flags: unix.MS_REMOUNT | unix.MS_BIND | flags}.give())
}

// fewFiles does with few open files what the test asks for.
func (a *actor) fewFiles() error {
	n, err := strconv.ParseUint(a.args[0], 10, 32)
	if err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
		return err
	}
	key := forks.Key("k" + a.args[0])
	for _, op := range []struct {
		name string
		do   func() error
	}{
		{"capture", func() error { return a.capture(forks.ID("c0"+a.args[0]), "") }},
		{"commit", func() error { return a.commit(forks.Work, forks.ID("d0"+a.args[0])) }},
		{"fork", func() error { return a.forkOf(key, "a0", false) }},
		{"status", func() error { _, err := a.d.Status(a.ctx, forks.Work); return err }},
		{"diff", func() error { _, err := a.d.Diff(a.ctx, "a0", "b0"); return err }},
		{"remove fork", func() error { return a.d.RemoveFork(a.ctx, key) }},
		{"check out", func() error { return a.d.Checkout(a.ctx, forks.Work, "a0") }},
	} {
		switch err := op.do(); {
		case err == nil:
			say("%s: done", op.name)
		case errors.Is(err, unix.EMFILE), errors.Is(err, forks.ErrNotFound) && op.name == "remove fork":
			say("%s: %v", op.name, err)
		default:
			return fmt.Errorf("%s with %d files: %w", op.name, n, err)
		}
	}
	return nil
}

// testFewFiles: with few open files each operation does its work or fails with
// the store as it was.
func testFewFiles(w *world) {
	w.filled(filepath.Join(w.dir, "src"))
	failed := false
	for _, n := range []int{10, 13, 16, 20, 26, 40, 64} {
		was := w.state()
		said := w.start("files", strconv.Itoa(n)).end()
		failed = failed || strings.Contains(said, "too many open files")
		w.open()
		now := w.state()
		for _, id := range was.ids {
			Equal(w, now.stored[id], was.stored[id])
		}
		for _, op := range []struct {
			name string
			id   forks.ID
		}{{"capture", "c0"}, {"commit", "d0"}} {
			_, made := now.stored[op.id+forks.ID(strconv.Itoa(n))]
			assert.Equal(w, made, strings.Contains(said, op.name+": done"), "%s", said)
		}
		if n == 64 {
			assert.Equal(w, strings.Count(said, ": done"), 7, "%s", said)
		}
		if err := w.d.RemoveFork(w.ctx, forks.Key("k"+strconv.Itoa(n))); err != nil {
			w.Error(err)
		}
		w.checkout(forks.Work, "b0")
		w.tree(forks.Work).sh(fmt.Sprint("echo again >again", n))
		_, err := w.d.Sweep(w.ctx)
		assert.NilError(w, err)
	}
	assert.Assert(w, failed, "ten files were enough")
}
