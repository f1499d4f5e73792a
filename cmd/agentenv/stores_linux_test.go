package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/all"
)

// owner is a person who has an environment of a given driver.
type owner struct {
	*person
	backend, root, src string
}

// onBackends runs test for every driver that works, as root and as an ordinary
// user as far as we may be either; in a short run as one of them, not the same
// for every test.
func onBackends(t *testing.T, test func(t *testing.T, u *owner)) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	for i, b := range all.Backends() {
		t.Run(b.Name, func(t *testing.T) {
			dir := backendVolume(t, b.Name, "1G", "")
			asEach(t, func(t *testing.T, p *person) {
				if leftOut(t, i, p) {
					return
				}
				test(t, newOwner(t, p, b.Name, dir))
			})
		})
	}
}

// leftOut says whether a short run does without the ith driver as person p.
func leftOut(t *testing.T, i int, p *person) bool {
	if os.Getenv("AGENTENV_TEST_LONG") != "" || os.Getuid() != 0 {
		return false
	}
	name, _, _ := strings.Cut(t.Name(), "/")
	return (p.uid == 0) != ((i+len(name))%2 == 0)
}

// programWithCgo is agentenv with the driver that needs a C compiler.
var programWithCgo = sync.OnceValues(func() ([]byte, error) { return build("CGO_ENABLED=1") })

// newOwner gives a person a place on a volume for an environment of a driver,
// and skips the test where that does not work for them.
func newOwner(t *testing.T, p *person, backend, volume string) *owner {
	t.Helper()
	top := filepath.Join(volume, p.name)
	assert.NilError(t, os.MkdirAll(top, 0o755))
	p.own(t, top)
	u := &owner{person: p, backend: backend, root: filepath.Join(top, "root"), src: filepath.Join(top, "src")}
	if backend == "btrfs" {
		bin, err := programWithCgo()
		if err != nil {
			t.Skip(err)
		}
		assert.NilError(t, os.WriteFile(filepath.Join(p.home, "bin", "agentenv"), bin, 0o755))
	}
	u.write(t, "probe")
	probe := u.root + "-probe"
	out, errs, code := u.run(t, u.src, "agentenv", "--root", probe, "--backend", backend, "init", "--from", u.src)
	if code == exitHarness && strings.Contains(errs, "does not work") {
		t.Skipf("for %s: %s", p.name, errs)
	}
	assert.Equal(t, code, 0, "%s%s", out, errs)
	return u
}

// backendVolume is a new file system on which a driver can work, or where we
// may not mount one, a plain directory.
func backendVolume(t *testing.T, backend, size, options string) string {
	t.Helper()
	if os.Getuid() != 0 {
		return t.TempDir()
	}
	kind := "ext4"
	if backend == "btrfs" {
		kind = "btrfs"
	}
	return newVolume(t, kind, size, options)
}

// newVolume mounts a new file system, with options of its mkfs.
func newVolume(t *testing.T, kind, size, options string) string {
	t.Helper()
	top, err := os.MkdirTemp("", "agentenv-volume-")
	assert.NilError(t, err)
	assert.NilError(t, os.Chmod(top, 0o755))
	img, dir := filepath.Join(top, "image"), filepath.Join(top, "at")
	mkfs := map[string]string{"ext4": "mkfs.ext4 -q -F", "xfs": "mkfs.xfs -q -f", "btrfs": "mkfs.btrfs -q -f"}[kind]
	script := fmt.Sprintf("mkdir -m 755 %s && truncate -s %s %s && %s %s %s && mount -o loop %s %s && chmod 755 %s",
		dir, size, img, mkfs, options, img, img, dir, dir)
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	if err != nil {
		assert.NilError(t, os.RemoveAll(top))
		t.Skipf("no %s volume: %v %s", kind, err, out)
	}
	t.Cleanup(func() {
		out, err := exec.Command("sh", "-c", `for i in 1 2 3 4 5 6 7 8 9; do umount -R "$1" && exit; sleep 0.2; done; umount -l "$1"; exit 1`, "sh", dir).CombinedOutput()
		assert.Check(t, err == nil, "%v %s", err, out)
		assert.Check(t, os.RemoveAll(top))
	})
	return dir
}

// stateFiles is how many files of a tree say which state it is in: with any of
// them wrong, the tree is a mix of two.
const stateFiles = 12

// stateScript makes a tree the state name.
func stateScript(name string) string {
	return fmt.Sprintf("for i in $(seq %d); do mkdir -p d$((i %% 4)); echo %s >d$((i %% 4))/$i; done", stateFiles, name)
}

// readScript prints a tree's state: one line, unless it is a mix.
const readScript = "cat d?/* | sort | uniq -c | tr -s ' ' | tr '\\n' ';'"

// whole is what readScript prints of the state name.
func whole(name string) string { return fmt.Sprintf(" %d %s;", stateFiles, name) }

// write makes the source directory the state name.
func (u *owner) write(t *testing.T, name string) {
	t.Helper()
	out, err := exec.Command("sh", "-e", "-c", fmt.Sprintf("mkdir -p %[1]s; cd %[1]s; %[2]s", u.src, stateScript(name))).CombinedOutput()
	assert.NilError(t, err, string(out))
	u.own(t, u.src)
}

// init makes the environment, whose first state is name.
func (u *owner) init(t *testing.T, name string) env.ID {
	t.Helper()
	u.write(t, name)
	return env.ID(u.must(t, u.src, "agentenv", "--root", u.root, "--backend", u.backend, "init", "--from", u.src))
}

// agentenv runs a command of the program that has to succeed.
func (u *owner) agentenv(t *testing.T, args ...string) string {
	t.Helper()
	return u.must(t, u.src, "agentenv", append([]string{"--root", u.root, "-q"}, args...)...)
}

// log is what `agentenv log` lists.
func (u *owner) log(t *testing.T) []env.Snapshot {
	t.Helper()
	var doc struct{ Snapshots []env.Snapshot }
	out := u.agentenv(t, "log", "--json")
	assert.NilError(t, json.Unmarshal([]byte(out), &doc), out)
	return doc.Snapshots
}

// tree is what readScript prints of the work tree. Unsaved work is saved.
func (u *owner) tree(t *testing.T) string {
	t.Helper()
	return u.agentenv(t, "exec", "--no-commit", "--", "sh", "-c", readScript)
}

// swept checks that nothing is left in the root that no snapshot needs. What
// ran in a fork when agentenv was killed ends a moment later, and the fork goes
// with the next command that writes.
func (u *owner) swept(t *testing.T) {
	t.Helper()
	var left []string
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		u.agentenv(t, "commit")
		left = nil
		for _, pattern := range []string{"forks/*", "scratch/*", "tmp/*", ".*"} {
			found, err := filepath.Glob(filepath.Join(u.root, pattern))
			assert.NilError(t, err)
			left = append(left, found...)
		}
		if len(left) == 0 {
			return
		}
	}
	t.Fatalf("left over: %v", left)
}

// freeBytes is the room on the file system of a path.
func freeBytes(t *testing.T, path string) int64 {
	t.Helper()
	unix.Sync()
	var st unix.Statfs_t
	assert.NilError(t, unix.Statfs(path, &st))
	return int64(st.Bavail) * st.Bsize
}
