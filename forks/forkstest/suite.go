//go:build linux

package forkstest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// RunVolumes runs the suite on every kind of volume, as root and as an ordinary
// user, side by side.
func RunVolumes(t *testing.T, b forks.Backend) {
	for _, kind := range Volumes {
		dir := func(t *testing.T) string { return Volume(t, kind) }
		t.Run("root-"+kind, func(t *testing.T) {
			t.Parallel()
			if IsUser() {
				t.Skip("this is the ordinary user")
			}
			Run(t, b, dir)
		})
		t.Run("user-"+kind, func(t *testing.T) {
			t.Parallel()
			if AsUser(t, Volume(t, kind)) {
				Run(t, b, dir)
			}
		})
	}
}

// Run runs the tests that every driver passes. dir gives each of them a new
// directory; the store and the trees that are captured lie in it.
func Run(t *testing.T, b forks.Backend, dir func(t *testing.T) string) {
	tests := []struct {
		name string
		fn   func(*world)
	}{
		{"Fidelity", testFidelity}, {"Umask", testUmask}, {"Empty", testEmpty}, {"Errors", testErrors},
		{"Names", testNames}, {"StatusExact", testStatusExact}, {"NoChange", testNoChange}, {"SameTimes", testSameTimes},
		{"Mmap", testMmap}, {"Isolation", testIsolation}, {"AddRemoveAdd", testAddRemoveAdd}, {"Types", testTypes},
		{"HardLinks", testHardLinks}, {"ReadOnlyDirs", testReadOnlyDirs}, {"Unreadable", testUnreadable},
		{"SourceUntouched", testSourceUntouched}, {"SourceAgain", testSourceAgain}, {"Exclude", testExclude},
		{"Vanishing", testVanishing}, {"PlantedLinks", testPlantedLinks}, {"Swapping", testSwapping},
		{"RunningProgram", testRunningProgram}, {"WorkingDirectory", testWorkingDirectory}, {"Locked", testLocked},
		{"Mounts", testMounts}, {"ForeignFile", testForeignFile}, {"Whiteout", testWhiteout},
		{"RemoveSnapshot", testRemoveSnapshot}, {"View", testView}, {"Apply", testApply}, {"TextBusy", testTextBusy},
		{"Cancel", testCancel}, {"Reopen", testReopen}, {"Random", testRandom}, {"Crash", testCrash},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := &world{T: t, b: b, dir: dir(t), ctx: t.Context()}
			w.open()
			tt.fn(w)
		})
	}
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

func (w *world) fork(key forks.Key, base forks.ID) string {
	w.Helper()
	tree, err := w.d.Fork(w.ctx, key, base, forks.ForkOptions{})
	assert.NilError(w, err)
	return tree.Mount.Dir
}

// work captures dir and makes the work tree.
func (w *world) work(files map[string]string) (forks.ID, string) {
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

// testFidelity: every property survives capture, fork, commit and checkout.
func testFidelity(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, false)
	want := Read(w, src)
	first := w.capture(src)
	work := w.fork(forks.Work, first)
	Equal(w, Read(w, work), want)
	w.clean(forks.Work)
	assert.Assert(w, allocated(w, w.dir) < 64<<20, "the sparse file became dense")

	shell(w, work, `chmod -R u+rwX . && find . -mindepth 1 -maxdepth 1 -exec rm -rf {} + && echo other >plain && touch -d @5 .`)
	emptied := Read(w, work)
	second := w.commit(forks.Work)
	w.checkout(forks.Work, first)
	Equal(w, Read(w, work), want)
	w.clean(forks.Work)
	w.checkout(forks.Work, second)
	Equal(w, Read(w, work), emptied)
	w.checkout(forks.Work, first)
	Equal(w, Read(w, work), want)
	Equal(w, Read(w, w.fork("again", first)), want)
	Equal(w, Read(w, w.fork("other", second)), emptied)

	// What an edit inside everything leaves is stored and restored as well.
	shell(w, work, `for f in $(find . -type f -name '[a-z]*' -size -100k ! -name 'ln*' | head -20); do echo more >>"$f" || true; done; mkdir -p n/e; ln -f three n/four; mv links moved; chmod 700 modes`)
	edited := Read(w, work)
	third := w.commit(forks.Work)
	w.clean(forks.Work)
	Equal(w, Read(w, w.fork("third", third)), edited)
	w.checkout(forks.Work, first)
	Equal(w, Read(w, work), want)
	for _, key := range []forks.Key{"again", "other", "third", forks.Work} {
		assert.NilError(w, w.d.RemoveFork(w.ctx, key))
	}
}

// testUmask: neither the umask nor a default ACL above the store shows.
func testUmask(w *world) {
	if hasTool("setfacl") {
		shell(w, w.dir, `setfacl -m d:u:65534:rwX,d:o::--- . 2>/dev/null || true`)
	}
	src := filepath.Join(w.dir, "src")
	assert.NilError(w, os.Mkdir(src, 0o755))
	if hasTool("setfacl") {
		shell(w, src, `setfacl -b -k .`)
	}
	Write(w, src, map[string]string{"a/b": "x", "exec": "x"})
	shell(w, src, `chmod 777 a; chmod 666 a/b; chmod 755 exec; ln -s x l`)
	want := Read(w, src)
	withUmask(0o077, func() {
		id := w.capture(src)
		work := w.fork(forks.Work, id)
		Equal(w, Read(w, work), want)
		shell(w, work, `rm -r a exec`)
		w.commit(forks.Work)
		w.checkout(forks.Work, id)
		Equal(w, Read(w, work), want)
	})
	fi, err := os.Stat(w.store())
	assert.NilError(w, err)
	assert.Equal(w, fi.Mode().Perm(), os.FileMode(0o700))
}

func testEmpty(w *world) {
	src := w.src(nil)
	want := Read(w, src)
	id := w.capture(src)
	work := w.fork(forks.Work, id)
	Equal(w, Read(w, work), want)
	w.clean(forks.Work)
	shell(w, work, `echo x >f`)
	w.commit(forks.Work)
	w.checkout(forks.Work, id)
	Equal(w, Read(w, work), want)
}

// testErrors: each failure is an Error of the right kind, and changes nothing.
func testErrors(w *world) {
	id, work := w.work(map[string]string{"f": "x"})
	want := Read(w, work)
	check := func(err error, target error) {
		w.Helper()
		var fe *forks.Error
		assert.Assert(w, errors.As(err, &fe), "%v is no *forks.Error", err)
		assert.ErrorIs(w, err, target)
		assert.Assert(w, !strings.Contains(err.Error(), "\n"))
	}
	_, err := w.d.Capture(w.ctx, "ffff", "", forks.Source{Dir: filepath.Join(w.dir, "gone")})
	check(err, os.ErrNotExist)
	_, err = w.d.Capture(w.ctx, "ffff", "", forks.Source{Dir: filepath.Join(w.dir, "src", "f")})
	assert.ErrorContains(w, err, "not a directory")
	_, err = w.d.Capture(w.ctx, id, "", forks.Source{Dir: filepath.Join(w.dir, "src")})
	check(err, forks.ErrExists)
	_, err = w.d.Capture(w.ctx, "ffff", "eeee", forks.Source{Dir: filepath.Join(w.dir, "src")})
	check(err, forks.ErrNotFound)
	_, err = w.d.Fork(w.ctx, forks.Work, id, forks.ForkOptions{})
	check(err, forks.ErrExists)
	_, err = w.d.Fork(w.ctx, "k", "eeee", forks.ForkOptions{})
	check(err, forks.ErrNotFound)
	_, err = w.d.Tree("k")
	check(err, forks.ErrNotFound)
	_, err = w.d.Status(w.ctx, "k")
	check(err, forks.ErrNotFound)
	_, err = w.d.Commit(w.ctx, "k", "ffff", nil)
	check(err, forks.ErrNotFound)
	check(w.d.Checkout(w.ctx, "k", id), forks.ErrNotFound)
	check(w.d.Checkout(w.ctx, forks.Work, "eeee"), forks.ErrNotFound)
	_, err = w.d.View(w.ctx, "eeee")
	check(err, forks.ErrNotFound)
	_, err = w.d.Diff(w.ctx, id, "eeee")
	check(err, forks.ErrNotFound)
	assert.NilError(w, w.d.RemoveFork(w.ctx, "k"))
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, "eeee"))
	Equal(w, Read(w, work), want)
	w.clean(forks.Work)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, ids, []forks.ID{id})
}

// testNames: ids and keys lead nowhere.
func testNames(w *world) {
	id, _ := w.work(map[string]string{"f": "x"})
	outside := filepath.Join(w.dir, "outside")
	Write(w, outside, map[string]string{"keep": "x"})
	for _, bad := range []string{"", "..", "../../outside", "a/b", "/etc", "-rf", "A", "x\x00", ".hidden", strings.Repeat("a", 300)} {
		_, err := w.d.Fork(w.ctx, forks.Key(bad), id, forks.ForkOptions{})
		assert.Assert(w, err != nil || bad == "-rf", "%q", bad)
		if bad != "a" {
			_, err = w.d.Capture(w.ctx, forks.ID(bad), "", forks.Source{Dir: outside})
			assert.Assert(w, err != nil, "%q", bad)
		}
		_, err = w.d.Tree(forks.Key(bad))
		assert.Assert(w, err != nil || bad == "-rf", "%q", bad)
		assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Key(bad)))
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, forks.ID(bad)))
	}
	_, err := os.Stat(filepath.Join(outside, "keep"))
	assert.NilError(w, err)
}

// testStatusExact: Status, Commit and Diff tell exactly what changed.
func testStatusExact(w *world) {
	a, work := w.work(map[string]string{"same": "s", "edit": "1", "mode": "m", "gone": "g", "d/x": "x", "d/y/z": "z", "type": "t"})
	shell(w, work, `echo 22 >edit; chmod 600 mode; rm gone; rm -r d/y; rm type; mkdir type; echo n >type/in; ln -s x new; touch -d @1 .; touch -d @1 d`)
	want := []string{"modified .", "modified d", "removed d/y", "removed d/y/z", "modified edit", "removed gone", "modified mode", "added new", "type type", "added type/in"}
	assert.DeepEqual(w, w.status(forks.Work), want)
	assert.DeepEqual(w, w.status(forks.Work), want)
	b := w.id()
	c, err := w.d.Commit(w.ctx, forks.Work, b, nil)
	assert.NilError(w, err)
	assert.DeepEqual(w, lines(c), want)
	for _, ch := range c.List {
		assert.Equal(w, ch.Old == nil, ch.Kind == forks.Added)
		assert.Equal(w, ch.New == nil, ch.Kind == forks.Removed)
	}
	w.clean(forks.Work)
	c, err = w.d.Diff(w.ctx, a, b)
	assert.NilError(w, err)
	assert.DeepEqual(w, lines(c), want)
	c, err = w.d.Diff(w.ctx, b, a)
	assert.NilError(w, err)
	assert.Equal(w, len(c.List), len(want))
}

// testNoChange: a commit without changes makes nothing, also where times of
// inodes moved but nothing else did.
func testNoChange(w *world) {
	_, work := w.work(map[string]string{"f": "x", "d/g": "y"})
	shell(w, work, `t=$(stat -c %y .); chmod 600 f; chmod 644 f; ln d/g h; rm h; touch -d "$t" .`)
	w.clean(forks.Work)
	c, err := w.d.Commit(w.ctx, forks.Work, "bbbb", nil)
	assert.NilError(w, err)
	assert.Equal(w, len(c.List), 0)
	ids, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	for _, id := range ids {
		assert.Assert(w, id != "bbbb")
	}
}
