//go:build linux

package driver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// damages are what can have come over the directory of a snapshot.
var damages = map[string]func(node string) error{
	"gone":      os.RemoveAll,
	"no record": func(node string) error { return os.Remove(filepath.Join(node, "record")) },
	"empty":     func(node string) error { return os.Truncate(filepath.Join(node, "record"), 0) },
	"cut":       func(node string) error { return os.Truncate(filepath.Join(node, "record"), 60) },
	"flipped": func(node string) error {
		b, err := os.ReadFile(filepath.Join(node, "record"))
		if err == nil {
			b[len(b)-7] ^= 1
			err = os.WriteFile(filepath.Join(node, "record"), b, 0o600)
		}
		return err
	},
	"a file": func(node string) error {
		if err := os.RemoveAll(node); err != nil {
			return err
		}
		return os.WriteFile(node, nil, 0o600)
	},
	"no files": func(node string) error { return os.RemoveAll(filepath.Join(node, "tree")) },
}

// A snapshot below the fork's base, or the base itself, is damaged: it is named,
// and a checkout of one that is whole gets out of it.
func TestDamagedBase(t *testing.T) {
	for _, o := range []Options{overlayOptions, copyOptions} {
		for name, damage := range damages {
			for _, bad := range []forks.ID{"b0", "c0"} {
				t.Run(o.Name+"/"+name+"/"+string(bad), func(t *testing.T) {
					asBoth(t, func(t *testing.T, dir string) { damagedBase(t, dir, o, bad, damage) })
				})
			}
		}
	}
}

// readable says that only the files of a snapshot are damaged.
func readable(node string) bool {
	_, record := os.Lstat(filepath.Join(node, "record"))
	_, tree := os.Lstat(filepath.Join(node, "tree"))
	return record == nil && tree != nil
}

func damagedBase(t *testing.T, dir string, o Options, bad forks.ID, damage func(string) error) {
	d := made(t, dir, o, map[string]string{"f": "1", "d/g": "1"})
	ctx := t.Context()
	for _, id := range []forks.ID{"b0", "c0"} {
		edit(t, d, forks.Work, "f", "of "+string(id))
		_, err := d.Commit(ctx, forks.Work, id, nil)
		assert.NilError(t, err)
	}
	edit(t, d, forks.Work, "n", "lost")
	assert.NilError(t, d.Close())
	assert.NilError(t, damage(filepath.Join(dir, "store/nodes", string(bad))))
	if o.Name == copyOptions.Name { // with it, nothing of the base is asked for
		assert.NilError(t, os.Remove(filepath.Join(dir, "store/work/index")))
	}

	d = open(t, dir, o)
	tree, err := d.Tree(forks.Work)
	assert.NilError(t, err)
	assert.Equal(t, tree.Base, forks.ID("c0"))
	named := func(err error) {
		t.Helper()
		assert.ErrorIs(t, err, forks.ErrDamaged)
		assert.ErrorContains(t, err, string(bad))
	}
	if readable(filepath.Join(dir, "store/nodes", string(bad))) {
		// The record tells what changed; to mount it is another thing.
		if o.Mounted && os.Geteuid() == 0 {
			_, err := tree.Mount.Open()
			named(err)
		}
	} else {
		_, err = d.Status(ctx, forks.Work)
		named(err)
		_, err = d.Commit(ctx, forks.Work, "d0", nil)
		named(err)
	}
	if o.Mounted && len(tree.Mount.Overlay.Lower) == 0 {
		_, err := tree.Mount.Open()
		assert.ErrorIs(t, err, forks.ErrDamaged)
		_, _, err = d.Use(ctx, forks.Work)
		named(err)
	}
	assert.Assert(t, d.Checkout(ctx, forks.Work, bad) != nil)
	assert.NilError(t, d.Checkout(ctx, forks.Work, "a0"))
	c, err := d.Status(ctx, forks.Work)
	assert.NilError(t, err)
	assert.Equal(t, len(c.List), 0)
	edit(t, d, forks.Work, "f", "goes on")
	c, err = d.Commit(ctx, forks.Work, "e0", nil)
	assert.NilError(t, err)
	assert.Equal(t, c.List[len(c.List)-1].Path, "f") // after the root itself, for its times
	if bad == "b0" {
		named(d.Checkout(ctx, forks.Work, "c0"))
	}
	for _, id := range []forks.ID{"b0", "c0"} {
		assert.NilError(t, d.RemoveSnapshot(ctx, id))
	}
	assert.NilError(t, d.RemoveFork(ctx, forks.Work))
	_, err = d.Fork(ctx, forks.Work, "e0", forks.ForkOptions{})
	assert.NilError(t, err)
}
