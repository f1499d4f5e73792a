package env_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
)

// TestForkMounts: what a command without namespaces mounts in its fork, and what
// one of a killed agentenv left there, is taken off and named.
func TestForkMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can mount where others see it")
	}
	for _, b := range all.Backends() {
		t.Run(b.Name, func(t *testing.T) {
			onBackend(t, b, placeFor(t, b.Name), testForkMounts)
		})
	}
}

func testForkMounts(t *testing.T, dir string, o env.Options) {
	envtest.Census(t)
	ctx, src, root := t.Context(), t.TempDir(), filepath.Join(dir, "root")
	assert.NilError(t, os.WriteFile(filepath.Join(src, "f"), []byte("x"), 0o600))
	var told []string
	o.Notify = func(line string) { told = append(told, line) }
	e, err := env.Init(ctx, root, env.InitOptions{From: src}, o)
	assert.NilError(t, err)
	fork := func(key forks.Key) *env.Fork {
		f, err := e.Fork(ctx, key, e.Head().ID, sandbox.LevelProcess)
		assert.NilError(t, err)
		return f
	}
	f := fork("a")
	run := shellRun(e, "mkdir m; mount -t tmpfs none m; echo lost >m/f; mkdir m/n; mount -t tmpfs none m/n; mount -t tmpfs none .")
	run.Level = sandbox.LevelProcess
	p, err := f.Start(ctx, run)
	assert.NilError(t, err)
	res, err := p.Wait()
	assert.NilError(t, err)
	assert.Equal(t, res.ExitCode, 0)
	said := strings.Join(told, "\n")
	assert.Equal(t, strings.Count(said, "was unmounted"), 3, said)
	assert.Assert(t, strings.Contains(said, "tmpfs, which a command mounted at "+f.Tree().Mount.Dir+"/m/n in its fork"), said)
	frozen, err := f.Freeze(ctx, e.Head().ID)
	assert.NilError(t, err)
	assert.Equal(t, fmt.Sprint(frozen.Changes.Warnings), "[]")
	assert.NilError(t, f.Remove(ctx))
	assert.NilError(t, e.Drop(ctx, frozen))

	mine := filepath.Join(e.WorkTree(), "mine") // a person's
	assert.NilError(t, os.Mkdir(mine, 0o700))
	assert.NilError(t, unix.Mount("none", mine, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(mine, unix.MNT_DETACH) })
	for _, key := range []forks.Key{"b", "exec.c"} {
		assert.NilError(t, unix.Mount("none", fork(key).Tree().Mount.Dir, "tmpfs", 0, ""))
	}
	assert.NilError(t, e.Close())
	told = nil
	e, err = env.Lock(ctx, root, "commit", o)
	assert.NilError(t, err)
	defer e.Close()
	assert.Equal(t, len(told), 2, told)
	assert.NilError(t, unix.Unmount(mine, 0))
	nothingLeft(t, e)
}
