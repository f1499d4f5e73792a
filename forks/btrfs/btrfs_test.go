//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/agentenv/agentenv/forks/forkstest"
	"gotest.tools/v3/assert"
)

func TestMain(m *testing.M) { os.Exit(forkstest.Main(m, Backend())) }

// volume returns a new directory on btrfs. The subvolumes in it are deleted in
// the end: a read-only one hinders its removal, and to empty one takes long.
func volume(t *testing.T) string {
	dir := forkstest.Volume(t, "btrfs")
	t.Cleanup(func() { removeSubvolumes(t, dir) })
	return dir
}

func removeSubvolumes(t *testing.T, dir string) {
	d := &driver{}
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil
		}
		fi, err := e.Info()
		if err != nil || fi.Sys().(*syscall.Stat_t).Ino != rootDir {
			return nil
		}
		assert.NilError(t, d.removeTree(t.Context(), filepath.Dir(path), filepath.Base(path)))
		return fs.SkipDir
	})
}

func TestSuite(t *testing.T) {
	t.Run("root", func(t *testing.T) {
		t.Parallel()
		if forkstest.IsUser() {
			t.Skip("this is the ordinary user")
		}
		forkstest.Run(t, Backend(), volume)
	})
	t.Run("user", func(t *testing.T) {
		t.Parallel()
		if forkstest.AsUser(t, volume(t)) {
			forkstest.Run(t, Backend(), volume)
		}
	})
}
