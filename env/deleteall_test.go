package env_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// TestDeleteAll: nothing is left of an environment, whatever state it is in.
func TestDeleteAll(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	harm := map[string]func(t *testing.T, root string){
		"whole":            func(*testing.T, string) {},
		"no-history":       func(t *testing.T, root string) { assert.NilError(t, os.Remove(filepath.Join(root, "meta.json"))) },
		"history-is-empty": func(t *testing.T, root string) { assert.NilError(t, os.Truncate(filepath.Join(root, "meta.json"), 0)) },
		"after-rm--rf": func(_ *testing.T, root string) {
			unmountBelow(t, root)
			_ = exec.Command("rm", "-rf", root).Run() // what it cannot remove stays
		},
		"no-forks-are-known": func(t *testing.T, root string) {
			unmountBelow(t, root)
			found, err := filepath.Glob(filepath.Join(root, "work", "*"))
			assert.NilError(t, err)
			for _, p := range found {
				if filepath.Base(p) != "current" {
					assert.NilError(t, exec.Command("rm", "-rf", p).Run())
				}
			}
		},
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		for name, do := range harm {
			t.Run(name, func(t *testing.T) {
				s := newScene(t, filepath.Join(dir, name), o)
				s.exec(t, editScript("edit"))
				do(t, s.root)
				if !exists(s.root) {
					return // rm could
				}
				d, err := env.DeleteAll(context.Background(), s.root, o)
				assert.NilError(t, err)
				assert.Assert(t, d.RootRemoved)
				assert.Assert(t, !exists(s.root))
				forkstest.Equal(t, forkstest.Read(t, s.src), s.before)
				_, err = env.DeleteAll(context.Background(), s.root, o)
				assert.ErrorIs(t, err, env.ErrNotFound)
			})
		}
	})
}

// TestDeleteAllKeepsWhatIsForeign: neither what is not agentenv's in a root, nor
// a directory that is none, nor the directory of an environment in place goes.
func TestDeleteAllKeepsWhatIsForeign(t *testing.T) {
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		mine := filepath.Join(s.root, "mine")
		assert.NilError(t, os.WriteFile(mine, []byte("mine"), 0o600))
		d, err := env.DeleteAll(context.Background(), s.root, o)
		assert.NilError(t, err)
		assert.DeepEqual(t, d.Left, []string{"mine"})
		assert.Equal(t, d.Snapshots, 1)
		assert.Assert(t, exists(mine))
		_, err = env.DeleteAll(context.Background(), s.root, o)
		assert.ErrorIs(t, err, env.ErrNotFound)
		assert.Assert(t, exists(mine))
		_, err = env.DeleteAll(context.Background(), s.src, o)
		assert.ErrorIs(t, err, env.ErrNotFound)

		p := newPlace(t, filepath.Join(dir, "inplace"), o)
		was := p.read()
		d, err = env.DeleteAll(context.Background(), p.root, o)
		assert.NilError(t, err)
		assert.Equal(t, d.Kept, p.dir)
		assert.Assert(t, !exists(p.root))
		forkstest.Equal(t, p.read(), was)
	})
}

// TestDeleteAllRefusesAndGoesOn: while somebody else is at work nothing is
// removed; what was cut short is completed.
func TestDeleteAllRefusesAndGoesOn(t *testing.T) {
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		e, err := env.Lock(context.Background(), s.root, "tournament", o)
		assert.NilError(t, err)
		_, err = env.DeleteAll(context.Background(), s.root, o)
		assert.ErrorIs(t, err, env.ErrHeld)
		assert.ErrorContains(t, err, "tournament")
		forkstest.Equal(t, stored(t, e, s.base), s.before)
		assert.NilError(t, e.Close())

		j := job{Op: "delete --all", Root: s.root, Backend: o.Backend}
		round := func(step int) (bool, int) {
			if !exists(s.root) {
				e, err := env.Init(context.Background(), s.root, env.InitOptions{From: s.src}, o)
				assert.NilError(t, err)
				assert.NilError(t, e.Close())
			}
			j.Step = step
			killed, steps := work(t, j)
			if os.Remove(s.root) != nil && exists(s.root) { // not an empty directory
				_, err := env.DeleteAll(context.Background(), s.root, o)
				assert.NilError(t, err, "after step %d", step)
			}
			assert.Assert(t, !exists(s.root))
			return killed, steps
		}
		eachStep(t, counting(round), killing(round))
	})
}
