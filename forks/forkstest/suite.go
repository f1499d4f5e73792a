//go:build linux

package forkstest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// RunVolumes runs the suite on every kind of volume, as root and as an ordinary
// user, side by side. Tests that take long run on some of them, unless
// AGENTENV_TEST_LONG is set.
func RunVolumes(t *testing.T, b forks.Backend) {
	if os.Geteuid() != 0 {
		t.Run(here, func(t *testing.T) {
			if AsUser(t, scratch(t, "")) {
				run(t, b, func(t *testing.T) string { return Volume(t, "") }, "user-ext4")
			}
		})
	}
	for _, kind := range Volumes {
		dir := func(t *testing.T) string { return Volume(t, kind) }
		t.Run("root-"+kind, func(t *testing.T) {
			t.Parallel()
			if IsUser() {
				t.Skip("this is the ordinary user")
			}
			dir(t) // or all of it skips
			run(t, b, dir, "root-"+kind)
		})
		t.Run("user-"+kind, func(t *testing.T) {
			t.Parallel()
			if AsUser(t, Volume(t, kind)) {
				run(t, b, dir, "user-"+kind)
			}
		})
	}
}

// here is where the suite runs for an ordinary user, who can make no volumes:
// wherever temporary files are.
const here = "user-here"

// Run runs the tests that every driver passes. dir gives each of them a new
// directory; the store and the trees that are captured lie in it.
func Run(t *testing.T, b forks.Backend, dir func(t *testing.T) string) { run(t, b, dir, "") }

func run(t *testing.T, b forks.Backend, dir func(t *testing.T) string, where string) {
	for _, tt := range tests {
		if tt.on != "" && where != "" && os.Getenv("AGENTENV_TEST_LONG") == "" && !slices.Contains(strings.Fields(tt.on), where) {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			w := &world{T: t, b: b, dir: dir(t), ctx: t.Context()}
			w.open()
			tt.fn(w)
		})
	}
}

// tests are the suite; on says where those run that take long.
var tests = []struct {
	name string
	fn   func(*world)
	on   string
}{
	{"Fidelity", testFidelity, ""},
	{"Umask", testUmask, ""},
	{"Empty", testEmpty, ""},
	{"HardLinks", testHardLinks, ""},
	{"ReadOnlyDirs", testReadOnlyDirs, ""},
	{"Unreadable", testUnreadable, ""},
	{"Sparse", testSparse, ""},
	{"LongNames", testLongNames, ""},
	{"OverlayMarks", testOverlayMarks, ""},

	{"Errors", testErrors, ""},
	{"Names", testNames, ""},
	{"StatusExact", testStatusExact, ""},
	{"NoChange", testNoChange, ""},
	{"SameTimes", testSameTimes, ""},
	{"Mmap", testMmap, ""},
	{"View", testView, ""},
	{"Apply", testApply, ""},
	{"Cancel", testCancel, ""},
	{"Reopen", testReopen, ""},

	{"SourceUntouched", testSourceUntouched, ""},
	{"SourceAgain", testSourceAgain, ""},
	{"Exclude", testExclude, ""},
	{"Vanishing", testVanishing, "root-ext4 user-ext4 root-xfs user-btrfs"},
	{"Mounts", testMounts, ""},
	{"ForeignFile", testForeignFile, ""},
	{"Whiteout", testWhiteout, ""},

	{"AddRemoveAdd", testAddRemoveAdd, ""},
	{"Types", testTypes, "root-ext4 user-xfs root-btrfs user-tmpfs"},
	{"PlantedLinks", testPlantedLinks, ""},
	{"Swapping", testSwapping, ""},
	{"RunningProgram", testRunningProgram, ""},
	{"Replace", testReplace, ""},
	{"WorkingDirectory", testWorkingDirectory, ""},
	{"Locked", testLocked, ""},

	{"Isolation", testIsolation, ""},
	{"Remade", testRemade, ""},
	{"Plain", testPlain, ""},
	{"TextBusy", testTextBusy, "root-ext4 user-xfs"},
	{"Many", testMany, "root-ext4 user-ext4"},
	{"InUse", testInUse, "root-ext4 user-tmpfs"},
	{"SelfUse", testSelfUse, ""},
	{"Attached", testAttached, ""},

	{"RemoveSnapshot", testRemoveSnapshot, ""},
	{"BaseRemoved", testBaseRemoved, ""},
	{"DeadFork", testDeadFork, ""},
	{"CollectWhileForking", testCollectWhileForking, "root-tmpfs user-ext4"},
	{"Readers", testReaders, "root-xfs user-btrfs"},
	{"Chain", testChain, "root-ext4 user-tmpfs"},

	{"Random", testRandom, ""},
	{"Crash", testCrash, "root-ext4 user-ext4 root-btrfs"},
	{"Steps", testSteps, "root-ext4 user-xfs root-tmpfs user-btrfs"},

	{"NoSpace", testNoSpace, "root-ext4 root-xfs root-btrfs user-tmpfs"},
	{"NoInodes", testNoInodes, "root-ext4 user-tmpfs"},
	{"ReadOnly", testReadOnly, "root-xfs user-ext4"},
	{"FewFiles", testFewFiles, "root-ext4 user-btrfs"},
}

// world is a store and a directory to capture.
type world struct {
	*testing.T
	b   forks.Backend
	dir string
	ctx context.Context
	d   forks.Driver
	ids int
}

func (w *world) store() string { return filepath.Join(w.dir, "store") }

// open opens the store anew, as another process would.
func (w *world) open() {
	w.Helper()
	if w.d != nil {
		assert.NilError(w, w.d.Close())
	}
	d, err := w.b.Open(w.ctx, w.store())
	assert.NilError(w, err)
	w.d = d
	w.Cleanup(func() { assert.NilError(w, d.Close()) })
}

// src makes the directory to capture.
func (w *world) src(files map[string]string) string {
	w.Helper()
	dir := filepath.Join(w.dir, "src")
	assert.NilError(w, os.Mkdir(dir, 0o755))
	Write(w, dir, files)
	return dir
}

func (w *world) id() forks.ID {
	w.ids++
	return forks.ID(fmt.Sprintf("%08x", w.ids))
}

func (w *world) capture(dir string) forks.ID {
	w.Helper()
	id := w.id()
	_, err := w.d.Capture(w.ctx, id, "", forks.Source{Dir: dir})
	assert.NilError(w, err)
	return id
}

func (w *world) fork(key forks.Key, base forks.ID) *tree {
	w.Helper()
	_, err := w.d.Fork(w.ctx, key, base, forks.ForkOptions{})
	assert.NilError(w, err)
	return &tree{w: w, key: key}
}

// tree is a fork that is there already.
func (w *world) tree(key forks.Key) *tree { return &tree{w: w, key: key} }

// attach makes a mounted tree stand on the host, where this user can.
func (w *world) attach(t *tree) bool {
	w.Helper()
	at, err := w.d.Attach(w.ctx, t.key)
	if errors.Is(err, forks.ErrUnsupported) {
		return false
	}
	assert.NilError(w, err)
	assert.Assert(w, at.Mount.Overlay == nil, "attached, and yet to be mounted")
	w.Cleanup(func() {
		if err := w.d.Detach(w.ctx, t.key); !errors.Is(err, forks.ErrNotFound) {
			assert.NilError(w, err)
		}
	})
	return true
}

// work captures dir and makes the work tree.
func (w *world) work(files map[string]string) (forks.ID, *tree) {
	w.Helper()
	id := w.capture(w.src(files))
	return id, w.fork(forks.Work, id)
}

func (w *world) commit(key forks.Key) forks.ID {
	w.Helper()
	id := w.id()
	c, err := w.d.Commit(w.ctx, key, id, nil)
	assert.NilError(w, err)
	assert.Assert(w, len(c.List) > 0, "nothing to commit")
	return id
}

func (w *world) checkout(key forks.Key, id forks.ID) {
	w.Helper()
	assert.NilError(w, w.d.Checkout(w.ctx, key, id))
}

// clean fails unless the fork is unchanged.
func (w *world) clean(key forks.Key) {
	w.Helper()
	assert.DeepEqual(w, w.status(key), []string(nil))
}

// status lists what changed, as "kind path".
func (w *world) status(key forks.Key) []string {
	w.Helper()
	c, err := w.d.Status(w.ctx, key)
	assert.NilError(w, err)
	return lines(c)
}

func lines(c forks.Changes) []string {
	var l []string
	for _, ch := range c.List {
		l = append(l, string(ch.Kind)+" "+ch.Path)
	}
	return l
}

// read reads a tree; where an ordinary user may not look, through the snapshot.
func (w *world) contents(id forks.ID, path string) string {
	w.Helper()
	v, err := w.d.View(w.ctx, id)
	assert.NilError(w, err)
	defer v.Close()
	f, err := v.Open(path)
	assert.NilError(w, err)
	defer f.Close()
	b, err := io.ReadAll(f)
	assert.NilError(w, err)
	return string(b)
}

// empty fails if the store holds anything.
func (w *world) empty() {
	w.Helper()
	// The mounts of a process that was killed end a moment after it, and until
	// then what lies under them stays.
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := w.d.Sweep(w.ctx)
		assert.NilError(w, err)
		out := shell(w, w.store(), `find nodes forks tmp work -mindepth 1 ! -path nodes/.overlays 2>/dev/null || true`)
		if out == "" {
			return
		}
		assert.Assert(w, time.Now().Before(end), "left over: %s", out)
	}
}

// stored reads a snapshot without any fork: like [Read], from its View.
func (w *world) stored(id forks.ID) Manifest {
	w.Helper()
	v, err := w.d.View(w.ctx, id)
	assert.NilError(w, err)
	defer v.Close()
	m, first := Manifest{}, map[uint64]string{}
	assert.NilError(w, v.Walk(func(e forks.Entry) error {
		line := fmt.Sprintf("%o %d:%d %d.%09d %q %x", e.Mode, e.UID, e.GID, e.Mtime.Unix(), e.Mtime.Nanosecond(), e.Target, e.Rdev)
		for _, name := range slices.Sorted(maps.Keys(e.Xattrs)) {
			line += fmt.Sprintf(" %s=%x", name, e.Xattrs[name])
		}
		if _, ok := first[e.Link]; e.Link != 0 && !ok {
			first[e.Link] = e.Path
		}
		if e.Mode&unix.S_IFMT == unix.S_IFREG {
			line += fmt.Sprintf(" %d link=%q", e.Size, first[e.Link])
			if e.Size < 1<<20 {
				b := w.contents(id, e.Path)
				assert.Equal(w, int64(len(b)), e.Size)
				line += fmt.Sprintf(" %x", sha256.Sum256([]byte(b)))
			}
		}
		m[e.Path] = line
		return nil
	}))
	return m
}
