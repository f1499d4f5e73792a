//go:build linux

package copytree

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// The benchmarks print our figures beside those of the tools that people would
// use instead. BENCH_TREE names a directory to use instead of 20,000 small
// files, and TMPDIR the file system.

// benchTree makes a tree of n small files, 50 to a directory.
func benchTree(b *testing.B, n int) string {
	if dir := os.Getenv("BENCH_TREE"); dir != "" {
		return dir
	}
	dir := filepath.Join(b.TempDir(), "src")
	for i := range n {
		d := filepath.Join(dir, fmt.Sprintf("d%02d", i/2500), fmt.Sprintf("e%02d", i/50%50))
		if i%50 == 0 {
			assert.NilError(b, os.MkdirAll(d, 0o755))
		}
		assert.NilError(b, os.WriteFile(filepath.Join(d, fmt.Sprintf("file%05d.txt", i)), make([]byte, 200+i%3000), 0o644))
	}
	return dir
}

const benchFiles = 20000

// benchWork opens a store with one snapshot and a work tree of it.
func benchWork(b *testing.B) (forks.Driver, string) {
	src := benchTree(b, benchFiles)
	d, err := Backend().Open(context.Background(), filepath.Join(b.TempDir(), "store"))
	assert.NilError(b, err)
	_, err = d.Capture(context.Background(), "a0", "", forks.Source{Dir: src})
	assert.NilError(b, err)
	t, err := d.Fork(context.Background(), forks.Work, "a0", forks.ForkOptions{})
	assert.NilError(b, err)
	return d, t.Mount.Dir
}

func runShell(b *testing.B, script string) {
	b.Helper()
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	assert.NilError(b, err, string(out))
}

func BenchmarkCapture(b *testing.B) {
	src := benchTree(b, benchFiles)
	tmp := b.TempDir()
	ctx := context.Background()
	assert.NilError(b, exec.Command("sync", "-f", src).Run())
	b.Run("agentenv", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			d, err := Backend().Open(ctx, filepath.Join(tmp, fmt.Sprint("store", b.N, i)))
			assert.NilError(b, err)
			_, err = d.Capture(ctx, "a0", "", forks.Source{Dir: src})
			assert.NilError(b, err)
			b.StopTimer()
			assert.NilError(b, d.RemoveSnapshot(ctx, "a0"))
			b.StartTimer()
		}
	})
	b.Run("cp", func(b *testing.B) {
		for b.Loop() {
			runShell(b, fmt.Sprintf("cp -a --reflink=auto %s %s/cp && sync -f %s/cp", src, tmp, tmp))
			b.StopTimer()
			assert.NilError(b, os.RemoveAll(filepath.Join(tmp, "cp")))
			b.StartTimer()
		}
	})
}

func BenchmarkFork(b *testing.B) {
	d, _ := benchWork(b)
	for i := 0; b.Loop(); i++ {
		_, err := d.Fork(context.Background(), forks.Key(fmt.Sprint("k", b.N, "-", i)), "a0", forks.ForkOptions{})
		assert.NilError(b, err)
	}
}

func BenchmarkStatus(b *testing.B) {
	d, dir := benchWork(b)
	b.Run("agentenv", func(b *testing.B) {
		for b.Loop() {
			c, err := d.Status(context.Background(), forks.Work)
			assert.NilError(b, err)
			assert.Equal(b, len(c.List), 0)
		}
	})
	b.Run("find", func(b *testing.B) {
		for b.Loop() {
			runShell(b, `find `+dir+` -printf '%p %i %C@ %s %T@\n' >/dev/null`)
		}
	})
}

func BenchmarkCommitOne(b *testing.B) {
	d, dir := benchWork(b)
	id := 1
	b.Run("agentenv", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			assert.NilError(b, os.WriteFile(filepath.Join(dir, "changed"), []byte(fmt.Sprint(id)), 0o644))
			b.StartTimer()
			id++
			c, err := d.Commit(context.Background(), forks.Work, forks.ID(fmt.Sprintf("%08x", id)), nil)
			assert.NilError(b, err)
			assert.Assert(b, len(c.List) > 0)
		}
	})
	b.Run("find", func(b *testing.B) {
		for b.Loop() {
			runShell(b, `find `+dir+` -printf '%p %i %C@ %s %T@\n' >/dev/null`)
		}
	})
}

func BenchmarkCheckout(b *testing.B) {
	d, dir := benchWork(b)
	ctx := context.Background()
	assert.NilError(b, os.WriteFile(filepath.Join(dir, "changed"), []byte("x"), 0o644))
	_, err := d.Commit(ctx, forks.Work, "b0", nil)
	assert.NilError(b, err)
	ids := []forks.ID{"a0", "b0"}
	for i := 0; b.Loop(); i++ {
		assert.NilError(b, d.Checkout(ctx, forks.Work, ids[i%2]))
	}
}

func BenchmarkRemoveFork(b *testing.B) {
	d, _ := benchWork(b)
	ctx := context.Background()
	for b.Loop() {
		b.StopTimer()
		_, err := d.Fork(ctx, "k", "a0", forks.ForkOptions{})
		assert.NilError(b, err)
		b.StartTimer()
		assert.NilError(b, d.RemoveFork(ctx, "k"))
	}
}
