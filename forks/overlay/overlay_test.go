//go:build linux

package overlay

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/layer/driver"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func TestMain(m *testing.M) { os.Exit(forkstest.Main(m, Backend())) }

func TestSuite(t *testing.T) { forkstest.RunVolumes(t, Backend()) }

func openStore(t *testing.T, dir string) forks.Driver {
	t.Helper()
	d, err := Backend().Open(t.Context(), dir)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, d.Close()) })
	return d
}

// seen mounts a fork below dir, and unmounts it in the end unless that was done.
func seen(t *testing.T, tree forks.Tree, dir string) (path string, hide func()) {
	t.Helper()
	path, err := os.MkdirTemp(dir, "seen")
	assert.NilError(t, err)
	fd, err := tree.Mount.Open()
	assert.NilError(t, err)
	defer unix.Close(fd)
	assert.NilError(t, unix.MoveMount(fd, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH))
	hidden := false
	hide = func() {
		if !hidden {
			hidden = true
			assert.NilError(t, unix.Unmount(path, 0))
			assert.NilError(t, os.Remove(path))
		}
	}
	t.Cleanup(hide)
	return path, hide
}

// store captures files and forks them as the work tree, as root on ext4.
func store(t *testing.T, files map[string]string) (d forks.Driver, dir string, tree forks.Tree) {
	t.Helper()
	dir = forkstest.Volume(t, "ext4")
	if forkstest.IsUser() {
		t.Skip("mounting on the host needs root")
	}
	src := filepath.Join(dir, "src")
	forkstest.Write(t, src, files)
	d = openStore(t, filepath.Join(dir, "store"))
	_, err := d.Capture(t.Context(), "a0", "", forks.Source{Dir: src})
	assert.NilError(t, err)
	tree, err = d.Fork(t.Context(), forks.Work, "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	return d, dir, tree
}

// A second mount of an upper is refused, also while the first is in another
// mount namespace; and when that is gone it is not.
func TestMountedOnce(t *testing.T) {
	_, dir, tree := store(t, map[string]string{"f": "x"})
	_, hide := seen(t, tree, dir)
	_, err := tree.Mount.Open()
	assert.ErrorIs(t, err, forks.ErrInUse)
	end, elsewhere := namespace(t, tree)
	assert.ErrorIs(t, elsewhere, forks.ErrInUse)
	end()
	hide()
	end, elsewhere = namespace(t, tree)
	assert.NilError(t, elsewhere)
	_, err = tree.Mount.Open()
	assert.ErrorIs(t, err, forks.ErrInUse)
	end()
	fd, err := tree.Mount.Open()
	assert.NilError(t, err)
	assert.NilError(t, unix.Close(fd))
}

// A mount that ends a moment later than its processes does not make a checkout
// or a removal leave anything behind.
func TestMountEndsLate(t *testing.T) {
	d, dir, tree := store(t, map[string]string{"f": "x"})
	late := func() {
		end, err := namespace(t, tree)
		assert.NilError(t, err)
		time.AfterFunc(100*time.Millisecond, end)
	}
	late()
	assert.NilError(t, d.Checkout(t.Context(), forks.Work, "a0"))
	late()
	assert.NilError(t, d.RemoveFork(t.Context(), forks.Work))
	assert.NilError(t, d.RemoveSnapshot(t.Context(), "a0"))
	for _, name := range []string{"tmp", "nodes"} {
		left, err := os.ReadDir(filepath.Join(dir, "store", name))
		assert.NilError(t, err)
		assert.Equal(t, len(left), 0, name)
	}
}

// namespace mounts the tree in a thread with a mount namespace of its own, that
// ends with end.
func namespace(t *testing.T, tree forks.Tree) (end func(), err error) {
	t.Helper()
	done, stop, ended := make(chan error), make(chan struct{}), make(chan struct{})
	go inThread(func() {
		defer close(ended)
		err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		fd := -1
		if err == nil {
			fd, err = tree.Mount.Open()
		}
		if err == nil {
			err = unix.MoveMount(fd, "", unix.AT_FDCWD, tree.Mount.Overlay.Dir+"/tmp", unix.MOVE_MOUNT_F_EMPTY_PATH)
			unix.Close(fd)
		}
		done <- err
		<-stop
	})
	err = <-done
	return func() { close(stop); <-ended }, err
}

// inThread calls fn in a thread that ends with the goroutine. The first thread
// of a process does not: while that is held, another is taken.
func inThread(fn func()) {
	runtime.LockOSThread()
	if unix.Gettid() != os.Getpid() {
		fn()
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		inThread(fn)
	}()
	<-done
	runtime.UnlockOSThread()
}

// Layers that a fork stands on outlive their snapshots, in the fork and in the
// upper that a checkout replaced while a process stood in it.
func TestLayersStay(t *testing.T) {
	d, dir, tree := store(t, map[string]string{"f": "first", "g": "g"})
	ctx := t.Context()
	var err error
	tree, err = d.Attach(ctx, forks.Work)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, d.Detach(context.Background(), forks.Work)) })
	assert.NilError(t, os.WriteFile(filepath.Join(tree.Mount.Dir, "n"), []byte("n"), 0o644))
	_, err = d.Commit(ctx, forks.Work, "b0", nil)
	assert.NilError(t, err)
	_, err = d.Capture(ctx, "c0", "", forks.Source{Dir: t.TempDir()})
	assert.NilError(t, err)
	assert.NilError(t, d.RemoveSnapshot(ctx, "a0"))
	assert.NilError(t, d.RemoveSnapshot(ctx, "b0"))
	stand, err := os.Open(tree.Mount.Dir) // as a shell does
	assert.NilError(t, err)
	defer stand.Close()
	assert.NilError(t, d.Checkout(ctx, forks.Work, "c0"))
	tree, err = d.Tree(forks.Work)
	assert.NilError(t, err)
	assert.Equal(t, len(tree.Warnings), 1)
	assert.Assert(t, strings.Contains(tree.Warnings[0], "cd"))
	for range 2 {
		_, err = d.Sweep(ctx)
		assert.NilError(t, err)
		at := fmt.Sprintf("/proc/self/fd/%d/", stand.Fd())
		for name, want := range map[string]string{"f": "first", "n": "n"} {
			b, err := os.ReadFile(at + name)
			assert.NilError(t, err)
			assert.Equal(t, string(b), want)
		}
	}
	assert.NilError(t, stand.Close())
	_, err = d.Sweep(ctx)
	assert.NilError(t, err)
	left, err := os.ReadDir(filepath.Join(dir, "store/nodes"))
	assert.NilError(t, err)
	assert.Equal(t, len(left), 1, "%v", left)
	left, err = os.ReadDir(filepath.Join(dir, "store/tmp"))
	assert.NilError(t, err)
	assert.Equal(t, len(left), 0, "%v", left)
}

// The bare directory refuses writes, root's too: after a reboot it is there
// without the tree, and when the tree is detached it is not there at all.
func TestBareDirectory(t *testing.T) {
	d, dir, _ := store(t, map[string]string{"f": "x"})
	tree, err := d.Attach(t.Context(), forks.Work)
	assert.NilError(t, err)
	file := filepath.Join(tree.Mount.Dir, "new")
	assert.NilError(t, os.WriteFile(file, []byte("1"), 0o644))
	assert.NilError(t, unix.Unmount(tree.Mount.Dir, 0)) // as a reboot does
	assert.ErrorIs(t, os.WriteFile(file, nil, 0o644), syscall.EPERM)
	tree, err = d.Attach(t.Context(), forks.Work)
	assert.NilError(t, err)
	b, err := os.ReadFile(file)
	assert.NilError(t, err)
	assert.Equal(t, string(b), "1")
	assert.NilError(t, d.Detach(t.Context(), forks.Work))
	assert.ErrorIs(t, os.WriteFile(file, nil, 0o644), os.ErrNotExist)
	assert.NilError(t, d.Detach(t.Context(), forks.Work))
	assert.Assert(t, !layer.InUse(filepath.Join(dir, "store/work/stack")))
}

// Hundreds of snapshots, most of them removed again: each is what it was, and
// no mount has more layers than it may.
func TestFlatten(t *testing.T) {
	d, dir, tree := store(t, map[string]string{"f": "0", "d/keep": "k", "gone/x": "x"})
	ctx := t.Context()
	want := map[forks.ID]forkstest.Manifest{}
	count := 210
	for i := 1; i <= count; i++ {
		path, hide := seen(t, tree, dir)
		assert.NilError(t, edit(path, i))
		id := forks.ID(fmt.Sprintf("b%x", i))
		want[id] = forkstest.Read(t, path)
		hide()
		_, err := d.Commit(ctx, forks.Work, id, nil)
		assert.NilError(t, err)
		tree, err = d.Tree(forks.Work)
		assert.NilError(t, err)
		assert.Equal(t, tree.Base, id)
		assert.Assert(t, len(tree.Mount.Overlay.Lower) <= layer.MaxLayers)
	}
	check := func(i int) {
		id := forks.ID(fmt.Sprintf("b%x", i))
		k, err := d.Fork(ctx, "k", id, forks.ForkOptions{})
		assert.NilError(t, err)
		path, hide := seen(t, k, dir)
		forkstest.Equal(t, forkstest.Read(t, path), want[id])
		hide()
		assert.NilError(t, d.RemoveFork(ctx, "k"))
	}
	for i := 1; i <= count; i += 7 {
		check(i)
	}
	for i := 1; i <= count; i++ {
		if i%10 != 0 {
			assert.NilError(t, d.RemoveSnapshot(ctx, forks.ID(fmt.Sprintf("b%x", i))))
		}
	}
	d = openStore(t, filepath.Join(dir, "store"))
	for i := 10; i <= count; i += 10 {
		check(i)
	}
	c, err := d.Diff(ctx, "ba", "b14")
	assert.NilError(t, err)
	assert.Assert(t, len(c.List) > 0)
}

// edit changes a little, and now and then removes and makes a directory anew.
func edit(path string, i int) error {
	errs := []error{
		os.WriteFile(filepath.Join(path, "f"), []byte(fmt.Sprint(i)), 0o644),
		os.WriteFile(filepath.Join(path, fmt.Sprint("n", i%9)), []byte("n"), 0o644),
	}
	switch i % 5 {
	case 1:
		errs = append(errs, os.RemoveAll(filepath.Join(path, "gone")))
	case 2:
		errs = append(errs, os.MkdirAll(filepath.Join(path, "gone", fmt.Sprint(i)), 0o755),
			os.Chmod(filepath.Join(path, "gone"), 0o555))
	case 3:
		errs = append(errs, os.Remove(filepath.Join(path, fmt.Sprint("n", i%9))))
	case 4: // names that come and go in layers that are then merged
		born := filepath.Join(path, fmt.Sprint("born", i))
		errs = append(errs, os.MkdirAll(filepath.Join(born, "x", "y"), 0o755), os.WriteFile(filepath.Join(born, "z"), nil, 0o644))
	case 0:
		born := filepath.Join(path, fmt.Sprint("born", i-1))
		errs = append(errs, os.RemoveAll(filepath.Join(born, "x")), os.Remove(filepath.Join(born, "z")))
	}
	return errors.Join(errs...)
}

// The probe says what is wrong, and what mends it.
func TestProbe(t *testing.T) {
	for _, kind := range forkstest.Volumes {
		dir := forkstest.Volume(t, kind)
		p := Backend().Probe(t.Context(), dir)
		assert.Assert(t, p.OK, "%s: %s", kind, p.Detail)
		left, err := os.ReadDir(dir)
		assert.NilError(t, err)
		assert.Equal(t, len(left), 0)
	}
	if os.Geteuid() != 0 {
		return
	}
	_, dir, tree := store(t, map[string]string{"f": "x"})
	on, hide := seen(t, tree, dir)
	p := Backend().Probe(t.Context(), on)
	assert.Assert(t, !p.OK)
	assert.Assert(t, strings.Contains(p.Detail, "lies on an overlay") && strings.Contains(p.Fix, "mount a volume"), "%s: %s", p.Detail, p.Fix)
	hide()
	ram := t.TempDir()
	assert.NilError(t, unix.Mount("test", ram, "ramfs", 0, "mode=0700"))
	defer func() { assert.NilError(t, unix.Unmount(ram, 0)) }()
	p = Backend().Probe(t.Context(), ram)
	assert.Assert(t, !p.OK && strings.Contains(p.Detail, "no user attributes"), p.Detail)
}

func TestExplain(t *testing.T) {
	fine := machine{dir: "/r", fs: unix.EXT4_SUPER_MAGIC, release: "6.1.0-13-amd64", known: true, setting: func(string) string { return "" }}
	with := func(name, value string) machine {
		m := fine
		m.setting = func(n string) string {
			if n == name {
				return value
			}
			return ""
		}
		return m
	}
	old, bare, tmpfs := fine, fine, fine
	old.release, bare.known, tmpfs.fs, tmpfs.release = "5.4.0", false, unix.TMPFS_MAGIC, "6.1.0"
	tests := []struct {
		m           machine
		step        string
		err         error
		detail, fix string
	}{
		{with("user/max_user_namespaces", "0"), "namespace", unix.ENOSPC, "switched off", "sysctl user.max_user_namespaces="},
		{with("kernel/unprivileged_userns_clone", "0"), "namespace", unix.EPERM, "root only", "sysctl kernel.unprivileged_userns_clone=1"},
		{with("kernel/apparmor_restrict_unprivileged_userns", "1"), "mount", unix.EPERM, "AppArmor", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
		{old, "mount", unix.EPERM, "5.11", "update the kernel"},
		{bare, "mount", unix.ENODEV, "no overlay file system", "modprobe overlay"},
		{tmpfs, "attribute", unix.ENOTSUP, "6.6", "--root"},
		{fine, "mount", unix.EINVAL, "cannot hold", "--root"},
		{fine, "mount", unix.EPERM, "containers", "SYS_ADMIN"},
		{fine, "delete", unix.EPERM, "delete: operation not permitted", "--root"},
	}
	for _, tt := range tests {
		detail, fix := tt.m.explain(&driver.TryError{Step: tt.step, Own: true, Err: tt.err})
		assert.Assert(t, strings.Contains(detail, tt.detail), detail)
		assert.Assert(t, strings.Contains(fix, tt.fix), fix)
		assert.Assert(t, !strings.Contains(detail+fix, "\n"))
	}
}

// A fork that is damaged is named, hinders nothing but the removal of layers
// that it may stand on, and can be removed.
func TestDamagedFork(t *testing.T) {
	d, dir, _ := store(t, map[string]string{"f": "x"})
	ctx := t.Context()
	_, err := d.Fork(ctx, "k", "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	lower := filepath.Join(dir, "store/forks/k/stack/lower")
	assert.NilError(t, os.Remove(lower))
	assert.NilError(t, os.Symlink("!", lower))
	_, err = d.Status(ctx, "k")
	assert.ErrorIs(t, err, forks.ErrDamaged)
	_, err = d.Capture(ctx, "b0", "", forks.Source{Dir: filepath.Join(dir, "src")})
	assert.NilError(t, err)
	assert.NilError(t, d.Checkout(ctx, forks.Work, "b0"))
	assert.NilError(t, d.RemoveSnapshot(ctx, "a0"))
	_, err = os.Lstat(filepath.Join(dir, "store/nodes/a0"))
	assert.NilError(t, err)
	assert.NilError(t, d.RemoveFork(ctx, "k"))
	_, err = os.Lstat(filepath.Join(dir, "store/nodes/a0"))
	assert.ErrorIs(t, err, os.ErrNotExist)
}
