package sandbox_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// notices collects what a Sandbox tells its user.
type notices struct {
	mu    sync.Mutex
	lines []string
}

func (n *notices) add(line string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lines = append(n.lines, line)
}

func (n *notices) all() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.lines)
}

func suite(t *testing.T, level sandbox.Level) {
	envtest.Census(t)
	if err := sandbox.Probe(level); err != nil {
		t.Skip(err)
	}
	var n notices
	envtest.Run(t, envtest.Subject{Executor: sandbox.New(sandbox.Options{Notice: n.add}), Level: level, Notices: n.all})
}

func TestNamespaces(t *testing.T) { suite(t, sandbox.LevelNamespaces) }
func TestProcess(t *testing.T)    { suite(t, sandbox.LevelProcess) }

// userID is a uid and gid that nobody on the machine has.
const userID = 64321

// identity is who runs tests, with what more in the environment.
type identity struct {
	attr *syscall.SysProcAttr
	env  []string
}

// as runs tests of this binary anew as somebody else, with a home of his own.
func as(t *testing.T, who identity, tests string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to become somebody else")
	}
	home, err := os.MkdirTemp("/var/lib", "sandbox-user-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, sandbox.RemoveScratch(home)) })
	assert.NilError(t, os.Chown(home, userID, userID))
	cmd := exec.Command("/proc/self/exe", "-test.run", tests, "-test.v")
	cmd.Dir, cmd.SysProcAttr = home, who.attr
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home,
		"AGENTENV_TEST_LONG=" + os.Getenv("AGENTENV_TEST_LONG")}, who.env...)
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		passed := strings.Contains(line, "--- PASS") || strings.HasPrefix(line, "=== ")
		if strings.Contains(line, "--- SKIP") || strings.Contains(line, "gone after") || err != nil && !passed {
			t.Log(strings.TrimRight(line, "\n"))
		}
	}
	assert.NilError(t, err)
	assert.Assert(t, strings.Contains(string(out), "--- PASS: "), "no test ran:\n%s", out)
}

func ordinaryUser() identity {
	return identity{attr: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: userID, Gid: userID}}}
}

// inNamespace is the view of a container: uid 0 with every capability, but not
// over the machine, and one other user.
func inNamespace(env ...string) identity {
	two := []syscall.SysProcIDMap{{ContainerID: 0, HostID: userID, Size: 2}}
	return identity{env: env, attr: &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: two, GidMappings: two,
		GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
	}}
}

func TestAsUser(t *testing.T) {
	as(t, ordinaryUser(), "^(TestNamespaces|TestProcess|TestKilled|TestDescriptors|TestRemoveScratch|TestAnyBytes)$"+
		"/^(status|ending|separation|workspace|home|mounts|rootfs|overlay|hold|errors|namespaces)$")
}

func TestInUserNamespace(t *testing.T) {
	as(t, inNamespace(), "^(TestNamespaces|TestKilled)$/^(status|separation|workspace|home|mounts|rootfs|overlay|hold|namespaces)$")
}
