package sandbox_test

import (
	"os"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// TestLacking: what a tree has no place for is told in one line.
func TestLacking(t *testing.T) {
	envtest.Census(t)
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	for _, c := range []struct {
		has  []string
		want []string
	}{
		{nil, []string{"the tree has no /proc, /dev, /sys, /run, /etc/resolv.conf (to resolve names), so commands run without; make empty ones in the tree to have them"}},
		{[]string{"proc", "sys", "run", "etc/resolv.conf/"}, []string{"the tree has no /dev, so commands run without; make an empty one in the tree to have it"}},
		{[]string{"proc", "dev", "sys", "run", "etc/resolv.conf/"}, []string{}},
	} {
		cmd := scene(t, scratchHome(t), sandbox.LevelNamespaces)
		cmd.View.At = ""
		smallSystem(t, cmd.View.Tree.Dir, "true")
		for _, name := range []string{"proc", "dev", "sys", "run", "etc/resolv.conf"} {
			assert.NilError(t, os.RemoveAll(cmd.View.Tree.Dir+"/"+name))
		}
		for _, name := range c.has {
			if name == "etc/resolv.conf/" {
				assert.NilError(t, os.MkdirAll(cmd.View.Tree.Dir+"/etc", 0o755))
				assert.NilError(t, os.WriteFile(cmd.View.Tree.Dir+"/etc/resolv.conf", nil, 0o644))
				continue
			}
			assert.NilError(t, os.Mkdir(cmd.View.Tree.Dir+"/"+name, 0o755))
		}
		var n notices
		cmd.Args = []string{"true"}
		finish(t, sandbox.New(sandbox.Options{Notice: n.add}), cmd)
		assert.DeepEqual(t, append([]string{}, n.all()...), c.want)
	}
}
