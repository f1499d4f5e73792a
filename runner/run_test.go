package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/specs"
)

func TestFirstPassByTheClock(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "old"}, plainExecutor{})
	start := time.Now()
	r, err := w.run(t.Context(), newPlan("grep -q new f", "sleep 60; echo new1 >f", "echo new2 >f", "echo bad >f; exec sleep 60"))
	assert.NilError(t, err)
	assert.Assert(t, time.Since(start) < 30*time.Second)
	assert.Equal(t, statuses(r), "cancelled passed cancelled")
	assert.Equal(t, reason(r.Attempts[0]), "another attempt passed first")
	assert.Equal(t, r.Winner.Candidate, "c2")
	assert.Equal(t, r.Status, RunPromoted)
	assert.Assert(t, r.Promoted)
	assert.Equal(t, r.Head, *r.Winner.Snapshot)
	assert.Equal(t, *r.Attempts[1].Snapshot, r.Head)
	assert.Equal(t, *w.env.Head().Parent, r.Base)
	assert.Equal(t, w.env.Head().Kind, env.KindTournament)
	assert.Equal(t, w.env.Head().Message, "trial: c2")
	assert.Equal(t, w.work("f"), "new2\n")
	assert.Equal(t, *r.Attempts[1].Changes, 1)
	assert.Equal(t, len(w.env.Log()), 2, "the losers are in no history")
}

func TestNobodyPasses(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "old"}, plainExecutor{})
	head := w.env.Head().ID
	r, err := w.run(t.Context(), newPlan("false", "touch a", "exit 3"))
	assert.NilError(t, err)
	assert.Equal(t, r.Status, RunNoWinner)
	assert.Assert(t, r.Winner == nil && !r.Promoted && r.Error == nil)
	assert.Equal(t, statuses(r), "failed failed")
	assert.Equal(t, reason(r.Attempts[0]), "test failed: exit status 1")
	assert.Equal(t, reason(r.Attempts[1]), "exit status 3")
	assert.Equal(t, *r.Attempts[1].ExitCode, 3)
	assert.Assert(t, r.Attempts[1].Test == nil && r.Attempts[1].TestLog == nil, "a candidate that failed is not tested")
	assert.Equal(t, w.env.Head().ID, head)
	assert.Equal(t, w.work("a"), "absent")
	assert.Equal(t, len(w.env.Log()), 1)
}

// A candidate that changes nothing wins like any other.
func TestNothingChangedWins(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	r, err := w.run(t.Context(), newPlan("true", "true"))
	assert.NilError(t, err)
	assert.Equal(t, r.Status, RunPromoted)
	assert.Equal(t, *r.Attempts[0].Changes, 0)
	assert.Assert(t, r.Head != r.Base)
	assert.Equal(t, w.work("f"), "x")
}

// The four ways to end without passing have four words.
func TestEveryStatusItsWord(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	p := newPlan("test -e ok", "sleep 60", "exit 7", "true", "kill -SEGV $$", "nonexistent-command", "sleep 60")
	p.Candidates[0].Timeout = specs.Duration(300 * time.Millisecond)
	p.Timeout = specs.Duration(3 * time.Second)
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	assert.Equal(t, statuses(r), "timeout failed failed failed failed timeout")
	assert.Equal(t, reason(r.Attempts[0]), "timed out after 300ms")
	assert.Equal(t, reason(r.Attempts[1]), "exit status 7")
	assert.Equal(t, reason(r.Attempts[2]), "test failed: exit status 1")
	assert.Equal(t, reason(r.Attempts[3]), "killed by SIGSEGV")
	assert.Equal(t, *r.Attempts[3].Signal, "SIGSEGV")
	assert.Equal(t, *r.Attempts[3].ExitCode, 139)
	assert.Assert(t, strings.HasPrefix(reason(r.Attempts[4]), "exit status 127: "), reason(r.Attempts[4]))
	assert.Assert(t, strings.Contains(reason(r.Attempts[4]), "nonexistent-command"), reason(r.Attempts[4]))
	assert.Equal(t, reason(r.Attempts[5]), "the tournament's timeout of 3s passed")
}

// However a test does not say yes, the report tells how.
func TestWaysToFailATest(t *testing.T) {
	for _, c := range []struct{ test, status, reason string }{
		{"kill -SEGV $$", "failed", "test failed: killed by SIGSEGV"},
		{"exit 77", "failed", "test failed: exit status 77"},
		{"exec sleep 60", "timeout", "the test timed out after 300ms"},
		// It is there on base, and the candidate took it away.
		{"./tool", "failed", "test failed: exit status 127: "},
		{"./data", "error", "the test cannot run on base either: exit status 126: "},
		{"/nonexistent/make", "error", "the test cannot run on base either: exit status 127: "},
	} {
		t.Run(c.test, func(t *testing.T) {
			w := newWorld(t, map[string]string{"tool": "#!/bin/sh\n", "data": "x"}, plainExecutor{})
			p := newPlan(c.test, "rm tool", "rm -f tool; touch other")
			p.Test.Timeout = specs.Duration(300 * time.Millisecond)
			r, err := w.run(t.Context(), p)
			assert.NilError(t, err)
			assert.Equal(t, statuses(r), c.status+" "+c.status)
			assert.Assert(t, strings.HasPrefix(reason(r.Attempts[0]), c.reason), reason(r.Attempts[0]))
			assert.Equal(t, r.Attempts[0].Test.Runs[0].Status, Status(c.status))
			assert.Equal(t, r.Status, map[bool]RunStatus{true: RunFailed, false: RunNoWinner}[c.status == "error"])
		})
	}
}

// The test is tried on base once, however many ask.
func TestBaseIsTestedOnce(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	count := filepath.Join(t.TempDir(), "count")
	p := newPlan(`[ "$AGENTENV_CANDIDATE" ] || echo base >>`+count+`; exit 127`, "true", "true", "true", "true")
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	assert.Equal(t, statuses(r), "error error error error")
	data, err := os.ReadFile(count)
	assert.NilError(t, err)
	assert.Equal(t, string(data), "base\n")
}

func TestInterrupt(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	head := w.env.Head().ID
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("terminated")
	p := newPlan("true", "echo 1 >f; exec sleep 60", "exec sleep 60", "true")
	p.Parallel = 2
	o := w.options(p)
	o.Sinks = append(o.Sinks, func(e Event) {
		if e.Type == EventRunning && e.Candidate == "c2" {
			cancel(stop)
		}
	})
	r, err := Run(ctx, o)
	assert.Assert(t, errors.Is(err, ErrInterrupted) && errors.Is(err, stop), "%v", err)
	assert.Equal(t, err.Error(), "terminated")
	w.checkResult(r)
	assert.Equal(t, statuses(r), "cancelled cancelled cancelled")
	assert.Equal(t, reason(r.Attempts[2]), "interrupted")
	assert.Equal(t, r.Status, RunInterrupted)
	assert.Equal(t, *r.Error, "terminated")
	assert.Equal(t, w.env.Head().ID, head)
}

// An interrupt while the losers are being ended comes before the promotion.
func TestInterruptAfterThePass(t *testing.T) {
	t.Parallel()
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	head := w.env.Head().ID
	ctx, cancel := context.WithCancel(t.Context())
	o := w.options(newPlan("true", "true", `trap "" TERM; while :; do sleep 0.1; done`))
	o.Sinks = append(o.Sinks, func(e Event) {
		if e.Type == EventWinner {
			cancel()
		}
	})
	r, err := Run(ctx, o)
	assert.Assert(t, errors.Is(err, ErrInterrupted), "%v", err)
	w.checkResult(r)
	assert.Equal(t, r.Status, RunInterrupted)
	assert.Assert(t, r.Winner == nil && !r.Promoted)
	assert.Equal(t, w.env.Head().ID, head)
}

// The second interrupt takes the grace away.
func TestHurry(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	ctx, cancel := context.WithCancel(t.Context())
	hurry := make(chan struct{})
	p := newPlan("true", `trap "" TERM; echo ready; while :; do sleep 0.1; done`)
	p.Grace = specs.Duration(time.Hour)
	o := w.options(p)
	o.Hurry = hurry
	o.Sinks = append(o.Sinks, func(e Event) {
		if e.Type == EventOutput {
			cancel()
			time.AfterFunc(100*time.Millisecond, func() { close(hurry) })
		}
	})
	r, err := Run(ctx, o)
	assert.Assert(t, errors.Is(err, ErrInterrupted), "%v", err)
	w.checkResult(r)
}

// An attempt holds its slot until its test is done.
func TestSlots(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	p := newPlan("exit 1", make([]string, 40)...)
	for i := range p.Candidates {
		p.Candidates[i].Run = "echo >g"
	}
	p.Parallel = 2
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	assert.Equal(t, r.Count(Failed), 40)
	at, most := 0, 0
	var order []string
	for _, e := range w.events {
		switch e.Type {
		case EventRunning:
			at++
			order = append(order, e.Candidate)
		case EventStatus:
			at--
		}
		most = max(most, at)
	}
	assert.Equal(t, most, 2)
	assert.Equal(t, order[0] == "c1" || order[0] == "c2", true)
	assert.Assert(t, r.Attempts[39].Queued > r.Attempts[0].Queued)
}

// Of the caller's environment little passes, and a command knows where it is.
func TestEnvironment(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	p := newPlan(`[ "$AGENTENV_CANDIDATE" = c1 ] && [ "$A" = plan ]`, "env >vars")
	p.Env = map[string]string{"A": "plan", "B": "plan"}
	p.Candidates[0].Env = map[string]string{"A": "own", "AGENTENV_RUN": "fake"}
	o := w.options(p)
	o.Caller = []string{"PATH=" + os.Getenv("PATH"), "HOME=/h", "LC_ALL=C", "TZ=UTC", "SECRET=s", "GITHUB_ENV=/x", "GITHUB_OUTPUT=/y", "LD_PRELOAD="}
	r, err := Run(t.Context(), o)
	assert.NilError(t, err)
	w.checkResult(r)
	assert.Equal(t, r.Status, RunPromoted, "%+v", r.Attempts)
	vars := "\n" + w.work("vars")
	for _, want := range []string{
		"HOME=/h", "LC_ALL=C", "TZ=UTC", "A=own", "B=plan", "AGENTENV=1", "AGENTENV_RUN=" + r.Run,
		"AGENTENV_CANDIDATE=c1", "AGENTENV_ATTEMPT=1", "AGENTENV_BASE=" + string(r.Base), "AGENTENV_TREE=" + w.root,
	} {
		assert.Assert(t, strings.Contains(vars, "\n"+want), "%s is missing:%s", want, vars)
	}
	assert.Assert(t, !strings.Contains(vars, "SECRET") && !strings.Contains(vars, "GITHUB") && !strings.Contains(vars, "LD_PRELOAD"), vars)
}

func TestTooLongAVariable(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	p := newPlan("true", "true")
	p.Candidates[0].Env = map[string]string{"BIG": strings.Repeat("x", 140<<10)}
	r, err := Run(t.Context(), w.options(p))
	assert.Assert(t, r == nil)
	assert.Assert(t, errors.Is(err, env.ErrUsage), "%v", err)
	assert.ErrorContains(t, err, "BIG")
	runs, err := List(w.env.RunsDir())
	assert.NilError(t, err)
	assert.Equal(t, len(runs), 0, "nothing was started")
}

// A text that is too long for an argument runs all the same.
func TestLongScript(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	pad := strings.Repeat("# filling\n", 20<<10)
	p := newPlan(pad+"grep -q yes f", pad+"echo yes >f\nfalse | true\n", pad+"false\necho yes >f")
	p.Candidates[0].Name = "test" // its file is not the test's
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	assert.Equal(t, r.Winner.Candidate, "test")
	// The shell's -e holds for it too.
	assert.Assert(t, r.Attempts[1].Status == Failed || r.Attempts[1].Status == Cancelled, "%+v", r.Attempts[1])
}

func TestScriptStdinWorkdirRepeat(t *testing.T) {
	w := newWorld(t, map[string]string{"sub/f": "x"}, plainExecutor{})
	dir := t.TempDir()
	script, in := filepath.Join(dir, "it's a script.sh"), filepath.Join(dir, "in")
	assert.NilError(t, os.WriteFile(script, []byte("#!/bin/sh\ncat >$AGENTENV_ATTEMPT\n[ $AGENTENV_ATTEMPT = 2 ]\n"), 0o644))
	assert.NilError(t, os.WriteFile(in, []byte("input"), 0o644))
	p := newPlan("grep -q input sub/2", "")
	c := &p.Candidates[0]
	c.Run, c.Script, c.Stdin, c.Workdir, c.Repeat = "", script, in, "sub", 3
	p.Parallel = 1
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	assert.Equal(t, statuses(r), "failed passed cancelled")
	assert.Equal(t, r.Winner.Attempt, 2)
	assert.Equal(t, w.work("sub/2"), "input")
	assert.Equal(t, w.env.Head().Message, "trial: c1 #2")

	c.Stdin = dir
	_, err = Run(t.Context(), w.options(p))
	assert.ErrorContains(t, err, "not a regular file")
	c.Stdin = filepath.Join(dir, "missing")
	_, err = Run(t.Context(), w.options(p))
	assert.Assert(t, errors.Is(err, env.ErrNotFound), "%v", err)
}

func TestNotPromoted(t *testing.T) {
	for _, keep := range []specs.Keep{specs.KeepWinner, specs.KeepNone} {
		w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
		head := w.env.Head().ID
		p := newPlan("true", "echo y >f")
		p.Promote, p.Keep = specs.PromoteFalse, keep
		r, err := w.run(t.Context(), p)
		assert.NilError(t, err)
		assert.Equal(t, r.Status, RunPassed)
		assert.Equal(t, w.env.Head().ID, head)
		assert.Equal(t, w.work("f"), "x")
		kept := keep == specs.KeepWinner
		assert.Equal(t, r.Winner.Snapshot != nil, kept)
		assert.Equal(t, len(w.env.Log()), map[bool]int{true: 2, false: 1}[kept])
	}
}

// Work that was done by hand during the run is saved, and named. The backend is
// one whose work tree everybody can reach from outside.
func TestWorkDuringTheRunIsSaved(t *testing.T) {
	plain := slices.DeleteFunc(slices.Clone(testBackends), func(b forks.Backend) bool { return b.Name != "copy" })
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{}, plain...)
	mine := filepath.Join(w.env.WorkTree(), "mine")
	r, err := w.run(t.Context(), newPlan("true", "echo y >f; echo precious >"+mine))
	assert.NilError(t, err)
	assert.Assert(t, r.Saved != nil)
	assert.Equal(t, w.work("mine"), "absent")
	v, err := w.env.Changes(t.Context(), *r.Saved)
	assert.NilError(t, err)
	assert.Assert(t, slices.ContainsFunc(v.List, func(c forks.Change) bool { return c.Path == "mine" }), "%v", v.List)
}

// refusing is an executor that cannot make a sandbox.
type refusing struct{ err error }

func (r refusing) Start(context.Context, sandbox.Command) (sandbox.Process, error) { return nil, r.err }

func TestNoSandbox(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, refusing{&sandbox.Error{What: "user namespace", Err: os.ErrPermission, Fix: "sysctl x=1"}})
	r, err := w.run(t.Context(), newPlan("true", "true", "true"))
	assert.NilError(t, err)
	assert.Equal(t, statuses(r), "error error")
	assert.Equal(t, reason(r.Attempts[0]), "cannot run the candidate: cannot make the sandbox's user namespace: permission denied; sysctl x=1")
	assert.Equal(t, r.Status, RunFailed)
	assert.Assert(t, strings.Contains(*r.Error, "2 of 2") && strings.Contains(*r.Error, "sysctl x=1"), *r.Error)
}

// 2 GB must not be slower to read because of us, nor stay in memory; a smaller
// amount shows that the log is cut and says so.
func TestMuchOutput(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	r, err := w.run(t.Context(), newPlan("true", "echo first; yes 0123456789abcdef | head -c 100000000; echo; echo last"))
	assert.NilError(t, err)
	assert.Equal(t, r.Status, RunPromoted)
	data, err := os.ReadFile(*r.Attempts[0].Log)
	assert.NilError(t, err)
	text := string(data)
	assert.Assert(t, len(text) <= sandbox.DefaultLogLimit+200, "%d", len(text))
	assert.Assert(t, strings.HasPrefix(text, "first\n") && strings.HasSuffix(text, "\nlast\n"))
	assert.Assert(t, strings.Contains(text, "bytes dropped"))
	var lines, dropped int64
	for _, e := range w.events {
		if e.Type == EventOutput {
			dropped += e.Dropped
			if e.Line != "" {
				lines++
			}
		}
	}
	assert.Assert(t, dropped > 0 && lines > 0, "%d %d", lines, dropped)
	const printed = 100000000/17 + 4
	assert.Assert(t, lines+dropped > printed-10 && lines+dropped <= printed, "%d lines and %d dropped of %d", lines, dropped, printed)
}

// A reader that never returns holds up nothing but the end, and that not long.
func TestStuckReader(t *testing.T) {
	t.Parallel()
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	release := make(chan struct{})
	defer close(release)
	o := w.options(newPlan("true", "seq 10000"))
	o.Sinks = append(o.Sinks, func(Event) { <-release })
	start := time.Now()
	r, err := Run(t.Context(), o)
	assert.NilError(t, err)
	w.checkResult(r)
	assert.Assert(t, time.Since(start) < drainWait+20*time.Second)
}

// Each candidate's events come in one order, and all readers see the same.
func TestOrderOfEvents(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	r, err := w.run(t.Context(), newPlan("echo testing", "echo hello"))
	assert.NilError(t, err)
	var got []string
	for _, e := range w.events {
		assert.Equal(t, e.Run, r.Run)
		got = append(got, string(e.Type)+e.Line)
	}
	assert.Equal(t, strings.Join(got, " "), "started queued forked running outputhello exited frozen testing outputtesting tested status winner promoted leaks ended")
	var kept []string
	assert.NilError(t, readEvents(filepath.Join(w.env.RunsDir(), r.Run, eventsName), func(e Event) { kept = append(kept, string(e.Type)) }))
	assert.Equal(t, strings.Join(kept, " "), "started queued forked running exited frozen testing tested status winner promoted leaks")
}

func TestPS10FreshProgramsStart(t *testing.T) {
	w := newWorld(t, map[string]string{"tool": "#!/bin/sh\nexit 1\n"}, plainExecutor{})
	script := filepath.Join(t.TempDir(), "s.sh")
	assert.NilError(t, os.WriteFile(script, []byte("#!/bin/sh\n"), 0o644))
	p := newPlan("./tool", make([]string, 30)...)
	for i := range p.Candidates {
		p.Candidates[i].Run, p.Candidates[i].Script = "", script
	}
	p.Parallel = 8
	r, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	for _, a := range r.Attempts {
		assert.Equal(t, reason(a), "test failed: exit status 1", fmt.Sprint(a.Candidate))
	}
}
