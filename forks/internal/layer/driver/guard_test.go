//go:build linux

package driver

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// What others mounted below the work tree is theirs: nothing takes it away.
func TestMountedBelow(t *testing.T) {
	dir := forkstest.Volume(t, "ext4")
	if forkstest.IsUser() {
		t.Skip("mounting on the host needs root")
	}
	// The way to the store has a symlink, which the kernel's list has not.
	assert.NilError(t, os.Symlink(dir, dir+".link"))
	t.Cleanup(func() { assert.NilError(t, os.Remove(dir+".link")) })
	d := made(t, dir+".link", overlayOptions, map[string]string{"f": "1", "sub/g": "1"})
	ctx := t.Context()
	work := attached(t, d)
	at := filepath.Join(work, "sub")
	assert.NilError(t, unix.Mount("tmpfs", at, "tmpfs", 0, ""))
	gone := false
	unmount := func() {
		if !gone {
			gone = true
			assert.NilError(t, unix.Unmount(at, 0))
		}
	}
	t.Cleanup(unmount)
	forkstest.Write(t, work, map[string]string{"sub/precious": "p", "f": "22"})

	c, err := d.Commit(ctx, forks.Work, "b0", nil)
	assert.NilError(t, err)
	assert.Equal(t, len(c.List), 1)
	assert.DeepEqual(t, c.Warnings, []string{"sub: is a mount point; what is below it was left out"})
	c, err = d.Status(ctx, forks.Work)
	assert.NilError(t, err)
	assert.Equal(t, len(c.Warnings), 1)

	before := forkstest.Read(t, work)
	for name, op := range map[string]func() error{
		"checkout": func() error { return d.Checkout(ctx, forks.Work, "a0") },
		"detach":   func() error { return d.Detach(ctx, forks.Work) },
		"remove":   func() error { return d.RemoveFork(ctx, forks.Work) },
	} {
		assert.ErrorContains(t, op(), "/store/work/current/sub is mounted below the work tree: unmount it first", name)
		forkstest.Equal(t, forkstest.Read(t, work), before)
		b, err := os.ReadFile(filepath.Join(at, "precious"))
		assert.NilError(t, err, name)
		assert.Equal(t, string(b), "p", name)
	}
	unmount()
	assert.NilError(t, d.Checkout(ctx, forks.Work, "a0"))
	b, err := os.ReadFile(filepath.Join(work, "f"))
	assert.NilError(t, err)
	assert.Equal(t, string(b), "1")
}

// While the work tree is not mounted its path takes no writes.
func TestGuard(t *testing.T) {
	asBoth(t, func(t *testing.T, dir string) {
		d := made(t, dir, overlayOptions, map[string]string{"f": "1"})
		ctx := t.Context()
		refuses := func() {
			t.Helper()
			for _, write := range []string{"echo x >W/f", "mkdir -p W && echo x >W/f", "mkdir -p W/new/dir", "touch W/f", "cp /etc/passwd W/", "ln -s x W/y", "echo x >W"} {
				cmd := exec.CommandContext(ctx, "sh", "-c", strings.ReplaceAll(write, "W", d.place(forks.Work)))
				out, err := cmd.CombinedOutput()
				assert.Assert(t, err != nil, "%s was not refused: %s", write, out)
			}
		}
		refuses()
		_, release, err := d.Use(ctx, forks.Work)
		assert.NilError(t, err)
		release()
		refuses()
		assert.NilError(t, d.Checkout(ctx, forks.Work, "a0"))
		refuses()
		if os.Geteuid() == 0 {
			tree, err := d.Attach(ctx, forks.Work)
			assert.NilError(t, err)
			forkstest.Write(t, tree.Mount.Dir, map[string]string{"f": "2"})
			assert.NilError(t, d.Detach(ctx, forks.Work))
			refuses()
			// A reboot leaves the bare directory.
			assert.NilError(t, makeBare(d.place(forks.Work)))
			refuses()
		}
		assert.NilError(t, d.Detach(ctx, forks.Work))
		refuses()

		// A store of before the guard, and what its user did then.
		assert.NilError(t, os.Remove(d.place(forks.Work)))
		_, release, err = d.Use(ctx, forks.Work)
		assert.NilError(t, err)
		release()
		refuses()
		assert.NilError(t, os.Remove(d.place(forks.Work)))
		forkstest.Write(t, d.place(forks.Work), map[string]string{"mine": "m"})
		for name, op := range map[string]func() error{
			"use":      func() error { _, _, err := d.Use(ctx, forks.Work); return err },
			"checkout": func() error { return d.Checkout(ctx, forks.Work, "a0") },
			"detach":   func() error { return d.Detach(ctx, forks.Work) },
			"remove":   func() error { return d.RemoveFork(ctx, forks.Work) },
			"attach": func() error {
				if os.Geteuid() != 0 {
					return forks.ErrReplaced
				}
				_, err := d.Attach(ctx, forks.Work)
				return err
			},
		} {
			assert.ErrorIs(t, op(), forks.ErrReplaced, name)
		}
		b, err := os.ReadFile(filepath.Join(d.place(forks.Work), "mine"))
		assert.NilError(t, err)
		assert.Equal(t, string(b), "m")
		assert.NilError(t, os.Rename(d.place(forks.Work), filepath.Join(dir, "moved")))

		_, err = d.Status(ctx, forks.Work)
		assert.NilError(t, err)
		assert.NilError(t, d.Detach(ctx, forks.Work))
		refuses()
		assert.NilError(t, d.Close())
		out, err := exec.CommandContext(ctx, "rm", "-rf", filepath.Join(dir, "store")).CombinedOutput()
		assert.NilError(t, err, "%s", out)
	})
}
