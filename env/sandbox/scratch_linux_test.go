package sandbox_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// TestRemoveScratch: no rights and no depth keep it from removing, and a link
// does not lead it elsewhere.
func TestRemoveScratch(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "scratch")
	deep := dir
	for range 40 {
		deep = filepath.Join(deep, "d")
	}
	assert.NilError(t, os.MkdirAll(deep, 0o755))
	for _, name := range []string{"readable", "none", "none/below"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
		assert.NilError(t, os.WriteFile(filepath.Join(dir, name, "f"), nil, 0o444))
	}
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"none/below", 0}, {"none", 0}, {"readable", 0o555}} {
		assert.NilError(t, os.Chmod(filepath.Join(dir, d.name), d.mode))
	}
	assert.NilError(t, os.WriteFile(filepath.Join(base, "kept"), nil, 0o444))
	assert.NilError(t, os.Symlink(base, filepath.Join(dir, "link")))
	assert.NilError(t, sandbox.RemoveScratch(dir))
	entries, err := os.ReadDir(base)
	assert.NilError(t, err)
	assert.Equal(t, len(entries), 1)
	assert.NilError(t, sandbox.RemoveScratch(dir)) // again
	assert.NilError(t, sandbox.RemoveScratch(filepath.Join(dir, "no", "parent")))
}

// TestAnyBytes: names, arguments and variables need not be UTF-8.
func TestAnyBytes(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	c := scene(t, filepath.Join(scratchHome(t), "b\xffd\nname"), sandbox.LevelNamespaces)
	var out strings.Builder
	c.Args = []string{"sh", "-c", `printf '%s %s' "$1" "$V"; pwd`, "sh", "a\xe9"}
	c.Env = append(c.Env, "V=\xfe\n")
	c.Stdout = &out
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	_, err = p.Wait()
	assert.NilError(t, err)
	assert.Equal(t, out.String(), "a\xe9 \xfe\n"+c.View.At+"\n")
}
