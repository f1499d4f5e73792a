package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/forks/all"
)

// TestScriptsOfEachBackend runs the scripts about trees with the backends that
// TestScripts does not choose.
func TestScriptsOfEachBackend(t *testing.T) {
	chosen := ""
	for _, b := range all.Backends() {
		t.Run(b.Name, func(t *testing.T) {
			p := b.Probe(context.Background(), t.TempDir())
			if !p.OK {
				t.Skip(p.Detail)
			}
			if chosen == "" {
				chosen = b.Name
				t.Skip("TestScripts runs them")
			}
			testscript.Run(t, testscript.Params{
				Files:               []string{"testdata/script/fork.txt", "testdata/script/worktree.txt"},
				RequireExplicitExec: true,
				Setup: func(e *testscript.Env) error {
					home := filepath.Join(e.WorkDir, "home")
					e.Setenv("HOME", home)
					e.Setenv("XDG_DATA_HOME", filepath.Join(e.WorkDir, "data"))
					e.Setenv("AGENTENV_BACKEND", b.Name)
					e.Defer(func() { unmountBelow(e.WorkDir) })
					return os.MkdirAll(home, 0o700)
				},
				Cmds: map[string]func(*testscript.TestScript, bool, []string){"exits": exits},
			})
		})
	}
}

// background starts a command that is to run beside others.
func (u *owner) background(t *testing.T, args ...string) (c *exec.Cmd, errs *bytes.Buffer) {
	t.Helper()
	c = u.command(u.src, "agentenv", append([]string{"--root", u.root}, args...)...)
	errs = &bytes.Buffer{}
	c.Stderr = errs
	assert.NilError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() }) // where the test failed before
	return c, errs
}

// until waits until a condition holds, at most 10 s.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// freeForks lists the forks of exec --fork.
func (u *owner) freeForks(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(u.root, "forks", "exec.*"))
	assert.NilError(t, err)
	return found
}

// marked lists the processes that sleep for as many seconds as nobody else.
func marked(t *testing.T, seconds string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	assert.NilError(t, err)
	var found []string
	for _, f := range files {
		if line, err := os.ReadFile(f); err == nil && bytes.Equal(line, []byte("sleep\x00"+seconds+"\x00")) {
			found = append(found, filepath.Base(filepath.Dir(f)))
		}
	}
	return found
}

// TestForkOutlivesOthers: a fork in which a command runs is left alone by all
// that others do meanwhile; when its agentenv is killed, no process stays and
// the next command that writes removes it.
func TestForkOutlivesOthers(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		first := u.init(t, "one")
		release := filepath.Join(u.src, "release")
		long := fmt.Sprint(40000 + os.Getpid())
		alive, errs := u.background(t, "exec", "--fork", "--keep", "--mount", u.src+":/mnt", "--", "sh", "-ec",
			stateScript("two")+"; while [ ! -e /mnt/release ]; do sleep 0.02; done; "+readScript+" >seen; cp seen /tmp/seen")
		dead, _ := u.background(t, "exec", "--fork", "--", "sh", "-c", "trap '' TERM; sleep "+long+" & sleep "+long)
		until(t, "both forks", func() bool { return len(u.freeForks(t)) == 2 && len(marked(t, long)) == 2 })

		assert.NilError(t, dead.Process.Kill())
		until(t, "the death of all that was killed", func() bool { return len(marked(t, long)) == 0 })
		until(t, "the removal of the dead one's fork", func() bool {
			u.agentenv(t, "commit", "--allow-empty")
			return len(u.freeForks(t)) == 1
		})
		u.agentenv(t, "exec", "--", "sh", "-c", stateScript("three"))
		u.agentenv(t, "checkout", string(first))
		u.agentenv(t, "tournament", "--plain", "--test", "true", "--", stateScript("four"))
		u.agentenv(t, "umount")
		assert.Equal(t, u.tree(t), whole("four"))

		assert.NilError(t, os.WriteFile(release, nil, 0o644))
		assert.NilError(t, alive.Wait(), errs.String())
		kept := u.log(t)[0]
		assert.Equal(t, kept.Kind, env.KindExec)
		assert.Equal(t, *kept.Parent, first)
		assert.Equal(t, u.agentenv(t, "show", string(kept.ID)+":seen"), whole("two"))
		assert.Equal(t, len(u.freeForks(t)), 0)
		u.agentenv(t, "commit")
		u.cleared(t)
	})
}

// cleared checks that no fork but the work tree is left, and no scratch
// directory.
func (u *owner) cleared(t *testing.T) {
	t.Helper()
	emptyDirs(t, filepath.Join(u.root, "scratch"))
	left, err := os.ReadDir(filepath.Join(u.root, "forks"))
	assert.NilError(t, err)
	for _, d := range left {
		assert.Equal(t, d.Name(), "current")
	}
}

// TestManyForks: any number of forks at once, of which each keeps its result,
// while others write: all are listed and hold what was made in them.
func TestManyForks(t *testing.T) {
	many := false // so many at once as to be sure, with one backend at least
	onBackends(t, func(t *testing.T, u *owner) {
		n := 12
		if !many || os.Getenv("AGENTENV_TEST_LONG") != "" {
			n, many = 64, true
		}
		first := u.init(t, "one")
		var wg sync.WaitGroup
		failures := make(chan string, 2*n)
		start := func(args ...string) {
			wg.Go(func() {
				c := u.command(u.src, "agentenv", append([]string{"--root", u.root}, args...)...)
				if out, err := c.CombinedOutput(); err != nil {
					failures <- fmt.Sprintf("%v: %v %s", args, err, out)
				}
			})
		}
		for i := range n {
			start("exec", "--fork", "--keep", "--", "sh", "-c", stateScript(strconv.Itoa(i)))
			if i%8 == 0 {
				start("commit", "--allow-empty", "-m", "meanwhile")
				start("exec", "--fork", "--", "true")
			}
		}
		wg.Wait()
		close(failures)
		for f := range failures {
			t.Error(f)
		}
		kept := 0
		for _, s := range u.log(t) {
			if s.Kind != env.KindExec {
				continue
			}
			kept++
			assert.Equal(t, s.Stats.Modified >= stateFiles, true, "%+v", s)
			if kept%6 == 0 { // a sample: each takes a process
				want, _, _ := strings.Cut(strings.SplitAfter(s.Message, "echo ")[1], " ")
				assert.Equal(t, u.agentenv(t, "exec", "--fork="+string(s.ID), "--", "sh", "-c", readScript), whole(want))
			}
		}
		assert.Equal(t, kept, n)
		assert.Equal(t, u.agentenv(t, "show", string(first)+":d1/1"), "one")
		u.agentenv(t, "commit")
		u.cleared(t)
	})
}

// TestKeepWaitsForTournament: what a command left is not lost because a
// tournament holds the environment when it ends; who cannot wait interrupts.
func TestKeepWaitsForTournament(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		if os.Getuid() != u.uid {
			t.Skip("waiting is the same for everybody")
		}
		u.init(t, "one")
		long, tells := u.background(t, "tournament", "--plain", "--test", "true", "--", "sleep 700")
		defer func() {
			if t.Failed() {
				t.Logf("the tournament said: %s", tells)
			}
		}()
		until(t, "the tournament", func() bool {
			_, errs, code := u.run(t, u.src, "agentenv", "--root", u.root, "commit")
			return code == exitHarness && strings.Contains(errs, "tournament")
		})
		patient, said := u.background(t, "exec", "--fork", "--keep", "--", "sh", "-c", stateScript("two")+"; exit 5")
		hasty, _ := u.background(t, "exec", "--fork", "--keep", "--", "touch", "made")
		time.Sleep(time.Second)
		assert.NilError(t, hasty.Process.Signal(unix.SIGINT))
		_ = hasty.Wait()
		assert.Equal(t, hasty.ProcessState.ExitCode(), exitInterrupt)
		assert.NilError(t, long.Process.Signal(unix.SIGINT))
		_ = long.Wait()
		_ = patient.Wait()
		assert.Equal(t, patient.ProcessState.ExitCode(), 5, said.String())
		assert.Assert(t, strings.Contains(said.String(), "is kept later") && strings.Contains(said.String(), "kept as"), said.String())
		var kept int
		for _, s := range u.log(t) {
			if s.Kind == env.KindExec {
				kept++
			}
		}
		assert.Equal(t, kept, 1)
		u.agentenv(t, "commit")
		u.cleared(t)
	})
}

// TestMountedWorkTree: where the work tree is a mount on the host, it is seen
// from init on until umount, again after the next command that needs it, also
// when somebody else took the mount away, and its place swallows no writes.
func TestMountedWorkTree(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		first := u.init(t, "one")
		place := filepath.Join(u.root, "work", "current")
		if !isMount(place) {
			t.Skipf("the work tree of %s is no mount for %s", u.backend, u.name)
		}
		state := func() string {
			out, err := exec.Command("sh", "-c", "cd "+place+" && "+readScript).CombinedOutput()
			assert.NilError(t, err, string(out))
			return string(out)
		}
		assert.Equal(t, state(), whole("one"))
		u.agentenv(t, "exec", "--", "sh", "-c", stateScript("two"))
		assert.Equal(t, state(), whole("two"))

		assert.Equal(t, u.must(t, filepath.Join(place, "d1"), "agentenv", "--root", u.root, "exec", "--", "cat", "1"), "two")

		// As after a reboot.
		assert.NilError(t, unix.Unmount(place, 0))
		assert.Assert(t, os.WriteFile(filepath.Join(place, "swallowed"), nil, 0o644) != nil)
		assert.Assert(t, strings.Contains(u.agentenv(t, "status"), "not mounted now"))
		assert.Assert(t, !isMount(place), "status mounts nothing")
		assert.Equal(t, u.tree(t), whole("two"))
		assert.Equal(t, state(), whole("two"))
		assert.NilError(t, unix.Unmount(place, 0))
		u.agentenv(t, "checkout", string(first))
		assert.Equal(t, state(), whole("one"))

		// Who stands in it is named, and keeps it.
		c := exec.Command("sleep", "700")
		c.Dir = filepath.Join(place, "d1")
		assert.NilError(t, c.Start())
		_, errs, code := u.run(t, u.src, "agentenv", "--root", u.root, "umount")
		assert.Equal(t, code, exitUsage, errs)
		assert.Assert(t, strings.Contains(errs, fmt.Sprintf("sleep (pid %d)", c.Process.Pid)), errs)
		assert.Equal(t, state(), whole("one"))
		// A checkout goes on, and says what they have to do.
		_, errs, code = u.run(t, u.src, "agentenv", "--root", u.root, "checkout", string(u.log(t)[0].ID))
		assert.Equal(t, code, 0, errs)
		assert.Assert(t, strings.Contains(errs, "cd"), errs)
		assert.Equal(t, strings.Count(errs, "must `cd` to it again"), 1, errs)
		assert.Equal(t, state(), whole("two"))
		assert.NilError(t, c.Process.Kill())
		_ = c.Wait()

		// A command elsewhere does not keep the mount alive.
		fork, _ := u.background(t, "exec", "--fork", "--", "sleep", "700")
		until(t, "the fork", func() bool { return len(u.freeForks(t)) == 1 })
		time.Sleep(200 * time.Millisecond)
		u.agentenv(t, "umount")
		assert.Assert(t, !isMount(place))
		assert.Equal(t, u.tree(t), whole("two"))
		assert.Assert(t, isMount(place))
		assert.NilError(t, fork.Process.Kill())
		_ = fork.Wait()
		u.agentenv(t, "umount")
	})
}

// unmountBelow lets go of the work trees that are mounted below dir, so that it
// can be removed.
func unmountBelow(dir string) {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return // removing says why it cannot
	}
	for _, m := range slices.Backward(mounts) {
		if m.FSType == "overlay" {
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
			if fd, err := unix.Open(m.Mountpoint, unix.O_RDONLY, 0); err == nil {
				_ = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0) // it refuses to be removed, too
				unix.Close(fd)
			}
		}
	}
}

// isMount says whether something is mounted at path.
func isMount(path string) bool {
	var st unix.Statx_t
	return unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, 0, &st) == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// TestProcessLevelNeedsAPlainTree: without namespaces a tree has to stand on the
// host; forks do, and where the work tree cannot, that is said.
func TestProcessLevelNeedsAPlainTree(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		u.init(t, "one")
		process := []string{"--root", u.root, "exec", "--isolation", "process"}
		run := []string{"--", "sh", "-c", "cd $AGENTENV_TREE && " + readScript}
		out, errs, code := u.run(t, u.src, "agentenv", append(append(process, "--fork"), run...)...)
		assert.Equal(t, code, 0, errs)
		assert.Equal(t, out, whole("one"))
		u.agentenv(t, "tournament", "--plain", "--isolation", "process", "--test", "grep -q two d1/1", "--", stateScript("two"))
		out, errs, code = u.run(t, u.src, "agentenv", append(process, run...)...)
		if strings.Contains(u.agentenv(t, "status", "--json"), env.SeenInside) {
			assert.Equal(t, code, exitOwnFailure, errs)
			assert.Assert(t, strings.Contains(errs, "--isolation namespaces") && strings.Contains(errs, "--backend copy"), errs)
		} else {
			assert.Equal(t, code, 0, errs)
			assert.Equal(t, out, whole("two"))
		}
		assert.Equal(t, u.tree(t), whole("two"))
		u.agentenv(t, "umount")
	})
}

// TestBackendThatDoesNotWork: one that was asked for is refused with the reason
// and what mends it, and nothing is made; left to itself agentenv takes another
// and says why it is not the better one.
func TestBackendThatDoesNotWork(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	u := newPerson(t, "root", 0)
	dir := filepath.Join(u.home, "container")
	src := filepath.Join(u.home, "src")
	for _, d := range []string{"low", "up", "work", "at"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	assert.NilError(t, os.Mkdir(src, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(src, "f"), []byte("x"), 0o644))
	if err := unix.Mount("overlay", dir+"/at", "overlay", 0, fmt.Sprintf("lowerdir=%[1]s/low,upperdir=%[1]s/up,workdir=%[1]s/work", dir)); err != nil {
		t.Skip(err)
	}
	root := dir + "/at/root"
	out, errs, code := u.run(t, src, "agentenv", "--root", root, "--backend", "overlay", "init", "--from", ".")
	assert.Equal(t, code, exitHarness, errs)
	assert.Equal(t, out, "")
	assert.Assert(t, strings.Contains(errs, "the overlay backend does not work at "+root), errs)
	assert.Assert(t, !strings.Contains(errs, "trial"), errs)
	emptyDirs(t, dir+"/at")
	_, errs, code = u.run(t, src, "agentenv", "--root", root, "init", "--from", ".")
	assert.Equal(t, code, 0, errs)
	assert.Assert(t, strings.Contains(errs, "backend: copy (") && strings.Contains(errs, "overlay: ") && strings.Contains(errs, "fix: "), errs)
	assert.Equal(t, u.must(t, src, "agentenv", "--root", root, "exec", "--fork", "--", "cat", "f"), "x")
	status := u.must(t, src, "agentenv", "--root", root, "status", "-v")
	assert.Assert(t, strings.Contains(status, "overlay: does not work, "), status)
	status = u.must(t, src, "agentenv", "--root", root, "status")
	assert.Assert(t, !strings.Contains(status, "overlay"), status)
}
