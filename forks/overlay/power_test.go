//go:build linux

package overlay

import (
	"fmt"
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

// goingDown is XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN: the file system stops
// at once; with the flag noLogFlush what was not synced is lost, as with the
// power.
const (
	goingDown  = 0x8004587d
	noLogFlush = 2
)

// disk is a file system whose power can be cut.
type disk struct {
	*testing.T
	kind, img string
	dir       string // where it is mounted
}

func newDisk(t *testing.T, kind string) *disk {
	if os.Geteuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	d := &disk{t, kind, filepath.Join(t.TempDir(), "img"), ""}
	mkfs := map[string]string{"ext4": "mkfs.ext4 -q -F", "xfs": "mkfs.xfs -q -f"}[kind]
	out, err := exec.Command("sh", "-c", fmt.Sprintf("truncate -s 400M %s && %s %s", d.img, mkfs, d.img)).CombinedOutput()
	if err != nil {
		t.Skipf("no %s: %v %s", kind, err, out)
	}
	d.mount()
	return d
}

func (d *disk) mount() {
	d.Helper()
	d.dir = d.TempDir()
	options := "loop"
	if d.kind == "xfs" {
		options += ",nouuid"
	}
	out, err := exec.Command("mount", "-t", d.kind, "-o", options, d.img, d.dir).CombinedOutput()
	if err != nil {
		d.Skipf("no loop device: %v %s", err, out)
	}
	dir := d.dir
	d.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// cut takes the power away and gives it back. What the device has then is
// mounted as another one: processes elsewhere may keep the dead one mounted.
func (d *disk) cut() {
	d.Helper()
	fd, err := unix.Open(d.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	assert.NilError(d, err)
	err = unix.IoctlSetPointerInt(fd, goingDown, noLogFlush)
	assert.NilError(d, unix.Close(fd))
	if err != nil {
		d.Skipf("%s cannot be stopped: %v", d.kind, err)
	}
	assert.NilError(d, unix.Unmount(d.dir, unix.MNT_DETACH))
	next := filepath.Join(d.TempDir(), "img")
	out, err := exec.Command("cp", "--sparse=always", d.img, next).CombinedOutput()
	assert.NilError(d, err, string(out))
	assert.NilError(d, os.Remove(d.img))
	d.img = next
	d.mount()
}

// What Commit has returned is there when the power fails the moment after, also
// of a fork that was mounted volatile; and the work tree is what it was or what
// it was to become.
func TestPowerLoss(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		for _, many := range []int{1, 60} { // synced one by one, and all at once
			t.Run(fmt.Sprint(kind, many), func(t *testing.T) { powerLoss(t, kind, many) })
		}
	}
}

func powerLoss(t *testing.T, kind string, many int) {
	disk := newDisk(t, kind)
	src := t.TempDir()
	forkstest.Write(t, src, map[string]string{"f": "first", "d/g": "g", "gone": "x"})
	var d forks.Driver
	open := func() {
		var err error
		d, err = Backend().Open(t.Context(), filepath.Join(disk.dir, "store"))
		assert.NilError(t, err)
	}
	cut := func() {
		assert.NilError(t, d.Close())
		disk.cut()
		open()
	}
	edit := func(key forks.Key, text string, live forks.ID) {
		tree, err := d.Tree(key)
		assert.NilError(t, err)
		path, hide := seen(t, tree, t.TempDir())
		files := map[string]string{"f": text, "d/new": text}
		for i := range many {
			files[fmt.Sprint("many/f", i)] = strings.Repeat(text, 1000)
		}
		forkstest.Write(t, path, files)
		assert.NilError(t, os.RemoveAll(filepath.Join(path, "gone")))
		if live != "" {
			_, err = d.Commit(t.Context(), key, live, nil)
			assert.NilError(t, err)
		}
		hide()
	}
	check := func(id forks.ID, text string) {
		t.Helper()
		k, err := d.Fork(t.Context(), "check", id, forks.ForkOptions{})
		assert.NilError(t, err)
		path, hide := seen(t, k, t.TempDir())
		defer func() { assert.NilError(t, d.RemoveFork(t.Context(), "check")) }()
		defer hide()
		for name, want := range map[string]string{"f": text, "d/new": text, "d/g": "g", "many/f0": strings.Repeat(text, 1000)} {
			b, err := os.ReadFile(filepath.Join(path, name))
			assert.NilError(t, err, "%s of %s", name, id)
			assert.Equal(t, string(b), want, "%s of %s", name, id)
		}
		_, err = os.Lstat(filepath.Join(path, "gone"))
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
	open()
	_, err := d.Capture(t.Context(), "a0", "", forks.Source{Dir: src})
	assert.NilError(t, err)
	_, err = d.Fork(t.Context(), forks.Work, "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	_, err = d.Fork(t.Context(), "k", "a0", forks.ForkOptions{})
	assert.NilError(t, err)
	edit("k", "attempt", "")
	_, err = d.Commit(t.Context(), "k", "b0", nil)
	assert.NilError(t, err)
	cut()
	check("b0", "attempt")
	edit(forks.Work, "work", "")
	_, err = d.Commit(t.Context(), forks.Work, "c0", nil)
	assert.NilError(t, err)
	cut()
	check("c0", "work")
	base := func(may ...forks.ID) {
		t.Helper()
		tree, err := d.Tree(forks.Work)
		assert.NilError(t, err)
		found := false
		for _, id := range may {
			found = found || tree.Base == id
		}
		assert.Assert(t, found, "the base is %s", tree.Base)
		_, release, err := d.Use(t.Context(), forks.Work)
		assert.NilError(t, err)
		release()
		c, err := d.Status(t.Context(), forks.Work)
		assert.NilError(t, err)
		assert.Equal(t, len(c.List), 0, "%v", names(c))
	}
	base("c0")
	edit(forks.Work, "live", "d0")
	cut()
	check("d0", "live")
	assert.NilError(t, d.Checkout(t.Context(), forks.Work, "b0"))
	cut()
	base("b0")
	assert.NilError(t, d.Close())
}
