package sandbox

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func TestParseHierarchies(t *testing.T) {
	const escaped = `25 20 0:22 / /sys/fs/cg\040x rw - cgroup2 cgroup2 rw`
	for name, c := range map[string]struct {
		mounts, membership string
		want               []hierarchy
	}{
		"v2":          {escaped, "0::/user.slice/a", []hierarchy{{v2: true, top: "/sys/fs/cg x", own: "/sys/fs/cg x/user.slice/a"}}},
		"namespace":   {`25 20 0:22 / /c ro - cgroup2 cgroup rw`, "0::/", []hierarchy{{v2: true, top: "/c", own: "/c"}}},
		"outside":     {`25 20 0:22 / /c ro - cgroup2 cgroup rw`, "0::/../x", []hierarchy{{v2: true, top: "/c"}}},
		"other part":  {`25 20 0:22 /docker/a /c ro - cgroup2 cgroup rw`, "0::/docker/ab", []hierarchy{{v2: true, top: "/c"}}},
		"part":        {`25 20 0:22 /docker/a /c ro - cgroup2 cgroup rw`, "0::/docker/a/b", []hierarchy{{v2: true, top: "/c", own: "/c/b"}}},
		"not mounted": {`25 20 0:22 / /sys rw - sysfs sysfs rw`, "0::/", nil},
		"v1": {"31 25 0:5 / /c/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n32 25 0:6 / /c/freezer rw - cgroup cgroup rw,freezer\n" +
			"33 25 0:7 /x /c/m rw - cgroup cgroup rw,memory\n",
			"5:cpu,cpuacct:/a:b\n4:memory:/x/y\n0::/\n",
			[]hierarchy{{controllers: []string{"cpu"}, top: "/c/cpu,cpuacct", own: "/c/cpu,cpuacct/a:b"}, {controllers: []string{"memory"}, top: "/c/m", own: "/c/m/y"}}},
		"second mount is better": {"25 20 0:22 /other /c rw - cgroup2 cgroup rw\n26 20 0:22 / /d rw - cgroup2 cgroup rw", "0::/a",
			[]hierarchy{{v2: true, top: "/d", own: "/d/a"}}},
	} {
		t.Run(name, func(t *testing.T) {
			got := parseHierarchies(c.mounts, c.membership)
			assert.Assert(t, slices.EqualFunc(got, c.want, func(a, b hierarchy) bool {
				return a.v2 == b.v2 && a.top == b.top && a.own == b.own && slices.Equal(a.controllers, b.controllers)
			}), "%+v", got)
		})
	}
}

func TestSizeText(t *testing.T) {
	for n, want := range map[int64]string{
		2 << 30: "2GiB", 1 << 10: "1KiB", 512 << 20: "512MiB", 1536 << 20: "1536MiB", 1e9: "1GB", 500e6: "500MB", 1234567: "1234567B", 1500: "1500B",
		1 << 40: "1TiB", 1: "1B", 64000: "64kB",
	} {
		assert.Equal(t, sizeText(n), want)
	}
}

// TestCgroupsSwept: what nobody uses goes, with the processes in it; what is
// locked stays.
func TestCgroupsSwept(t *testing.T) {
	for _, h := range hierarchies() {
		s, err := h.seat(nil)
		if err != nil {
			t.Logf("%s: %v", h.top, err)
			continue
		}
		t.Run(filepath.Base(h.top), func(t *testing.T) {
			used, err := newCgroup([]seat{s}, Limits{})
			assert.NilError(t, err)
			defer used.remove()
			left := filepath.Join(s.dir, cgroupPrefix+"test")
			assert.NilError(t, os.MkdirAll(filepath.Join(left, cgroupPrefix+"inner"), 0o755)) // of an agentenv inside
			victim, err := os.StartProcess("/bin/sleep", []string{"sleep", "100"}, &os.ProcAttr{})
			assert.NilError(t, err)
			assert.NilError(t, os.WriteFile(filepath.Join(left, "cgroup.procs"), []byte(strconv.Itoa(victim.Pid)), 0))
			h.sweep()
			state, err := victim.Wait()
			assert.NilError(t, err)
			assert.Assert(t, !state.Exited(), "it was not killed")
			h.sweep()
			_, err = os.Stat(left)
			assert.ErrorIs(t, err, os.ErrNotExist)
			_, err = os.Stat(used.dirs[0].Name())
			assert.NilError(t, err)
		})
	}
}

// TestDiskWalk: each block counts once, no link is followed, no mount entered.
func TestDiskWalk(t *testing.T) {
	dir := t.TempDir()
	outside := t.TempDir()
	all := func() int64 {
		n, whole := walkBlocks(dir, func() bool { return false })
		assert.Assert(t, whole)
		return n
	}
	size := func(path string) int64 {
		var st unix.Stat_t
		assert.NilError(t, unix.Lstat(path, &st))
		return st.Blocks * 512
	}
	write := func(path string) string {
		assert.NilError(t, os.WriteFile(path, make([]byte, 1<<20), 0o600))
		return path
	}
	empty := all()
	deep := filepath.Join(dir, "a", "b")
	assert.NilError(t, os.MkdirAll(deep, 0o700))
	file := write(filepath.Join(deep, "file"))
	assert.NilError(t, os.Link(file, filepath.Join(dir, "link")))
	write(filepath.Join(outside, "file"))
	assert.NilError(t, os.Symlink(outside, filepath.Join(dir, "out")))
	assert.NilError(t, os.Truncate(write(filepath.Join(dir, "hole")), 0))
	assert.NilError(t, os.Truncate(filepath.Join(dir, "hole"), 1<<30))
	assert.Equal(t, all()-empty, size(file)+size(deep)+size(filepath.Dir(deep)))

	n, whole := walkBlocks(dir, func() bool { return true })
	assert.Assert(t, !whole && n == 0)
	if os.Geteuid() != 0 {
		return
	}
	before := all()
	assert.NilError(t, unix.Mount("tmpfs", deep, "tmpfs", 0, ""))
	defer unix.Unmount(deep, unix.MNT_DETACH)
	write(filepath.Join(deep, "file"))
	assert.Assert(t, all() <= before)
}
