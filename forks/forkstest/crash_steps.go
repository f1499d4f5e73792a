//go:build linux

package forkstest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// story is a sequence of everything that changes a store. Each script says the
// times of what it touches, so that two tellings end alike.
var story = []struct {
	name string
	do   func(a *actor) error
}{
	{"capture a0", func(a *actor) error { return a.capture("a0", "") }},
	{"fork current of a0", func(a *actor) error { return a.forkOf(forks.Work, "a0", false) }},
	{"commit b0", func(a *actor) error {
		return errors.Join(a.edit(forks.Work, `echo b >f; rm gone; rm -r d; mkdir d; echo n >d/n; ln f hard; touch -d @2000 f d d/n .`, nil),
			a.commit(forks.Work, "b0"))
	}},
	{"commit c0 while current is seen", func(a *actor) error {
		return a.edit(forks.Work, `echo c >f; echo more >>d/n; mkdir -p e/f; touch -d @3000 f d d/n e/f e .`,
			func() error { return a.commit(forks.Work, "c0") })
	}},
	{"commit c1 after that", func(a *actor) error {
		return errors.Join(a.edit(forks.Work, `rm hard; rmdir e/f; echo x >e/f; touch -d @3500 e/f e .`, nil),
			a.commit(forks.Work, "c1"))
	}},
	{"check out a0", func(a *actor) error { return a.d.Checkout(a.ctx, forks.Work, "a0") }},
	{"fork k1 of b0", func(a *actor) error { return a.forkOf("k1", "b0", false) }},
	{"fork p1 of c0", func(a *actor) error { return a.forkOf("p1", "c0", true) }},
	{"commit d0 from k1", func(a *actor) error {
		return errors.Join(a.edit("k1", `echo d >d/d; rm f; ln -s d f; touch -h -d @4000 f; touch -d @4000 d/d d .`, nil),
			a.commit("k1", "d0"))
	}},
	{"remove p1", func(a *actor) error { return a.d.RemoveFork(a.ctx, "p1") }},
	{"remove c0", func(a *actor) error { return a.d.RemoveSnapshot(a.ctx, "c0") }},
	{"check out d0", func(a *actor) error { return a.d.Checkout(a.ctx, forks.Work, "d0") }},
	{"remove k1", func(a *actor) error { return a.d.RemoveFork(a.ctx, "k1") }},
	{"capture e0 upon a0", func(a *actor) error {
		return errors.Join(script(filepath.Join(a.dir, "src"), `echo new >new; touch -d @5000 new .`), a.capture("e0", "a0"))
	}},
	{"remove b0", func(a *actor) error { return a.d.RemoveSnapshot(a.ctx, "b0") }},
	{"sweep", func(a *actor) error { _, err := a.d.Sweep(a.ctx); return err }},
	{"commit f0, attached where that can be", func(a *actor) error {
		if _, err := a.d.Attach(a.ctx, forks.Work); err != nil && !errors.Is(err, forks.ErrUnsupported) {
			return err
		}
		return a.edit(forks.Work, `echo f >f2; touch -d @6000 f2 .`, func() error { return a.commit(forks.Work, "f0") })
	}},
	{"check out e0", func(a *actor) error { return a.d.Checkout(a.ctx, forks.Work, "e0") }},
	{"detach", func(a *actor) error { return a.d.Detach(a.ctx, forks.Work) }},
	{"remove d0", func(a *actor) error { return a.d.RemoveSnapshot(a.ctx, "d0") }},
}

func (a *actor) capture(id, base forks.ID) error {
	_, err := a.d.Capture(a.ctx, id, base, forks.Source{Dir: filepath.Join(a.dir, "src")})
	return err
}

func (a *actor) forkOf(key forks.Key, base forks.ID, plain bool) error {
	_, err := a.d.Fork(a.ctx, key, base, forks.ForkOptions{Plain: plain})
	return err
}

func (a *actor) commit(key forks.Key, id forks.ID) error {
	_, err := a.d.Commit(a.ctx, key, id, nil)
	return err
}

// edit changes a fork, and does then, if that is not nil, while it is seen.
func (a *actor) edit(key forks.Key, text string, then func() error) error {
	dir, hide, err := a.show(key)
	if err != nil {
		return err
	}
	err = script(dir, text)
	if err == nil && then != nil {
		err = then()
	}
	return errors.Join(err, hide())
}

func script(dir, text string) error {
	cmd := exec.Command("sh", "-ec", "umask 022\n"+text)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// steps tells the story and kills itself at the step that its argument says;
// with 0 it says how many there are.
func (a *actor) steps() error {
	last, err := strconv.Atoi(a.args[0])
	if err != nil {
		return err
	}
	var n atomic.Int64
	OnStep(func(name string) {
		if n.Add(1) == int64(last) {
			say("at %s", name)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // until it comes
		}
	})
	for i, op := range story {
		say("op %d", i)
		if err := op.do(a); err != nil {
			return fmt.Errorf("%s: %w", op.name, err)
		}
	}
	say("steps %d", n.Load())
	return nil
}

// chapter is how the store is to be after an operation.
type chapter struct {
	ids   []forks.ID
	trees map[forks.Key]Manifest
	bases map[forks.Key]forks.ID
}

// told is the whole story as it goes when nobody dies.
type told struct {
	chapters []chapter
	// stored and trees say what each snapshot is, by its View and in a fork.
	stored, trees map[forks.ID]Manifest
}

// scene makes a world of its own below this one, with what the story captures.
func (w *world) scene(name string) *world {
	w.Helper()
	s := &world{T: w.T, b: w.b, ctx: w.ctx, dir: filepath.Join(w.dir, name)}
	assert.NilError(w, os.Mkdir(s.dir, 0o755))
	src := s.src(map[string]string{"f": "f", "gone": "g", "d/old": "o", "d/sub/x": "x", "g": "g"})
	shell(w, src, `ln g g2; find . -type d -exec chmod 755 {} +; find . -exec touch -d @1000 {} +`) // whatever the umask
	s.open()
	return s
}

func (w *world) tell() told {
	w.Helper()
	s := w.scene("told")
	a := &actor{ctx: w.ctx, d: s.d, dir: s.dir}
	t := told{stored: map[forks.ID]Manifest{}, trees: map[forks.ID]Manifest{}}
	for _, op := range story {
		err := op.do(a)
		if errors.Is(err, errNoMounter) {
			w.Skip(err)
		}
		assert.NilError(w, err, op.name)
		c := s.chapter()
		t.chapters = append(t.chapters, c)
		for _, id := range c.ids {
			if t.stored[id] == nil {
				t.stored[id] = s.stored(id)
				t.trees[id] = s.fork("look", id).read()
				assert.NilError(w, s.d.RemoveFork(w.ctx, "look"))
			}
		}
	}
	return t
}

// chapter reads the store; forks whose checkout was cut short have no tree.
func (w *world) chapter() chapter {
	w.Helper()
	c := chapter{trees: map[forks.Key]Manifest{}, bases: map[forks.Key]forks.ID{}}
	var err error
	c.ids, err = w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	keys, err := w.d.Forks(w.ctx)
	assert.NilError(w, err)
	for _, k := range keys {
		_, twice := c.bases[k]
		assert.Assert(w, !twice, "%s is listed twice", k)
		f, err := w.d.Tree(k)
		assert.NilError(w, err)
		c.bases[k] = f.Base
		if !f.Interrupted {
			c.trees[k] = w.tree(k).read()
		}
	}
	return c
}

// testSteps kills a process at every point between two changes on disk, and
// looks at what it left.
func testSteps(w *world) {
	t := w.tell()
	s := w.scene("whole")
	lines := strings.Fields(s.start("steps", "0").end())
	total, err := strconv.Atoi(lines[len(lines)-1])
	assert.NilError(w, err)
	assert.Assert(w, total > 0, "the driver names no steps")
	w.Logf("%d steps", total)
	for n := 1; n <= total; n++ {
		if os.Getenv("AGENTENV_TEST_LONG") == "" && rand.IntN(total) >= sampledSteps {
			continue
		}
		s := w.scene(fmt.Sprint("step", n))
		died := s.start("steps", fmt.Sprint(n))
		s.afterStep(t, died.killed())
	}
}

// sampledSteps is about how many of the steps a quick run takes.
const sampledSteps = 6

// afterStep: every snapshot that is listed is complete, each fork is old or new
// or says that it is neither, nothing is listed twice, and the store can be
// emptied.
func (w *world) afterStep(t told, said string) {
	w.Helper()
	fields := strings.Fields(said)
	where := fields[len(fields)-1]
	op := strings.Count(said, "op ") - 1
	assert.Assert(w, op >= 0 && strings.Contains(said, "\nat "), "it did not die at a step: %s", said)
	w.Logf("killed in %q at %s", story[op].name, where)
	w.open()
	defer func() {
		if w.Failed() {
			w.Logf("in %q at %s", story[op].name, where)
		}
	}()
	before, after := chapter{}, t.chapters[op]
	if op > 0 {
		before = t.chapters[op-1]
	}
	now := w.chapter()
	for range 2 {
		w.oldOrNew(t, now, before, after, strings.HasPrefix(story[op].name, "check out"))
		_, err := w.d.Sweep(w.ctx)
		assert.NilError(w, err)
		now = w.chapter() // and so it is after it was swept
	}
	w.restoreAll(t, now)
	for k := range now.bases {
		assert.NilError(w, w.d.Detach(w.ctx, k))
		assert.NilError(w, w.d.RemoveFork(w.ctx, k))
	}
	for _, id := range now.ids {
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	}
	w.empty()
}

// oldOrNew compares the store with what it was before and after an operation.
func (w *world) oldOrNew(t told, now, before, after chapter, checkout bool) {
	w.Helper()
	for i, id := range now.ids {
		assert.Assert(w, !slices.Contains(now.ids[:i], id), "%s is listed twice", id)
		assert.Assert(w, slices.Contains(before.ids, id) || slices.Contains(after.ids, id), "snapshot %s", id)
		w.equal("snapshot "+string(id), w.stored(id), t.stored[id])
	}
	for _, id := range before.ids {
		assert.Assert(w, slices.Contains(now.ids, id) || !slices.Contains(after.ids, id), "snapshot %s is lost", id)
	}
	for k := range before.bases {
		_, is := now.bases[k]
		_, stays := after.bases[k]
		assert.Assert(w, is || !stays, "fork %s is lost", k)
	}
	for k, base := range now.bases {
		old, was := before.bases[k]
		next, will := after.bases[k]
		assert.Assert(w, was && base == old || will && base == next, "the base of %s is %s", k, base)
		tree, whole := now.trees[k]
		if !whole {
			assert.Assert(w, checkout, "%s is said to be interrupted", k)
			continue
		}
		if len(Differences(tree, before.trees[k])) > 0 {
			w.equal("fork "+string(k), tree, after.trees[k])
		}
		assert.Equal(w, len(w.status(k)) == 0, len(Differences(tree, t.trees[base])) == 0, "%s against %s", k, base)
	}
}

// equal is [Equal] for one thing of many.
func (w *world) equal(what string, got, want Manifest) {
	w.Helper()
	if len(Differences(got, want)) > 0 {
		w.Log(what)
	}
	Equal(w, got, want)
}

// restoreAll checks out every snapshot in every fork.
func (w *world) restoreAll(t told, now chapter) {
	w.Helper()
	for k := range now.bases {
		for _, id := range now.ids {
			w.checkout(k, id)
			w.equal(fmt.Sprintf("fork %s at %s", k, id), w.tree(k).read(), t.trees[id])
			w.clean(k)
		}
	}
}
