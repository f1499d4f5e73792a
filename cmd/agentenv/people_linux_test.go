package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/runner"
)

// person is somebody who runs agentenv on this machine, in a home of their own.
type person struct {
	name string
	uid  int // and gid
	home string
}

// ordinaryID is a uid and gid that nobody on the machine has.
const ordinaryID = 64322

// asEach runs test as whoever we are and, if that is root, as an ordinary user
// too.
func asEach(t *testing.T, test func(t *testing.T, p *person)) {
	names := map[string]int{"self": os.Getuid()}
	if os.Getuid() == 0 {
		names = map[string]int{"root": 0, "ordinary": ordinaryID}
	}
	for _, name := range []string{"self", "root", "ordinary"} {
		if uid, ok := names[name]; ok {
			t.Run(name, func(t *testing.T) { test(t, newPerson(t, name, uid)) })
		}
	}
}

// program is agentenv as its users have it, whatever this test was built with.
var program = sync.OnceValues(func() ([]byte, error) { return build("CGO_ENABLED=0") })

// build builds agentenv with a setting of the environment.
func build(setting string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "agentenv-build-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, "agentenv")
	cmd := exec.Command("go", "build", "-trimpath", "-o", bin, ".")
	cmd.Env = append(os.Environ(), setting)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build: %w\n%s", err, out)
	}
	return os.ReadFile(bin)
}

// newPerson makes a person with an empty home, where agentenv is in bin.
func newPerson(t *testing.T, name string, uid int) *person {
	home, err := os.MkdirTemp("", "agentenv-home-")
	assert.NilError(t, err)
	p := &person{name: name, uid: uid, home: home}
	t.Cleanup(func() {
		unmountBelow(p.home)
		// What an overlay leaves may be closed even to its owner.
		assert.Check(t, sandbox.RemoveScratch(p.home))
	})
	assert.NilError(t, os.MkdirAll(filepath.Join(p.home, "bin"), 0o755))
	bin, err := program()
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(filepath.Join(p.home, "bin", "agentenv"), bin, 0o755))
	p.own(t, p.home)
	return p
}

// own gives a path and all below it to the person.
func (p *person) own(t *testing.T, path string) {
	if os.Getuid() != 0 {
		return
	}
	assert.NilError(t, filepath.WalkDir(path, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, p.uid, p.uid)
	}))
}

// copyIn copies a tree to a place in the person's home.
func (p *person) copyIn(t *testing.T, from string, to ...string) string {
	dir := filepath.Join(append([]string{p.home}, to...)...)
	assert.NilError(t, os.MkdirAll(filepath.Dir(dir), 0o755))
	out, err := exec.Command("cp", "-a", from, dir).CombinedOutput()
	assert.NilError(t, err, string(out))
	p.own(t, filepath.Join(p.home, to[0]))
	return dir
}

// command is a command that the person runs in dir.
func (p *person) command(dir, name string, args ...string) *exec.Cmd {
	path := filepath.Join(p.home, "bin") + ":" + os.Getenv("PATH")
	env := []string{"HOME=" + p.home, "LANG=C.UTF-8", "GOTOOLCHAIN=local", "GOPROXY=off", "GOFLAGS="}
	if name == "agentenv" {
		name = filepath.Join(p.home, "bin", "agentenv")
	}
	c := exec.Command(name, args...)
	if !strings.Contains(name, "/") {
		// LookPath would search our own PATH.
		c = exec.Command("/usr/bin/env", append([]string{name}, args...)...)
	}
	c.Dir, c.Env = dir, append(env, "PATH="+path)
	if os.Getuid() == 0 && p.uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.uid)}}
	}
	return c
}

// run runs a command and returns its output and its exit status.
func (p *person) run(t *testing.T, dir, name string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	c := p.command(dir, name, args...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	err := c.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return out.String(), errs.String(), exit.ExitCode()
	}
	assert.NilError(t, err)
	return out.String(), errs.String(), 0
}

// must runs a command that has to succeed and returns its standard output
// without the newline at its end.
func (p *person) must(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	out, errs, code := p.run(t, dir, name, args...)
	assert.Equal(t, code, 0, "%s %q as %s:\n%s%s", name, args, p.name, out, errs)
	return strings.TrimSuffix(out, "\n")
}

// tournament runs a tournament that ends with status code, and checks that
// nothing is left of it.
func (p *person) tournament(t *testing.T, dir string, code int, args ...string) *runner.Result {
	t.Helper()
	out, errs, got := p.run(t, dir, "agentenv", append([]string{"tournament", "--json"}, args...)...)
	assert.Equal(t, got, code, "%s\n%s", errs, out)
	var res runner.Result
	assert.NilError(t, json.Unmarshal([]byte(out), &res), out)
	l := res.Leaks
	assert.Assert(t, l.Processes == 0 && l.Mounts == 0 && l.Bytes == 0, "left over: %+v", l)
	assert.DeepEqual(t, processesOf(t, res.Run), []string(nil))
	return &res
}

// statuses are how the attempts of a tournament ended, by candidate.
func statuses(res *runner.Result) map[string]runner.Status {
	m := map[string]runner.Status{}
	for _, a := range res.Attempts {
		m[a.Candidate] = a.Status
	}
	return m
}

// processesOf lists the living processes that a tournament started, by what
// their environment says.
func processesOf(t *testing.T, run string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	assert.NilError(t, err)
	var found []string
	for _, f := range files {
		env, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(env), "AGENTENV_RUN="+run+"\x00") {
			found = append(found, filepath.Base(filepath.Dir(f)))
		}
	}
	return found
}

// keepDir is a directory for what is costly to make and the same for every
// run of the tests.
func keepDir(t testing.TB) string {
	base, err := os.UserCacheDir()
	if err != nil {
		base = filepath.Join(os.TempDir(), "cache-"+strconv.Itoa(os.Getuid()))
	}
	dir := filepath.Join(base, "agentenv-test")
	assert.NilError(t, os.MkdirAll(dir, 0o700))
	return dir
}

// withGo gives the person a Go build cache with the standard library in it, as
// somebody has who uses Go; without it each attempt would compile all of that.
// pkgs are packages whose tests will be run besides the example's.
func (p *person) withGo(t *testing.T, pkgs ...string) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("go is not on PATH")
	}
	if out, _, code := p.run(t, p.home, "go", "version"); code != 0 {
		t.Skipf("%s cannot run go: %s", p.name, out)
	}
	cache := filepath.Join(keepDir(t), "go-build-"+runtime.Version())
	cmd := exec.Command("go", append([]string{"test", "-run", "^$", "."}, pkgs...)...)
	cmd.Dir, cmd.Env = "../../examples/fix-a-bug", append(os.Environ(), "GOCACHE="+cache, "GOFLAGS=", "GOPROXY=off")
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, string(out))
	p.copyIn(t, cache, ".cache", "go-build")
}

// goRoot is where the Go distribution of this machine is.
func goRoot(t testing.TB) string {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Skipf("go env GOROOT: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// emptyDirs checks that directories hold nothing, or are not there.
func emptyDirs(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		list, err := os.ReadDir(dir)
		assert.Assert(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
		assert.Equal(t, len(list), 0, "%s holds %v", dir, list)
	}
}
