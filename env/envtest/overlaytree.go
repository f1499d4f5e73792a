//go:build linux

package envtest

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// layered makes the tree of a bench an overlay: the layer that its directory
// was and a nearer one, empty so far. It gives the host paths of the nearer
// layer and of the upper.
func (b *bench) layered() (near, upper string) {
	b.t.Helper()
	store := b.hidden + "/layers"
	for _, d := range []string{"near", "upper", "work"} {
		assert.NilError(b.t, os.MkdirAll(filepath.Join(store, d), 0o755))
	}
	far := filepath.Join(store, "far")
	assert.NilError(b.t, os.Rename(b.tree, far))
	b.command.View.Tree.Overlay = &forks.Overlay{Dir: store, Lower: []string{"near", "far"}, Upper: "upper", Work: "work"}
	return filepath.Join(store, "near"), filepath.Join(store, "upper")
}

// testOverlayTree: the tree is an overlay that the sandbox mounts for its
// command alone.
func testOverlayTree(t *testing.T, s Subject) {
	t.Run("workspace", func(t *testing.T) {
		b := newBench(t, s)
		write(t, b.tree+"/far", "far")
		write(t, b.tree+"/both", "far")
		write(t, b.tree+"/gone", "far")
		near, upper := b.layered()
		write(t, near+"/both", "near")
		far := fingerprint(t, b.hidden+"/layers/far")
		out := b.sh(`cat far both; rm gone; echo new >both; echo made >made; ls; cat both; pwd`)
		assert.Equal(t, out, "farnearboth\nfar\nmade\nnew\n"+b.command.View.At+"\n")
		assert.Equal(t, names(t, upper), "both gone made")
		assert.Equal(t, read(t, near+"/both"), "near")
		assert.Equal(t, fingerprint(t, b.hidden+"/layers/far"), far)
		assert.Equal(t, len(Mounts(t, b.dir)), 0)
		// The next command finds what the last one left.
		assert.Equal(t, b.sh("cat both made; ls -A "+b.hidden), "new\nmade\n")
		assert.Assert(t, !exists(b.tree), "its place on the host is not needed")
	})
	t.Run("rootfs", func(t *testing.T) {
		s := s
		s.system = makeSystem(t)
		b := newSystem(t, s, allDirs...)
		_, upper := b.layered()
		assert.Equal(t, b.sh("pwd; echo x >/root/f; rm -r /var/tmp; ls /proc/self/mountinfo"), "/\n/proc/self/mountinfo\n")
		assert.Equal(t, names(t, upper), "root var")
		assert.Equal(t, len(Mounts(t, b.dir)), 0)
	})
	t.Run("its own mount is locked", func(t *testing.T) {
		need(t, "umount")
		b := newBench(t, s)
		write(t, b.tree+"/f", "far")
		b.layered()
		assert.Equal(t, b.sh("cd /; umount "+b.command.View.At+" 2>/dev/null && exit 1; cat "+b.command.View.At+"/f"), "far")
	})
	t.Run("a home around it", func(t *testing.T) {
		b := newBench(t, s)
		b.command.View.Home, b.command.View.At = sandbox.HomeOverlay, b.home+"/project"
		write(t, b.home+"/project/f", "the original")
		write(t, b.tree+"/f", "the tree's")
		_, upper := b.layered()
		assert.Equal(t, b.sh("cat f; echo x >g; echo x >../h"), "the tree's")
		assert.Equal(t, names(t, upper), "g")
		assert.Equal(t, names(t, b.home)+names(t, b.home+"/project"), "projectf")
	})
	t.Run("a second command in it", func(t *testing.T) {
		b := newBench(t, s)
		b.layered()
		p, _ := b.start(context.Background(), "sleep", "1000")
		scratch := b.dir + "/second"
		assert.NilError(t, os.Mkdir(scratch, 0o755))
		b.scratch, b.command.View.Scratch = scratch, scratch
		e := b.refused("true")
		assert.Equal(t, e.What, "tree")
		assert.Assert(t, strings.Contains(e.Fix, "another command"), e.Fix)
		p.Stop(0)
		_, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, b.run("true").ExitCode, 0)
	})
	t.Run("a layer that is missing", func(t *testing.T) {
		b := newBench(t, s)
		near, upper := b.layered()
		assert.NilError(t, os.Remove(near))
		e := b.refused("true")
		assert.Equal(t, e.What, "tree")
		assert.ErrorContains(t, e, "near")
		assert.Assert(t, strings.Contains(e.Fix, "layer"), e.Fix)
		assert.Equal(t, names(t, upper), "")
	})
	t.Run("an upper that cannot be one", func(t *testing.T) {
		b := newBench(t, s)
		near, _ := b.layered()
		b.command.View.Tree.Overlay.Upper = "near/file"
		write(t, near+"/file", "x")
		e := b.refused("true")
		assert.Equal(t, e.What, "tree")
		assert.ErrorContains(t, e, b.tree)
		assert.Assert(t, e.Fix != "")
	})
}

// testHold: what a command holds stays locked until everything in it is dead,
// and the command does not see it.
func testHold(t *testing.T, s Subject) {
	b := newBench(t, s)
	dir, err := os.Open(b.hidden)
	assert.NilError(t, err)
	defer dir.Close()
	assert.NilError(t, unix.Flock(int(dir.Fd()), unix.LOCK_EX))
	b.command.Hold = dir
	assert.Equal(t, b.sh("for d in 3 4 5 6 7 8 9; do [ ! -e /proc/$$/fd/$d ] || readlink /proc/$$/fd/$d; done"), "")
	p, _ := b.start(context.Background(), "sleep", "1000")
	assert.NilError(t, dir.Close()) // as when agentenv dies: the lock is the helper's alone
	assert.Assert(t, locked(t, b.hidden))
	p.Stop(0)
	_, err = p.Wait()
	assert.NilError(t, err)
	assert.Assert(t, !locked(t, b.hidden))
}

// locked says whether somebody holds a directory's lock.
func locked(t *testing.T, path string) bool {
	t.Helper()
	dir, err := os.Open(path)
	assert.NilError(t, err)
	defer dir.Close()
	err = unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err != unix.EWOULDBLOCK {
		assert.NilError(t, err)
	}
	return err != nil
}

// testHiddenMounts: what is mounted in the store is not kept alive by a command
// that cannot see it.
func testHiddenMounts(t *testing.T, s Subject) {
	needRoot(t)
	b := newBench(t, s)
	at := b.hidden + "/work"
	assert.NilError(t, os.Mkdir(at, 0o755))
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, ""); err != nil {
		t.Skip(err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	write(t, at+"/f", "x")
	assert.Equal(t, strings.TrimSpace(b.sh("grep "+at+" /proc/self/mountinfo || :")), "")
	assert.Equal(t, read(t, at+"/f"), "x") // on the host it stays
	// A tree that is itself mounted there is used all the same.
	b.command.View.Tree.Dir = at
	assert.Equal(t, b.sh("cat f"), "x")
}
