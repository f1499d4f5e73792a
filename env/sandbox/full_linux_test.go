package sandbox_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// TestFullScratch: a file system without room, or inodes, is not blamed on the
// home or on namespaces.
func TestFullScratch(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	envtest.Census(t)
	for inodes := range 8 {
		t.Run(strconv.Itoa(inodes), func(t *testing.T) {
			volume, tree, home := t.TempDir(), t.TempDir(), t.TempDir()
			assert.NilError(t, unix.Mount("tmpfs", volume, "tmpfs", 0, "nr_inodes="+strconv.Itoa(inodes+3)))
			defer func() { assert.NilError(t, unix.Unmount(volume, unix.MNT_DETACH)) }()
			scratch := filepath.Join(volume, "scratch")
			assert.NilError(t, os.Mkdir(scratch, 0o700))
			_, err := sandbox.New(sandbox.Options{}).Start(t.Context(), sandbox.Command{
				Level: sandbox.LevelNamespaces,
				View: sandbox.View{Tree: forks.Mount{Dir: tree}, At: tree, Scratch: scratch,
					Home: sandbox.HomeOverlay, HomeDir: home},
				Args: []string{"true"},
			})
			var e *sandbox.Error
			assert.Assert(t, errors.As(err, &e), "%v", err)
			assert.ErrorIs(t, err, unix.ENOSPC)
			assert.Assert(t, e.OfFileSystem() && e.Fix == "" && !errors.Is(err, sandbox.ErrSandbox), "%v", err)
		})
	}
}

// TestProbeSweeps: what a killed probe left goes, and nothing else.
func TestProbeSweeps(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	elsewhere := t.TempDir()
	old := time.Now().Add(-time.Hour)
	for _, name := range []string{"agentenv-probe-old", "agentenv-probe-new", "other"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, name, "tree", "d"), 0o700))
		if name != "agentenv-probe-new" {
			assert.NilError(t, os.Chtimes(filepath.Join(dir, name), old, old))
		}
	}
	assert.NilError(t, os.Symlink(elsewhere, filepath.Join(dir, "agentenv-probe-link")))
	_ = sandbox.Probe(sandbox.LevelProcess) // whether it works does not matter here
	entries, err := os.ReadDir(dir)
	assert.NilError(t, err)
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	assert.DeepEqual(t, left, []string{"agentenv-probe-link", "agentenv-probe-new", "other"})
}
