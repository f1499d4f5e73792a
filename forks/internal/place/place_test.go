//go:build linux

package place_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"pgregory.net/rapid"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/forks/copytree"
	"github.com/agentenv/agentenv/forks/forkstest"
)

func TestMain(m *testing.M) { os.Exit(forkstest.Main(m, copytree.Backend())) }

// scene is a store and a directory that is not of it.
type scene struct {
	testing.TB
	d   forks.Driver
	src forks.Source
	n   int
}

// newScene has its store in one directory and its tree in another, and knows
// the tree by an index beside the store.
func newScene(t testing.TB, store, dir string) *scene {
	t.Helper()
	return newSceneOf(t, copytree.Backend(), store, dir)
}

func newSceneOf(t testing.TB, b forks.Backend, store, dir string) *scene {
	t.Helper()
	for _, p := range []string{filepath.Join(store, "known"), dir} {
		assert.NilError(t, os.MkdirAll(p, 0o755))
	}
	d, err := b.Open(t.Context(), filepath.Join(store, "store"))
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, d.Close()) })
	return &scene{TB: t, d: d, src: forks.Source{Dir: dir, Index: filepath.Join(store, "known", "index")}}
}

// inOneVolume is a scene on one file system.
func inOneVolume(t testing.TB, top string) *scene {
	return newScene(t, filepath.Join(top, "root"), filepath.Join(top, "dir"))
}

func (s *scene) path(name string) string { return filepath.Join(s.src.Dir, name) }

// capture stores the directory.
func (s *scene) capture() forks.ID {
	s.Helper()
	s.n++
	id := forks.ID(fmt.Sprintf("ab%02x", s.n))
	_, err := s.d.Capture(s.Context(), id, "", s.src)
	assert.NilError(s, err)
	return id
}

// replace makes the directory equal to id, and checks that it then is, and that
// nothing is left.
func (s *scene) replace(id forks.ID) forks.Changes {
	s.Helper()
	c, err := s.d.Replace(s.Context(), id, s.src)
	assert.NilError(s, err)
	s.tidy()
	return c
}

// tidy checks that no temporary file is left anywhere.
func (s *scene) tidy() {
	s.Helper()
	out, err := exec.Command("find", s.src.Dir, filepath.Dir(s.known()), "-name", ".agentenv-*", "-o", "-name", "*.stage", "-o", "-name", "*.replacing").Output()
	if os.Geteuid() == 0 { // others may not look everywhere
		assert.NilError(s, err)
	}
	assert.Equal(s, string(out), "")
}

func (s *scene) known() string {
	if s.src.Index == "" {
		return filepath.Join(s.src.Dir, "x")
	}
	return s.src.Index
}

// differs lists what the directory has changed against id.
func (s *scene) differs(id forks.ID) []string {
	s.Helper()
	c, err := s.d.Compare(s.Context(), id, s.src)
	assert.NilError(s, err)
	var list []string
	for _, ch := range c.List {
		list = append(list, string(ch.Kind)+" "+ch.Path)
	}
	return list
}

func (s *scene) write(files map[string]string) { s.Helper(); forkstest.Write(s, s.src.Dir, files) }

func inode(t testing.TB, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	assert.NilError(t, unix.Lstat(path, &st))
	return st.Ino
}

// eachVolume runs fn on every kind of file system, as root and as an ordinary
// user; where some are named, on those alone unless the run is a long one.
func eachVolume(t *testing.T, fn func(t *testing.T, dir string), quick ...string) {
	kinds := forkstest.Volumes
	if len(quick) > 0 && os.Getenv("AGENTENV_TEST_LONG") == "" {
		kinds = quick
	}
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) { fn(t, forkstest.Volume(t, kind)) })
		t.Run(kind+" user", func(t *testing.T) {
			if dir := forkstest.Volume(t, kind); forkstest.AsUser(t, dir) {
				fn(t, dir)
			}
		})
	}
}

func TestReplaceTrickyTree(t *testing.T) {
	eachVolume(t, func(t *testing.T, dir string) { toAndFro(t, inOneVolume(t, dir)) })
}

// Replace needs no more of a driver than every driver has.
func TestReplaceWithEveryDriver(t *testing.T) {
	for _, b := range all.Backends() {
		if b.Name == copytree.Name {
			continue // all other tests
		}
		volume := "ext4"
		if b.Name == "btrfs" {
			volume = b.Name
		}
		run := func(t *testing.T, dir string) {
			if p := b.Probe(t.Context(), dir); !p.OK {
				t.Skip(b.Name + ": " + p.Detail)
			}
			s := newSceneOf(t, b, filepath.Join(dir, "root"), filepath.Join(dir, "dir"))
			toAndFro(t, s)
			for _, id := range []forks.ID{"ab01", "ab02"} {
				assert.NilError(t, s.d.RemoveSnapshot(t.Context(), id))
			}
		}
		t.Run(b.Name, func(t *testing.T) { run(t, forkstest.Volume(t, volume)) })
		t.Run(b.Name+" user", func(t *testing.T) {
			if dir := forkstest.Volume(t, volume); forkstest.AsUser(t, dir) {
				run(t, dir)
			}
		})
	}
}

// toAndFro goes between a tree with everything that a snapshot keeps and one
// with next to nothing.
func toAndFro(t *testing.T, s *scene) {
	forkstest.TrickyTree(t, s.src.Dir, true)
	want, full := forkstest.Read(t, s.src.Dir), s.capture()
	out, err := exec.Command("sh", "-c", `chmod -R u+rwX "$1" && find "$1" -mindepth 1 -delete && echo x >"$1/plain" && mkdir "$1/links"`, "sh", s.src.Dir).CombinedOutput()
	assert.NilError(t, err, string(out))
	bare, none := forkstest.Read(t, s.src.Dir), s.capture()
	for range 2 {
		s.replace(full)
		forkstest.Equal(t, forkstest.Read(t, s.src.Dir), want)
		assert.Equal(t, len(s.differs(full)), 0)
		s.replace(none)
		forkstest.Equal(t, forkstest.Read(t, s.src.Dir), bare)
		assert.Equal(t, len(s.differs(none)), 0)
	}
}

// TestReplaceBetweenRandomTrees goes to and fro between trees made at random,
// with and without an index, the store on the same file system and on another.
func TestReplaceBetweenRandomTrees(t *testing.T) {
	eachVolume(t, func(t *testing.T, dir string) {
		n := 0
		rapid.Check(t, func(rt *rapid.T) {
			n++
			top := filepath.Join(dir, fmt.Sprint(n))
			store := filepath.Join(top, "root")
			if rapid.Bool().Draw(rt, "store elsewhere") {
				store = elsewhere(t)
			}
			s := newScene(t, store, filepath.Join(top, "dir"))
			if rapid.Bool().Draw(rt, "no index") {
				s.src.Index = ""
			}
			var ids []forks.ID
			var want []forkstest.Manifest
			for range rapid.IntRange(2, 4).Draw(rt, "trees") {
				edit(rt, s.src.Dir)
				ids, want = append(ids, s.capture()), append(want, forkstest.Read(t, s.src.Dir))
			}
			for range 4 {
				i := rapid.IntRange(0, len(ids)-1).Draw(rt, "to")
				if rapid.Bool().Draw(rt, "edited") {
					edit(rt, s.src.Dir)
				}
				s.replace(ids[i])
				forkstest.Equal(t, forkstest.Read(t, s.src.Dir), want[i])
				assert.Equal(t, len(s.differs(ids[i])), 0)
			}
		})
	})
}

// elsewhere is a directory on a file system of its own.
func elsewhere(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "place")
	assert.NilError(t, err)
	t.Cleanup(func() { clear(dir) })
	return dir
}

// edit changes a tree at random: few names, so that types clash.
func edit(rt *rapid.T, dir string) {
	names := []string{"a", "b", "c", "a/a", "a/b", "b/a", "b/b", "a/a/a", "a/a/b", "b/b/c", "a-b", ".agent"}
	for range rapid.IntRange(1, 8).Draw(rt, "edits") {
		name := rapid.SampledFrom(names).Draw(rt, "name")
		p := filepath.Join(dir, name)
		if os.MkdirAll(filepath.Dir(p), 0o755) != nil {
			continue // something else is there
		}
		_ = os.Chmod(filepath.Dir(p), 0o755)
		switch rapid.IntRange(0, 9).Draw(rt, "what") {
		case 0:
			clear(p)
		case 1:
			clear(p)
			_ = os.Symlink(rapid.SampledFrom([]string{"a", "/etc", "gone"}).Draw(rt, "target"), p)
		case 2:
			clear(p)
			_ = unix.Mkfifo(p, 0o600)
		case 3:
			clear(p)
			_ = os.MkdirAll(p, 0o755)
		case 4:
			from := filepath.Join(dir, rapid.SampledFrom(names).Draw(rt, "from"))
			if fi, err := os.Lstat(from); err == nil && fi.Mode().IsRegular() && from != p {
				clear(p)
				_ = os.Link(from, p)
			}
		case 5:
			if fi, err := os.Lstat(p); err == nil && fi.Mode()&os.ModeSymlink == 0 {
				_ = os.Chmod(p, rapid.SampledFrom([]os.FileMode{0o755, 0o555, 0o700, 0o644}).Draw(rt, "mode"))
			}
		case 6:
			_ = unix.Lsetxattr(p, "user.a", []byte(rapid.SampledFrom([]string{"1", "2"}).Draw(rt, "xattr")), 0)
		case 7:
			ts := []unix.Timespec{{Sec: rapid.Int64Range(1, 9).Draw(rt, "time"), Nsec: 5}, {Sec: rapid.Int64Range(1, 9).Draw(rt, "time"), Nsec: 5}}
			_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, ts, unix.AT_SYMLINK_NOFOLLOW)
		default:
			if fi, err := os.Lstat(p); err == nil && !fi.Mode().IsRegular() {
				clear(p)
			}
			_ = os.Chmod(p, 0o644)
			_ = os.WriteFile(p, []byte(rapid.SampledFrom([]string{"", "x", "y", strings.Repeat("z", 5000)}).Draw(rt, "bytes")), 0o644)
		}
	}
}

func clear(p string) {
	_ = exec.Command("chmod", "-R", "u+rwX", p).Run()
	_ = os.RemoveAll(p)
}

// RS06, RS07: what need not change keeps its inode; what is open, running or a
// shell's directory goes on.
func TestReplaceKeepsWhatStays(t *testing.T) {
	eachVolume(t, func(t *testing.T, dir string) {
		s := inOneVolume(t, dir)
		s.write(map[string]string{"src/sub/same": "s", "src/f": "one", "run": "", "gone/f": "x"})
		tool, err := os.ReadFile("/bin/sleep")
		assert.NilError(t, err)
		assert.NilError(t, os.WriteFile(s.path("run"), tool, 0o755))
		id := s.capture()
		shell := exec.Command("sh", "-c", "echo; read line; pwd -P; cat f; ls sub")
		shell.Dir = s.path("src")
		in, err := shell.StdinPipe()
		assert.NilError(t, err)
		var out strings.Builder
		shell.Stdout, shell.Stderr = &out, &out
		assert.NilError(t, shell.Start())

		s.write(map[string]string{"src/f": "two", "new/dir/f": "n"})
		assert.NilError(t, os.Remove(s.path("run")))
		assert.NilError(t, os.WriteFile(s.path("run"), append(tool, 0), 0o755))
		assert.NilError(t, os.RemoveAll(s.path("gone")))
		running := exec.Command(s.path("run"), "60")
		assert.NilError(t, running.Start())
		defer func() { _ = running.Process.Kill(); _ = running.Wait() }()
		editor, err := os.Open(s.path("src/f"))
		assert.NilError(t, err)
		defer editor.Close()
		kept := []string{"", "src", "src/sub", "src/sub/same"}
		inodes := map[string]uint64{}
		for _, p := range kept {
			inodes[p] = inode(t, s.path(p))
		}
		s.replace(id)
		for _, p := range kept {
			assert.Equal(t, inode(t, s.path(p)), inodes[p], p)
		}
		b := make([]byte, 8)
		n, _ := editor.Read(b)
		assert.Equal(t, string(b[:n]), "two") // what was open stays
		now, err := os.ReadFile(s.path("src/f"))
		assert.NilError(t, err)
		assert.Equal(t, string(now), "one")
		_, err = in.Write([]byte("\n"))
		assert.NilError(t, err)
		assert.NilError(t, shell.Wait(), out.String())
		real, err := filepath.EvalSymlinks(s.path("src"))
		assert.NilError(t, err)
		assert.Equal(t, out.String(), "\n"+real+"\nonesame\n")
	}, "ext4", "btrfs")
}

// RS03: every change of type, and what a symlink points to is never touched.
func TestReplaceEveryType(t *testing.T) {
	make := map[string]func(t *testing.T, p, outside string){
		"nothing": func(*testing.T, string, string) {},
		"file":    func(t *testing.T, p, _ string) { assert.NilError(t, os.WriteFile(p, []byte("f"), 0o640)) },
		"dir":     func(t *testing.T, p, _ string) { forkstest.Write(t, p, map[string]string{"a/b": "x", "c": "y"}) },
		"symlink": func(t *testing.T, p, outside string) { assert.NilError(t, os.Symlink(outside, p)) },
		"fifo":    func(t *testing.T, p, _ string) { assert.NilError(t, unix.Mkfifo(p, 0o620)) },
		"socket":  func(t *testing.T, p, _ string) { assert.NilError(t, unix.Mknod(p, unix.S_IFSOCK|0o700, 0)) },
		"ro dir": func(t *testing.T, p, _ string) {
			forkstest.Write(t, p, map[string]string{"f": "x"})
			_ = os.Chmod(p, 0o555)
		},
		"hardlink": func(t *testing.T, p, _ string) {
			assert.NilError(t, os.WriteFile(p, []byte("h"), 0o600))
			assert.NilError(t, os.Link(p, p+"2"))
		},
	}
	eachVolume(t, func(t *testing.T, dir string) {
		s := inOneVolume(t, dir)
		outside := filepath.Join(dir, "outside")
		forkstest.Write(t, outside, map[string]string{"keep": "k"})
		before := forkstest.Read(t, outside)
		ids, want := map[string]forks.ID{}, map[string]forkstest.Manifest{}
		for name, fn := range make {
			clear(s.path("p"))
			clear(s.path("p2"))
			fn(t, s.path("p"), outside)
			ids[name], want[name] = s.capture(), forkstest.Read(t, s.src.Dir)
		}
		for from := range make {
			for to := range make {
				s.replace(ids[from])
				s.replace(ids[to])
				forkstest.Equal(t, forkstest.Read(t, s.src.Dir), want[to])
			}
		}
		forkstest.Equal(t, forkstest.Read(t, outside), before)
	}, "ext4")
}

// RS04: what is immutable is named, before anything changes.
func TestReplaceRefusesImmutable(t *testing.T) {
	s := inOneVolume(t, forkstest.Volume(t, "ext4"))
	s.write(map[string]string{"a": "1", "d/i": "1", "z": "1"})
	id := s.capture()
	for _, c := range []struct{ flag, path string }{{"+i", "d/i"}, {"+a", "d/i"}, {"+i", "d"}} {
		t.Run(c.flag+" "+c.path, func(t *testing.T) {
			s.write(map[string]string{"a": "2", "d/i": "2", "z": "2"})
			out, err := exec.Command("chattr", c.flag, s.path(c.path)).CombinedOutput()
			assert.NilError(t, err, string(out))
			before := forkstest.Read(t, s.src.Dir)
			_, err = s.d.Replace(t.Context(), id, s.src)
			assert.ErrorContains(t, err, s.path(c.path))
			assert.ErrorIs(t, err, forks.ErrUntouched)
			forkstest.Equal(t, forkstest.Read(t, s.src.Dir), before)
			s.tidy()
			out, err = exec.Command("chattr", "-i", "-a", s.path(c.path)).CombinedOutput()
			assert.NilError(t, err, string(out))
			s.replace(id)
			assert.Equal(t, len(s.differs(id)), 0)
		})
	}
}

// RS05: mounts below the directory stay, and so does what is in them; the
// directory may be one itself.
func TestReplaceLeavesMountsAlone(t *testing.T) {
	top := forkstest.Volume(t, "ext4")
	s := inOneVolume(t, top)
	assert.NilError(t, unix.Mount(s.src.Dir, s.src.Dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(s.src.Dir, unix.MNT_DETACH) })
	s.write(map[string]string{"f": "1", "m/": "", "bound": "1"})
	id := s.capture()
	s.write(map[string]string{"f": "2", "new/m/": "", "bound": "2"})
	for _, m := range []string{"m", "new/m"} {
		assert.NilError(t, unix.Mount("t", s.path(m), "tmpfs", 0, ""))
		t.Cleanup(func() { _ = unix.Unmount(s.path(m), unix.MNT_DETACH) })
		s.write(map[string]string{m + "/data": m})
	}
	assert.NilError(t, unix.Mount(s.path("f"), s.path("bound"), "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(s.path("bound"), unix.MNT_DETACH) })

	c := s.replace(id)
	warned := strings.Join(c.Warnings, "\n")
	for _, m := range []string{"m", "new/m", "bound"} {
		assert.Assert(t, strings.Contains(warned, m+": is a mount point"), warned)
	}
	for path, want := range map[string]string{"f": "1", "m/data": "m", "new/m/data": "new/m", "bound": "2"} {
		got, err := os.ReadFile(s.path(path))
		assert.NilError(t, err)
		assert.Equal(t, string(got), want, path)
	}

	// Where something else must take its place, nothing is changed.
	assert.NilError(t, os.RemoveAll(filepath.Join(top, "other")))
	other := newScene(t, filepath.Join(top, "root"), filepath.Join(top, "other"))
	other.d, other.n = s.d, 50
	other.write(map[string]string{"f": "3", "new": "a file"})
	file := other.capture()
	before := forkstest.Read(t, s.src.Dir)
	_, err := s.d.Replace(t.Context(), file, s.src)
	assert.ErrorContains(t, err, "new")
	assert.ErrorIs(t, err, forks.ErrUntouched)
	forkstest.Equal(t, forkstest.Read(t, s.src.Dir), before)
}

func TestReplaceLeavesExcludedAlone(t *testing.T) {
	s := inOneVolume(t, forkstest.Volume(t, "ext4"))
	s.src.Exclude = []string{"node_modules", "/build"}
	s.src.Skip = []string{s.path("skipped")}
	s.write(map[string]string{"f": "1"})
	id := s.capture()
	s.write(map[string]string{"f": "2", "node_modules/x": "x", "build/y": "y", "pkg/node_modules/z": "z", "pkg/f": "f", "skipped/s": "s"})
	s.replace(id)
	for _, p := range []string{"node_modules/x", "build/y", "pkg/node_modules/z", "skipped/s"} {
		_, err := os.Stat(s.path(p))
		assert.NilError(t, err)
	}
	_, err := os.Stat(s.path("pkg/f"))
	assert.ErrorIs(t, err, os.ErrNotExist)
	// pkg was not in the snapshot, and holds what must stay.
	assert.DeepEqual(t, s.differs(id), []string{"added pkg"})

	// A snapshot that has such paths leaves those here alone, too.
	s.src.Exclude = nil
	full := s.capture()
	s.src.Exclude = []string{"node_modules", "/build"}
	assert.NilError(t, os.RemoveAll(s.path("pkg")))
	assert.NilError(t, os.RemoveAll(s.path("build")))
	s.write(map[string]string{"node_modules/x": "mine"})
	s.replace(full)
	got, err := os.ReadFile(s.path("node_modules/x"))
	assert.NilError(t, err)
	assert.Equal(t, string(got), "mine")
	_, err = os.Stat(s.path("build"))
	assert.ErrorIs(t, err, os.ErrNotExist)
	assert.Equal(t, len(s.differs(full)), 0)
}

// Space is taken before anything changes; if there is none, nothing does.
func TestReplaceWithoutSpace(t *testing.T) {
	for _, near := range []bool{true, false} {
		t.Run(fmt.Sprint("store near ", near), func(t *testing.T) {
			small := forkstest.SmallVolume(t, "ext4", "40m")
			big := forkstest.Volume(t, "ext4")
			store := filepath.Join(big, "root")
			s := newScene(t, store, filepath.Join(big, "dir"))
			s.write(map[string]string{"d/f": "old", "d/gone": "x"})
			for i := range 10 {
				s.write(map[string]string{fmt.Sprintf("d/big%d", i): strings.Repeat(fmt.Sprint(i), 8<<20)})
			}
			id := s.capture()
			s.src.Dir = filepath.Join(small, "dir")
			if near {
				s.src.Index = filepath.Join(small, "known", "index")
				assert.NilError(t, os.Mkdir(filepath.Dir(s.src.Index), 0o700))
			}
			s.write(map[string]string{"d/f": "new", "d/mine": "m", "ro/x": "x"})
			assert.NilError(t, os.Chmod(s.path("ro"), 0o555))
			before := forkstest.Read(t, s.src.Dir)
			_, err := s.d.Replace(t.Context(), id, s.src)
			assert.ErrorIs(t, err, unix.ENOSPC)
			assert.ErrorIs(t, err, forks.ErrUntouched)
			forkstest.Equal(t, forkstest.Read(t, s.src.Dir), before)
			s.tidy()
		})
	}
}

// What someone writes while Replace is at work is kept, and named.
func TestReplaceMeetsAnEditor(t *testing.T) {
	for _, where := range []string{"stage", "beside"} {
		s := inOneVolume(t, forkstest.Volume(t, "ext4"))
		if where == "beside" {
			s = newScene(t, t.TempDir(), forkstest.Volume(t, "ext4")+"/dir")
		}
		s.write(map[string]string{"f": "1", "d/x": "1", "t": "1"})
		id := s.capture()
		for name, c := range map[string]struct{ step, script, path string }{
			"replaced":              {"place.replace.written", "printf precious >f", "f"},
			"saved by rename":       {"place.replace.written", "printf precious >.f; mv .f f", "f"},
			"same size and mtime":   {"place.replace.written", "touch -r f /tmp/$$; printf P >f; touch -r /tmp/$$ f; rm /tmp/$$", "f"},
			"at the last moment":    {"place.replace.looked", "printf precious >f", "f"},
			"removed at last":       {"place.replace.looked", "printf precious >gone", "gone"},
			"to come":               {"place.replace.written", "mkdir -p d; printf precious >d/x", "d/x"},
			"in one that goes":      {"place.replace.written", "printf precious >n/new", "n/new"},
			"in one that gives way": {"place.replace.cleared", "mkdir -p t; printf precious >t/new", "t/new"},
			"opened before":         {"place.replace.exchanged", "printf precious >&3", "f"},
			"removed when open":     {"place.replace.put", "printf precious >&4", "n/f"},
		} {
			t.Run(where+"/"+name, func(t *testing.T) {
				s.replace(id)
				assert.NilError(t, os.RemoveAll(s.path("t")))
				s.write(map[string]string{"f": "2", "gone": "2", "n/f": "2", "t/f": "2"})
				assert.NilError(t, os.Remove(s.path("d/x")))
				s.src.Held = s.capture()
				defer func() { s.src.Held = "" }()
				open := []*os.File{openFile(t, s.path("f")), openFile(t, s.path("n/f"))}
				done := false
				forkstest.OnStep(func(step string) {
					if step == c.step && !done && (c.step != "place.replace.put" || !exists(s.path("n/f"))) {
						done = true
						cmd := exec.Command("sh", "-e", "-c", c.script)
						cmd.Dir, cmd.ExtraFiles = s.src.Dir, open
						out, err := cmd.CombinedOutput()
						assert.NilError(t, err, string(out))
					}
				})
				got, err := s.d.Replace(t.Context(), id, s.src)
				forkstest.OnStep(nil)
				assert.NilError(t, err)
				assert.Assert(t, done)
				s.tidy()
				data, err := os.ReadFile(s.path(c.path))
				assert.NilError(t, err)
				assert.Assert(t, len(data) > 0 && (data[0] == 'p' || data[0] == 'P'), "%q", data)
				first, _, _ := strings.Cut(c.path, "/")
				assert.Assert(t, strings.Contains("\n"+strings.Join(got.Warnings, "\n"), "\n"+first), got.Warnings)
				for _, line := range s.differs(id) { // and nothing else
					assert.Assert(t, strings.Contains(line, " "+first) || line == "modified .", line)
				}
			})
		}
	}
}

func openFile(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, f.Close()) })
	return f
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// What changed since it was stored is no more lost than what changes meanwhile.
func TestReplaceKeepsWhatIsNotHeld(t *testing.T) {
	s := inOneVolume(t, forkstest.Volume(t, "ext4"))
	s.write(map[string]string{"f": "1", "d/x": "1", "t": "1", "back": "1", "del": "1", "mode/x": "1"})
	a := s.capture()
	run := func(script string) {
		t.Helper()
		cmd := exec.Command("sh", "-e", "-c", script)
		cmd.Dir = s.src.Dir
		out, err := cmd.CombinedOutput()
		assert.NilError(t, err, string(out))
	}
	run("for f in f d/x back del mode/x; do printf 22 >$f; done; rm t; mkdir t; printf 2 >t/f; printf 2 >gone; chmod 700 mode")
	s.src.Held = s.capture()
	run("printf new >f; mkdir d/sub; printf new >d/sub/n; printf new >n; printf new >t/n; rm del; chmod 750 mode")
	c, err := s.d.Replace(t.Context(), a, s.src)
	assert.NilError(t, err)
	s.tidy()
	for path, want := range map[string]string{"f": "new", "d/x": "1", "d/sub/n": "new", "n": "new", "t/n": "new", "t/f": "2", "back": "1", "mode/x": "1"} {
		got, err := os.ReadFile(s.path(path))
		assert.NilError(t, err)
		assert.Equal(t, string(got), want, path)
	}
	assert.Assert(t, !exists(s.path("gone")) && !exists(s.path("del")))
	st, err := os.Stat(s.path("mode"))
	assert.NilError(t, err)
	assert.Equal(t, st.Mode().Perm(), os.FileMode(0o750))
	const kept = ": was changed meanwhile, and is kept as it is: no snapshot holds it yet"
	assert.DeepEqual(t, c.Warnings, []string{"d/sub" + kept, "del" + kept, "f" + kept, "mode" + kept, "n" + kept, "t" + kept})
	var paths []string
	for _, ch := range c.List {
		paths = append(paths, ch.Path)
	}
	assert.DeepEqual(t, paths, []string{".", "back", "d", "d/x", "gone", "mode/x"})
}

// An ordinary user cannot give files away: the owner and the group that he
// cannot give stay recorded, and are no change.
func TestReplaceKeepsOwnersRecorded(t *testing.T) {
	s := inOneVolume(t, func() string {
		if forkstest.IsUser() {
			return os.Getenv("HOME")
		}
		return forkstest.Volume(t, "ext4")
	}())
	top := filepath.Dir(s.src.Dir)
	ids := top + "/ids"
	if !forkstest.IsUser() {
		if os.Geteuid() != 0 {
			t.Skip("needs root, to give files to others")
		}
		s.write(map[string]string{"shared": "1", "foreign": "1", "mine": "1"})
		assert.NilError(t, os.WriteFile(ids, []byte(s.capture()), 0o644))
		s.write(map[string]string{"shared": "22", "foreign": "22", "mine": "22"})
		out, err := exec.Command("chown", "-R", "61234:61234", top).CombinedOutput()
		assert.NilError(t, err, string(out))
		assert.NilError(t, os.Chown(s.path("shared"), 61234, 0))
		assert.NilError(t, os.Chown(s.path("foreign"), 0, 0))
		forkstest.AsUser(t, top)
		return
	}
	old, err := os.ReadFile(ids)
	assert.NilError(t, err)
	s.n = 7
	now := s.capture()
	s.src.Held = now
	for range 2 {
		s.src.Held = now
		c := s.replace(forks.ID(old))
		assert.Equal(t, len(s.differs(forks.ID(old))), 0, s.differs(forks.ID(old)))
		assert.Assert(t, len(c.Warnings) == 1 && strings.Contains(c.Warnings[0], "owner"), c.Warnings)
		s.src.Held = forks.ID(old)
		c = s.replace(now)
		assert.Equal(t, len(s.differs(now)), 0, s.differs(now))
		assert.Assert(t, len(c.Warnings) == 1 && strings.Contains(c.Warnings[0], "owner"), c.Warnings)
	}
	assert.NilError(t, os.WriteFile(s.path("shared"), []byte("333"), 0o644))
	assert.DeepEqual(t, s.differs(now), []string{"modified shared"})
}

// Without its directory, and before its first change, a Replace has touched
// nothing.
func TestReplaceOfNothing(t *testing.T) {
	s := inOneVolume(t, t.TempDir())
	s.write(map[string]string{"f": "1"})
	id := s.capture()
	assert.NilError(t, os.Rename(s.src.Dir, s.src.Dir+"-moved"))
	_, err := s.d.Replace(t.Context(), id, s.src)
	assert.ErrorIs(t, err, forks.ErrUntouched)
	assert.ErrorIs(t, err, os.ErrNotExist)
}

// The index spares reading: where a store has lost its files, a comparison
// that has to read them fails.
func TestIndexSparesReading(t *testing.T) {
	s := inOneVolume(t, forkstest.Volume(t, "ext4"))
	s.write(map[string]string{"same": "s", "d/f": "1"})
	one := s.capture()
	s.write(map[string]string{"d/f": "22"})
	c, err := s.d.Capture(t.Context(), "bbbb", one, s.src)
	assert.NilError(t, err)
	assert.Equal(t, len(c.List), 1)
	s.replace(one)
	time.Sleep(30 * time.Millisecond)       // what was just written is read again once
	assert.Equal(t, len(s.differs(one)), 0) // reads what was replaced
	stored := filepath.Join(filepath.Dir(filepath.Dir(s.src.Index)), "store", "nodes", string(one), "tree")
	assert.NilError(t, os.Rename(stored, stored+"-hidden"))
	assert.Equal(t, len(s.differs(one)), 0)
	// Of another snapshot only what differs is read, in either direction.
	assert.DeepEqual(t, s.differs("bbbb"), []string{"modified d/f"})
	assert.NilError(t, os.Rename(stored+"-hidden", stored))
	assert.Equal(t, len(s.differs(one)), 0)
	assert.NilError(t, os.Rename(stored, stored+"-hidden"))
	index, err := os.ReadFile(s.src.Index)
	assert.NilError(t, err)
	// Who only looks leaves it as it is.
	s.src.IndexReadOnly = true
	s.write(map[string]string{"more": "m"})
	assert.DeepEqual(t, s.differs(one), []string{"modified .", "added more"})
	again, err := os.ReadFile(s.src.Index)
	assert.NilError(t, err)
	assert.Equal(t, string(again), string(index))
	s.src.IndexReadOnly = false

	// Damaged or gone, it costs a reading and no more.
	for _, damage := range []func() error{
		func() error { return os.WriteFile(s.src.Index, []byte("rubbish"), 0o600) },
		func() error { return os.Remove(s.src.Index) },
	} {
		assert.NilError(t, damage())
		_, err = s.d.Compare(t.Context(), one, s.src)
		assert.ErrorIs(t, err, forks.ErrDamaged)
		assert.NilError(t, os.Rename(stored+"-hidden", stored))
		assert.DeepEqual(t, s.differs(one), []string{"modified .", "added more"})
		assert.NilError(t, os.Rename(stored, stored+"-hidden"))
		time.Sleep(30 * time.Millisecond)
	}
}

// An edit right after a comparison is seen, whatever the clock's grain.
func TestIndexSeesImmediateEdits(t *testing.T) {
	for _, kind := range forkstest.Volumes {
		t.Run(kind, func(t *testing.T) {
			s := inOneVolume(t, forkstest.Volume(t, kind))
			s.write(map[string]string{"f": "0"})
			id := s.capture()
			for i := range 30 {
				s.replace(id)
				assert.NilError(t, os.WriteFile(s.path("f"), []byte{byte('a' + i%26)}, 0o644))
				ts := []unix.Timespec{{Sec: 1}, {Sec: 1}}
				assert.NilError(t, unix.UtimesNanoAt(unix.AT_FDCWD, s.path("f"), ts, 0))
				assert.Equal(t, len(s.differs(id)), 1)
			}
		})
	}
}

// So it is on a file system that keeps whole seconds only.
func TestIndexSeesEditsWithinASecond(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	dir := t.TempDir()
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "at")
	script := `mkdir "$2" && truncate -s 64M "$1" && mkfs.ext4 -q -F -I 128 "$1" && mount -o loop "$1" "$2"`
	if out, err := exec.Command("sh", "-c", script, "sh", image, at).CombinedOutput(); err != nil {
		t.Skipf("no ext4 with small inodes: %v %s", err, out)
	}
	t.Cleanup(func() { assert.NilError(t, unix.Unmount(at, unix.MNT_DETACH)) })
	s := newScene(t, filepath.Join(dir, "root"), filepath.Join(at, "dir"))
	s.write(map[string]string{"f": "0"})
	id := s.capture()
	ts := []unix.Timespec{{Sec: 1}, {Sec: 1}}
	for i := range 5 {
		s.replace(id)
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, len(s.differs(id)), 0)
		assert.NilError(t, os.WriteFile(s.path("f"), []byte{byte('a' + i)}, 0o644))
		assert.NilError(t, unix.UtimesNanoAt(unix.AT_FDCWD, s.path("f"), ts, 0))
		id = s.capture()
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, len(s.differs(id)), 0)
		assert.NilError(t, os.WriteFile(s.path("f"), []byte{byte('A' + i)}, 0o644))
		assert.NilError(t, unix.UtimesNanoAt(unix.AT_FDCWD, s.path("f"), ts, 0))
		assert.DeepEqual(t, s.differs(id), []string{"modified f"})
	}
}

// crashAt, in a child, is the number of the step at which it is to die.
const crashAt = "AGENTENV_TEST_PLACE_CRASH"

// TestCrashChild is what the children of [TestReplaceCrashes] run.
func TestCrashChild(t *testing.T) {
	var at int
	var to string
	if _, err := fmt.Sscan(os.Getenv(crashAt), &at, &to); err != nil {
		t.Skip("run by another test")
	}
	s := inOneVolume(t, os.Getenv(crashAt+"_DIR"))
	if os.Getenv(crashAt+"_NEAR") == "" {
		s.src.Index = filepath.Join(os.Getenv(crashAt+"_KNOWN"), "index")
	}
	n := 0
	forkstest.OnStep(func(string) {
		if n++; n == at {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
	_, err := s.d.Replace(t.Context(), forks.ID(to), s.src)
	assert.NilError(t, err)
}

// A Replace that was killed at any step is completed, or undone, by the next.
func TestReplaceCrashes(t *testing.T) {
	for _, near := range []string{"1", ""} {
		t.Run("stage near "+near, func(t *testing.T) {
			top, known := forkstest.Volume(t, "ext4"), elsewhere(t)
			s := inOneVolume(t, top)
			if near == "" {
				s.src.Index = filepath.Join(known, "index")
			}
			s.write(map[string]string{"f": "1", "d/x": "1", "d/e/y": "1", "t/dir/f": "1", "l": "link"})
			assert.NilError(t, os.Link(s.path("l"), s.path("d/l")))
			one, m1 := s.capture(), forkstest.Read(t, s.src.Dir)
			s.write(map[string]string{"f": "2", "d/e/y": "2", "new/a/b": "2", "new/c": "2"})
			assert.NilError(t, os.RemoveAll(s.path("t")))
			assert.NilError(t, os.WriteFile(s.path("t"), []byte("file"), 0o600))
			assert.NilError(t, os.Remove(s.path("d/x")))
			two, m2 := s.capture(), forkstest.Read(t, s.src.Dir)
			ids, want := []forks.ID{one, two}, []forkstest.Manifest{m1, m2}
			steps := 0
			for at := 1; ; at++ {
				to := at % 2
				s.replace(ids[1-to])
				cmd := exec.Command("/proc/self/exe", "-test.run=^TestCrashChild$")
				cmd.Env = append(os.Environ(), crashAt+"="+fmt.Sprint(at, " ", ids[to]), crashAt+"_DIR="+top, crashAt+"_NEAR="+near, crashAt+"_KNOWN="+known)
				out, err := cmd.CombinedOutput()
				if err == nil {
					break
				}
				ee, ok := err.(*exec.ExitError)
				assert.Assert(t, ok && ee.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL, "%v\n%s", err, out)
				steps = at
				// What a mix is captured as has none of the temporary names.
				mix := s.capture()
				v, err := s.d.View(t.Context(), mix)
				assert.NilError(t, err)
				assert.NilError(t, v.Walk(func(e forks.Entry) error {
					assert.Assert(t, !strings.Contains(e.Path, ".agentenv"), "at step %d: %s", at, e.Path)
					return nil
				}))
				back := (at / 2) % 2
				s.replace(ids[back])
				forkstest.Equal(t, forkstest.Read(t, s.src.Dir), want[back])
			}
			assert.Assert(t, steps > 12, steps)
		})
	}
}
