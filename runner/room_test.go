package runner

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// onVolume makes the test's files lie on a small file system of its own.
func onVolume(t *testing.T, kind string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	dir, err := os.MkdirTemp("", "runner-volume-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, os.RemoveAll(dir)) })
	script := "mkdir at && mount -t tmpfs -o size=12m,nr_inodes=400 none at"
	if kind == "ext4" {
		script = "mkdir at && truncate -s 24M image && mkfs.ext4 -q -F -m 20 image && mount -o loop image at"
	}
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("no %s volume: %v %s", kind, err, out)
	}
	t.Cleanup(func() { assert.Check(t, unix.Unmount(dir+"/at", unix.MNT_DETACH)) })
	t.Setenv("TMPDIR", dir+"/at")
}

// A full disk is no answer: what failed for want of room is an error, unless a
// limit of the plan explains it.
func TestFullDisk(t *testing.T) {
	const bytes, inodes = "cat /dev/zero >big", "i=0; while : >f$i; do i=$((i+1)); done"
	for _, c := range []struct{ kind, run, test, want string }{
		{"tmpfs", bytes, "true", "exit status 1"},
		{"tmpfs", inodes, "true", "exit status "},
		{"tmpfs", "true", bytes, "the test: exit status 1"},
		{"ext4", bytes, "true", "exit status 1"},
	} {
		t.Run(c.kind+" "+c.run+" "+c.test, func(t *testing.T) {
			onVolume(t, c.kind)
			w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
			o := w.options(newPlan(c.test, c.run, "exit 3"))
			o.Plan.Parallel = 1
			o.Explain = func(err error) string {
				if !errors.Is(err, unix.ENOSPC) {
					return err.Error()
				}
				return "explained: " + err.Error()
			}
			r, err := Run(t.Context(), o)
			assert.NilError(t, err)
			assert.Equal(t, statuses(r), "error failed", "%s", reason(r.Attempts[0]))
			got := reason(r.Attempts[0])
			assert.Assert(t, strings.HasPrefix(got, "explained: "+c.want) && strings.HasSuffix(got, "no space left on device"), got)
			assert.Equal(t, reason(r.Attempts[1]), "exit status 3")
			assert.Equal(t, r.Status, RunFailed)
			for _, line := range r.Warnings {
				assert.Assert(t, strings.Count(line, w.root) <= 1, line)
			}
		})
	}
}

// What is kept for root is room for root.
func TestAlmostFullDisk(t *testing.T) {
	onVolume(t, "ext4")
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	cmd := exec.Command("sh", "-c", `while [ "$(stat -f -c %a .)" -gt 0 ]; do head -c 100000 /dev/zero >>filler; done`)
	cmd.Dir = os.Getenv("TMPDIR")
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, string(out))
	r, err := w.run(t.Context(), newPlan("true", "exit 3"))
	assert.NilError(t, err)
	assert.Equal(t, statuses(r), "failed")
}
