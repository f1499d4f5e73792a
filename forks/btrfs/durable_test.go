//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// disk is a btrfs on a file, of which copies are made as a loss of power would
// leave them: with what was written out, and nothing else.
type disk struct {
	*testing.T
	top, img string
	copies   int
}

func newDisk(t *testing.T) *disk {
	top := forkstest.Volume(t, "tmpfs") // room for the copies, in memory
	d := &disk{T: t, top: top, img: filepath.Join(top, "img")}
	sh(t, top, `truncate -s 256m img && mkfs.btrfs -q -f img && mkdir m && mount -o loop,commit=300 img m`)
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(top, "m"), unix.MNT_DETACH) })
	return d
}

// lost copies the disk as it is, and calls fn with what it holds after the
// loss of power.
func (d *disk) lost(fn func(dir string)) {
	d.Helper()
	d.copies++
	at := filepath.Join(d.top, fmt.Sprint("copy", d.copies))
	if err := os.Mkdir(at, 0o755); err != nil {
		d.Fatal(err)
	}
	// A copy has the same fsid; kernels before 6.7 do not mount both.
	sh(d.T, d.top, fmt.Sprintf(`cp --sparse=always img %s.img`, at))
	defer sh(d.T, d.top, fmt.Sprintf(`umount %s 2>/dev/null || true; rm -f %s.img`, at, at))
	if out, err := exec.Command("mount", "-o", "loop", at+".img", at).CombinedOutput(); err != nil {
		d.Skipf("a copy of a mounted btrfs cannot be mounted here: %s", out)
	}
	fn(filepath.Join(at, "store"))
	assert.NilError(d, unix.Unmount(at, 0))
}

// A loss of power at any point of any operation leaves every listed snapshot
// complete, and each fork what one of its states was; what an operation that
// returned has done is there.
func TestLossOfPower(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	p := &power{disk: newDisk(t), trees: map[forks.ID]forkstest.Manifest{}}
	p.s = newScene(t, filepath.Join(p.top, "m"))
	src := filepath.Join(p.top, "src")
	forkstest.Write(t, src, map[string]string{"f": "1", "d/g": "2", "d/h": "3"})
	defer step.Hook(nil)
	ctx, d := t.Context(), p.s.d
	p.do("capture", "a", src, func() error { _, err := d.Capture(ctx, "a", "", forks.Source{Dir: src}); return err })
	p.do("fork", "", "", func() error { _, err := d.Fork(ctx, forks.Work, "a", forks.ForkOptions{}); return err })
	tree := d.tree(forks.Work, "").Mount.Dir
	sh(t, tree, `echo more >>f; rm d/g; mkdir -p n/m; echo new >n/m/x; ln n/m/x y; head -c 300000 /dev/urandom >big`)
	p.do("commit", "b", tree, func() error { _, err := d.Commit(ctx, forks.Work, "b", nil); return err })
	for _, id := range []forks.ID{"a", "b"} {
		p.base = id
		p.do("checkout "+string(id), "", "", func() error { return d.Checkout(ctx, forks.Work, id) })
	}
	sh(t, src, `echo 2 >>f; rm -r d`)
	p.do("capture upon a", "c", src, func() error { _, err := d.Capture(ctx, "c", "a", forks.Source{Dir: src}); return err })
	p.gone = "c"
	p.do("remove", "", "", func() error { return d.RemoveSnapshot(ctx, "c") })
	assert.Assert(t, p.copies > 20, "only %d copies were made", p.copies)
}

// power is what is known of a store when the power is lost.
type power struct {
	*disk
	s *scene
	// trees has what each snapshot must be; done those that were made.
	trees map[forks.ID]forkstest.Manifest
	done  []forks.ID
	// base, if set, is what the work tree is made equal to; clean says that it
	// is equal to its base at any time; gone is the snapshot that is removed.
	base, gone forks.ID
	clean      bool
}

// do runs an operation that may make the snapshot id, equal to the directory
// of, and loses the power at all of its steps and after it.
func (p *power) do(name string, id forks.ID, of string, fn func() error) {
	p.Helper()
	if id != "" {
		p.trees[id] = forkstest.Read(p, of)
	}
	looking := false
	step.Hook(func(point string) {
		if !looking {
			looking = true
			p.check(name+" at "+point, false)
			looking = false
		}
	})
	assert.NilError(p, fn(), name)
	step.Hook(nil)
	if id != "" {
		p.done = append(p.done, id)
	}
	if id == "b" {
		p.base, p.clean = id, true
	}
	p.check("after "+name, true)
}

func (p *power) check(point string, after bool) {
	p.lost(func(dir string) {
		open, err := Backend().Open(p.Context(), dir)
		assert.NilError(p, err)
		defer open.Close()
		d := open.(*driver)
		ids, err := d.Snapshots(p.Context())
		assert.NilError(p, err, point)
		for _, id := range ids {
			assert.Assert(p, id != p.gone || !after, "%s: %s is there", point, id)
			forkstest.Equal(p, forkstest.Read(p, d.treePath(id)), p.trees[id])
			_, err := d.since(id)
			assert.NilError(p, err, "%s: %s", point, id)
		}
		for _, id := range p.done {
			assert.Assert(p, id == p.gone || slices.Contains(ids, id), "%s: %s is lost", point, id)
		}
		p.checkWork(d, point, after)
		_, err = d.Sweep(p.Context())
		assert.NilError(p, err)
		assert.Equal(p, sh(p.T, p.top, `cd `+dir+` 2>/dev/null || exit 0; ls tmp; ls work 2>/dev/null | grep -v -x -e base -e current || true`), "", point)
	})
}

func (p *power) checkWork(d *driver, point string, after bool) {
	keys, err := d.Forks(p.Context())
	assert.NilError(p, err)
	if after && len(p.done) > 0 && p.trees["b"] != nil {
		assert.Equal(p, len(keys), 1, point)
	}
	for _, key := range keys {
		c, err := d.Status(p.Context(), key)
		assert.NilError(p, err, point)
		at, err := d.Tree(key)
		assert.NilError(p, err, point)
		if p.clean {
			assert.Equal(p, len(c.List), 0, "%s: %v", point, lines(c.List))
			forkstest.Equal(p, forkstest.Read(p, at.Mount.Dir), p.trees[at.Base])
		}
		if after && p.base != "" {
			assert.Equal(p, at.Base, p.base, point)
		}
	}
}
