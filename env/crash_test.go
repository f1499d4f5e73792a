package env_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/forks/all"
)

// crashRoot, set for a child of this test, is where it works until it is
// killed.
const crashRoot = "AGENTENV_TEST_CRASH_ROOT"

// TestKilledAtAnyInstant kills a process that commits, checks out and promotes
// as fast as it can, at random instants, and looks at what it left.
func TestKilledAtAnyInstant(t *testing.T) {
	rounds := 25
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		rounds = 100
	}
	dir := t.TempDir()
	src, root := filepath.Join(dir, "src"), filepath.Join(dir, "root")
	assert.NilError(t, os.Mkdir(src, 0o755))
	writeState(t, src, 0)
	e, err := env.Init(context.Background(), root, env.InitOptions{From: src}, options())
	assert.NilError(t, err)
	assert.NilError(t, e.Close())
	snapshots := 0
	checked := map[env.ID]bool{}
	for n := range rounds {
		killWorker(t, root)
		// Someone goes on by hand before agentenv is called again.
		gold := fmt.Sprintf("gold-%d", n)
		assert.NilError(t, os.WriteFile(filepath.Join(root, "work", "current", gold), []byte(gold), 0o644))
		snapshots = checkAfterCrash(t, root, gold, checked)
	}
	assert.Assert(t, snapshots > rounds/2, "the workers got nowhere: %d snapshots", snapshots)
}

// killWorker lets a worker run for a while and kills it.
func killWorker(t *testing.T, root string) {
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestCrashWorker$", "-test.v")
	cmd.Env = append(os.Environ(), crashRoot+"="+root)
	out, err := cmd.StdoutPipe()
	assert.NilError(t, err)
	assert.NilError(t, cmd.Start())
	lines := bufio.NewReader(out)
	for line := ""; line != ready; {
		line, err = lines.ReadString('\n')
		assert.NilError(t, err, "the worker did not start: %s", line)
	}
	time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
	assert.NilError(t, cmd.Process.Kill())
	rest, _ := io.ReadAll(lines)
	var exit *exec.ExitError
	err = cmd.Wait()
	assert.Assert(t, errors.As(err, &exit) && !exit.Exited(), "the worker ended by itself: %v\n%s", err, rest)
}

// ready is what a worker says when it begins.
const ready = "ready\n"

// TestCrashWorker is the process that is killed.
func TestCrashWorker(t *testing.T) {
	root := os.Getenv(crashRoot)
	if root == "" {
		t.Skip("runs only as a child of TestKilledAtAnyInstant")
	}
	ctx := context.Background()
	e, err := env.Lock(ctx, root, "test", options())
	assert.NilError(t, err)
	fmt.Print(ready)
	for n := len(e.Log()); ; n++ {
		// One file only: what a kill cuts short here is no mix of two states.
		assert.NilError(t, os.WriteFile(filepath.Join(e.WorkTree(), "edited"), []byte(strconv.Itoa(n)), 0o644))
		s, _, err := e.Commit(ctx, "edit", false)
		assert.NilError(t, err)
		// What builds upon a mix that was saved is one too, and no fault.
		log := slices.DeleteFunc(e.Log(), func(s env.Snapshot) bool { return isUnclean(s) })
		_, err = e.Checkout(ctx, string(log[rand.IntN(len(log))].ID), false)
		assert.NilError(t, err)
		f, err := e.Fork(ctx, "candidate", s.ID)
		assert.NilError(t, err)
		n++
		writeState(t, f.Tree().Mount.Dir, n)
		fr, err := f.Freeze(ctx, s.ID)
		assert.NilError(t, err)
		_, _, err = e.Promote(ctx, fr, strconv.Itoa(n))
		assert.NilError(t, err)
		assert.NilError(t, f.Remove(ctx))
	}
}

// files is how many files of a tree carry its number: with any of them wrong,
// the tree is a mix of two.
const files = 30

// writeState makes tree the state n: some files that all say so.
func writeState(t *testing.T, tree string, n int) {
	for i := range files {
		dir := filepath.Join(tree, fmt.Sprintf("d%d", i%5))
		assert.NilError(t, os.MkdirAll(dir, 0o755))
		assert.NilError(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), []byte(strconv.Itoa(n)), 0o644))
	}
}

// checkAfterCrash reads what is listed without writing, then recovers, and
// compares: the reader saw what recovery gave, every snapshot is whole, the
// work tree is HEAD's (a later edit aside), and nothing unlisted is left.
func checkAfterCrash(t *testing.T, root, gold string, checked map[env.ID]bool) int {
	ctx := context.Background()
	r, err := env.Open(ctx, root, options())
	assert.NilError(t, err)
	seen, seenHead := r.Log(), r.Head().ID
	_, err = r.Status(ctx)
	assert.NilError(t, err)
	assert.NilError(t, r.Close())

	e, err := env.Lock(ctx, root, "test", options())
	assert.NilError(t, err)
	defer e.Close()
	log := e.Log()
	if len(log) == len(seen) { // an edit that was found and saved is one more
		assert.Equal(t, e.Head().ID, seenHead)
	}
	found := exists(filepath.Join(e.WorkTree(), gold))
	for _, s := range log {
		if checked[s.ID] {
			continue
		}
		checked[s.ID] = true
		v, err := e.View(ctx, s.ID)
		assert.NilError(t, err)
		_, err = v.Lookup(gold)
		found = found || err == nil
		assert.NilError(t, v.Close())
		if !isUnclean(s) {
			checkSnapshot(t, e, s)
		}
	}
	assert.Assert(t, found, "%s is in no snapshot and not in the work tree", gold)
	assertState(t, string(e.Head().ID), func(path string) (io.ReadCloser, error) {
		return os.Open(filepath.Join(e.WorkTree(), path))
	})
	for _, name := range []string{"forks", "scratch", "tmp"} {
		left, err := os.ReadDir(filepath.Join(root, name))
		assert.Assert(t, err == nil || errors.Is(err, fs.ErrNotExist))
		assert.Equal(t, len(left), 0, name)
	}
	assert.Equal(t, len(nodesOnDisk(t, root)), len(log))
	return len(log)
}

// isUnclean says whether a snapshot is a mix of two states, and says so.
func isUnclean(s env.Snapshot) bool { return strings.HasPrefix(s.Message, "unclean: ") }

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// checkSnapshot reads all of a snapshot.
func checkSnapshot(t *testing.T, e *env.Env, s env.Snapshot) {
	v, err := e.View(context.Background(), s.ID)
	assert.NilError(t, err)
	defer v.Close()
	assertState(t, fmt.Sprintf("%s (%s %q)", s.ID, s.Kind, s.Message), func(path string) (io.ReadCloser, error) { return v.Open(path) })
}

// assertState says whether a tree is whole: all files that a promotion changed
// together carry the same number.
func assertState(t *testing.T, what string, open func(path string) (io.ReadCloser, error)) {
	first := ""
	for i := range files {
		f, err := open(fmt.Sprintf("d%d/%d", i%5, i))
		assert.NilError(t, err, "%s", what)
		got, err := io.ReadAll(f)
		assert.NilError(t, err)
		assert.NilError(t, f.Close())
		if i == 0 {
			first = string(got)
		}
		assert.Equal(t, string(got), first, "%s is a mix of two states", what)
	}
	assert.Assert(t, first != "")
}

func nodesOnDisk(t *testing.T, root string) []string {
	d, err := all.Backends()[0].Open(context.Background(), root)
	assert.NilError(t, err)
	ids, err := d.Snapshots(context.Background())
	assert.NilError(t, err)
	assert.NilError(t, d.Close())
	var out []string
	for _, id := range ids {
		out = append(out, string(id))
	}
	return out
}
