package env_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// errnos are what a file system says that cannot go on.
var errnos = []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.EROFS, unix.EIO}

// TestDriverFails lets each step that an operation asks of its driver fail. The
// error is passed on as it is, and the old state, or the new, is intact.
func TestDriverFails(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	cases := []struct {
		op, method string
		nth        int
	}{
		{"commit", "Commit", 1}, {"commit", "Tree", 1}, {"commit", "Sweep", 1}, {"commit", "Snapshots", 1}, {"commit", "Forks", 1},
		{"exec", "Commit", 1}, {"exec", "Commit", 2},
		{"checkout", "Commit", 1}, {"checkout", "Checkout", 1},
		{"checkout --discard", "Checkout", 1},
		{"keep", "Fork", 1}, {"keep", "Commit", 1}, {"keep", "RemoveFork", 1},
		{"promote", "Fork", 1}, {"promote", "Commit", 1}, {"promote", "Commit", 2}, {"promote", "Checkout", 1}, {"promote", "RemoveFork", 1},
		{"take", "Capture", 1}, {"delete", "RemoveSnapshot", 1},
	}
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		for i, c := range cases {
			for k, errno := range errnos {
				if os.Getenv("AGENTENV_TEST_LONG") == "" && k != i%len(errnos) {
					continue
				}
				t.Run(fmt.Sprintf("%s %d of %s, %s", c.method, c.nth, c.op, unix.ErrnoName(errno)), func(t *testing.T) {
					j := job{Op: c.op, Root: s.root, Src: s.src, Backend: o.Backend, Script: editScript("cand")}
					var old []env.Snapshot
					old, j.Ref = s.prepare(t, c.op)
					if c.op == "take" {
						touchSource(t, s.src, len(old))
					}
					var f forkstest.Faults
					f.Fail(c.method, c.nth, errno)
					err := operations[c.op](context.Background(), j, faulty(o, &f))
					if (c.op == "checkout --discard" || c.op == "delete") && (errno == unix.ENOSPC || errno == unix.EDQUOT) {
						// It makes room: the reserve is given up, and it goes on.
						assert.NilError(t, err)
					} else {
						assert.ErrorIs(t, err, errno)
					}
					s.check(t, j, old)
				})
			}
		}
	})
}

// faulty are options whose drivers fail as f says.
func faulty(o env.Options, f *forkstest.Faults) env.Options {
	backends := make([]forks.Backend, 0, len(o.Backends))
	for _, b := range o.Backends {
		backends = append(backends, f.Wrap(b))
	}
	o.Backends = backends
	return o
}

// TestInitFails: nothing is left of an environment whose making failed.
func TestInitFails(t *testing.T) {
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		src, root := dir+"/src", dir+"/a/root"
		writeSource(t, src)
		for i, method := range []string{"Open", "Capture", "View", "Fork"} {
			errno := errnos[i%len(errnos)]
			var f forkstest.Faults
			f.Fail(method, 1, errno)
			_, err := env.Init(context.Background(), root, env.InitOptions{From: src}, faulty(o, &f))
			assert.ErrorIs(t, err, errno, method)
			_, err = os.Lstat(dir + "/a")
			assert.Assert(t, os.IsNotExist(err), "%s: something was left", method)
		}
		e, err := env.Init(context.Background(), root, env.InitOptions{From: src}, o)
		assert.NilError(t, err)
		forkstest.Equal(t, stored(t, e, e.Head().ID), forkstest.Read(t, src))
		assert.NilError(t, e.Close())
	})
}

// TestHistoryCannotBeSaved fills the file system just before a history is
// written, and takes the room away at each of the points after that.
func TestHistoryCannotBeSaved(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	dir := forkstest.SmallVolume(t, "ext4", "48m")
	for _, b := range []string{"overlay", "copy"} {
		t.Run(b, func(t *testing.T) {
			o := optionsFor(b)
			if p := probeOf(b, dir); !p.OK {
				t.Skipf("%s does not work here: %s", b, p.Detail)
			}
			t.Cleanup(func() { unmountBelow(t, dir) })
			s := newScene(t, dir+"/"+b, o)
			for _, op := range []string{"commit", "checkout", "promote", "keep", "take", "tag", "delete"} {
				j := job{Op: op, Root: s.root, Src: s.src, Backend: b, Script: editScript("cand")}
				var old []env.Snapshot
				old, j.Ref = s.prepare(t, op)
				if op == "take" {
					touchSource(t, s.src, len(old))
				}
				filler := dir + "/filler"
				env.OnStep(func(name string) {
					if name == "meta.ready" {
						fillUp(t, filler)
					}
				})
				err := operations[op](context.Background(), j, o)
				env.OnStep(nil)
				assert.ErrorIs(t, err, unix.ENOSPC, op)
				assert.ErrorContains(t, err, s.root)
				assert.NilError(t, os.Remove(filler))
				unix.Sync()
				s.check(t, j, old)
			}
		})
	}
}

// fillUp takes all room that there is.
func fillUp(t *testing.T, path string) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	assert.NilError(t, err)
	defer f.Close()
	for block := make([]byte, 1<<20); len(block) > 0; {
		if _, err := f.Write(block); err != nil {
			assert.ErrorIs(t, err, unix.ENOSPC)
			block = block[:len(block)/2]
		}
	}
	assert.NilError(t, f.Sync())
}

// TestTornFork: what a loss of power left of an attempt's fork, of which nothing
// is synced, is removed and stops nobody.
func TestTornFork(t *testing.T) {
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		s := newScene(t, dir, o)
		ctx := context.Background()
		e, err := env.Lock(ctx, s.root, "test", o)
		assert.NilError(t, err)
		_, err = e.Fork(ctx, "candidate", e.Head().ID, sandbox.LevelNamespaces)
		assert.NilError(t, err)
		assert.NilError(t, e.Close())
		left := filepath.Join(s.root, "forks", "candidate")
		torn := 0
		assert.NilError(t, filepath.WalkDir(left, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.Type()&os.ModeSymlink != 0 {
				torn++
				return os.Remove(path)
			}
			return err
		}))
		assert.Assert(t, torn > 0)
		e, err = env.Lock(ctx, s.root, "test", o)
		assert.NilError(t, err)
		assert.NilError(t, e.Close())
		_, err = os.Lstat(left)
		assert.ErrorIs(t, err, os.ErrNotExist)
	})
}
