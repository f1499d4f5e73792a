//go:build linux

package overlay

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// Each operation at two sizes of the base: it is to cost the same.
func BenchmarkFlat(b *testing.B) {
	for _, files := range []int{1000, 100000} {
		dir := b.TempDir()
		src := filepath.Join(dir, "src")
		for i := range files {
			if i%100 == 0 {
				assert.NilError(b, os.MkdirAll(filepath.Join(src, fmt.Sprint("d", i/1000), fmt.Sprint("e", i/100)), 0o755))
			}
			assert.NilError(b, os.WriteFile(filepath.Join(src, fmt.Sprint("d", i/1000), fmt.Sprint("e", i/100), fmt.Sprint("f", i)), nil, 0o644))
		}
		store := filepath.Join(dir, "store")
		open := func() forks.Driver {
			d, err := Backend().Open(b.Context(), store)
			assert.NilError(b, err)
			return d
		}
		d := open()
		_, err := d.Capture(b.Context(), "a0", "", forks.Source{Dir: src})
		assert.NilError(b, err)
		_, err = d.Fork(b.Context(), forks.Work, "a0", forks.ForkOptions{})
		assert.NilError(b, err)
		ids := 0
		name := func(what string) string { return fmt.Sprintf("%s/%d", what, files) }
		b.Run(name("fork"), func(b *testing.B) {
			for b.Loop() {
				ids++
				_, err := d.Fork(b.Context(), forks.Key(fmt.Sprint("k", ids)), "a0", forks.ForkOptions{})
				assert.NilError(b, err)
			}
		})
		// Each commit by another process, as the command line does.
		change := func() forks.ID {
			ids++
			assert.NilError(b, os.MkdirAll(filepath.Join(store, "work/stack/tree/d0/e3"), 0o755))
			assert.NilError(b, os.WriteFile(filepath.Join(store, "work/stack/tree/d0/e3/f333"), []byte(fmt.Sprint(ids)), 0o644))
			return forks.ID(fmt.Sprintf("c%x", ids))
		}
		b.Run(name("commit"), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				assert.NilError(b, d.Checkout(b.Context(), forks.Work, "a0"))
				assert.NilError(b, d.Close())
				id := change()
				b.StartTimer()
				d = open()
				_, err := d.Commit(b.Context(), forks.Work, id, nil)
				assert.NilError(b, err)
			}
		})
		b.Run(name("status"), func(b *testing.B) {
			change()
			for b.Loop() {
				assert.NilError(b, d.Close())
				d = open()
				_, err := d.Status(b.Context(), forks.Work)
				assert.NilError(b, err)
			}
		})
		b.Run(name("checkout"), func(b *testing.B) {
			for b.Loop() {
				assert.NilError(b, d.Checkout(b.Context(), forks.Work, "a0"))
			}
		})
		assert.NilError(b, d.Close())
	}
}
