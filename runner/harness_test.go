package runner

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/reexec"
	"go.uber.org/goleak"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/specs"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	if root := os.Getenv(doomedRoot); root != "" {
		runDoomed(root)
		return
	}
	// The sandbox keeps one thread for ever, to start its helpers from; it is
	// there once something was run.
	_ = sandbox.Probe(sandbox.LevelProcess) // tests that need it say so
	goleak.VerifyTestMain(m, goleak.IgnoreCurrent())
}

// world is an environment and what a tournament in it told.
type world struct {
	t      *testing.T
	env    *env.Env
	root   string
	mu     sync.Mutex
	events []Event
}

var testBackends = all.Backends()

// newWorld makes an environment of files, NAME: CONTENT, with a work tree.
func newWorld(t *testing.T, files map[string]string, exec env.Executor, backends ...forks.Backend) *world {
	t.Helper()
	envtest.Census(t)
	if backends == nil {
		backends = testBackends
	}
	dir, root := filepath.Join(t.TempDir(), "tree"), filepath.Join(t.TempDir(), "root")
	for name, text := range files {
		p := filepath.Join(dir, name)
		assert.NilError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		mode := os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") {
			mode = 0o755
		}
		assert.NilError(t, os.WriteFile(p, []byte(text), mode))
	}
	e, err := env.Init(t.Context(), root, env.InitOptions{From: dir, Kind: env.Workspace},
		env.Options{Backends: backends, Executor: exec})
	assert.NilError(t, err)
	w := &world{t: t, env: e, root: root}
	t.Cleanup(func() {
		_, err := w.env.Umount(context.Background())
		assert.NilError(t, errors.Join(err, w.env.Close()))
	})
	return w
}

// newPlan is a plan with the defaults that specs would fill in, except that it
// is for [plainExecutor].
func newPlan(test string, runs ...string) *specs.Plan {
	p := &specs.Plan{
		Name: "trial", Shell: []string{"sh", "-e", "-c"}, Select: specs.FirstPass, Parallel: len(runs),
		Grace: specs.Duration(time.Second), Home: specs.HomePrivate, Network: specs.NetworkHost,
		Isolation: specs.Process, Promote: specs.PromoteTrue, Keep: specs.KeepWinner,
		Test: specs.Test{Run: test},
	}
	for i, run := range runs {
		p.Candidates = append(p.Candidates, specs.Candidate{Name: "c" + strconv.Itoa(i+1), Run: run, Repeat: 1})
	}
	return p
}

func (w *world) options(p *specs.Plan) Options {
	return Options{
		Env: w.env, Plan: p, Base: w.env.Head(), Caller: os.Environ(), HomeDir: w.t.TempDir(),
		Sinks: []Sink{func(e Event) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
		}},
	}
}

// run runs a plan and checks what holds for every result.
func (w *world) run(ctx context.Context, p *specs.Plan) (*Result, error) {
	w.t.Helper()
	r, err := Run(ctx, w.options(p))
	assert.Assert(w.t, r != nil, "%v", err)
	w.checkResult(r)
	return r, err
}

func (w *world) checkResult(r *Result) {
	w.t.Helper()
	assert.Equal(w.t, r.Leaks.Processes, 0, "%v", r.Leaks.Names)
	assert.Equal(w.t, r.Leaks.Mounts, 0, "%v", r.Leaks.Names)
	assert.Equal(w.t, r.Leaks.Bytes, int64(0), "%v", r.Leaks.Names)
	assert.DeepEqual(w.t, r.Warnings, []string{})
	assert.Equal(w.t, r.Head, w.env.Head().ID)
	words := []Status{Passed, Failed, Timeout, Cancelled, Error}
	for _, a := range r.Attempts {
		assert.Assert(w.t, slices.Contains(words, a.Status), "status %q", a.Status)
		assert.Equal(w.t, a.Reason == nil, a.Status == Passed, "%+v", a)
	}
	loaded, err := Load(w.env.RunsDir(), r.Run)
	assert.NilError(w.t, err)
	want, err := json.Marshal(r)
	assert.NilError(w.t, err)
	got, err := json.Marshal(loaded)
	assert.NilError(w.t, err)
	assert.Equal(w.t, string(got), string(want))
	last := w.events[len(w.events)-1]
	assert.Equal(w.t, last.Type, EventEnded)
}

// plainExecutor runs commands as plain processes, each in a group of its own:
// quick, and enough for what does not depend on isolation.
type plainExecutor struct{}

type plainProcess struct {
	cmd   *exec.Cmd
	start time.Time
}

func (plainExecutor) Start(_ context.Context, c sandbox.Command) (sandbox.Process, error) {
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = c.Env, c.Dir, c.Stdout, c.Stderr
	if c.Stdin != nil {
		cmd.Stdin = c.Stdin
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &plainProcess{cmd, time.Now()}, nil
}

func (p *plainProcess) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

func (p *plainProcess) Freeze() error { return syscall.Kill(-p.cmd.Process.Pid, syscall.SIGSTOP) }
func (p *plainProcess) Thaw() error   { return syscall.Kill(-p.cmd.Process.Pid, syscall.SIGCONT) }

func (p *plainProcess) Stop(grace time.Duration) {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGTERM)
	time.AfterFunc(grace, func() { _ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) })
}

func (p *plainProcess) Wait() (sandbox.Result, error) {
	err := p.cmd.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		return sandbox.Result{}, err
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	res := sandbox.Result{ExitCode: p.cmd.ProcessState.ExitCode(), Started: p.start, Duration: time.Since(p.start)}
	if st := p.cmd.ProcessState.Sys().(syscall.WaitStatus); st.Signaled() {
		res.Signal, res.ExitCode = st.Signal(), 128+int(st.Signal())
	}
	return res, nil
}

// statuses are those of the attempts, in the order of the plan.
func statuses(r *Result) string {
	var out []string
	for _, a := range r.Attempts {
		out = append(out, string(a.Status))
	}
	return strings.Join(out, " ")
}

func reason(a Attempt) string {
	if a.Reason == nil {
		return ""
	}
	return *a.Reason
}

// work is the content of a file of the work tree, which must be equal to HEAD. It
// is read from the snapshot: an ordinary user's work tree is mounted only where
// commands run.
func (w *world) work(name string) string {
	w.t.Helper()
	ctx := w.t.Context()
	c, err := w.env.WorkChanges(ctx)
	assert.NilError(w.t, err)
	assert.Equal(w.t, len(c.List), 0, "the work tree is not HEAD: %v", c.List)
	v, err := w.env.View(ctx, w.env.Head().ID)
	assert.NilError(w.t, err)
	defer v.Close()
	r, err := v.Open(name)
	if errors.Is(err, forks.ErrNotFound) {
		return "absent"
	}
	assert.NilError(w.t, err)
	defer r.Close()
	data, err := io.ReadAll(r)
	assert.NilError(w.t, err)
	return string(data)
}
