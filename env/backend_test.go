package env_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/copytree"
)

// moody is a backend that works only when told so.
type moody struct{ works, opens bool }

func (m *moody) backend() forks.Backend {
	b := copytree.Backend()
	open := b.Open
	b.Name = "moody"
	b.Probe = func(_ context.Context, dir string) forks.Probe {
		return forks.Probe{Name: b.Name, OK: m.works, Detail: "no mood at " + dir, Lost: "the mood", Fix: "sing to it in " + dir}
	}
	b.Open = func(ctx context.Context, dir string) (forks.Driver, error) {
		if !m.opens {
			return nil, errors.New("it sulks")
		}
		return open(ctx, dir)
	}
	return b
}

// failing is an Executor that cannot make one part of a sandbox.
type failing struct{ what string }

func (f failing) Start(context.Context, sandbox.Command) (sandbox.Process, error) {
	return nil, &sandbox.Error{What: f.what, Err: errors.New("it is broken")}
}

// TestBackendIsChosenAndKept: the first that works is taken, the better ones
// that do not are known with their reasons, and an environment whose backend
// does not work any more says so.
func TestBackendIsChosenAndKept(t *testing.T) {
	ctx := context.Background()
	src := t.TempDir()
	assert.NilError(t, os.WriteFile(filepath.Join(src, "f"), []byte("x"), 0o644))
	m := &moody{opens: true}
	opts := env.Options{Backends: []forks.Backend{m.backend(), copytree.Backend()}, Executor: failing{"tree"}}
	in := env.InitOptions{From: src}

	root := filepath.Join(t.TempDir(), "copied")
	e, err := env.Init(ctx, root, in, opts)
	assert.NilError(t, err)
	assert.Equal(t, e.Backend(), "copy")
	assert.Equal(t, len(e.Refused()), 1)
	assert.Equal(t, e.Refused()[0].Detail, "no mood at "+root)
	assert.NilError(t, e.Close())

	forced := opts
	forced.Backend = "moody"
	root = filepath.Join(t.TempDir(), "forced")
	_, err = env.Init(ctx, root, in, forced)
	assert.ErrorIs(t, err, forks.ErrUnsupported)
	assert.Error(t, err, "the moody backend does not work at "+root+": no mood at "+root+": sing to it in "+root)
	_, err = os.Lstat(root)
	assert.ErrorIs(t, err, os.ErrNotExist)

	m.works = true
	e, err = env.Init(ctx, root, in, opts)
	assert.NilError(t, err)
	assert.Equal(t, e.Backend(), "moody")
	assert.Equal(t, len(e.Refused()), 0)
	run := env.Run{Level: sandbox.LevelNamespaces, Args: []string{"true"}}
	_, err = e.Exec(ctx, run, false, func(sandbox.Process) {})
	assert.ErrorIs(t, err, sandbox.ErrSandbox) // the backend works: it is something else
	m.works = false
	_, err = e.Exec(ctx, run, false, func(sandbox.Process) {})
	assert.ErrorIs(t, err, forks.ErrUnsupported)
	assert.ErrorContains(t, err, "does not work here now (no mood at "+root+")")
	assert.ErrorContains(t, err, "sing to it")
	assert.NilError(t, e.Close())

	m.opens = false
	_, err = env.Open(ctx, root, opts)
	assert.ErrorIs(t, err, forks.ErrUnsupported)
	assert.ErrorContains(t, err, "sing to it")
	entries, err := os.ReadDir(filepath.Join(root, "scratch"))
	assert.NilError(t, err)
	assert.Equal(t, len(entries), 0, "trials leave nothing")
}

// TestFailureOfTheSandboxIsNotTheBackends: what is broken beside the tree is
// told as it is.
func TestFailureOfTheSandboxIsNotTheBackends(t *testing.T) {
	ctx := context.Background()
	src := t.TempDir()
	assert.NilError(t, os.WriteFile(filepath.Join(src, "f"), []byte("x"), 0o644))
	m := &moody{opens: true, works: true}
	e, err := env.Init(ctx, filepath.Join(t.TempDir(), "root"), env.InitOptions{From: src},
		env.Options{Backends: []forks.Backend{m.backend()}, Executor: failing{"pipes"}})
	assert.NilError(t, err)
	defer e.Close()
	m.works = false
	_, err = e.Exec(ctx, env.Run{Level: sandbox.LevelNamespaces, Args: []string{"true"}}, false, func(sandbox.Process) {})
	assert.ErrorIs(t, err, sandbox.ErrSandbox)
	assert.Assert(t, !errors.Is(err, forks.ErrUnsupported))
	_, err = e.ExecFork(ctx, "HEAD", env.Run{Level: sandbox.LevelNamespaces, Args: []string{"true"}}, true, func(sandbox.Process) {})
	assert.ErrorIs(t, err, sandbox.ErrSandbox)
	left, err := e.Leftovers(ctx)
	assert.NilError(t, err)
	assert.Equal(t, len(left), 0)
	free, err := filepath.Glob(filepath.Join(e.Root(), "*", "exec.*"))
	assert.NilError(t, err)
	assert.Equal(t, len(free), 0, "the fork of a command that could not start is removed")
}
