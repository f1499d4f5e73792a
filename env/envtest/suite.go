//go:build linux

package envtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// Subject is what the suite is run on.
type Subject struct {
	Executor sandbox.Executor
	Level    sandbox.Level
	// Notices gives what the executor told the user so far; nil if it has no
	// such thing.
	Notices func() []string

	system string // a small system, from which those of the rootfs tests are made
}

// Long says whether slow tests run too.
func Long() bool { return os.Getenv("AGENTENV_TEST_LONG") != "" }

// Run runs the suite.
func Run(t *testing.T, s Subject) {
	for _, group := range []struct {
		name       string
		namespaces bool // only where there are namespaces
		test       func(*testing.T, Subject)
	}{
		{"status", false, testStatus},
		{"output", false, testOutput},
		{"ending", false, testEnding},
		{"separation", true, testSeparation},
		{"workspace", true, testWorkspace},
		{"home", true, testHome},
		{"mounts", true, testMounts},
		{"rootfs", true, testRootfs},
		{"overlay", true, testOverlayTree},
		{"hidden", true, testHiddenMounts},
		{"hold", false, testHold},
		{"errors", false, testErrors},
	} {
		if group.namespaces && s.Level != sandbox.LevelNamespaces {
			continue
		}
		t.Run(group.name, func(t *testing.T) { group.test(t, s) })
	}
}

// bench is the place for one command: a tree, a scratch directory, a home and
// a store, each in a directory of its own.
type bench struct {
	t                                *testing.T
	s                                Subject
	dir, tree, scratch, home, hidden string
	command                          sandbox.Command
}

func newBench(t *testing.T, s Subject) *bench {
	t.Helper()
	dir := tempDir(t)
	b := &bench{t: t, s: s, dir: dir, tree: filepath.Join(dir, "fork"), scratch: filepath.Join(dir, "scratch"),
		home: filepath.Join(dir, "home"), hidden: filepath.Join(dir, "store")}
	for _, d := range []string{b.tree, b.scratch, b.home, b.hidden} {
		assert.NilError(t, os.Mkdir(d, 0o755))
	}
	write(t, filepath.Join(b.hidden, "secret"), "store")
	b.command = sandbox.Command{
		Level: s.Level,
		View: sandbox.View{Tree: forks.Mount{Dir: b.tree}, At: filepath.Join(dir, "project"), Scratch: b.scratch,
			Home: sandbox.HomePrivate, HomeDir: b.home, Hide: []string{b.hidden}},
		Env: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.home, "LC_ALL=C.UTF-8"},
	}
	return b
}

// tempDir is t.TempDir for directories that an overlay leaves behind. It lies
// in the home: in a sandbox /tmp is another.
func tempDir(t *testing.T) string {
	t.Helper()
	home, err := os.UserHomeDir()
	assert.NilError(t, err)
	dir, err := os.MkdirTemp(home, ".envtest-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, sandbox.RemoveScratch(dir)) })
	return dir
}

// fresh gives the next command of this bench a new scratch directory, as
// the caller of an Executor does.
func (b *bench) fresh() {
	b.t.Helper()
	assert.NilError(b.t, sandbox.RemoveScratch(b.scratch))
	assert.NilError(b.t, os.Mkdir(b.scratch, 0o755))
}

// outcome is a command's result with what it wrote to both streams.
type outcome struct {
	sandbox.Result
	out string
}

// start starts args; its output is collected for finish.
func (b *bench) start(ctx context.Context, args ...string) (sandbox.Process, *bytes.Buffer) {
	b.t.Helper()
	b.fresh()
	out := &bytes.Buffer{}
	b.command.Args = args
	b.command.Stdout, b.command.Stderr = out, out
	p, err := b.s.Executor.Start(ctx, b.command)
	assert.NilError(b.t, err)
	return p, out
}

// run runs args to their end.
func (b *bench) run(args ...string) outcome {
	b.t.Helper()
	p, out := b.start(context.Background(), args...)
	r, err := p.Wait()
	assert.NilError(b.t, err)
	return outcome{r, out.String()}
}

// sh runs a script, which must succeed, and gives its output.
func (b *bench) sh(script string) string {
	b.t.Helper()
	r := b.run("sh", "-ec", script)
	assert.Equal(b.t, r.ExitCode, 0, "%s\n%s%s", script, r.out, r.Reason)
	return r.out
}

// refused runs a command whose sandbox cannot be made.
func (b *bench) refused(args ...string) *sandbox.Error {
	b.t.Helper()
	b.fresh()
	b.command.Args = args
	_, err := b.s.Executor.Start(context.Background(), b.command)
	var e *sandbox.Error
	assert.Assert(b.t, errors.As(err, &e), "got %v", err)
	return e
}

func write(t *testing.T, path, content string) {
	t.Helper()
	assert.NilError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	assert.NilError(t, os.WriteFile(path, []byte(content), 0o644))
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	assert.NilError(t, err)
	return string(b)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// names lists a directory.
func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	assert.NilError(t, err)
	var n []string
	for _, e := range entries {
		n = append(n, e.Name())
	}
	return strings.Join(n, " ")
}

// waitFor waits until a condition holds, at most 10 s.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// Alive lists the processes whose environment holds the marker.
func Alive(marker string) []string {
	var found []string
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, f := range files {
		env, err := os.ReadFile(f)
		if err == nil && bytes.Contains(env, []byte(marker)) {
			found = append(found, filepath.Base(filepath.Dir(f)))
		}
	}
	return found
}

// Mounts lists the mounts of this mount namespace that have to do with dir.
// Others come and go on a busy machine.
func Mounts(t *testing.T, dir string) []string {
	t.Helper()
	var found []string
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		if strings.Contains(line, dir) {
			found = append(found, line)
		}
	}
	return found
}

func need(t *testing.T, tool string) {
	t.Helper()
	if _, err := exec.LookPath(tool); err != nil {
		t.Skipf("%s is not installed", tool)
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

const kill = syscall.SIGKILL
