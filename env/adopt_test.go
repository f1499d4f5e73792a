package env_test

import (
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// A directory that was moved keeps its environment, in place or not, and is
// where it is found from.
func TestAdopt(t *testing.T) {
	onBackends(t, func(t *testing.T, top string, o env.Options) {
		for _, inPlace := range []bool{true, false} {
			name := map[bool]string{true: "in-place", false: "taken"}[inPlace]
			t.Run(name, func(t *testing.T) {
				data := filepath.Join(top, name)
				t.Setenv("XDG_DATA_HOME", data)
				dir, moved := filepath.Join(data, "dir"), filepath.Join(data, "moved")
				writeSource(t, dir)
				root := env.RootOf(dir, os.Getenv)
				e, err := env.Init(t.Context(), root, env.InitOptions{From: dir, InPlace: inPlace}, o)
				assert.NilError(t, err)
				zero := e.Head().ID
				assert.NilError(t, e.Close())
				forkstest.Write(t, data, map[string]string{"other/f": "x", "file": "x"})

				_, err = env.Adopt(t.Context(), root, filepath.Join(data, "other"), os.Getenv, o)
				assert.ErrorIs(t, err, env.ErrExists) // the directory is there
				assert.NilError(t, os.Rename(dir, moved))
				_, err = env.Adopt(t.Context(), root, filepath.Join(data, "none"), os.Getenv, o)
				assert.ErrorIs(t, err, env.ErrNotFound)

				to, err := env.Adopt(t.Context(), root, moved, os.Getenv, o)
				assert.NilError(t, err)
				assert.Equal(t, to, env.RootOf(moved, os.Getenv))
				found, meant, err := env.FindRoot("", os.Getenv, moved)
				assert.NilError(t, err)
				assert.Assert(t, meant && found == to, found)
				assert.Assert(t, !env.Exists(root))
				again, err := env.Adopt(t.Context(), to, moved, os.Getenv, o)
				assert.NilError(t, err)
				assert.Equal(t, again, to)

				l, err := env.Lock(t.Context(), to, "test", o)
				assert.NilError(t, err)
				defer func() { assert.NilError(t, l.Close()) }()
				assert.Equal(t, l.Source(), moved)
				assert.Equal(t, l.MountAt(), moved)
				if inPlace {
					assert.Equal(t, l.WorkTree(), moved)
					forkstest.Write(t, moved, map[string]string{"keep": "edited"})
					_, made, err := l.Commit(t.Context(), "edited", false)
					assert.NilError(t, err)
					assert.Assert(t, made)
				}
				_, err = l.Checkout(t.Context(), string(zero), false)
				assert.NilError(t, err)
				s, err := l.TakeDir(t.Context(), moved)
				assert.NilError(t, err)
				assert.Equal(t, s.ID, zero) // it is known as what it was taken from
				_, err = l.Umount(t.Context())
				assert.NilError(t, err)
			})
		}
	})
}
