package runner

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

// altering runs commands as plain processes and changes how they ended.
type altering struct {
	plainExecutor
	change func(c sandbox.Command, r *sandbox.Result)
}

type altered struct {
	sandbox.Process
	change func(*sandbox.Result)
}

func (a altering) Start(ctx context.Context, c sandbox.Command) (sandbox.Process, error) {
	p, err := a.plainExecutor.Start(ctx, c)
	return altered{p, func(r *sandbox.Result) { a.change(c, r) }}, err
}

func (a altered) Wait() (sandbox.Result, error) {
	r, err := a.Process.Wait()
	a.change(&r)
	return r, err
}

// A limit that was reached is why an attempt failed, whatever the exit status;
// a process that cannot be ended is nobody's failure, and named.
func TestLimitsAndStuckProcesses(t *testing.T) {
	const oom, hung = "out of memory (limit 2GiB)", "process 12 (dd) hangs in the kernel"
	w := newWorld(t, map[string]string{"f": "x"}, altering{change: func(c sandbox.Command, r *sandbox.Result) {
		switch c.Args[len(c.Args)-1] {
		case "oom":
			r.Limit = oom
		case "oom, stuck":
			r.Limit, r.Stuck = oom, []string{hung, "process 13 (dd) hangs in the kernel"}
		case "test":
			for _, kv := range c.Env {
				switch kv {
				case "AGENTENV_CANDIDATE=c3":
					r.Limit, r.ExitCode = oom, 127
				case "AGENTENV_CANDIDATE=c4":
					r.Stuck = []string{hung}
				}
			}
		}
	}})
	p := newPlan("test", "oom", "oom, stuck", "true", "true")
	p.Shell = []string{"sh", "-c", "exit 0"}
	p.Parallel = 1
	p.Candidates = append(p.Candidates, specs.Candidate{Name: "last", Run: "true", Repeat: 1})
	r, err := Run(t.Context(), w.options(p))
	assert.NilError(t, err)
	assert.Equal(t, statuses(r), "failed error failed error passed")
	assert.Equal(t, reason(r.Attempts[0]), oom)
	assert.Equal(t, reason(r.Attempts[1]), "cannot be ended: "+hung+", process 13 (dd) hangs in the kernel")
	assert.Equal(t, reason(r.Attempts[2]), "test failed: "+oom)
	assert.Equal(t, reason(r.Attempts[3]), "the test: cannot be ended: "+hung)
	assert.Equal(t, r.Attempts[2].Test.Runs[0].Status, Failed)
}

// A port that was taken is told of where another attempt may have taken it.
func TestClashIsTold(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(*specs.Plan)
		clashes [2]bool
	}{
		{"shared", func(p *specs.Plan) {}, [2]bool{true, true}},
		{"one at a time", func(p *specs.Plan) { p.Parallel = 1 }, [2]bool{}},
		{"private", func(p *specs.Plan) {
			p.Candidates[0].Network, p.Test.Network = specs.NetworkPrivate, specs.NetworkPrivate
		}, [2]bool{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlan("echo 'bind: Address already in use'; exit 2", "echo 'listen EADDRINUSE: :::3000'; exit 1", "true")
			c.change(p)
			tour := &tournament{Options: Options{Plan: p}, attempts: make([]*attempt, len(p.Candidates))}
			log := t.TempDir() + "/log"
			for i, text := range []string{"listen EADDRINUSE: :::3000", "bind: Address already in use"} {
				assert.NilError(t, os.WriteFile(log, []byte(text), 0o600))
				network := []specs.Network{p.Candidates[0].Network, p.Test.Network}[i]
				got := (&attempt{t: tour}).reason(ending{Result: sandbox.Result{ExitCode: 1}}, network, &log)
				assert.Equal(t, strings.HasPrefix(got, "exit status 1; another attempt"), c.clashes[i], got)
			}
		})
	}
	// And through a whole run.
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	r, err := w.run(t.Context(), newPlan("echo 'bind: Address already in use'; exit 2", "echo EADDRINUSE; exit 1", "true"))
	assert.NilError(t, err)
	assert.Assert(t, strings.Contains(reason(r.Attempts[0]), "exit status 1; another attempt"), reason(r.Attempts[0]))
	assert.Assert(t, strings.Contains(reason(r.Attempts[1]), "test failed: exit status 2; another attempt"), reason(r.Attempts[1]))
}

// What this machine cannot give stops a run before anything is made.
func TestCheckComesFirst(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	for _, change := range []func(*specs.Plan){
		func(p *specs.Plan) { p.Network = specs.NetworkPrivate },
		func(p *specs.Plan) { p.Candidates[1].Network = specs.NetworkNAT },
		func(p *specs.Plan) { p.Test.Network = specs.NetworkPrivate },
		func(p *specs.Plan) { p.Limits = &specs.Limits{NoFile: 999_999_999} },
	} {
		p := newPlan("true", "true", "true") // at the level process
		change(p)
		r, err := Run(t.Context(), w.options(p))
		assert.Assert(t, r == nil)
		assert.Assert(t, errors.Is(err, sandbox.ErrSandbox), "%v", err)
	}
	runs, err := List(w.env.RunsDir())
	assert.NilError(t, err)
	assert.Equal(t, len(runs), 0)
}

// With best-effort the run goes on; what is in force, and that it is less, is
// in the result, once.
func TestBestEffort(t *testing.T) {
	notices := make(chan func(string), 1)
	exec := altering{change: func(sandbox.Command, *sandbox.Result) {
		tell := <-notices
		tell("limits: nofile cannot be enforced")
		notices <- tell
	}}
	w := newWorld(t, map[string]string{"f": "x"}, exec)
	p := newPlan("true", "true")
	p.Limits = &specs.Limits{NoFile: 999_999_999, Enforce: specs.BestEffort}
	o := w.options(p)
	back := 0
	o.Notices = func(fn func(string)) func() {
		notices <- fn
		return func() { back++ }
	}
	r, err := Run(t.Context(), o)
	assert.NilError(t, err)
	assert.Equal(t, back, 1)
	assert.DeepEqual(t, r.Warnings, []string{"limits: nofile cannot be enforced"})
	assert.Assert(t, r.Limits == nil || r.Limits.NoFile < 999_999_999, "%+v", r.Limits)
	assert.Equal(t, w.events[0].Isolation, string(specs.Process))
	assert.DeepEqual(t, w.events[0].Networks, []string{"host"})
	assert.DeepEqual(t, w.events[0].Limits, r.Limits)
}

// A plan's networks are told once each, the plan's first.
func TestNetworks(t *testing.T) {
	p := newPlan("true", "true", "true", "true")
	for i, n := range []specs.Network{"host", "nat", "host"} {
		p.Candidates[i].Network = n
	}
	p.Test.Network = specs.NetworkPrivate
	assert.DeepEqual(t, networks(p), []string{"host", "nat", "private"})
	assert.Assert(t, inForce(p) == nil)
	p.Limits = &specs.Limits{NoFile: 64, Enforce: specs.Strict}
	assert.DeepEqual(t, inForce(p), &specs.Limits{NoFile: 64, Enforce: specs.Strict})
}

var someTime = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// A run that was cut short still tells what was in force.
func TestInForceOfAnUnfinishedRun(t *testing.T) {
	dir := t.TempDir()
	p := newPlan("true", "true")
	p.Network, p.Candidates[0].Network = specs.NetworkPrivate, specs.NetworkNAT
	f, err := newFolder(dir, p, someTime)
	assert.NilError(t, err)
	f.record(Event{Type: EventStarted, Time: someTime, Limits: &specs.Limits{PIDs: 9}})
	f.record(Event{Type: EventQueued, Candidate: "c1", Attempt: 1})
	assert.NilError(t, f.close())
	r, err := Load(dir, f.run)
	assert.NilError(t, err)
	assert.Equal(t, r.Network, "private")
	assert.Equal(t, r.Attempts[0].Network, "nat")
	assert.Equal(t, r.Limits.PIDs, 9)
}
