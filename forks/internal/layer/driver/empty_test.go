//go:build linux

package driver

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// A store whose forks and snapshots are removed holds nothing that rm(1) could
// not remove, whatever was in it.
func TestEmptied(t *testing.T) {
	for _, o := range []Options{overlayOptions, copyOptions} {
		t.Run(o.Name, func(t *testing.T) { asBoth(t, func(t *testing.T, dir string) { emptied(t, dir, o) }) })
	}
}

func emptied(t *testing.T, dir string, o Options) {
	d := made(t, dir, o, map[string]string{"f": "1", "shut/g": "1"})
	ctx := t.Context()
	edit(t, d, forks.Work, "shut/h", "h")
	tree := d.place(forks.Work)
	if o.Mounted {
		tree = filepath.Join(dir, "store/work/stack/tree")
	}
	assert.NilError(t, os.Chmod(filepath.Join(tree, "shut"), 0))
	_, err := d.Commit(ctx, forks.Work, "b0", nil)
	assert.NilError(t, err)
	_, err = d.Fork(ctx, "k", "b0", forks.ForkOptions{})
	assert.NilError(t, err)
	if os.Geteuid() == 0 {
		if o.Mounted {
			_, err = d.Attach(ctx, forks.Work)
			assert.NilError(t, err)
		} else {
			lock(t, filepath.Join(tree, "f"))
		}
	}
	keys, err := d.Forks(ctx)
	assert.NilError(t, err)
	for _, k := range keys {
		assert.NilError(t, d.RemoveFork(ctx, k))
	}
	ids, err := d.Snapshots(ctx)
	assert.NilError(t, err)
	for _, id := range ids {
		assert.NilError(t, d.RemoveSnapshot(ctx, id))
	}
	_, err = d.Sweep(ctx)
	assert.NilError(t, err)
	assert.NilError(t, d.Close())

	store := filepath.Join(dir, "store")
	var left []string
	assert.NilError(t, filepath.WalkDir(store, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if fsat.Locked(unix.AT_FDCWD, path) || !e.IsDir() && e.Name() != triedName {
			left = append(left, path)
		}
		return nil
	}))
	assert.DeepEqual(t, left, []string(nil))
	assert.NilError(t, os.RemoveAll(store))
}

// lock makes a file immutable.
func lock(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	assert.NilError(t, err)
	defer f.Close()
	fsat.Lock(int(f.Fd()))
}
