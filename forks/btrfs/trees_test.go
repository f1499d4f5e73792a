//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"encoding/json"
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

func sh(t *testing.T, dir, script string) string {
	t.Helper()
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, "%s\n%s", script, out)
	return string(out)
}

func asRootAndUser(t *testing.T, fn func(t *testing.T, dir string)) {
	t.Run("root", func(t *testing.T) {
		if forkstest.IsUser() {
			t.Skip("this is the ordinary user")
		}
		fn(t, volume(t))
	})
	t.Run("user", func(t *testing.T) {
		if forkstest.AsUser(t, volume(t)) {
			fn(t, volume(t))
		}
	})
}

// Subvolumes in a directory that is captured become directories, at any depth.
func TestNestedInSource(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		s := newScene(t, dir)
		src := filepath.Join(dir, "src")
		sh(t, dir, `mkdir src; echo x >src/f; btrfs -q subvolume create src/sub; echo y >src/sub/g; mkdir src/sub/d
			btrfs -q subvolume create src/sub/d/deep; echo z >src/sub/d/deep/h; ln src/sub/d/deep/h src/sub/d/deep/i`)
		id := s.captureAs(forks.Source{Dir: src}, "")
		want := forkstest.Read(t, src)
		tree := s.fork(forks.Work, id)
		forkstest.Equal(t, forkstest.Read(t, tree), want)
		within, err := nested(mustOpen(t, tree))
		assert.NilError(t, err)
		assert.Equal(t, len(within), 0)
		// And upon a base, from inside one of them.
		sh(t, src, `echo more >>sub/d/deep/i; rm sub/g`)
		second := s.captureAs(forks.Source{Dir: src}, id)
		c, err := s.d.Diff(t.Context(), id, second)
		assert.NilError(t, err)
		assert.DeepEqual(t, lines(c.List), []string{"modified sub", "modified sub/d/deep/h", "modified sub/d/deep/i", "removed sub/g"})
		forkstest.Equal(t, forkstest.Read(t, s.fork("k", second)), forkstest.Read(t, src))
		sh(t, dir, `rm -r src`)
	})
}

func mustOpen(t *testing.T, path string) int {
	fd, err := openTree(path)
	assert.NilError(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// A subvolume that was made in a fork is told by Status, refused by name by
// Commit, and no hindrance to a checkout and to the removal of the fork.
func TestNestedInFork(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		s := newScene(t, dir)
		id := s.capture(map[string]string{"f": "x", "d/g": "y"})
		tree := s.fork(forks.Work, id)
		make := `btrfs -q subvolume create d/sub; echo n >d/sub/n; mkdir d/sub/e; btrfs -q subvolume snapshot -r d/sub d/sub/e/ro`
		sh(t, tree, make)
		c, err := s.d.Status(t.Context(), forks.Work)
		assert.NilError(t, err)
		assert.Assert(t, strings.Contains(strings.Join(lines(c.List), "\n"), "added d/sub/n"), "%v", lines(c.List))
		assert.Assert(t, len(c.Warnings) == 1 && strings.HasPrefix(c.Warnings[0], "d/sub: is a btrfs subvolume"), "%q", c.Warnings)
		_, err = s.d.Commit(t.Context(), forks.Work, "ffff", nil)
		assert.ErrorIs(t, err, forks.ErrUnkeepable)
		assert.ErrorContains(t, err, "d/sub: cannot be kept in a snapshot: it is a btrfs subvolume of its own")
		ids, err := s.d.Snapshots(t.Context())
		assert.NilError(t, err)
		assert.DeepEqual(t, ids, []forks.ID{id})

		assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
		assert.Equal(t, sh(t, tree, `ls; ls d`), "d\nf\ng\n")
		sh(t, tree, make)
		assert.NilError(t, s.d.RemoveFork(t.Context(), forks.Work))
		assert.NilError(t, s.d.RemoveSnapshot(t.Context(), id))
		assert.Equal(t, sh(t, s.d.store.Dir, `find . -mindepth 2`), "")
	})
}

// subvolumes counts those below dir.
func subvolumes(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	assert.NilError(t, err)
	defer unix.Close(fd)
	found, err := nested(fd)
	assert.NilError(t, err)
	return len(found)
}

// Without the right to delete subvolumes, an ordinary user leaves none behind
// either; with it, they go at once.
func TestRemovalByUser(t *testing.T) {
	for name, option := range map[string]string{"without": "", "with": "user_subvol_rm_allowed"} {
		t.Run(name, func(t *testing.T) {
			var dir string
			if !forkstest.IsUser() {
				dir = forkstest.SmallVolume(t, "btrfs", "300m")
				if option != "" {
					assert.NilError(t, unix.Mount("", dir, "", unix.MS_REMOUNT, option))
				}
			}
			if !forkstest.AsUser(t, dir) {
				assert.Equal(t, subvolumes(t, dir), 0)
				return
			}
			dir = os.Getenv("HOME")
			p := probe(t.Context(), dir)
			assert.Assert(t, p.OK, p.Detail)
			assert.Equal(t, strings.Contains(p.Detail, "takes time"), option == "", p.Detail)
			assert.Equal(t, strings.Contains(p.Fix, "user_subvol_rm_allowed"), option == "", p.Fix)
			s := newScene(t, dir)
			id := s.capture(map[string]string{"f": "x", "d/g": "y"})
			tree := s.fork(forks.Work, id)
			for i := range 20 {
				s.fork(forks.Key(fmt.Sprint("k", i)), id)
				sh(t, tree, `echo x >>d/g; chmod 500 d`)
				second, _ := s.commit(forks.Work)
				assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
				assert.NilError(t, s.d.RemoveSnapshot(t.Context(), second))
				assert.NilError(t, s.d.RemoveFork(t.Context(), forks.Key(fmt.Sprint("k", i))))
			}
			assert.NilError(t, s.d.RemoveFork(t.Context(), forks.Work))
			assert.NilError(t, s.d.RemoveSnapshot(t.Context(), id))
			_, err := s.d.Sweep(t.Context())
			assert.NilError(t, err)
			sh(t, dir, `rm -r src store`)
		})
	}
}

// A full quota group is an error that says so, and leaves the old state.
func TestQuota(t *testing.T) {
	dir := forkstest.SmallVolume(t, "btrfs", "300m")
	sh(t, dir, `btrfs quota enable .; btrfs qgroup create 1/0 .`)
	s := newScene(t, dir)
	id := s.capture(map[string]string{"f": "x"})
	tree := s.fork(forks.Work, id)
	sh(t, dir, `btrfs qgroup limit 10m store/work/current`)
	// What is written to the tree meets the limit; a commit of it does not.
	out := sh(t, tree, `head -c 20000000 /dev/urandom >big 2>&1 || echo failed`)
	assert.Assert(t, strings.Contains(out, "failed"), out)
	second, c := s.commit(forks.Work)
	assert.Assert(t, len(c.List) > 0)
	want := forkstest.Read(t, tree)
	sh(t, dir, `sync -f .; btrfs qgroup limit 16k 0/5 .`)
	_, err := s.d.Capture(t.Context(), "aaaa", "", forks.Source{Dir: tree})
	assert.ErrorIs(t, err, unix.EDQUOT)
	assert.ErrorContains(t, err, "btrfs qgroup show")
	assert.ErrorIs(t, s.d.Checkout(t.Context(), forks.Work, id), unix.EDQUOT)
	p := probe(t.Context(), dir)
	assert.Assert(t, !p.OK && strings.Contains(p.Fix, "btrfs qgroup limit"), "%+v", p)
	forkstest.Equal(t, forkstest.Read(t, tree), want)
	sh(t, dir, `btrfs quota disable .`)
	ids, err := s.d.Snapshots(t.Context())
	assert.NilError(t, err)
	assert.DeepEqual(t, ids, []forks.ID{id, second})
	assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
	assert.Equal(t, sh(t, tree, `ls`), "f\n")
}

// What is mounted in a tree would go with it: a checkout and a removal are
// refused, and a commit has what lies below.
func TestMountInTree(t *testing.T) {
	s := newScene(t, volume(t))
	id := s.capture(map[string]string{"m/below": "b", "f": "x"})
	tree := s.fork(forks.Work, id)
	assert.NilError(t, unix.Mount("t", filepath.Join(tree, "m"), "tmpfs", 0, ""))
	defer func() { _ = unix.Unmount(filepath.Join(tree, "m"), unix.MNT_DETACH) }()
	sh(t, tree, `echo over >m/over; echo y >f`)
	c, err := s.d.Status(t.Context(), forks.Work)
	assert.NilError(t, err)
	assert.DeepEqual(t, lines(c.List), []string{"modified f"})
	assert.DeepEqual(t, c.Warnings, []string{"m: is a mount point; what is below it was left out"})
	second, c := s.commit(forks.Work)
	assert.DeepEqual(t, lines(c.List), []string{"modified f"})
	assert.DeepEqual(t, c.Warnings, []string{"m: is a mount point; what is below it was left out"})
	assert.Equal(t, sh(t, s.d.treePath(second), `cat m/below`), "b")
	assert.ErrorContains(t, s.d.Checkout(t.Context(), forks.Work, id), "m: is a mount point")
	assert.ErrorContains(t, s.d.RemoveFork(t.Context(), forks.Work), "m: is a mount point")
	assert.Equal(t, sh(t, tree, `cat f m/over`), "y\nover\n")
	assert.NilError(t, unix.Unmount(filepath.Join(tree, "m"), 0))
	assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
	assert.Equal(t, sh(t, tree, `cat f m/below`), "xb")
}

// A process that has its working directory in a tree that is replaced is named.
func TestLeftBehind(t *testing.T) {
	s := newScene(t, volume(t))
	id := s.capture(map[string]string{"d/f": "x"})
	tree := s.fork(forks.Work, id)
	sh(t, tree, `echo y >d/f`)
	cmd := exec.Command("sleep", "100")
	cmd.Dir = filepath.Join(tree, "d")
	assert.NilError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
	at, err := s.d.Tree(forks.Work)
	assert.NilError(t, err)
	assert.Assert(t, len(at.Warnings) == 1 && strings.Contains(at.Warnings[0], fmt.Sprint("process ", cmd.Process.Pid)), "%q", at.Warnings)
	// Nothing to do: the tree, and who is in it, stays.
	was := sh(t, tree, `stat -c %d .`)
	assert.NilError(t, s.d.Checkout(t.Context(), forks.Work, id))
	assert.Equal(t, sh(t, tree, `stat -c %d .`), was)
}

// Bytes are what is new on disk: no shared extents, no unchanged file.
func TestBytes(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		s := newScene(t, dir)
		src := filepath.Join(dir, "src")
		sh(t, dir, `mkdir src; head -c 8000000 /dev/urandom >src/big; sync -f src`)
		c, err := s.d.Capture(t.Context(), "aaaa", "", forks.Source{Dir: src})
		assert.NilError(t, err)
		assert.Assert(t, c.Bytes < 100_000, "a reflinked copy took %d bytes", c.Bytes)
		tree := s.fork(forks.Work, "aaaa")
		sh(t, tree, `head -c 1000000 /dev/urandom | dd of=big bs=1000000 conv=notrunc iflag=fullblock 2>/dev/null; echo small >s`)
		_, c = s.commit(forks.Work)
		assert.Assert(t, c.Bytes >= 1_000_000 && c.Bytes < 1_100_000, "%d bytes", c.Bytes)
		sh(t, tree, `chmod 600 big`)
		_, c = s.commit(forks.Work)
		assert.Equal(t, c.Bytes, int64(0))
		sh(t, src, `cp --reflink=never big copy; head -c 2000000 /dev/urandom >new; rm big; sync -f .`)
		c, err = s.d.Capture(t.Context(), "bbbb", "aaaa", forks.Source{Dir: src})
		assert.NilError(t, err)
		assert.Assert(t, c.Bytes < 100_000, "a reflinked copy took %d bytes", c.Bytes)
		if os.Geteuid() != 0 {
			return
		}
		other := forkstest.Volume(t, "tmpfs")
		sh(t, other, `cp -a `+src+`/. .; head -c 3000000 /dev/urandom >new`)
		c, err = s.d.Capture(t.Context(), "cccc", "bbbb", forks.Source{Dir: other})
		assert.NilError(t, err)
		assert.Assert(t, c.Bytes >= 3_000_000 && c.Bytes < 3_100_000, "%d bytes for %v", c.Bytes, lines(c.List))
	})
}

// Sweep says what the file system has got back.
func TestSweepBytes(t *testing.T) {
	dir := forkstest.SmallVolume(t, "btrfs", "400m")
	s := newScene(t, dir)
	id := s.capture(map[string]string{"f": "x"})
	st, err := s.d.store.NewStage()
	assert.NilError(t, err)
	assert.NilError(t, os.Mkdir(filepath.Join(st.Path, "node"), 0o700))
	tree := filepath.Join(st.Path, "node", "tree")
	assert.NilError(t, s.d.snapshot(tree, s.d.treePath(id), false))
	sh(t, tree, `head -c 60000000 /dev/urandom >big; sync -f big`)
	assert.NilError(t, unix.Close(st.FD)) // its maker died
	n, err := s.d.Sweep(t.Context())
	assert.NilError(t, err)
	assert.Assert(t, n > 55_000_000 && n < 70_000_000, "%d bytes", n)
	n, err = s.d.Sweep(t.Context())
	assert.NilError(t, err)
	assert.Equal(t, n, int64(0))
}

// What an ordinary user cannot set on disk is kept in the record, through
// forks, renames and commits.
func TestRecord(t *testing.T) {
	var dir string
	if !forkstest.IsUser() {
		dir = volume(t)
		sh(t, dir, `mkdir -p src/dev; mknod src/dev/null c 1 3; echo x >src/f; echo y >src/g; chmod -R go+rX src`)
	}
	if !forkstest.AsUser(t, dir) {
		return
	}
	if os.Getenv("HOME") == "" {
		t.Skip("this case needs a device that root made")
	}
	dir = os.Getenv("HOME")
	s := newScene(t, dir)
	owners := map[string][2]uint32{"f": {1, 2}, "dev": {3, 4}, ".": {5, 6}}
	id := s.captureAs(forks.Source{Dir: filepath.Join(dir, "src"), Owners: owners}, "")
	check := func(id forks.ID, paths map[string]string) {
		t.Helper()
		v, err := s.d.View(t.Context(), id)
		assert.NilError(t, err)
		defer v.Close()
		for path, was := range paths {
			e, err := v.Lookup(path)
			assert.NilError(t, err)
			if o, ok := owners[was]; ok {
				assert.Equal(t, [2]uint32{e.UID, e.GID}, o, path)
			}
			if was == "dev/null" {
				assert.Equal(t, e.Rdev, unix.Mkdev(1, 3))
			}
		}
	}
	check(id, map[string]string{".": ".", "f": "f", "dev": "dev", "dev/null": "dev/null"})
	tree := s.fork(forks.Work, id)
	c, err := s.d.Status(t.Context(), forks.Work)
	assert.NilError(t, err)
	assert.Equal(t, len(c.List), 0, "%v", lines(c.List))
	sh(t, tree, `echo more >>f; mv f h; mv dev devices; rm g`)
	second, c := s.commit(forks.Work)
	check(second, map[string]string{".": ".", "h": "f", "devices": "dev", "devices/null": "dev/null"})
	assert.DeepEqual(t, lines(c.List), []string{"modified .", "removed dev", "removed dev/null", "added devices", "added devices/null", "removed f", "removed g", "added h"})
	// The owner says nothing of another file of that name.
	sh(t, tree, `rm h; echo new >h`)
	third, _ := s.commit(forks.Work)
	v, err := s.d.View(t.Context(), third)
	assert.NilError(t, err)
	defer v.Close()
	e, err := v.Lookup("h")
	assert.NilError(t, err)
	assert.Equal(t, int(e.UID), os.Getuid())
}

// An index makes files known whatever the base is: they are not read.
func TestIndex(t *testing.T) {
	dir := volume(t)
	s := newScene(t, dir)
	src := forks.Source{Dir: filepath.Join(dir, "src"), Index: filepath.Join(dir, "index")}
	sh(t, dir, `mkdir src; head -c 30000000 /dev/urandom >src/big; echo 1 >src/f`)
	one := s.captureAs(src, "")
	sh(t, src.Dir, `sleep 0.02; echo 2 >f`)
	two := s.captureAs(src, one)
	for _, base := range []forks.ID{two, one, two} {
		before := readBytes(t)
		c, err := s.d.Compare(t.Context(), base, src)
		assert.NilError(t, err)
		want := []string(nil)
		if base == one {
			want = []string{"modified f"}
		}
		assert.DeepEqual(t, lines(c.List), want)
		assert.Assert(t, readBytes(t)-before < 1_000_000, "the large file was read against %s", base)
	}
}

// readBytes is what this process has read so far.
func readBytes(t *testing.T) (n int64) {
	b, err := os.ReadFile("/proc/self/io")
	assert.NilError(t, err)
	_, err = fmt.Sscanf(string(b), "rchar: %d", &n)
	assert.NilError(t, err)
	return n
}

// A balance moves everything, a defragmentation writes it anew, and a reader
// changes the times of access: nothing of that is a change.
func TestNoChanges(t *testing.T) {
	dir := forkstest.SmallVolume(t, "btrfs", "400m")
	s := newScene(t, dir)
	files := map[string]string{"big": strings.Repeat("0123456789abcdef", 1<<17)}
	for i := range 300 {
		files[fmt.Sprintf("d%d/f%d", i%7, i)] = fmt.Sprint(i)
	}
	id := s.capture(files)
	tree := s.fork(forks.Work, id)
	sh(t, tree, `echo x >d1/new`)
	s.commit(forks.Work)
	sh(t, tree, `sleep 0.05; cat big d*/* >/dev/null; btrfs -q filesystem defragment -r -f .`)
	sh(t, dir, `btrfs -q balance start --full-balance .; sync -f .`)
	c, err := s.d.Status(t.Context(), forks.Work)
	assert.NilError(t, err)
	assert.Equal(t, len(c.List), 0, "%v", lines(c.List))
	_, c = s.commit(forks.Work)
	assert.Equal(t, len(c.List), 0, "%v", lines(c.List))
	sh(t, tree, `echo y >d2/f2`)
	sh(t, dir, `btrfs -q balance start --full-balance .`)
	_, c = s.commit(forks.Work)
	assert.DeepEqual(t, lines(c.List), []string{"modified d2/f2"})
}

// What was only read is not read again to know that it did not change.
func TestReadersChangeNothing(t *testing.T) {
	s := newScene(t, volume(t))
	tree := s.fork(forks.Work, s.capture(map[string]string{"big": strings.Repeat("0123456789abcdef", 1<<20), "f": "x"}))
	sh(t, tree, `sleep 0.05; echo x >>f`)
	s.commit(forks.Work)
	sh(t, tree, `sleep 0.05; was=$(stat -c %x big); cat big >/dev/null; test "$(stat -c %x big)" != "$was"; echo y >f`)
	before := readBytes(t)
	c, err := s.d.Status(t.Context(), forks.Work)
	assert.NilError(t, err)
	assert.DeepEqual(t, lines(c.List), []string{"modified f"})
	assert.Assert(t, readBytes(t)-before < 1<<20, "the large file was read")
}

// A snapshot whose files are damaged, missing or of a newer program is named,
// and hinders no other.
func TestDamaged(t *testing.T) {
	for name, tt := range map[string]struct {
		script, want string
		is           error
	}{
		"no tree": {`btrfs property set tree ro false; mv tree gone`, "its tree is missing", forks.ErrDamaged},
		"no info": {`rm info`, "its info is missing", forks.ErrDamaged},
		"cut":     {`ln -sfn 1: info`, "its info is unreadable", forks.ErrDamaged},
		"newer":   {`ln -sfn 9:more info`, "newer agentenv", forks.ErrUnsupported},
		"record":  {`echo '{"Version"' >record`, "its record is unreadable", forks.ErrDamaged},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, volume(t))
			id := s.capture(map[string]string{"f": "1"})
			tree := s.fork(forks.Work, id)
			sh(t, tree, `echo 2 >f`)
			second, _ := s.commit(forks.Work)
			s.fork("k", second)
			sh(t, s.d.store.NodePath(second), tt.script)
			_, err := s.d.Status(t.Context(), "k")
			assert.ErrorIs(t, err, tt.is)
			assert.ErrorContains(t, err, tt.want)
			assert.ErrorContains(t, err, string(second))
			ids, err := s.d.Snapshots(t.Context())
			assert.NilError(t, err)
			assert.Equal(t, len(ids), 2)
			other := s.fork("other", id)
			assert.Equal(t, sh(t, other, `cat f`), "1")
			assert.NilError(t, s.d.Checkout(t.Context(), "k", id))
			assert.NilError(t, s.d.RemoveFork(t.Context(), "k"))
		})
	}
}

func TestProbe(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		p := Backend().Probe(t.Context(), dir)
		assert.Assert(t, p.OK, p.Detail)
		left, err := os.ReadDir(dir)
		assert.NilError(t, err)
		assert.Equal(t, len(left), 0)
	})
	if forkstest.IsUser() {
		return
	}
	p := Backend().Probe(t.Context(), forkstest.Volume(t, "tmpfs"))
	assert.Assert(t, !p.OK && strings.HasPrefix(p.Detail, "not here: ") && p.Fix == "" && p.Lost != "", "%+v", p)
	p = Backend().Probe(t.Context(), "/nowhere/at/all")
	assert.Assert(t, !p.OK && strings.Contains(p.Detail, "/nowhere/at/all"))
}

// The record survives being written down.
func TestRecordEncoding(t *testing.T) {
	o := newRecorded()
	o.inodes[7] = inodeRecord{Ino: 7, UID: 1, Xattrs: []xattr{{[]byte("security.x"), []byte{0, 255}}}}
	o.addDevice(deviceRecord{Dir: 3, Name: []byte("\xff\n"), Mode: unix.S_IFCHR | 0o600, Rdev: 5})
	b, err := o.encode()
	assert.NilError(t, err)
	var r record
	assert.NilError(t, json.Unmarshal(b, &r))
	assert.DeepEqual(t, r.Inodes, []inodeRecord{o.inodes[7]})
	assert.DeepEqual(t, r.Devices, []deviceRecord{o.devices[3]["\xff\n"]})
}

// A directory of the user's is made equal to a snapshot, as by all drivers.
func TestReplace(t *testing.T) {
	asRootAndUser(t, func(t *testing.T, dir string) {
		s := newScene(t, dir)
		id := s.capture(map[string]string{"f": "x", "d/g": "y", "d/h": "z"})
		src := forks.Source{Dir: filepath.Join(dir, "src"), Index: filepath.Join(dir, "index")}
		want := forkstest.Read(t, src.Dir)
		sh(t, src.Dir, `echo more >>f; rm -r d; mkdir n; echo n >n/n`)
		second := s.captureAs(src, id)
		edited := forkstest.Read(t, src.Dir)
		for _, to := range []forks.ID{id, second, id} {
			_, err := s.d.Replace(t.Context(), to, src)
			assert.NilError(t, err)
			forkstest.Equal(t, forkstest.Read(t, src.Dir), map[forks.ID]forkstest.Manifest{id: want, second: edited}[to])
			c, err := s.d.Compare(t.Context(), to, src)
			assert.NilError(t, err)
			assert.Equal(t, len(c.List), 0, "%v", lines(c.List))
		}
	})
}
