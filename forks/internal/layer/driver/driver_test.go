//go:build linux

package driver

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"gotest.tools/v3/assert"
)

var (
	overlayOptions = Options{Name: "overlay", Mounted: true}
	copyOptions    = Options{Name: "copy"}
)

func backend(o Options) forks.Backend {
	return forks.Backend{Name: o.Name, Open: func(_ context.Context, dir string) (forks.Driver, error) { return Open(dir, o) }}
}

func TestMain(m *testing.M) { os.Exit(forkstest.Main(m, backend(overlayOptions))) }

// asBoth runs the test as root and as an ordinary user, on ext4.
func asBoth(t *testing.T, test func(t *testing.T, dir string)) {
	t.Run("root", func(t *testing.T) {
		dir := forkstest.Volume(t, "ext4")
		if forkstest.IsUser() {
			t.Skip("this is the ordinary user")
		}
		test(t, dir)
	})
	t.Run("user", func(t *testing.T) {
		dir := forkstest.Volume(t, "ext4")
		if forkstest.AsUser(t, dir) {
			test(t, dir)
		}
	})
}

// open opens the store in dir as a new process would.
func open(t *testing.T, dir string, o Options) *driver {
	t.Helper()
	d, err := Open(filepath.Join(dir, "store"), o)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, d.Close()) })
	return d.(*driver)
}

// made is a store with the snapshot a0 of files, and its work tree.
func made(t *testing.T, dir string, o Options, files map[string]string) *driver {
	t.Helper()
	src := filepath.Join(dir, "src")
	forkstest.Write(t, src, files)
	d := open(t, dir, o)
	_, err := d.Capture(t.Context(), "a0", "", forks.Source{Dir: src})
	assert.NilError(t, err)
	_, err = d.Fork(t.Context(), forks.Work, "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	return d
}

// edit writes to a path of a fork that is not mounted, as what is mounted would.
func edit(t *testing.T, d *driver, key forks.Key, path, content string) {
	t.Helper()
	dir := d.place(key)
	if !d.plain(key) {
		home, _ := d.store.ForkDir(key)
		dir = filepath.Join(home, "stack/tree")
	}
	forkstest.Write(t, dir, map[string]string{path: content})
}

func attached(t *testing.T, d *driver) string {
	t.Helper()
	tree, err := d.Attach(t.Context(), forks.Work)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, d.Detach(context.Background(), forks.Work)) })
	return tree.Mount.Dir
}
