package sandbox_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// TestRefused: where the machine refuses user namespaces the error names the
// setting and the command that mends it.
func TestRefused(t *testing.T) {
	switch os.Getenv("SANDBOX_REFUSED") {
	case "":
		as(t, inNamespace("SANDBOX_REFUSED=1"), "^TestRefused$")
		return
	case "1":
		// The limit counts for what is made below this namespace.
		assert.NilError(t, os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
		cmd := exec.Command("/proc/self/exe", "-test.run", "^TestRefused$", "-test.v")
		cmd.Env = append(os.Environ(), "SANDBOX_REFUSED=2", "TMPDIR=/tmp")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1, Gid: 1, NoSetGroups: true}}
		out, err := cmd.CombinedOutput()
		assert.NilError(t, err, string(out))
		return
	}
	// No census: package syscall forgets the pipe for the maps of a user namespace
	// that it was refused.
	err := sandbox.Probe(sandbox.LevelNamespaces)
	var e *sandbox.Error
	assert.Assert(t, errors.As(err, &e), "got %v", err)
	assert.ErrorIs(t, err, syscall.ENOSPC)
	assert.Assert(t, strings.Contains(e.Fix, "sysctl user.max_user_namespaces="), e.Error())
	assert.NilError(t, sandbox.Probe(sandbox.LevelProcess))
}

// TestBounded: uid 0 with the power to mount, in a place that refuses a
// further user namespace, gets the same sandbox by other means.
func TestBounded(t *testing.T) {
	if os.Getenv("SANDBOX_BOUNDED") == "" {
		as(t, inNamespace("SANDBOX_BOUNDED=1"), "^TestBounded$/^(status|separation|workspace|rootfs)$")
		return
	}
	assert.NilError(t, os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
	suite(t, sandbox.LevelNamespaces)
}

// TestMaskedProc: a container that hides parts of /proc lets nobody mount a
// new one.
func TestMaskedProc(t *testing.T) {
	if os.Getenv("SANDBOX_MASKED") == "" {
		if os.Geteuid() != 0 {
			t.Skip("needs root")
		}
		mask := `mount --bind /dev/null /proc/version && exec setpriv --reuid 64321 --regid 64321 --clear-groups env SANDBOX_MASKED=1 TMPDIR=/tmp "$0" -test.run '^TestMaskedProc$' -test.v`
		cmd := exec.Command("unshare", "-m", "sh", "-c", mask, "/proc/self/exe")
		self, err := os.Open("/proc/self/exe")
		assert.NilError(t, err)
		defer self.Close()
		cmd.ExtraFiles = []*os.File{self}
		cmd.Args[len(cmd.Args)-1] = "/proc/self/fd/3"
		cmd.Dir = "/"
		out, err := cmd.CombinedOutput()
		assert.NilError(t, err, string(out))
		return
	}
	envtest.Census(t)
	err := sandbox.Probe(sandbox.LevelNamespaces)
	assert.ErrorIs(t, err, syscall.EPERM)
	assert.ErrorContains(t, err, "/proc")
	assert.ErrorContains(t, err, "systempaths=unconfined")
}

// TestProcessRefused: a tree that is a mount has no place at the level process,
// and who is told so learns of forks, which have one.
func TestProcessRefused(t *testing.T) {
	c := scene(t, scratchHome(t), sandbox.LevelProcess)
	c.Args = []string{"true"}
	dir := c.View.Tree.Dir
	c.View.Tree.Overlay = &forks.Overlay{Lower: []string{dir}, Dir: dir}
	_, err := sandbox.New(sandbox.Options{}).Start(t.Context(), c)
	assert.ErrorIs(t, err, sandbox.ErrSandbox)
	assert.ErrorContains(t, err, "exec --fork")
}
