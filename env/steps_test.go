package env_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// job is what a child of these tests does until it is killed.
type job struct {
	Op, Root, Src, Backend string
	// Step is the point at which it kills itself; 0 is never.
	Step int
	// Ref is the snapshot that the operation is about.
	Ref env.ID
	// Script is what exec and a candidate run.
	Script string
}

// jobVar holds the job of a child, as JSON.
const jobVar = "AGENTENV_TEST_STEP_JOB"

// operations are all that move HEAD, add a snapshot or change the history.
var operations = map[string]func(ctx context.Context, j job, o env.Options) error{
	"init": func(ctx context.Context, j job, o env.Options) error {
		return closing(env.Init(ctx, j.Root, env.InitOptions{From: j.Src}, o))
	},
	"init of a tarball": func(ctx context.Context, j job, o env.Options) error {
		f, err := os.Open(j.Src + ".tar")
		if err != nil {
			return err
		}
		defer f.Close()
		return closing(env.Init(ctx, j.Root, env.InitOptions{Tarball: f, TarballName: "it", MountAt: j.Src}, o))
	},
	"init without a work tree": func(ctx context.Context, j job, o env.Options) error {
		return closing(env.Init(ctx, j.Root, env.InitOptions{From: j.Src, NoWorkTree: true}, o))
	},
	"lock": locked(func(context.Context, *env.Env, job) error { return nil }),
	"commit": locked(func(ctx context.Context, e *env.Env, _ job) error {
		_, _, err := e.Commit(ctx, "a commit", false)
		return err
	}),
	"commit --allow-empty": locked(func(ctx context.Context, e *env.Env, _ job) error {
		for range 2 {
			if _, _, err := e.Commit(ctx, "a commit", true); err != nil {
				return err
			}
		}
		return nil
	}),
	"exec": locked(func(ctx context.Context, e *env.Env, j job) error {
		_, err := e.Exec(ctx, shellRun(e, j.Script), false, func(sandbox.Process) {})
		return err
	}),
	"checkout": locked(func(ctx context.Context, e *env.Env, j job) error {
		_, err := e.Checkout(ctx, string(j.Ref), false)
		return err
	}),
	"checkout --discard": locked(func(ctx context.Context, e *env.Env, j job) error {
		_, err := e.Checkout(ctx, string(j.Ref), true)
		return err
	}),
	"keep": locked(func(ctx context.Context, e *env.Env, j job) error {
		return inCandidate(ctx, e, j, func(fr env.Frozen) error {
			_, err := e.Keep(fr, "kept")
			return err
		})
	}),
	"promote": locked(func(ctx context.Context, e *env.Env, j job) error {
		return inCandidate(ctx, e, j, func(fr env.Frozen) error {
			_, _, err := e.Promote(ctx, fr, "promoted")
			return err
		})
	}),
	"take": locked(func(ctx context.Context, e *env.Env, j job) error {
		_, err := e.TakeDir(ctx, j.Src)
		return err
	}),
	"tag": locked(func(_ context.Context, e *env.Env, j job) error {
		if err := e.SetTag("name", string(j.Ref)); err != nil {
			return err
		}
		return e.RemoveTag("name")
	}),
	"delete": locked(func(ctx context.Context, e *env.Env, j job) error {
		_, err := e.Delete(ctx, string(j.Ref))
		return err
	}),
	"delete --all": func(ctx context.Context, j job, o env.Options) error {
		_, err := env.DeleteAll(ctx, j.Root, o)
		return err
	},
}

func closing(e *env.Env, err error) error {
	if err != nil {
		return err
	}
	return e.Close()
}

func locked(op func(ctx context.Context, e *env.Env, j job) error) func(context.Context, job, env.Options) error {
	return func(ctx context.Context, j job, o env.Options) error {
		e, err := env.Lock(ctx, j.Root, "test", o)
		if err != nil {
			return err
		}
		return errors.Join(op(ctx, e, j), e.Close())
	}
}

// inCandidate runs the script in a fork of a snapshot, freezes that and gives it
// to use.
func inCandidate(ctx context.Context, e *env.Env, j job, use func(env.Frozen) error) error {
	f, err := e.Fork(ctx, "candidate", j.Ref, sandbox.LevelNamespaces)
	if err != nil {
		return err
	}
	if err := runIn(ctx, e, f, j.Script); err != nil {
		return err
	}
	fr, err := f.Freeze(ctx, j.Ref)
	if err != nil {
		return err
	}
	if err := use(fr); err != nil {
		return err
	}
	return f.Remove(ctx)
}

func runIn(ctx context.Context, e *env.Env, f *env.Fork, script string) error {
	p, err := f.Start(ctx, shellRun(e, script))
	if err != nil {
		return err
	}
	res, err := p.Wait()
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("the candidate ended with %d %s", res.ExitCode, res.Reason)
	}
	return err
}

// TestStepWorker is the process that kills itself.
func TestStepWorker(t *testing.T) {
	text := os.Getenv(jobVar)
	if text == "" {
		t.Skip("runs only as a child of other tests")
	}
	var j job
	assert.NilError(t, json.Unmarshal([]byte(text), &j))
	var steps atomic.Int64
	last := func(string) {
		if int(steps.Add(1)) == j.Step {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	env.OnStep(last)
	forkstest.OnStep(last)
	assert.NilError(t, operations[j.Op](context.Background(), j, optionsFor(j.Backend)))
	fmt.Printf("steps: %d\n", steps.Load())
}

// work runs a job in a child. It returns whether the child was killed, and how
// many steps it took if not.
func work(t *testing.T, j job) (killed bool, steps int) {
	t.Helper()
	text, err := json.Marshal(j)
	assert.NilError(t, err)
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestStepWorker$", "-test.v")
	cmd.Env = append(os.Environ(), jobVar+"="+string(text))
	out, err := cmd.CombinedOutput()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == unix.SIGKILL {
		return true, 0
	}
	assert.NilError(t, err, "%s: %s", j.Op, out)
	_, rest, ok := strings.Cut(string(out), "steps: ")
	assert.Assert(t, ok, string(out))
	_, err = fmt.Sscan(rest, &steps)
	assert.NilError(t, err)
	return false, steps
}

// fewSteps is less than any operation takes, for runs that do not count them.
const fewSteps = 12

// eachStep calls round for each step of an operation, whose number count finds
// out; in a short run for one of them. round says whether the process was
// killed: it is, at each step that there is.
func eachStep(t *testing.T, count func() int, round func(step int) bool) {
	t.Helper()
	if os.Getenv("AGENTENV_TEST_LONG") == "" {
		round(1 + rand.IntN(fewSteps))
		return
	}
	total := count()
	assert.Assert(t, total > 0)
	kills := 0
	for n := range total {
		if round(n + 1) {
			kills++
		}
	}
	// The number of steps is not always the same: now and then there is a
	// layer more to collect.
	assert.Assert(t, kills > total/2, "%d of %d processes were killed", kills, total)
}

// TestKilledAtEveryStep kills every operation at each point between two of its
// changes on disk and looks at what is left.
func TestKilledAtEveryStep(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		for _, op := range []string{
			"commit", "commit --allow-empty", "exec", "checkout", "checkout --discard", "keep", "promote", "take", "tag", "delete",
		} {
			s.op(t, op)
		}
		s.recovery(t)
		for _, op := range []string{"init", "init of a tarball", "init without a work tree"} {
			initAtEveryStep(t, dir, op, o)
		}
	})
}

// scene is an environment in which operations are cut short.
type scene struct {
	o         env.Options
	root, src string
	base      env.ID
	// before is the base's state, edit that of the work tree with unsaved
	// work, cand that of a candidate, also if it ran on that work.
	before, edit, cand forkstest.Manifest
	known              map[env.ID]forkstest.Manifest
}

func newScene(t *testing.T, dir string, o env.Options) *scene {
	s := &scene{o: o, root: filepath.Join(dir, "root"), src: filepath.Join(dir, "src"), known: map[env.ID]forkstest.Manifest{}}
	writeSource(t, s.src)
	s.before = forkstest.Read(t, s.src)
	s.edit, s.cand = edited(t, s.src, "edit"), edited(t, s.src, "cand")
	e, err := env.Init(context.Background(), s.root, env.InitOptions{From: s.src}, o)
	assert.NilError(t, err)
	s.base = e.Head().ID
	assert.NilError(t, e.Close())
	return s
}

// prepare brings the environment to its base, with unsaved work in its tree, and
// returns the history then and a snapshot besides.
func (s *scene) prepare(t *testing.T, op string) (old []env.Snapshot, ref env.ID) {
	t.Helper()
	ctx := context.Background()
	e, err := env.Lock(ctx, s.root, "test", s.o)
	assert.NilError(t, err)
	defer func() { assert.NilError(t, e.Close()) }()
	_, err = e.Checkout(ctx, string(s.base), true)
	assert.NilError(t, err)
	ref = s.base
	if op == "delete" || strings.HasPrefix(op, "checkout") {
		_, err := e.Exec(ctx, shellRun(e, editScript("cand")), false, func(sandbox.Process) {})
		assert.NilError(t, err)
		ref = e.Head().ID
		forkstest.Equal(t, stored(t, e, ref), s.cand)
		_, err = e.Checkout(ctx, string(s.base), true)
		assert.NilError(t, err)
	}
	res, err := e.Exec(ctx, shellRun(e, editScript("edit")), true, func(sandbox.Process) {})
	assert.NilError(t, err)
	assert.Equal(t, res.ExitCode, 0)
	for _, sn := range e.Log() {
		if s.known[sn.ID] == nil {
			s.known[sn.ID] = stored(t, e, sn.ID)
		}
	}
	return e.Log(), ref
}

// op cuts an operation short at its steps.
func (s *scene) op(t *testing.T, op string) {
	t.Run(op, func(t *testing.T) {
		j := job{Op: op, Root: s.root, Src: s.src, Backend: s.o.Backend, Script: editScript("cand")}
		round := func(step int) (killed bool, steps int) {
			var old []env.Snapshot
			old, j.Ref = s.prepare(t, op)
			j.Step = step
			if op == "take" {
				touchSource(t, s.src, len(old))
			}
			killed, steps = work(t, j)
			s.check(t, j, old)
			return killed, steps
		}
		eachStep(t, counting(round), killing(round))
	})
}

// counting runs a round to its end to count its steps.
func counting(round func(step int) (bool, int)) func() int {
	return func() int { _, steps := round(0); return steps }
}

func killing(round func(step int) (bool, int)) func(int) bool {
	return func(step int) bool { killed, _ := round(step); return killed }
}

// touchSource changes the directory that the environment was taken from.
func touchSource(t *testing.T, src string, n int) {
	assert.NilError(t, os.WriteFile(filepath.Join(src, "taken"), fmt.Append(nil, n), 0o644))
}

// check looks at what a process left that was killed, or was not.
func (s *scene) check(t *testing.T, j job, old []env.Snapshot) {
	t.Helper()
	ctx := context.Background()
	r, err := env.Open(ctx, s.root, s.o)
	assert.NilError(t, err)
	seen, seenHead := idsOf(r.Log()), r.Head().ID
	_, err = r.Status(ctx)
	assert.NilError(t, err)
	assert.NilError(t, r.Close())

	e, err := env.Lock(ctx, s.root, "test", s.o)
	assert.NilError(t, err)
	defer func() { assert.NilError(t, e.Close()) }()
	assert.Equal(t, e.Head().ID, seenHead, "the reader saw another HEAD than recovery gave")
	found := idsOf(e.Log())
	for _, id := range seen {
		assert.Assert(t, slices.Contains(found, id), "the reader saw %s, which is not there", id)
	}
	once := slices.Clone(found)
	slices.Sort(once)
	assert.Equal(t, len(slices.Compact(once)), len(found), "a snapshot is listed twice")
	for _, sn := range old {
		if j.Op != "delete" || sn.ID != j.Ref {
			assert.Assert(t, slices.Contains(found, sn.ID), "%s is lost", sn.ID)
		}
	}
	nothingLeft(t, e)
	s.checkTree(t, j, e)
}

func idsOf(list []env.Snapshot) []env.ID {
	ids := make([]env.ID, len(list))
	for i, s := range list {
		ids[i] = s.ID
	}
	return ids
}

// checkTree checks that HEAD and the work tree are the old ones or the new ones,
// that every snapshot is whole, and that no work is lost.
func (s *scene) checkTree(t *testing.T, j job, e *env.Env) {
	t.Helper()
	ctx := context.Background()
	head := e.Head()
	tree, _, err := e.Commit(ctx, "what the tree was after the crash", false)
	assert.NilError(t, err)
	saved := false
	for _, sn := range e.Log() {
		m := stored(t, e, sn.ID)
		if was := s.known[sn.ID]; was != nil {
			forkstest.Equal(t, m, was)
			continue
		}
		s.known[sn.ID] = m
		saved = saved || same(m, s.edit)
		if j.Op == "take" && sn.Kind == env.KindSync {
			forkstest.Equal(t, m, forkstest.Read(t, s.src))
			continue
		}
		whole := same(m, s.edit) || same(m, s.before) || same(m, s.cand)
		assert.Assert(t, whole || isUnclean(sn), "%s (%s %q) is no state that there was: %v", sn.ID, sn.Kind, sn.Message, forkstest.Differences(m, s.edit))
	}
	headState, treeState := s.known[head.ID], s.known[tree.ID]
	ok := same(headState, treeState) ||
		same(headState, s.before) && same(treeState, s.edit) ||
		j.Op == "exec" && same(headState, s.edit) && same(treeState, s.cand)
	assert.Assert(t, ok, "HEAD %s and the tree do not belong together: %v", head.ID, forkstest.Differences(headState, treeState))
	assert.Assert(t, saved || j.Op == "checkout --discard", "unsaved work is lost")
	plain(t, e, treeState)
}

// plain checks the work tree by the file system's own account, where it stands
// on the host.
func plain(t *testing.T, e *env.Env, want forkstest.Manifest) {
	t.Helper()
	if _, err := os.Lstat(filepath.Join(e.WorkTree(), "keep")); err == nil {
		forkstest.Equal(t, forkstest.Read(t, e.WorkTree()), want)
	}
}

// recovery cuts recovery itself short, after each of several crashes.
func (s *scene) recovery(t *testing.T) {
	parts := []float64{0.7}
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		parts = []float64{0.3, 0.5, 0.7, 0.9}
	}
	for _, op := range []string{"checkout", "promote"} {
		for _, part := range parts {
			t.Run(fmt.Sprintf("recovery of %s cut short after %.0f%%", op, part*100), func(t *testing.T) {
				crash := job{Op: op, Root: s.root, Src: s.src, Backend: s.o.Backend, Script: editScript("cand")}
				_, crash.Ref = s.prepare(t, op)
				_, total := work(t, crash)
				round := func(step int) (bool, int) {
					var old []env.Snapshot
					old, crash.Ref = s.prepare(t, op)
					crash.Step = int(float64(total) * part)
					killed, _ := work(t, crash)
					assert.Assert(t, killed)
					killed, steps := work(t, job{Op: "lock", Root: s.root, Backend: s.o.Backend, Step: step})
					s.check(t, crash, old)
					return killed, steps
				}
				eachStep(t, counting(round), killing(round))
			})
		}
	}
}

// initAtEveryStep cuts the making of an environment short: it can be made anew,
// and then is as if nothing had happened.
func initAtEveryStep(t *testing.T, dir, op string, o env.Options) {
	t.Run(op, func(t *testing.T) {
		ctx := context.Background()
		src := filepath.Join(dir, "init-src")
		if _, err := os.Lstat(src); err != nil {
			writeSource(t, src)
			out, err := exec.Command("tar", "-C", src, "-cf", src+".tar", ".").CombinedOutput()
			assert.NilError(t, err, string(out))
		}
		want := forkstest.Read(t, src)
		j := job{Op: op, Src: src, Backend: o.Backend}
		round := func(step int) (killed bool, steps int) {
			top := filepath.Join(dir, fmt.Sprintf("made-%s-%d", strings.ReplaceAll(op, " ", "-"), step))
			j.Step, j.Root = step, filepath.Join(top, "a", "root")
			killed, steps = work(t, j)
			if !env.Exists(j.Root) {
				j.Step = 0
				_, _ = work(t, j)
			}
			e, err := env.Lock(ctx, j.Root, "test", o)
			assert.NilError(t, err)
			assert.Equal(t, len(e.Log()), 1)
			got := stored(t, e, e.Head().ID)
			if op == "init of a tarball" {
				wholeSeconds(got)
				wholeSeconds(want)
			}
			forkstest.Equal(t, got, want)
			_, created, err := e.Commit(ctx, "", false)
			assert.NilError(t, err)
			assert.Assert(t, !created)
			nothingLeft(t, e)
			assert.NilError(t, e.Close())
			return killed, steps
		}
		eachStep(t, counting(round), killing(round))
	})
}

// wholeSeconds cuts off of the times what a plain tar does not keep.
func wholeSeconds(m forkstest.Manifest) {
	for path, line := range m {
		f := strings.Fields(line)
		f[2], _, _ = strings.Cut(f[2], ".")
		m[path] = strings.Join(f, " ")
	}
}
