package env_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// promoteFails promotes a candidate, which has to fail, and checks that HEAD
// and tree are the old ones and that the winner is kept and named.
func promoteFails(t *testing.T, s *scene, o env.Options) error {
	t.Helper()
	ctx := context.Background()
	var winner env.ID
	e, err := env.Lock(ctx, s.root, "test", o)
	assert.NilError(t, err)
	perr := inCandidate(ctx, e, job{Ref: s.base, Script: editScript("cand")}, func(fr env.Frozen) error {
		winner = fr.ID
		_, _, err := e.Promote(ctx, fr, "promoted")
		return err
	})
	assert.ErrorContains(t, perr, string(winner))
	assert.Equal(t, e.Head().ID, s.base)
	assert.NilError(t, e.Close())

	var told []string
	o = s.o
	o.Notify = func(line string) { told = append(told, line) }
	e, err = env.Lock(ctx, s.root, "test", o)
	assert.NilError(t, err)
	defer func() { assert.NilError(t, e.Close()) }()
	assert.Equal(t, len(told), 0, "%v", told)
	assert.Equal(t, e.Head().ID, s.base)
	forkstest.Equal(t, stored(t, e, winner), s.cand)
	st, err := e.Status(ctx)
	assert.NilError(t, err)
	assert.Equal(t, st.Changes, 0)
	nothingLeft(t, e)
	return perr
}

// TestPromotionThatFails: if the work tree cannot be changed, HEAD does not
// move, and the next command has nothing to put right.
func TestPromotionThatFails(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		stood := exists(filepath.Join(s.root, "work", "current", "keep"))
		var f forkstest.Faults
		f.Fail("Checkout", 1, unix.EIO)
		assert.ErrorIs(t, promoteFails(t, s, faulty(o, &f)), unix.EIO)
		assert.Equal(t, exists(filepath.Join(s.root, "work", "current", "keep")), stood)
	})
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TestPromotionOverAMount: a mount in the work tree keeps btrfs from changing
// it.
func TestPromotionOverAMount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir := placeFor(t, "btrfs")
	if p := probeOf("btrfs", dir); !p.OK {
		t.Skip(p.Detail)
	}
	s := newScene(t, dir, optionsFor("btrfs"))
	mount := filepath.Join(s.root, "work", "current", "d0")
	assert.NilError(t, unix.Mount("none", mount, "tmpfs", 0, ""))
	defer func() { _ = unix.Unmount(mount, unix.MNT_DETACH) }()
	ctx := context.Background()
	e, err := env.Lock(ctx, s.root, "test", s.o)
	assert.NilError(t, err)
	_, err = e.SaveWork(ctx, "what the mount hides counts as removed")
	if err == nil {
		s.base = e.Head().ID
	}
	perr := inCandidate(ctx, e, job{Ref: s.base, Script: editScript("cand")}, func(fr env.Frozen) error {
		_, _, err := e.Promote(ctx, fr, "promoted")
		return err
	})
	assert.ErrorContains(t, perr, "unmount it first")
	assert.Equal(t, e.Head().ID, s.base)
	assert.NilError(t, e.Close())
	e, err = env.Lock(ctx, s.root, "test", s.o)
	assert.NilError(t, err)
	assert.Equal(t, e.Head().ID, s.base)
	assert.NilError(t, e.Close())
}
