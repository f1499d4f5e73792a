//go:build linux

package driver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// That overlays work is found out once, not by every process; and anew where it
// may be another's answer.
func TestTriedOnce(t *testing.T) {
	asBoth(t, func(t *testing.T, dir string) {
		d := made(t, dir, copyOptions, map[string]string{"f": "1"})
		kept := filepath.Join(dir, "store/nodes", triedName)
		tree, err := d.Fork(t.Context(), "k", "a0", forks.ForkOptions{})
		assert.NilError(t, err)
		assert.Assert(t, tree.Mount.Overlay != nil)
		assert.Assert(t, d.tried(rights()))
		was, err := os.Lstat(kept)
		assert.NilError(t, err)

		d = open(t, dir, copyOptions)
		assert.Assert(t, d.Features().ConstantFork)
		is, err := os.Lstat(kept)
		assert.NilError(t, err)
		assert.Assert(t, os.SameFile(was, is), "it was tried again")

		assert.NilError(t, os.WriteFile(kept, []byte("uid 4711 boot another\n"), 0o600))
		d = open(t, dir, copyOptions)
		assert.Assert(t, !d.tried(rights()))
		assert.Assert(t, d.Features().ConstantFork)
		assert.Assert(t, d.tried(rights()))
	})
}
