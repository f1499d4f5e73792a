package sandbox_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// frozenVolume makes a file system on which every write hangs in the kernel until
// thaw is called. The test's end calls it too.
func frozenVolume(t *testing.T) (dir string, thaw func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("freezing a file system needs root")
	}
	dir = t.TempDir()
	image := filepath.Join(t.TempDir(), "image")
	run := func(name string, args ...string) {
		t.Helper()
		out, err := exec.Command(name, args...).CombinedOutput()
		if err != nil && name == "mount" {
			t.Skipf("no loop mounts here: %s", out)
		}
		assert.NilError(t, err, string(out))
	}
	run("truncate", "-s", "16M", image)
	run("mkfs.ext4", "-q", image)
	run("mount", "-o", "loop", image, dir)
	t.Cleanup(func() { assert.Check(t, unix.Unmount(dir, 0)) })
	ioctl := func(request uint) error {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.IoctlSetInt(int(f.Fd()), request, 0)
	}
	const freezeFS, thawFS = 0xC0045877, 0xC0045878 // FIFREEZE, FITHAW
	assert.NilError(t, ioctl(freezeFS))
	frozen := true
	thaw = func() {
		if frozen {
			frozen = false
			assert.Check(t, ioctl(thawFS))
		}
	}
	t.Cleanup(thaw)
	return dir, thaw
}

// stuckCommand writes to a frozen volume, and hangs.
func stuckCommand(t *testing.T, level sandbox.Level, volume, before string) sandbox.Command {
	c := scene(t, scratchHome(t), level)
	to := volume
	if level == sandbox.LevelNamespaces {
		to = "/mnt"
		c.View.Binds = []sandbox.Bind{{From: volume, To: to, Mode: sandbox.ReadWrite}}
	}
	c.Args = []string{"sh", "-c", before + "touch ready; exec dd if=/dev/zero of=" + to + "/f count=1"}
	return c
}

// locked says whether something still holds the lock on a directory.
func locked(t *testing.T, dir string) bool {
	t.Helper()
	f, err := os.Open(dir)
	assert.NilError(t, err)
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// TestStuck: what hangs in the kernel is named and not waited for. What it stands
// in stays locked until it has ended.
func TestStuck(t *testing.T) {
	for _, level := range []sandbox.Level{sandbox.LevelNamespaces, sandbox.LevelProcess} {
		for name, before := range map[string]string{"alone": "", "with others": "sleep 1000 & (trap '' TERM; sleep 1000) & "} {
			t.Run(string(level)+" "+name, func(t *testing.T) {
				t.Parallel()
				envtest.Census(t)
				volume, thaw := frozenVolume(t)
				testStuck(t, stuckCommand(t, level, volume, before), thaw)
			})
		}
	}
	t.Run("left", testStuckLeftover)
}

func testStuck(t *testing.T, c sandbox.Command, thaw func()) {
	hold, err := os.Open(c.View.Tree.Dir)
	assert.NilError(t, err)
	assert.NilError(t, unix.Flock(int(hold.Fd()), unix.LOCK_EX))
	c.Hold = hold
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	assert.NilError(t, hold.Close())
	eventually(t, "ready", func() bool { _, err := os.Stat(c.View.Tree.Dir + "/ready"); return err == nil })
	time.Sleep(100 * time.Millisecond) // until it hangs
	began := time.Now()
	p.Stop(0)
	r, err := p.Wait()
	assert.NilError(t, err)
	took := time.Since(began)
	assert.Assert(t, took < 3500*time.Millisecond, "took %v", took)
	assert.Equal(t, len(r.Stuck), 1, "%q", r.Stuck)
	assert.Assert(t, regexp.MustCompile(`^pid \d+ \(dd\) hangs in the kernel \(state D(, in \w+)?\)$`).MatchString(r.Stuck[0]), r.Stuck[0])
	t.Logf("after %v: %s", took, r.Stuck[0])
	assert.Assert(t, locked(t, c.View.Tree.Dir), "what hangs holds nothing any more")
	thaw()
	eventually(t, "end of what hung", func() bool { return !locked(t, c.View.Tree.Dir) })
}

// testStuckLeftover: the command ends by itself and leaves a process that hangs.
func testStuckLeftover(t *testing.T) {
	t.Parallel()
	envtest.Census(t)
	volume, thaw := frozenVolume(t)
	c := stuckCommand(t, sandbox.LevelNamespaces, volume, "")
	c.Args[2] = strings.Replace(c.Args[2], "exec dd", "(exec dd", 1) + ") & sleep 0.1; exit 7"
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	r, err := p.Wait()
	assert.NilError(t, err)
	assert.Equal(t, r.ExitCode, 7)
	assert.Equal(t, len(r.Stuck), 1, "%q", r.Stuck)
	thaw()
}
