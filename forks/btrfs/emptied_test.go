//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// A store whose forks and snapshots are removed holds nothing that rm(1) could
// not remove: no subvolume is left, whatever was in it, whoever may delete them.
func TestEmptied(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		s := newScene(t, dir)
		id := s.capture(map[string]string{"f": "x", "d/g": "y"})
		tree := s.fork(forks.Work, id)
		sh(t, tree, `echo more >>f; chmod 500 d`)
		second, _ := s.commit(forks.Work)
		sh(t, s.fork("k", second), `btrfs -q subvolume create sub; btrfs -q subvolume snapshot -r sub sub/ro`)
		s.fork("damaged", second)
		// What was cut short, and what something else damaged.
		sh(t, s.d.store.Dir, `mkdir -p tmp/dead/node forks/damaged; btrfs -q subvolume snapshot -r work/current tmp/dead/node/tree
			btrfs -q subvolume snapshot -r work/current work/next; rm forks/damaged/base nodes/`+string(second)+`/info`)
		keys, err := s.d.Forks(t.Context())
		assert.NilError(t, err)
		for _, k := range keys {
			assert.NilError(t, s.d.RemoveFork(t.Context(), k))
		}
		ids, err := s.d.Snapshots(t.Context())
		assert.NilError(t, err)
		for _, id := range ids {
			assert.NilError(t, s.d.RemoveSnapshot(t.Context(), id))
		}
		_, err = s.d.Sweep(t.Context())
		assert.NilError(t, err)
		assert.NilError(t, filepath.WalkDir(s.d.store.Dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			fi, err := e.Info()
			assert.NilError(t, err)
			assert.Assert(t, e.IsDir() && fi.Sys().(*syscall.Stat_t).Ino != rootDir, path)
			return nil
		}))
		assert.NilError(t, os.RemoveAll(s.d.store.Dir))
	})
}

// A fork whose base is gone says so, and a checkout gets out of it.
func TestDamagedBase(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		s := newScene(t, dir)
		id := s.capture(map[string]string{"f": "x"})
		tree := s.fork(forks.Work, id)
		sh(t, tree, `echo more >>f`)
		second, _ := s.commit(forks.Work)
		sh(t, tree, `echo more >>f`)
		assert.NilError(t, os.Rename(s.d.store.NodePath(second), filepath.Join(dir, "lost")))
		_, err := s.d.Status(t.Context(), forks.Work)
		assert.ErrorIs(t, err, forks.ErrDamaged)
		assert.ErrorContains(t, err, string(second))
		_, err = s.d.Commit(t.Context(), forks.Work, "ffff", nil)
		assert.ErrorIs(t, err, forks.ErrDamaged)
		assert.ErrorContains(t, err, string(second))
		assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
		assert.Equal(t, sh(t, tree, `cat f`), "x")
		c, err := s.d.Status(t.Context(), forks.Work)
		assert.NilError(t, err)
		assert.Equal(t, len(c.List), 0)
		assert.NilError(t, s.d.RemoveSnapshot(t.Context(), second))
	})
}
