package main

import (
	"errors"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/moby/sys/reexec"
	"github.com/rogpeppe/go-internal/testscript"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	testscript.Main(m, map[string]func(){"agentenv": main})
}

// TestScripts runs the command line's specification, testdata/script/*.txt.
func TestScripts(t *testing.T) {
	envtest.Census(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			home := filepath.Join(e.WorkDir, "home")
			e.Setenv("HOME", home)
			e.Setenv("XDG_DATA_HOME", filepath.Join(e.WorkDir, "data"))
			e.Setenv("FIXTURES", fixtures(t))
			e.Defer(func() { unmountBelow(e.WorkDir) })
			return os.MkdirAll(home, 0o700)
		},
		Cmds:      map[string]func(*testscript.TestScript, bool, []string){"exits": exits},
		Condition: func(cond string) (bool, error) { return cond == "root" && os.Getuid() == 0, nil },
	})
}

// exits runs a command and checks its exit status: `exits N CMD ARGS…`. With
// `!` the status must be another.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: exits N CMD ARGS…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if (got == want) == neg {
		ts.Fatalf("exit status %d, want %s%d", got, map[bool]string{true: "not "}[neg], want)
	}
}

func fixtures(t *testing.T) string {
	abs, err := filepath.Abs("testdata")
	assert.NilError(t, err)
	return abs
}

// TestScriptsAsOrdinaryUser runs the same as a user without rights.
func TestScriptsAsOrdinaryUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("TestScripts ran as an ordinary user already")
	}
	asNobody(t, "TestScripts$")
}

// asNobody runs tests of this binary again as the user nobody, who owns the
// temporary directory that they use.
func asNobody(t *testing.T, run string) {
	u, err := user.Lookup("nobody")
	assert.NilError(t, err)
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	dir, err := os.MkdirTemp("", "agentenv-user-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.NilError(t, os.RemoveAll(dir)) })
	assert.NilError(t, os.Chown(dir, uid, gid))
	// The build's own directory may be closed to others.
	bin, data := filepath.Join(dir, "agentenv.test"), filepath.Join(dir, "testdata")
	self, err := os.ReadFile("/proc/self/exe")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(bin, self, 0o755))
	assert.NilError(t, os.CopyFS(data, os.DirFS("testdata")))
	cmd := exec.Command(bin, "-test.run", run, "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "HOME="+dir, "XDG_DATA_HOME="+dir+"/data", "GOCACHE="+dir+"/cache")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as %s: %v\n%s", u.Username, err, out)
	}
}
