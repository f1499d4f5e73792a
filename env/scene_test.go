package env_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// volumeFor is the file system on which a driver is tested.
func volumeFor(backend string) string {
	if backend == "btrfs" {
		return "btrfs"
	}
	return "ext4"
}

// onBackends runs test with every driver that works, as root and as an ordinary
// user as far as this process may be either; in a short run as one of them, not
// the same for every test.
func onBackends(t *testing.T, test func(t *testing.T, dir string, o env.Options)) {
	long := os.Getenv("AGENTENV_TEST_LONG") != "" || os.Geteuid() != 0
	for i, b := range all.Backends() {
		asRoot := (i+len(t.Name()))%2 == 0
		t.Run(b.Name, func(t *testing.T) {
			if os.Geteuid() == 0 && (long || asRoot) {
				t.Run("root", func(t *testing.T) { onBackend(t, b, placeFor(t, b.Name), test) })
			}
			if !long && asRoot {
				return
			}
			t.Run("user", func(t *testing.T) {
				if os.Geteuid() != 0 && !forkstest.IsUser() {
					onBackend(t, b, t.TempDir(), test)
				} else if dir := placeFor(t, b.Name); forkstest.AsUser(t, dir) {
					onBackend(t, b, dir, test)
				}
			})
		})
	}
}

func onBackend(t *testing.T, b forks.Backend, dir string, test func(t *testing.T, dir string, o env.Options)) {
	if p := b.Probe(context.Background(), dir); !p.OK {
		t.Skipf("%s does not work here: %s", b.Name, p.Detail)
	}
	test(t, dir, optionsFor(b.Name))
}

// placeFor is a directory on a file system for a driver.
func placeFor(t *testing.T, backend string) string {
	dir := forkstest.Volume(t, volumeFor(backend))
	t.Cleanup(func() {
		unmountBelow(t, dir)
		if backend == "btrfs" && os.Geteuid() == 0 {
			// Read-only subvolumes; their inode has this number.
			out, err := exec.Command("sh", "-c", `find "$1" -type d -inum 256 -exec btrfs property set -ts {} ro false \;`, "sh", dir).CombinedOutput()
			assert.Check(t, err, string(out))
		}
	})
	return dir
}

// unmountBelow lets go of the work trees that stand on the host.
func unmountBelow(t *testing.T, dir string) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	assert.NilError(t, err)
	for line := range strings.SplitSeq(string(data), "\n") {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			assert.Check(t, unix.Unmount(f[4], unix.MNT_DETACH))
		}
	}
}

func probeOf(backend, dir string) forks.Probe {
	i := slices.IndexFunc(all.Backends(), func(b forks.Backend) bool { return b.Name == backend })
	return all.Backends()[i].Probe(context.Background(), dir)
}

func optionsFor(backend string) env.Options {
	return env.Options{Backends: all.Backends(), Backend: backend, Executor: sandbox.New(sandbox.Options{})}
}

// shellRun is a shell script as a command to run in a tree.
func shellRun(e *env.Env, script string) env.Run {
	return env.Run{
		Level: sandbox.LevelNamespaces, Home: sandbox.HomePrivate, HomeDir: "/nonexistent",
		Args: []string{"/bin/sh", "-e", "-c", script}, Env: e.Environ(os.Environ()), Stderr: os.Stderr,
	}
}

// editScript changes a tree in every way that a snapshot has to keep, to a state
// that depends on name alone: it sets all times.
func editScript(name string) string {
	return fmt.Sprintf(`
echo %[1]s >n; mkdir -p new/deep; echo %[1]s >new/deep/f; ln -f new/deep/f new/hard; ln -sfn %[1]s new/link
for i in 1 2 3 4 5 6 7 8; do echo %[1]s $i >d$((i %% 3))/$i; done
rm -rf gone; chmod 600 d0/mode; rm -rf swap; echo was a directory >swap
touch -h -d '2001-02-03 04:05:06.789' n new/deep/f new/deep new/link new d?/* d? swap .
`, name)
}

// writeSource makes the directory that environments are taken from.
func writeSource(t *testing.T, dir string) {
	files := map[string]string{"keep": "k", "gone/f": "g", "swap/f": "s", "d0/mode": "m"}
	for i := range 9 {
		files[fmt.Sprintf("d%d/%d", i%3, i)] = "before"
	}
	forkstest.Write(t, dir, files)
	// Nothing writes to this one: where forks are overlays, that splits it.
	assert.NilError(t, os.Link(filepath.Join(dir, "keep"), filepath.Join(dir, "keep too")))
}

// edited is what a tree equal to src becomes by editScript(name) and then more,
// found out without any of what is tested.
func edited(t *testing.T, src, name string, more ...string) forkstest.Manifest {
	dir := filepath.Join(t.TempDir(), "edited")
	cmd := exec.Command("/bin/sh", "-e", "-c", `cp -a "$1" "$2"; cd "$2";`+editScript(name)+strings.Join(more, "\n"), "sh", src, dir)
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, string(out))
	return forkstest.Read(t, dir)
}

// stored is what a snapshot holds, as [forkstest.Read] writes it.
func stored(t *testing.T, e *env.Env, id env.ID) forkstest.Manifest {
	t.Helper()
	v, err := e.View(context.Background(), id)
	assert.NilError(t, err)
	defer v.Close()
	m := forkstest.Manifest{}
	first := map[uint64]string{}
	assert.NilError(t, v.Walk(func(ent forks.Entry) error {
		line := fmt.Sprintf("%o %d:%d %d.%09d %s", ent.Mode, ent.UID, ent.GID, ent.Mtime.Unix(), ent.Mtime.Nanosecond(), attributes(ent))
		switch ent.Mode & 0o170000 {
		case 0o100000:
			link := ent.Path
			if ent.Link != 0 {
				if first[ent.Link] == "" {
					first[ent.Link] = ent.Path
				}
				link = first[ent.Link]
			}
			line += fmt.Sprintf(" %d %s link=%q", ent.Size, hashOf(t, v, ent.Path), link)
		case 0o120000:
			line += fmt.Sprintf(" -> %q", ent.Target)
		}
		m[ent.Path] = line
		return nil
	}), "snapshot %s", id)
	return m
}

func attributes(ent forks.Entry) string {
	var all []string
	for k, v := range ent.Xattrs {
		all = append(all, fmt.Sprintf("%s=%x", k, v))
	}
	slices.Sort(all)
	return fmt.Sprint(all)
}

func hashOf(t *testing.T, v forks.View, path string) string {
	f, err := v.Open(path)
	assert.NilError(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	assert.NilError(t, err, path)
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// isUnclean says whether a snapshot is a mix of two states, and says so.
func isUnclean(s env.Snapshot) bool { return strings.HasPrefix(s.Message, "unclean: ") }

// same says whether two trees are equal.
func same(a, b forkstest.Manifest) bool { return len(forkstest.Differences(a, b)) == 0 }

// nothingLeft checks that every file of the store is accounted for by its
// history.
func nothingLeft(t *testing.T, e *env.Env) {
	t.Helper()
	left, err := e.Leftovers(context.Background())
	assert.NilError(t, err)
	assert.Equal(t, len(left), 0, "%v", left)
	for _, dir := range []string{"forks", "scratch", "tmp"} {
		entries, err := os.ReadDir(filepath.Join(e.Root(), dir))
		assert.Assert(t, err == nil || os.IsNotExist(err))
		assert.Equal(t, len(entries), 0, "%s holds %v", dir, entries)
	}
	entries, err := os.ReadDir(e.Root())
	assert.NilError(t, err)
	for _, d := range entries {
		assert.Assert(t, !strings.HasPrefix(d.Name(), "."), "%s was left", d.Name())
	}
}
