package env_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
)

// TestAppliedIsKnown: a directory that is what was applied to it has not
// changed, and the next apply finds no conflict with that, also when an older
// snapshot was deleted; what the user changed there is one, until the directory
// is taken anew.
func TestAppliedIsKnown(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		apply := func(conflicts int) {
			t.Helper()
			s.with(t, func(ctx context.Context, e *env.Env) {
				res, err := e.Apply(ctx, "HEAD", env.ApplyOptions{})
				assert.NilError(t, err)
				assert.Equal(t, len(res.Conflicts), conflicts, "%v", res.Conflicts)
			})
		}
		keep := func() string {
			data, err := os.ReadFile(filepath.Join(s.src, "d0/mode"))
			assert.NilError(t, err)
			return string(data)
		}
		first := s.exec(t, "echo one >d0/mode")
		apply(0)
		s.exec(t, "echo two >d0/mode")
		s.with(t, func(ctx context.Context, e *env.Env) {
			changed, err := e.SourceChanged(ctx)
			assert.NilError(t, err)
			assert.Assert(t, !changed)
		})
		apply(0)
		assert.Equal(t, keep(), "two\n")
		s.with(t, func(ctx context.Context, e *env.Env) {
			_, err := e.Delete(ctx, string(first))
			assert.NilError(t, err)
		})
		s.exec(t, "echo three >d0/mode")
		apply(0)
		assert.Equal(t, keep(), "three\n")

		assert.NilError(t, os.WriteFile(filepath.Join(s.src, "d0/mode"), []byte("mine\n"), 0o644))
		s.exec(t, "echo four >d0/mode")
		apply(1)
		assert.Equal(t, keep(), "mine\n")
		s.with(t, func(ctx context.Context, e *env.Env) {
			taken, err := e.TakeDir(ctx, s.src)
			assert.NilError(t, err)
			_, err = e.Checkout(ctx, string(taken.ID), true)
			assert.NilError(t, err)
		})
		s.exec(t, "echo five >d0/mode")
		apply(0)
		assert.Equal(t, keep(), "five\n")
	})
}
