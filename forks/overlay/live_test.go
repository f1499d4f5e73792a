//go:build linux

package overlay

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"gotest.tools/v3/assert"
)

// script is a random edit, in the words of a shell. What cannot be done where
// it is tried, such as renaming a directory of a lower layer, is left out.
func script(r *rand.Rand) string {
	path := func() string {
		p := []string{"a", "b", "c"}[r.IntN(3)]
		for range r.IntN(3) {
			p += "/" + []string{"a", "b", "c"}[r.IntN(3)]
		}
		return p
	}
	var b strings.Builder
	for range 1 + r.IntN(8) {
		p, q := path(), path()
		fmt.Fprintln(&b, strings.NewReplacer("P", p, "Q", q, "N", fmt.Sprint(r.IntN(1000))).Replace([]string{
			"[ -p P ] || echo N >P", "[ -p P ] || echo N >>P", "[ -p P ] || echo N >P", "rm -rf P", "mkdir -p P", "rm -rf P; mkdir P; echo N >P/c",
			"rm -rf P; mkdir P", "mv -T P Q", "ln P Q", "ln -sfn N P", "chmod 7N P; chmod u+rwx P", "touch -d @N P",
			"setfattr -n user.n -v N P", "[ -f P ] && exec 5<>P; exec 5>&-", "rm -rf P; cp -a Q P", "mkfifo P", "[ -p P ] || truncate -s N P",
		}[r.IntN(17)]))
	}
	return b.String()
}

// Commits of a tree that stays mounted and in use, between others of one that
// is not: each snapshot is what was seen when it was taken, in a fork and by
// what Diff and Status say.
func TestLiveHistories(t *testing.T) {
	histories, rounds := 6, 10
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		histories, rounds = 150, 20
	}
	for range histories {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(seed), func(t *testing.T) { liveHistory(t, rand.New(rand.NewPCG(seed, 1)), rounds) })
	}
}

func liveHistory(t *testing.T, r *rand.Rand, rounds int) {
	d, dir, tree := store(t, map[string]string{"a/a": "1", "a/b/c": "2", "b": "3", "c/a/b": "4", "c/b": "5"})
	ctx := t.Context()
	want := map[forks.ID]forkstest.Manifest{}
	last := forks.ID("a0")
	var log []string
	path, hide := seen(t, tree, dir)
	for i := range rounds {
		text := script(r)
		log = append(log, text)
		cmd := exec.CommandContext(ctx, "sh", "-c", text)
		cmd.Dir = path
		_ = cmd.Run() // some of it fails
		id := forks.ID(fmt.Sprintf("b%x", i))
		want[id] = forkstest.Read(t, path)
		idle := r.IntN(3) == 0
		if idle {
			hide()
		}
		status, err := d.Status(ctx, forks.Work)
		assert.NilError(t, err)
		c, err := d.Commit(ctx, forks.Work, id, nil)
		assert.NilError(t, err)
		assert.Equal(t, fmt.Sprint(names(status)), fmt.Sprint(names(c)), "%v", log)
		if len(c.List) > 0 {
			diff, err := d.Diff(ctx, last, id)
			assert.NilError(t, err)
			assert.Equal(t, fmt.Sprint(names(c)), fmt.Sprint(names(diff)), "%v", log)
			last = id
		} else {
			want[last] = want[id]
		}
		check(t, d, dir, last, want[last], log)
		status, err = d.Status(ctx, forks.Work)
		assert.NilError(t, err)
		assert.Equal(t, len(status.List), 0, "%v: %v", names(status), log)
		if idle {
			tree, err = d.Tree(forks.Work)
			assert.NilError(t, err)
			path, hide = seen(t, tree, dir)
			if ds := forkstest.Differences(want[last], forkstest.Read(t, path)); len(ds) > 0 {
				t.Fatalf("the tree changed: %v\n%v", ds, log)
			}
		}
	}
	hide()
	for id, m := range want {
		if _, err := d.View(ctx, id); err == nil { // one without changes was not made
			check(t, d, dir, id, m, log)
		}
	}
}

func names(c forks.Changes) (l []string) {
	for _, ch := range c.List {
		l = append(l, string(ch.Kind)+" "+ch.Path)
	}
	return l
}

// check compares a snapshot, in an overlay and in a plain fork, with m.
func check(t *testing.T, d forks.Driver, dir string, id forks.ID, m forkstest.Manifest, log []string) {
	t.Helper()
	for _, plain := range []bool{false, true} {
		k, err := d.Fork(t.Context(), "k", id, forks.ForkOptions{Plain: plain})
		assert.NilError(t, err)
		path, hide := k.Mount.Dir, func() {}
		if !plain {
			path, hide = seen(t, k, dir)
		}
		ds := forkstest.Differences(m, forkstest.Read(t, path))
		hide()
		if len(ds) > 0 {
			t.Fatalf("%s, plain %v: %v\n%v", id, plain, ds, strings.Join(log, "--\n"))
		}
		assert.NilError(t, d.RemoveFork(context.Background(), "k"))
	}
}
