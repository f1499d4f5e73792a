package sandbox

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// fakeCgroups makes directories with files like those of cgroups.
func fakeCgroups(t *testing.T, files map[string]string) string {
	t.Helper()
	top := t.TempDir()
	for name, text := range files {
		name = filepath.Join(top, name)
		assert.NilError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		assert.NilError(t, os.WriteFile(name, []byte(text), 0o644))
	}
	return top
}

// TestSeatKeepsLimits: commands are not put where a limit of agentenv's own cgroup
// does not hold.
func TestSeatKeepsLimits(t *testing.T) {
	for name, c := range map[string]struct {
		own      map[string]string
		pids     int
		escapes  bool
		controls []string
	}{
		"none":       {own: map[string]string{"memory.max": "max", "cpu.max": "max 100000", "pids.max": "max", "cpuset.cpus": "\n"}, controls: []string{"memory"}},
		"memory":     {own: map[string]string{"memory.max": "104857600"}, escapes: true},
		"high":       {own: map[string]string{"memory.high": "104857600"}, escapes: true},
		"cpu":        {own: map[string]string{"cpu.max": "5000 100000"}, escapes: true},
		"cpuset":     {own: map[string]string{"cpuset.cpus": "0-1"}, escapes: true},
		"processes":  {own: map[string]string{"pids.max": "50"}, pids: 50, controls: []string{"memory", "pids"}},
		"no process": {own: map[string]string{"pids.max": "0"}, pids: 1, controls: []string{"memory", "pids"}},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{
				"cgroup.controllers": "cpu memory pids", "cgroup.type": "domain", "cgroup.procs": "",
				"x.scope/cgroup.controllers": "memory pids", "x.scope/cgroup.type": "domain", "x.scope/cgroup.procs": "1",
			}
			for f, text := range c.own {
				files["x.scope/"+f] = text
			}
			top := fakeCgroups(t, files)
			s, err := hierarchy{v2: true, top: top, own: filepath.Join(top, "x.scope")}.seat([]string{"memory"})
			if c.escapes {
				assert.ErrorIs(t, err, errEscape)
				return
			}
			assert.NilError(t, err)
			assert.Equal(t, s.dir, filepath.Join(top, cgroupParent))
			assert.Equal(t, s.pids, c.pids)
			assert.DeepEqual(t, s.controllers, c.controls)
		})
	}
}

// TestSeatLimitsProcesses: where a limit of processes would not hold, the command has
// it.
func TestSeatLimitsProcesses(t *testing.T) {
	s, _ := ownSeat(t, "pids")
	s.pids = 7
	for asked, want := range map[int]string{0: "7", 5: "5", 9: "7"} {
		g, err := newCgroup([]seat{s}, Limits{PIDs: asked})
		assert.NilError(t, err)
		assert.Equal(t, strings.TrimSpace(string(g.dirs[0].read("pids.max"))), want)
		g.remove()
	}
}

// ownSeat is a seat with the controller below a cgroup of the test's, which it gives
// too.
func ownSeat(t *testing.T, controller string) (seat, cgroupDir) {
	t.Helper()
	for _, s := range seatsFor([]string{controller}).seats {
		if !slices.Contains(s.controllers, controller) {
			continue
		}
		around, err := s.makeDir()
		assert.NilError(t, err)
		t.Cleanup(func() { removeCgroup(around.Name()); around.Close() })
		s.dir = around.Name()
		if s.v2 {
			s.dir = filepath.Join(s.dir, cgroupParent)
		}
		return s, around
	}
	t.Skip("no cgroup limits here")
	panic("not reached")
}

// TestOutOfMemoryAround: what the kernel killed for a limit around the command's is
// told from its own.
func TestOutOfMemoryAround(t *testing.T) {
	s, around := ownSeat(t, "memory")
	assert.NilError(t, around.limitMemory(32<<20))
	g, err := newCgroup([]seat{s}, Limits{Memory: 1 << 30})
	assert.NilError(t, err)
	defer g.remove()
	assert.Equal(t, g.reached(), "")
	cmd := exec.Command("sh", "-c", `echo $$ >"$1" && exec tail /dev/zero`, "sh", filepath.Join(g.dirs[0].Name(), "cgroup.procs"))
	out, err := cmd.CombinedOutput()
	assert.ErrorContains(t, err, "killed", string(out))
	assert.Equal(t, g.reached(), "out of memory (of the machine, or of a limit around agentenv)")
}

// TestHandedDownAnew: a controller that systemd has taken away since the seat was
// found is handed on again.
func TestHandedDownAnew(t *testing.T) {
	for _, h := range hierarchies() {
		if !h.v2 || h.own == "" || unix.Access(h.top, unix.W_OK) != nil || !isRootCgroup(h.top) {
			continue
		}
		unused := slices.DeleteFunc(words(h.top, "cgroup.controllers"), func(c string) bool {
			return slices.Contains(words(h.top, subtreeControl), c) || c == "cpuset"
		})
		if len(unused) == 0 {
			break
		}
		c := unused[0]
		above := filepath.Join(h.top, "test-"+strconv.Itoa(os.Getpid()))
		assert.NilError(t, os.Mkdir(above, 0o755))
		defer func() {
			assert.NilError(t, os.Remove(above))
			assert.NilError(t, os.WriteFile(filepath.Join(h.top, subtreeControl), []byte("-"+c), 0))
		}()
		s := seat{dir: filepath.Join(above, cgroupParent), v2: true, controllers: []string{c}}
		for range 2 {
			d, err := s.makeDir()
			assert.NilError(t, err)
			assert.DeepEqual(t, words(s.dir, "cgroup.controllers"), []string{c})
			removeCgroup(d.Name())
			d.Close()
			for _, dir := range []string{above, h.top} {
				assert.NilError(t, os.WriteFile(filepath.Join(dir, subtreeControl), []byte("-"+c), 0))
			}
		}
		return
	}
	t.Skip("no controller to take away from the root of a v2 hierarchy")
}

// TestUserScope: a scope of the user's own systemd is the user's to divide.
func TestUserScope(t *testing.T) {
	top := t.TempDir()
	for dir, want := range map[string]bool{
		"user.slice/user@7.service/app.slice/a.scope":   true,
		"user.slice/user@7.service/app.slice/a.service": false,
		"user.slice/user@7.service/init.scope":          false,
		"user.slice/session-1.scope":                    false,
	} {
		dir = filepath.Join(top, dir)
		assert.NilError(t, os.MkdirAll(dir, 0o755))
		assert.Equal(t, hierarchy{v2: true, top: top, own: dir}.delegated(), want, dir)
		if os.Geteuid() == 0 {
			assert.NilError(t, os.Chown(dir, 7, 7))
			assert.Assert(t, !hierarchy{v2: true, top: top, own: dir}.delegated(), "somebody else's")
		}
	}
}

// TestStopAll: who stands still when the time is over has stopped.
func TestStopAll(t *testing.T) {
	calls := 0
	quiet := func() []string { calls++; return nil }
	assert.NilError(t, stopAll(quiet, 0))
	assert.Equal(t, calls, looks)
	assert.ErrorContains(t, stopAll(func() []string { return []string{"pid 7 (state R)"} }, 0), "not all processes could be stopped: pid 7 (state R)")
}

// TestHomeVanishes: what goes while the home is laid out is left out.
func TestHomeVanishes(t *testing.T) {
	if !mayMount() {
		t.Skip("needs to mount")
	}
	home, to, scratch := t.TempDir(), t.TempDir(), t.TempDir()
	for _, d := range []string{"dir", "way/mount", "mount"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(home, d), 0o755))
	}
	assert.NilError(t, os.WriteFile(filepath.Join(home, "file"), nil, 0o644))
	assert.NilError(t, os.Symlink("file", filepath.Join(home, "link")))
	entries, err := os.ReadDir(home)
	assert.NilError(t, err)
	assert.Equal(t, len(entries), 5)
	for _, e := range entries {
		assert.NilError(t, os.RemoveAll(filepath.Join(home, e.Name())))
	}
	w := &world{spec: &spec{View: View{HomeDir: home, Scratch: scratch}}, uppers: -1, notice: func(string) {},
		homeMounts: []string{filepath.Join(home, "way/mount"), filepath.Join(home, "mount")}}
	open := func(dir string) int {
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		assert.NilError(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	w.scratch = open(scratch)
	assert.NilError(t, w.fill(home, entries, open(to)))
}

// TestWithRlimits: the command is started with the very limit of open files, hard and
// soft.
func TestWithRlimits(t *testing.T) {
	const asked = "SANDBOX_NOFILE"
	if os.Getenv(asked) == "" {
		for _, n := range []string{"least", "100", "1000"} {
			cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$") // a hard limit may be lost
			cmd.Env = append(os.Environ(), asked+"="+n)
			out, err := cmd.CombinedOutput()
			assert.NilError(t, err, "%s: %s", n, out)
		}
		return
	}
	n, err := strconv.Atoi(os.Getenv(asked))
	if err != nil {
		n = int(filesNeeded())
	}
	var during unix.Rlimit
	_, err = withRlimits(Limits{NoFile: n}, func() (int, error) {
		return os.Getpid(), unix.Getrlimit(unix.RLIMIT_NOFILE, &during)
	})
	assert.NilError(t, err)
	assert.Equal(t, during, unix.Rlimit{Cur: uint64(n), Max: uint64(n)})
}
