//go:build linux

package envtest

import (
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// testMounts: what else is brought in.
func testMounts(t *testing.T, s Subject) {
	bind := func(b *bench, from, to string, m sandbox.Mode) {
		b.command.View.Binds = append(b.command.View.Binds, sandbox.Bind{From: from, To: to, Mode: m})
	}
	t.Run("modes", func(t *testing.T) {
		b := newBench(t, s)
		for _, m := range []sandbox.Mode{sandbox.ReadOnly, sandbox.Overlay, sandbox.ReadWrite} {
			from := b.dir + "/from-" + string(m)
			write(t, from+"/f", "old")
			bind(b, from, "/envtest-gone/"+string(m), m)
			bind(b, from, from, m)
		}
		out := b.sh(`cd /envtest-gone; ls; for m in *; do cat $m/f; (echo new >$m/f; touch $m/g) 2>/dev/null || echo " $m refused"; done; cat */f`)
		assert.Equal(t, out, "overlay\nro\nrw\noldold ro refused\noldnew\noldnew\n")
		assert.Equal(t, read(t, b.dir+"/from-rw/f"), "new\n")
		assert.Equal(t, names(t, b.dir+"/from-rw"), "f g")
		for _, m := range []string{"ro", "overlay"} {
			assert.Equal(t, read(t, b.dir+"/from-"+m+"/f"), "old")
			assert.Equal(t, names(t, b.dir+"/from-"+m), "f")
		}
	})
	t.Run("a file", func(t *testing.T) {
		b := newBench(t, s)
		write(t, b.dir+"/script", "echo run")
		bind(b, b.dir+"/script", "/run/agentenv/script", sandbox.ReadOnly)
		bind(b, b.dir+"/script", "/etc/hosts", sandbox.ReadOnly)
		assert.Equal(t, b.sh("sh /run/agentenv/script; sh /etc/hosts"), "run\nrun\n")
	})
	t.Run("around and in the tree", func(t *testing.T) {
		b := newBench(t, s)
		write(t, b.tree+"/sub/f", "tree")
		write(t, b.dir+"/other/f", "other")
		bind(b, b.dir+"/other", b.command.View.At+"/sub", sandbox.ReadOnly)
		bind(b, b.dir, "/envtest-gone", sandbox.ReadOnly)
		b.command.View.At = "/envtest-gone/project"
		b.command.View.Binds[0].To = "/envtest-gone/fork/sub"
		// The hidden store is hidden at every place where it would be seen.
		assert.Equal(t, b.sh("cat sub/f ../fork/sub/f; ls -A ../store"), "treeother")
	})
	t.Run("a place that is missing in the tree", func(t *testing.T) {
		b := newBench(t, s)
		before := fingerprint(t, b.tree)
		bind(b, b.home, b.command.View.At+"/none", sandbox.ReadOnly)
		e := b.refused("true")
		assert.ErrorContains(t, e, b.command.View.At+"/none")
		assert.Assert(t, e.Fix != "")
		assert.Equal(t, fingerprint(t, b.tree), before)
	})
	t.Run("a source that is missing", func(t *testing.T) {
		b := newBench(t, s)
		bind(b, b.dir+"/none", "/mnt/x", sandbox.ReadOnly)
		assert.ErrorContains(t, b.refused("true"), b.dir+"/none")
	})
}

// testErrors: a sandbox that cannot be made says what and why, and leaves
// nothing.
func testErrors(t *testing.T, s Subject) {
	t.Run("no tree", func(t *testing.T) {
		b := newBench(t, s)
		b.command.View.Tree.Dir = b.dir + "/none"
		assert.ErrorContains(t, b.refused("true"), b.dir+"/none")
	})
	t.Run("relative paths", func(t *testing.T) {
		b := newBench(t, s)
		b.command.View.Tree.Dir = "tree"
		assert.ErrorContains(t, b.refused("true"), `"tree"`)
	})
	t.Run("no command", func(t *testing.T) {
		assert.ErrorContains(t, newBench(t, s).refused(), "no command")
	})
	t.Run("unknown level", func(t *testing.T) {
		b := newBench(t, s)
		b.command.Level = "strong"
		assert.ErrorContains(t, b.refused("true"), "strong")
	})
	t.Run("a system as a process", func(t *testing.T) {
		if s.Level != sandbox.LevelProcess {
			t.Skip("only for the process level")
		}
		b := newBench(t, s)
		b.command.View.At = ""
		assert.Assert(t, b.refused("true").Fix != "")
	})
	t.Run("an overlay as a process", func(t *testing.T) {
		if s.Level != sandbox.LevelProcess {
			t.Skip("only for the process level")
		}
		b := newBench(t, s)
		b.layered()
		e := b.refused("true")
		assert.Equal(t, e.What, "tree")
		assert.Assert(t, strings.Contains(e.Fix, "--backend copy"), e.Fix)
	})
}
