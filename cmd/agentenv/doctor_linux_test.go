package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
)

// diagnosis runs doctor and returns its checks by name, and its exit code.
func diagnosis(t *testing.T, cmd *exec.Cmd) (map[string]check, int) {
	t.Helper()
	out, err := cmd.Output()
	var exit *exec.ExitError
	assert.Assert(t, err == nil || errors.As(err, &exit), "%v", err)
	var doc struct{ Checks []check }
	dec := json.NewDecoder(strings.NewReader(string(out)))
	dec.DisallowUnknownFields()
	assert.NilError(t, dec.Decode(&doc), "%s", out)
	checks := map[string]check{}
	for _, c := range doc.Checks {
		_, twice := checks[c.Name]
		assert.Assert(t, !twice && c.Name != "" && c.Detail != "", "%+v", c)
		assert.Assert(t, !c.OK || c.Lost == "" && c.Fix == "", "%+v", c)
		checks[c.Name] = c
	}
	return checks, cmd.ProcessState.ExitCode()
}

// TestDoctor: everything that is tried has a line; it is quick, and leaves
// nothing behind.
func TestDoctor(t *testing.T) {
	envtest.Census(t)
	asEach(t, func(t *testing.T, p *person) {
		began := time.Now()
		checks, code := diagnosis(t, p.command(p.home, "agentenv", "--root", p.home+"/root", "doctor", "--json"))
		assert.Assert(t, time.Since(began) < 5*time.Second) // 0.15 s, on a machine that does nothing else
		for _, name := range []string{"backend btrfs", "backend overlay", "backend copy", "isolation namespaces", "isolation process",
			"user namespace", "mount namespace", "overlay mount", "PID namespace", "network private", "network nat", "limits",
			"freeze and kill", "subordinate ids", "kernel", "reflink", "space", "inotify", "open files", "seccomp filter", "terminal"} {
			assert.Assert(t, checks[name].Name != "", "no line for %s", name)
		}
		assert.Equal(t, code == 0, checks["isolation namespaces"].OK)
		entries, err := os.ReadDir(p.home + "/root")
		assert.Assert(t, err != nil, "it made a root: %v", entries)
		text, _ := p.command(p.home, "agentenv", "--root", p.home+"/root", "doctor").Output() // the code is as above
		for name, c := range checks {
			mark := map[bool]string{true: "ok ", false: "no "}[c.OK]
			if !c.OK && c.Fix == "" {
				mark = "-- "
			}
			assert.Assert(t, strings.Contains("\n"+string(text), "\n"+mark+name+" "), "%s%s:\n%s", mark, name, text)
		}
	})
}

// TestDoctorInUserNamespace: what a container's root has.
func TestDoctorInUserNamespace(t *testing.T) {
	envtest.Census(t)
	asEach(t, func(t *testing.T, p *person) {
		checks, code := diagnosis(t, p.command(p.home, "unshare", "-Ur", "agentenv", "--root", p.home+"/root", "doctor", "--json"))
		assert.Equal(t, code, 0)
		assert.Assert(t, checks["isolation namespaces"].OK && checks["user namespace"].OK && checks["mount namespace"].OK, "%+v", checks)
	})
}

// TestDoctorRefused: where there may be no user namespaces it names the setting.
func TestDoctorRefused(t *testing.T) {
	envtest.Census(t)
	if os.Getuid() != 0 {
		t.Skip("needs root to change a limit of namespaces")
	}
	p := newPerson(t, "ordinary", ordinaryID)
	// The limit counts for what is made below this namespace.
	const script = `echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --reuid 1 --regid 1 --clear-groups agentenv --root /tmp/nosuch-root doctor --json`
	cmd := p.command("/", "sh", "-c", script)
	two := []syscall.SysProcIDMap{{ContainerID: 0, HostID: ordinaryID, Size: 2}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS, UidMappings: two, GidMappings: two,
		GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{}}
	cmd.Env = append(slices.DeleteFunc(cmd.Env, func(kv string) bool { return strings.HasPrefix(kv, "TMPDIR=") }), "TMPDIR=/tmp")
	assert.NilError(t, os.Chmod(p.home, 0o755))
	checks, code := diagnosis(t, cmd)
	assert.Equal(t, code, exitHarness)
	for _, name := range []string{"isolation namespaces", "user namespace", "mount namespace", "network private"} {
		c := checks[name]
		assert.Assert(t, !c.OK && c.Lost != "" && strings.Contains(c.Fix, "sysctl user.max_user_namespaces="), "%+v", c)
	}
	assert.Assert(t, checks["isolation process"].OK)
}
