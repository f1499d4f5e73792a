package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
)

// TestKilledAtRandomInstants kills agentenv, as its users run it, while it
// commits, checks out, runs commands and tournaments, and looks with the same
// program at what it left.
func TestKilledAtRandomInstants(t *testing.T) {
	rounds := 5
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		rounds = 200
	}
	onBackends(t, func(t *testing.T, u *owner) {
		k := &killing{owner: u, took: map[string]time.Duration{}, states: map[env.ID]string{}}
		k.base = u.init(t, "base")
		stop := u.load(t)
		defer stop()
		// A kill at a random instant may come after the end: more rounds then.
		for n := 0; n < rounds || k.kills == 0 && n < 20*rounds; n++ {
			k.round(t, n)
		}
		assert.Assert(t, k.kills > 0, "nothing was killed in %d rounds", rounds)
	})
}

// killing is a series of rounds of which each kills one process.
type killing struct {
	*owner
	base env.ID
	// took is how long the operations take.
	took  map[string]time.Duration
	kills int
	// states are those of the snapshots that were looked at.
	states map[env.ID]string
}

// commands are those that are killed. What exec does is one change: a command
// of the user's that was killed leaves what it leaves.
func (k *killing) commands(n int) map[string][]string {
	return map[string][]string{
		"commit":     {"commit", "-m", "a commit"},
		"exec":       {"exec", "--", "sh", "-c", fmt.Sprintf("echo %d >by-exec", n)},
		"checkout":   {"checkout", string(k.base)},
		"tournament": {"tournament", "--plain", "--test", "true", "--", stateScript(fmt.Sprintf("cand%d", n)), "sleep 9"},
		"fork":       {"exec", "--fork", "--keep", "--", "sh", "-c", stateScript(fmt.Sprintf("cand%d", n))},
	}
}

// round leaves unsaved work in the tree, kills an operation, and looks.
func (k *killing) round(t *testing.T, n int) {
	t.Helper()
	names := []string{"commit", "exec", "checkout", "tournament", "fork"}
	op := names[n%len(names)]
	if op == "fork" && !k.hasFork(t) {
		op = "commit"
	}
	edit := fmt.Sprintf("edit%d", n)
	k.agentenv(t, "exec", "--no-commit", "--", "sh", "-c", stateScript(edit))
	before := k.log(t)
	what := fmt.Sprintf("round %d, %s", n, op)
	k.kill(t, op, k.commands(n)[op])

	// A reader, without the lock.
	k.agentenv(t, "status", "--json")
	head := env.ID(k.agentenv(t, "head"))
	seen := k.log(t)
	// The next command that writes recovers.
	tree := k.tree(t)
	cand := whole(fmt.Sprintf("cand%d", n))
	assert.Assert(t, tree == whole(edit) || tree == whole("base") || tree == cand, "%s: the tree is %q", what, tree)
	after := k.log(t)
	contains(t, after, before, what)
	contains(t, after, seen, what)
	k.swept(t)
	saved := false
	for _, s := range after {
		state, ok := k.states[s.ID]
		if !ok {
			state = k.stateOf(t, s.ID)
			k.states[s.ID] = state
			good := state == whole(edit) || state == cand || state == whole("base")
			assert.Assert(t, good || strings.HasPrefix(s.Message, "unclean: "), "%s: %s (%s %q) is %q", what, s.ID, s.Kind, s.Message, state)
		}
		saved = saved || state == whole(edit)
	}
	assert.Assert(t, saved, "%s: the work that no snapshot held is lost", what)
	_, known := k.states[head]
	assert.Assert(t, known, "%s: HEAD was %s, which is not listed", what, head)
}

// kill runs a command and kills it at a random instant of its time.
func (k *killing) kill(t *testing.T, op string, args []string) {
	t.Helper()
	if k.took[op] == 0 {
		k.took[op] = 150 * time.Millisecond
	}
	c := k.command(k.src, "agentenv", append([]string{"--root", k.root, "-q"}, args...)...)
	begun := time.Now()
	assert.NilError(t, c.Start())
	timer := time.AfterFunc(time.Duration(rand.Int64N(int64(k.took[op])*6/5)), func() { _ = c.Process.Kill() })
	err := c.Wait()
	timer.Stop()
	if err == nil {
		k.took[op] = time.Since(begun)
		return
	}
	k.kills++
	assert.Equal(t, c.ProcessState.String(), "signal: killed", "%s: %v", op, err)
}

func (k *killing) hasFork(t *testing.T) bool {
	t.Helper()
	_, _, code := k.run(t, k.src, "agentenv", "--root", k.root, "exec", "--fork", "--", "true")
	return code == 0
}

// stateOf is the state of a snapshot, found out by checking it out.
func (k *killing) stateOf(t *testing.T, id env.ID) string {
	t.Helper()
	k.agentenv(t, "checkout", string(id))
	return k.tree(t)
}

// contains checks that every snapshot of part is in all, once.
func contains(t *testing.T, all, part []env.Snapshot, what string) {
	t.Helper()
	count := map[env.ID]int{}
	for _, s := range all {
		count[s.ID]++
		assert.Equal(t, count[s.ID], 1, "%s: %s is listed twice", what, s.ID)
	}
	for _, s := range part {
		assert.Equal(t, count[s.ID], 1, "%s: %s is lost", what, s.ID)
	}
}

// load keeps readers busy until it is stopped; none of them may fail.
func (u *owner) load(t *testing.T) (stop func()) {
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		most := 0
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			args := [][]string{{"log", "--json"}, {"status", "--json"}, {"head"}, {"show", "HEAD"}, {"branches"}, {"tag"}}[i%6]
			c := u.command(u.src, "agentenv", append([]string{"--root", u.root}, args...)...)
			out, err := c.Output()
			if !assert.Check(t, err == nil, "%v while others write: %v %s", args, err, out) {
				return
			}
			if args[0] != "log" {
				continue
			}
			n := strings.Count(string(out), `"created"`)
			assert.Check(t, n >= most, "a reader saw %d snapshots and then %d", most, n)
			most = n
		}
	}()
	return func() { close(done); <-ended }
}

// TestNoMountIsLeftByTheKilled counts the host's mounts over a series of kills.
func TestNoMountIsLeftByTheKilled(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		base := u.init(t, "base")
		u.tree(t) // what is mounted from the first command on is mounted now
		before := u.mounts(t)
		for n := range 3 {
			k := &killing{owner: u, base: base, took: map[string]time.Duration{}}
			for _, op := range []string{"exec", "tournament"} {
				k.kill(t, op, k.commands(n)[op])
			}
		}
		u.tree(t)
		after := u.mounts(t) // the tree may have been mounted anew
		assert.Equal(t, len(after), len(before), "%q, before %q", after, before)
	})
}

// mounts are the host's that have to do with this owner's environment.
func (u *owner) mounts(t *testing.T) (list []string) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	assert.NilError(t, err)
	for line := range strings.SplitSeq(string(data), "\n") {
		if strings.Contains(line, filepath.Dir(u.root)) || strings.Contains(line, u.home) {
			list = append(list, line)
		}
	}
	return list
}
