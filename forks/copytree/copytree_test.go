//go:build linux

package copytree

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
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

// chain makes a store with n snapshots, each built upon the last.
func chain(t *testing.T, dir string, n int) (forks.Driver, []forks.ID, forks.Tree) {
	t.Helper()
	src := filepath.Join(dir, "src")
	forkstest.Write(t, src, map[string]string{"f": "0", "d/g": "g"})
	d := openStore(t, filepath.Join(dir, "store"))
	ids := []forks.ID{"a0"}
	_, err := d.Capture(t.Context(), "a0", "", forks.Source{Dir: src})
	assert.NilError(t, err)
	tree, err := d.Fork(t.Context(), forks.Work, "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	for i := 1; i < n; i++ {
		forkstest.Write(t, tree.Mount.Dir, map[string]string{"f": fmt.Sprint(i), fmt.Sprint("n", i): "x"})
		id := forks.ID(fmt.Sprintf("a%x", i))
		_, err := d.Commit(t.Context(), forks.Work, id, nil)
		assert.NilError(t, err)
		ids = append(ids, id)
	}
	return d, ids, tree
}

// A damaged, newer or missing record is named, and others stay usable.
func TestDamagedRecord(t *testing.T) {
	damage := map[string]struct {
		do   func(t *testing.T, path string)
		want string
		is   error
	}{
		"cut":     {func(t *testing.T, p string) { assert.NilError(t, os.Truncate(p, 60)) }, "a2", forks.ErrDamaged},
		"empty":   {func(t *testing.T, p string) { assert.NilError(t, os.Truncate(p, 0)) }, "a2", forks.ErrDamaged},
		"missing": {func(t *testing.T, p string) { assert.NilError(t, os.Remove(p)) }, "a2", forks.ErrDamaged},
		"flipped": {func(t *testing.T, p string) { change(t, p, func(b []byte) { b[len(b)-20] ^= 4 }) }, "a2", forks.ErrDamaged},
		"newer":   {func(t *testing.T, p string) { change(t, p, func(b []byte) { b[12] = 99 }) }, "newer agentenv", forks.ErrUnsupported},
	}
	for name, tt := range damage {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			_, _, _ = chain(t, dir, 3)
			tt.do(t, filepath.Join(dir, "store/nodes/a2/record"))
			d := openStore(t, filepath.Join(dir, "store"))
			_, err := d.View(t.Context(), "a2")
			assert.ErrorIs(t, err, tt.is)
			assert.ErrorContains(t, err, tt.want)
			for _, id := range []forks.ID{"a0", "a1"} {
				assert.NilError(t, d.Checkout(t.Context(), forks.Work, id))
			}
			ids, err := d.Snapshots(t.Context())
			assert.NilError(t, err)
			assert.Equal(t, len(ids), 3)
			assert.NilError(t, d.RemoveSnapshot(t.Context(), "a2"))
		})
	}
}

func change(t *testing.T, path string, fn func([]byte)) {
	t.Helper()
	b, err := os.ReadFile(path)
	assert.NilError(t, err)
	fn(b)
	assert.NilError(t, os.WriteFile(path, b, 0o600))
}

// A damaged or missing index costs time, and nothing else.
func TestDamagedIndex(t *testing.T) {
	dir := t.TempDir()
	d, ids, tree := chain(t, dir, 3)
	want := forkstest.Read(t, tree.Mount.Dir)
	index := filepath.Join(dir, "store/work/index")
	for _, do := range []func(){
		func() { assert.NilError(t, os.Remove(index)) },
		func() { assert.NilError(t, os.Truncate(index, 100)) },
		func() { change(t, index, func(b []byte) { b[200] ^= 1 }) },
		func() { assert.NilError(t, os.WriteFile(index, nil, 0o600)) },
	} {
		do()
		c, err := d.Status(t.Context(), forks.Work)
		assert.NilError(t, err)
		assert.Equal(t, len(c.List), 0, "%v", c.List)
		assert.NilError(t, d.Checkout(t.Context(), forks.Work, ids[0]))
		assert.NilError(t, d.Checkout(t.Context(), forks.Work, ids[2]))
		forkstest.Equal(t, forkstest.Read(t, tree.Mount.Dir), want)
	}
}

// Out of space, nothing that was there is lost, and nothing half made stays.
func TestNoSpace(t *testing.T) {
	for _, kind := range []string{"ext4", "tmpfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := forkstest.SmallVolume(t, kind, "48m")
			src := t.TempDir()
			big := strings.Repeat("0123456789abcdef", 12<<16) // 12 MiB
			forkstest.Write(t, src, map[string]string{"big": big, "small": "s"})
			ctx := t.Context()
			d := openStore(t, filepath.Join(dir, "store"))
			_, err := d.Capture(ctx, "a0", "", forks.Source{Dir: src})
			assert.NilError(t, err)
			tree, err := d.Fork(ctx, forks.Work, "a0", forks.ForkOptions{})
			assert.NilError(t, err)
			_, err = d.Fork(ctx, "k", "a0", forks.ForkOptions{Plain: true})
			if err == nil {
				_, err = d.Fork(ctx, "l", "a0", forks.ForkOptions{Plain: true})
			}
			assert.ErrorIs(t, err, unix.ENOSPC)
			fill(t, filepath.Join(dir, "filler"))
			forkstest.Write(t, tree.Mount.Dir, map[string]string{})
			assert.NilError(t, os.Truncate(filepath.Join(tree.Mount.Dir, "big"), 12<<20-1))
			assert.NilError(t, os.Chmod(filepath.Join(tree.Mount.Dir, "small"), 0o600))
			before := forkstest.Read(t, tree.Mount.Dir)
			_, err = d.Commit(ctx, forks.Work, "b0", nil)
			assert.ErrorIs(t, err, unix.ENOSPC)
			assert.ErrorIs(t, d.Checkout(ctx, forks.Work, "a0"), unix.ENOSPC)
			forkstest.Equal(t, forkstest.Read(t, tree.Mount.Dir), before)
			ids, err := d.Snapshots(ctx)
			assert.NilError(t, err)
			assert.DeepEqual(t, ids, []forks.ID{"a0"})
			left, err := os.ReadDir(filepath.Join(dir, "store/tmp"))
			assert.NilError(t, err)
			assert.Equal(t, len(left), 0)
			assert.NilError(t, os.Remove(filepath.Join(dir, "filler")))
			assert.NilError(t, d.RemoveFork(ctx, "k"))
			assert.NilError(t, d.Checkout(ctx, forks.Work, "a0"))
			assert.NilError(t, os.RemoveAll(filepath.Join(dir, "none")))
		})
	}
}

// fill takes all space that is left.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	assert.NilError(t, err)
	defer f.Close()
	for _, size := range []int{1 << 20, 4096} {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		assert.ErrorIs(t, err, unix.ENOSPC)
	}
}

// A wide and deep tree with few descriptors.
func TestFewDescriptors(t *testing.T) {
	src := t.TempDir()
	for i := range 300 {
		forkstest.Write(t, src, map[string]string{fmt.Sprintf("wide%d/a/b/f", i): "x", "deep/" + strings.Repeat("d/", i%40) + fmt.Sprint("f", i): "x"})
	}
	var old unix.Rlimit
	assert.NilError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	assert.NilError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 128, Max: old.Max}))
	defer func() { assert.NilError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	d := openStore(t, filepath.Join(t.TempDir(), "store"))
	_, err := d.Capture(t.Context(), "a0", "", forks.Source{Dir: src})
	assert.NilError(t, err)
	tree, err := d.Fork(t.Context(), forks.Work, "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	forkstest.Equal(t, forkstest.Read(t, tree.Mount.Dir), forkstest.Read(t, src))
	assert.NilError(t, d.RemoveFork(t.Context(), forks.Work))
}

func TestProbe(t *testing.T) {
	for kind, want := range map[string]string{
		"ext4": "no reflink on ext4, files are copied", "xfs": "files share their blocks on xfs",
		"btrfs": "files share their blocks on btrfs", "tmpfs": "no reflink on tmpfs, files are copied",
	} {
		t.Run(kind, func(t *testing.T) {
			dir := forkstest.Volume(t, kind)
			p := Backend().Probe(context.Background(), dir)
			assert.Assert(t, p.OK)
			assert.Equal(t, p.Detail, want)
			left, err := os.ReadDir(dir)
			assert.NilError(t, err)
			assert.Equal(t, len(left), 0)
			d := openStore(t, dir)
			assert.Equal(t, d.Features().SharedExtents, strings.HasPrefix(want, "files share"))
		})
	}
	p := Backend().Probe(context.Background(), "/nowhere/at/all")
	assert.Assert(t, !p.OK && strings.Contains(p.Detail, "/nowhere/at/all"))
}
