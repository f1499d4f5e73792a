package main

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
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
		assert.Assert(t, !c.OK && c.Lost != "" && strings.Contains(c.Fix, "sysctl user.max_user_namespaces=") && strings.Contains(c.Fix, "--isolation process"), "%+v", c)
	}
	assert.Assert(t, checks["isolation process"].OK)
	assert.Equal(t, verdict(slices.Collect(maps.Values(checks)), false), "A tournament can run here only with --isolation process, and only in a workspace.")
	for _, c := range checks {
		assert.Assert(t, !strings.Contains(c.Fix, "agentenv doctor"), "%+v", c)
	}
}

// TestDoctorWithout: doctor, and a tournament, get on without a directory for
// temporary files, a PATH, and a word on where environments are.
func TestDoctorWithout(t *testing.T) {
	envtest.Census(t)
	p := newPerson(t, "self", os.Getuid())
	if os.Getuid() == 0 {
		p = newPerson(t, "ordinary", ordinaryID)
	}
	src := filepath.Join(p.home, "src")
	assert.NilError(t, os.MkdirAll(filepath.Join(src, ".git"), 0o755))
	p.own(t, src)
	p.must(t, src, "env", "TMPDIR=/nonexistent", "agentenv", "tournament", "--test", "true", "--", "true")
	left, err := filepath.Glob(filepath.Join(p.home, ".local/share/agentenv/.agentenv-*"))
	assert.NilError(t, err)
	assert.Equal(t, len(left), 0, "%v", left)

	program := filepath.Join(p.home, "bin", "agentenv")
	checks, code := diagnosis(t, p.command(src, "env", "TMPDIR=/nonexistent", "PATH=", program, "--root", p.home+"/root", "doctor", "--json"))
	assert.Equal(t, code, 0)
	assert.Assert(t, checks["isolation namespaces"].OK && checks["overlay mount"].OK, "%+v", checks)
	checks, code = diagnosis(t, p.command("/", "env", "-u", "HOME", "TMPDIR=/nonexistent", program, "doctor", "--json"))
	assert.Equal(t, code, exitHarness)
	assert.Assert(t, strings.Contains(checks["root"].Fix, "--root"), "%+v", checks)
	assert.Assert(t, checks["user namespace"].OK, "%+v", checks)
	assert.Assert(t, strings.Contains(checks["isolation namespaces"].Fix, "TMPDIR"), "%+v", checks)
	assert.Assert(t, !strings.Contains(checks["limits"].Detail, "/sys/fs"), "%+v", checks["limits"])
	assert.Assert(t, hasUserManager() || !strings.Contains(checks["freeze and kill"].Fix, "--user"), "%+v", checks)

	out, err := p.command(src, "sh", "-c", "ulimit -f 0; exec agentenv --root $HOME/root doctor --json").Output()
	assert.ErrorContains(t, err, "exit status 3")
	assert.Assert(t, !strings.Contains(string(out), "error"+"write"), string(out))
}

// TestWhyNot: a reason that several limits share is said once, without a path.
func TestWhyNot(t *testing.T) {
	assert.Equal(t, whyNot([]string{"cpus", "memory"}, "cpu: write /sys/fs/cgroup/cpu/a: permission denied; memory: write /sys/fs/cgroup/m: permission denied; pids: x"),
		"cpus and memory: no cgroup for it: permission denied")
}

// TestFewProcesses: who may have too few processes is told so in one line.
func TestFewProcesses(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be a user who has no process yet")
	}
	envtest.Census(t)
	p := newPerson(t, "ordinary", ordinaryID)
	src := smallEnvironment(t, p)
	for _, x := range []struct {
		args string
		code int
	}{{"exec -- true", exitOwnFailure}, {"--json tournament --test true -- true", exitHarness}} {
		out, errs, code := p.run(t, src, "bash", "-c", "ulimit -u 13; agentenv "+x.args)
		assert.Equal(t, code, x.code, errs+out)
		assert.Assert(t, strings.Contains(errs+out, "ulimit -u ") && !strings.Contains(errs, "goroutine"), errs+out)
		assert.Equal(t, strings.Contains(out, `"error"`), x.code == exitHarness, out)
	}
	out, errs, code := p.run(t, src, "bash", "-c", "ulimit -u 28; agentenv tournament --parallel 4 --test true -- true true true false")
	assert.Equal(t, code, 0, errs+out)
	assert.Assert(t, strings.Contains(errs, " at once, not 4: there may be 28 processes"), errs)
}
