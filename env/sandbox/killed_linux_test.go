package sandbox_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// scene makes the directories of one command.
func scene(t testing.TB, dir string, level sandbox.Level) sandbox.Command {
	t.Helper()
	for _, d := range []string{"tree", "scratch", "home"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	return sandbox.Command{
		Level: level, Env: []string{"PATH=" + os.Getenv("PATH")},
		View: sandbox.View{Tree: forks.Mount{Dir: dir + "/tree"}, At: dir + "/tree", Scratch: dir + "/scratch", Home: sandbox.HomeOverlay, HomeDir: dir + "/home"},
	}
}

// layer makes the tree of a command an overlay over what it was.
func layer(t testing.TB, c *sandbox.Command) {
	t.Helper()
	dir := filepath.Dir(c.View.Tree.Dir)
	for _, d := range []string{"upper", "work"} {
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	c.View.Tree.Overlay = &forks.Overlay{Dir: dir, Lower: []string{"tree"}, Upper: "upper", Work: "work", Volatile: true}
}

func scratchHome(t *testing.T) string {
	t.Helper()
	home, err := os.UserHomeDir()
	assert.NilError(t, err)
	dir, err := os.MkdirTemp(home, ".sandbox-test-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, sandbox.RemoveScratch(dir)) })
	return dir
}

// TestVictim is what TestKilled kills: it starts commands that do not end.
func TestVictim(t *testing.T) {
	dir := os.Getenv("SANDBOX_VICTIM")
	if dir == "" {
		t.Skip("only run by TestKilled")
	}
	level := sandbox.Level(os.Getenv("SANDBOX_LEVEL"))
	s := sandbox.New(sandbox.Options{})
	for i := range 6 {
		c := scene(t, filepath.Join(dir, strconv.Itoa(i)), level)
		c.Env = append(c.Env, "SANDBOX_MARK="+os.Getenv("SANDBOX_MARK"))
		if i%2 == 1 && level == sandbox.LevelNamespaces {
			layer(t, &c)
		}
		hold, err := os.Open(c.View.Tree.Dir)
		assert.NilError(t, err)
		assert.NilError(t, unix.Flock(int(hold.Fd()), unix.LOCK_EX))
		c.Hold = hold
		c.Args = []string{"sh", "-c", `trap '' TERM; (setsid sleep 1000 &); sleep 1000 & sleep 1000`}
		go s.Start(context.Background(), c)
	}
	time.Sleep(time.Hour)
}

// TestKilled: whenever agentenv is killed, nothing of its sandboxes is left.
func TestKilled(t *testing.T) {
	envtest.Census(t)
	rounds := 6
	if envtest.Long() {
		rounds = 300
	}
	for _, level := range []sandbox.Level{sandbox.LevelNamespaces, sandbox.LevelProcess} {
		t.Run(string(level), func(t *testing.T) {
			if err := sandbox.Probe(level); err != nil {
				t.Skip(err)
			}
			for i := range rounds {
				killOnce(t, level, time.Duration(rand.IntN(80))*time.Millisecond, i)
			}
		})
	}
}

func killOnce(t *testing.T, level sandbox.Level, after time.Duration, round int) {
	t.Helper()
	dir := scratchHome(t)
	mark := fmt.Sprintf("SANDBOX_MARK=%d.%d.%s", os.Getpid(), round, level)
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestVictim$")
	cmd.Env = append(os.Environ(), "SANDBOX_VICTIM="+dir, "SANDBOX_LEVEL="+string(level), mark)
	assert.NilError(t, cmd.Start())
	time.Sleep(after)
	assert.NilError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	deadline := time.Now().Add(10 * time.Second)
	for len(envtest.Alive(mark))+len(helpers(t)) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("killed after %v: left %v and %v", after, envtest.Alive(mark), helpers(t))
		}
		time.Sleep(2 * time.Millisecond)
	}
	assert.Equal(t, len(envtest.Mounts(t, dir)), 0)
	trees, err := filepath.Glob(dir + "/*/tree")
	assert.NilError(t, err)
	for _, tree := range trees {
		f, err := os.Open(tree)
		assert.NilError(t, err)
		// The kernel closes files a moment after the process cannot be seen.
		for unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			if time.Now().After(deadline) {
				t.Fatalf("killed after %v: %s is still held", after, tree)
			}
			time.Sleep(time.Millisecond)
		}
		f.Close()
	}
}

// helpers lists the helper processes made from this very binary that are
// alive.
func helpers(t *testing.T) []string {
	t.Helper()
	self, err := os.Readlink("/proc/self/exe")
	assert.NilError(t, err)
	var found []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		line, _ := os.ReadFile(f)
		exe, _ := os.Readlink(filepath.Join(filepath.Dir(f), "exe"))
		if exe == self && (bytes.HasPrefix(line, []byte("agentenv-init")) || bytes.HasPrefix(line, []byte("agentenv-reaper"))) {
			found = append(found, filepath.Base(filepath.Dir(f)))
		}
	}
	return found
}

// TestShared: where the host's mounts are shared, as systemd makes them, what
// a sandbox mounts does not spread to them.
func TestShared(t *testing.T) {
	if os.Getenv("SANDBOX_SHARED") == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run", "^TestShared$", "-test.v")
		cmd.Env = append(os.Environ(), "SANDBOX_SHARED=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if os.Geteuid() != 0 {
			t.Skip("needs root")
		}
		out, err := cmd.CombinedOutput()
		assert.NilError(t, err, string(out))
		return
	}
	envtest.Census(t)
	assert.NilError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
	s := sandbox.New(sandbox.Options{})
	dir := scratchHome(t)
	c := scene(t, dir, sandbox.LevelNamespaces)
	c.Args = []string{"sleep", "1000"}
	p, err := s.Start(context.Background(), c)
	assert.NilError(t, err)
	assert.Equal(t, len(envtest.Mounts(t, dir)), 0)
	p.Stop(0)
	_, err = p.Wait()
	assert.NilError(t, err)
	assert.Equal(t, len(envtest.Mounts(t, dir)), 0)
}

// TestDescriptors: an ended command leaves nothing open.
func TestDescriptors(t *testing.T) {
	envtest.Census(t)
	s := sandbox.New(sandbox.Options{})
	dir := scratchHome(t)
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		assert.NilError(t, err)
		return len(fds)
	}
	before := 0
	for i := range 6 {
		c := scene(t, dir+"/"+strconv.Itoa(i), sandbox.LevelProcess)
		c.Args, c.Stdout, c.Stderr = []string{"sh", "-c", "echo x; exit 1"}, &bytes.Buffer{}, &bytes.Buffer{}
		if i%2 == 1 {
			c.View.Tree.Dir += "/none" // an error
		}
		p, err := s.Start(context.Background(), c)
		if err == nil {
			_, err = p.Wait()
			assert.NilError(t, err)
		}
		if i == 1 { // what the runtime itself opens is open by now
			before = open()
		}
	}
	assert.Equal(t, open(), before)
}
