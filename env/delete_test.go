package env_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// with opens the scene's environment for changing it.
func (s *scene) with(t *testing.T, fn func(ctx context.Context, e *env.Env)) {
	t.Helper()
	e, err := env.Lock(context.Background(), s.root, "test", s.o)
	assert.NilError(t, err)
	defer func() { assert.NilError(t, e.Close()) }()
	fn(context.Background(), e)
}

// exec changes the work tree and returns the snapshot of that.
func (s *scene) exec(t *testing.T, script string) (id env.ID) {
	t.Helper()
	s.with(t, func(ctx context.Context, e *env.Env) {
		res, err := e.Exec(ctx, shellRun(e, script), false, func(sandbox.Process) {})
		assert.NilError(t, err)
		assert.Assert(t, res.Created)
		id = res.Head.ID
	})
	return id
}

// TestDeleteWhatAForkUses: a snapshot in a fork of which a command runs is held
// until that ends.
func TestDeleteWhatAForkUses(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		used := s.exec(t, editScript("used"))
		s.exec(t, "echo more >more")
		ctx, stop := context.WithCancel(context.Background())
		running, ended := make(chan struct{}), make(chan error)
		go func() {
			e, err := env.Open(ctx, s.root, o)
			if err == nil {
				_, err = e.ExecFork(ctx, string(used), shellRun(e, "sleep 60"), false, func(sandbox.Process) { close(running) })
				_ = e.Close() // the fork's end is what counts
			}
			ended <- err
		}()
		select {
		case <-running:
		case err := <-ended:
			t.Fatal(err)
		}
		s.with(t, func(ctx context.Context, e *env.Env) {
			_, err := e.Delete(ctx, string(used))
			assert.ErrorIs(t, err, env.ErrHeld)
			assert.ErrorContains(t, err, "fork")
		})
		_, err := env.DeleteAll(context.Background(), s.root, o)
		assert.ErrorIs(t, err, env.ErrHeld)
		assert.ErrorContains(t, err, "fork")
		stop()
		<-ended
		s.with(t, func(ctx context.Context, e *env.Env) {
			forkstest.Equal(t, stored(t, e, used), edited(t, s.src, "used"))
			_, err := e.Delete(ctx, string(used))
			assert.NilError(t, err)
			nothingLeft(t, e)
		})
	})
}

// TestDeleteBelowOthers: what stays on disk after a delete counts on.
func TestDeleteBelowOthers(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		below := s.exec(t, "head -c 300000 /dev/urandom >big")
		top := s.exec(t, "echo more >more")
		bytes := func(e *env.Env) int64 {
			st, err := e.Status(context.Background())
			assert.NilError(t, err)
			return st.Disk.Bytes
		}
		s.with(t, func(ctx context.Context, e *env.Env) {
			before := bytes(e)
			assert.Assert(t, before >= 300000)
			d, err := e.Delete(ctx, string(below))
			assert.NilError(t, err)
			if !exists(filepath.Join(s.root, "nodes", string(below))) {
				assert.Equal(t, d.Stays, int64(0))
				return // this driver needs it no more
			}
			assert.Assert(t, d.Stays >= 300000, "%d", d.Stays)
			assert.Equal(t, bytes(e), before)
			_, err = e.Checkout(ctx, string(s.base), true)
			assert.NilError(t, err)
			d, err = e.Delete(ctx, string(top))
			assert.NilError(t, err)
			assert.Equal(t, d.Stays, int64(0))
			assert.Assert(t, !exists(filepath.Join(s.root, "nodes", string(below))))
			assert.Assert(t, bytes(e) < before-300000)
		})
	})
}

// TestDeleteOneOfTwoThatShare: the bytes go over to the snapshot that has the
// same tree.
func TestDeleteOneOfTwoThatShare(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		first := s.exec(t, "head -c 300000 /dev/urandom >big")
		s.with(t, func(ctx context.Context, e *env.Env) {
			_, _, err := e.Commit(ctx, "the same", true)
			assert.NilError(t, err)
			before, err := e.Status(ctx)
			assert.NilError(t, err)
			_, err = e.Delete(ctx, string(first))
			assert.NilError(t, err)
			after, err := e.Status(ctx)
			assert.NilError(t, err)
			assert.Equal(t, after.Disk.Bytes, before.Disk.Bytes)
		})
	})
}

// TestDamagedBelowHead: a snapshot on which HEAD is built is gone. What does not
// need it works, and what does names it.
func TestDamagedBelowHead(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		lost := s.exec(t, editScript("lost"))
		head := s.exec(t, "echo more >more")
		s.with(t, func(ctx context.Context, e *env.Env) {
			_, err := e.Umount(ctx)
			assert.NilError(t, err)
		})
		node := filepath.Join(s.root, "nodes", string(lost))
		assert.NilError(t, os.Rename(node, filepath.Join(dir, "away")))

		e, err := env.Open(context.Background(), s.root, o)
		assert.NilError(t, err)
		st, err := e.Status(context.Background())
		assert.NilError(t, err)
		assert.Equal(t, st.Head, head)
		assert.Equal(t, st.Snapshots, 3)
		if st.Damaged == "" { // this driver's snapshots stand for themselves
			assert.Assert(t, !st.Dirty)
		} else {
			assert.Assert(t, strings.Contains(st.Damaged, string(lost)), st.Damaged)
			assert.Assert(t, st.Dirty)
		}
		assert.NilError(t, e.Close())

		s.with(t, func(ctx context.Context, e *env.Env) {
			if st.Damaged != "" {
				_, err := e.Checkout(ctx, string(s.base), false)
				assert.ErrorIs(t, err, env.ErrDamaged)
				assert.ErrorContains(t, err, "--discard")
				assert.ErrorContains(t, err, string(lost))
			}
			_, err := e.Checkout(ctx, string(s.base), true)
			assert.NilError(t, err)
			assert.Equal(t, e.Head().ID, s.base)
			_, err = e.Delete(ctx, string(lost))
			assert.NilError(t, err)
			st, err := e.Status(ctx)
			assert.NilError(t, err)
			assert.Equal(t, st.Damaged, "")
			assert.Assert(t, !st.Dirty)
		})
		assert.Equal(t, s.exec(t, editScript("edit")) != "", true)
	})
}

// TestSomethingElseAtTheWorkTree: what somebody put in the place of the work
// tree is named at once and left alone.
func TestSomethingElseAtTheWorkTree(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		place := filepath.Join(s.root, "work", "current")
		forms := map[string]func() error{
			"a file":    func() error { return os.WriteFile(place, []byte("mine"), 0o644) },
			"a symlink": func() error { return os.Symlink(s.src, place) },
		}
		if o.Backend == "btrfs" {
			forms["a copy"] = func() error { return os.CopyFS(place, os.DirFS(s.src)) }
		}
		for name, put := range forms {
			t.Run(name, func(t *testing.T) {
				s.with(t, func(ctx context.Context, e *env.Env) {
					_, err := e.Umount(ctx)
					assert.NilError(t, err)
				})
				away := filepath.Join(t.TempDir(), "away")
				_ = os.Chmod(place, 0o700)
				if err := os.Rename(place, away); err != nil && !os.IsNotExist(err) {
					assert.NilError(t, os.RemoveAll(place))
				}
				assert.NilError(t, put())
				begun := time.Now()
				r, err := env.Open(context.Background(), s.root, o)
				assert.NilError(t, err)
				_, err = r.Status(context.Background())
				if err != nil { // else the tree is not what stands there
					assert.ErrorIs(t, err, env.ErrDamaged)
					assert.ErrorContains(t, err, place+" is not the work tree any more")
				}
				assert.Assert(t, time.Since(begun) < time.Second)
				assert.NilError(t, r.Close())
				s.with(t, func(ctx context.Context, e *env.Env) {
					tree, terr := e.Exec(ctx, shellRun(e, "true"), true, func(sandbox.Process) {})
					if terr == nil {
						assert.Equal(t, tree.ExitCode, 0)
						return
					}
					assert.ErrorIs(t, terr, env.ErrDamaged)
					assert.ErrorContains(t, terr, place+" is not the work tree any more")
				})
				assert.NilError(t, os.RemoveAll(place))
				s.with(t, func(ctx context.Context, e *env.Env) {
					_, err := e.Exec(ctx, shellRun(e, "test -e keep"), true, func(sandbox.Process) {})
					assert.NilError(t, err)
				})
			})
		}
	})
}

// TestCommitMountsTheWorkTree: it stands on the host after any command that
// needs it.
func TestCommitMountsTheWorkTree(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		stands := filepath.Join(s.root, "work", "current", "keep")
		stood := exists(stands)
		s.with(t, func(ctx context.Context, e *env.Env) {
			_, err := e.Umount(ctx)
			assert.NilError(t, err)
			_, made, err := e.Commit(ctx, "", false)
			assert.NilError(t, err)
			assert.Assert(t, !made)
			assert.Equal(t, exists(stands), stood)
		})
	})
}
