package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/specs"
)

// attempt is one run of a candidate. Only its own goroutine writes to it until
// it has ended.
type attempt struct {
	t         *tournament
	candidate *specs.Candidate
	// index is the attempt's place in the plan; of is how many its candidate
	// has.
	index, of int
	res       Attempt
	slot      time.Time
	frozen    *env.Frozen
	// cleanup is what to do once the verdict is known, last first.
	cleanup []func(context.Context) error
}

// verdict is how an attempt ends, and why.
type verdict struct {
	status Status
	reason string
}

func newAttempt(t *tournament, c *specs.Candidate, n int) *attempt {
	return &attempt{
		t: t, candidate: c, index: len(t.attempts), of: max(c.Repeat, 1),
		res: Attempt{Candidate: c.Name, Command: commandLine(c), Attempt: n, Network: string(c.Network), Tampered: []string{}},
	}
}

// commandMax is how many characters of a command tell it from others.
const commandMax = 60

// commandLine is a candidate's command in a line of bounded length.
func commandLine(c *specs.Candidate) string {
	line, more, _ := strings.Cut(strings.TrimSpace(c.Run), "\n")
	if c.Script != "" {
		line = c.Script
	}
	r := []rune(strings.ToValidUTF8(line, "?"))
	if len(r) > commandMax {
		return string(r[:commandMax]) + "…"
	}
	if more != "" {
		return string(r) + " …"
	}
	return string(r)
}

// title names the attempt in one word or two.
func (a *attempt) title() string {
	if a.of > 1 {
		return fmt.Sprintf("%s #%d", a.res.Candidate, a.res.Attempt)
	}
	return a.res.Candidate
}

func (a *attempt) event(e Event) {
	e.Candidate, e.Attempt, e.Of = a.res.Candidate, a.res.Attempt, a.of
	a.t.bus.send(e)
}

// logPath is where the log of the candidate's command, or of its test, goes.
func (a *attempt) logPath(test bool) string {
	kind := ".log"
	if test {
		kind = ".test.log"
	}
	return a.t.folder.path(fmt.Sprintf("%s.%d%s", fileName(a.res.Candidate, a.index), a.res.Attempt, kind))
}

// key names one of the attempt's forks.
func (a *attempt) key(what string) forks.Key {
	return forks.Key(fmt.Sprintf("%s.%d.%s", a.t.res.Run, a.index, what))
}

// run takes the attempt from its fork to its verdict and cleans up. An error
// ends the tournament.
func (a *attempt) run(ctx context.Context) error {
	a.slot = a.t.Now()
	a.res.Queued = a.slot.Sub(a.t.res.Started).Seconds()
	v, err := a.try(ctx)
	now := a.t.Now()
	a.end(v)
	if v.status == Passed {
		a.t.passes <- pass{a, now}
	}
	a.clean(context.WithoutCancel(ctx))
	return err
}

// end records the verdict.
func (a *attempt) end(v verdict) {
	v.reason = oneLine(v.reason)
	a.res.Status = v.status
	if v.reason != "" {
		a.res.Reason = &v.reason
	}
	if a.slot.IsZero() {
		a.res.Queued = a.t.since(a.t.res.Started)
	} else {
		a.res.Duration = a.t.since(a.slot)
	}
	a.event(Event{Type: EventStatus, Status: v.status, Reason: v.reason, Changes: a.res.Changes, Duration: a.res.Duration})
}

// clean removes the attempt's forks, and its frozen tree if it cannot win.
func (a *attempt) clean(ctx context.Context) {
	var errs []error
	for i := len(a.cleanup) - 1; i >= 0; i-- {
		errs = append(errs, a.cleanup[i](ctx))
	}
	if a.frozen != nil && a.res.Status != Passed {
		errs = append(errs, a.t.Env.Drop(ctx, *a.frozen))
		a.frozen = nil
	}
	if err := errors.Join(errs...); err != nil {
		a.t.warn("%s was not cleaned up: %v", a.title(), err)
	}
}

// try runs candidate and test. Its error is set if it will befall every attempt.
func (a *attempt) try(ctx context.Context) (verdict, error) {
	start := a.t.Now()
	fork, err := a.t.Env.Fork(ctx, a.key("run"), a.t.Base.ID, level(a.t.Plan))
	if err != nil {
		return a.failure(ctx, "fork the base", err)
	}
	a.cleanup = append(a.cleanup, fork.Remove)
	a.res.Fork = a.t.since(start)
	a.event(Event{Type: EventForked, Duration: a.res.Fork})
	for _, w := range fork.Tree().Warnings {
		a.t.warn("%s", w)
	}

	end, err := a.runCandidate(ctx, fork)
	if err != nil {
		return a.failure(ctx, "run the candidate", err)
	}
	if v, ok := a.judgeCandidate(end); !ok {
		return v, nil
	}
	// The end may have come between two steps.
	if cause := context.Cause(ctx); cause != nil {
		return a.t.stopped(cause), nil
	}
	frozen, err := fork.Freeze(ctx, a.t.Base.ID)
	if err != nil && isGone(fork) {
		return verdict{Failed, "it removed its own tree"}, nil
	}
	if errors.Is(err, forks.ErrUnkeepable) {
		return verdict{Failed, err.Error()}, nil
	}
	if err != nil {
		return a.failure(ctx, "freeze the tree", err)
	}
	changes := len(frozen.Changes.List)
	a.frozen, a.res.Changes = &frozen, &changes
	a.event(Event{Type: EventFrozen, Changes: &changes})
	return a.test(ctx, frozen)
}

// isGone says whether the fork's tree was removed, or moved away: without
// namespaces a candidate can do that. What a mounted tree is made of is out of
// its reach.
func isGone(fork *env.Fork) bool {
	if fork.Tree().Mount.Overlay != nil {
		return false
	}
	st, err := os.Lstat(fork.Tree().Mount.Dir)
	return errors.Is(err, fs.ErrNotExist) || err == nil && !st.IsDir()
}

// failure is the verdict when the harness could not do something for the
// attempt. The error is set if no other attempt can fare better.
func (a *attempt) failure(ctx context.Context, what string, err error) (verdict, error) {
	if cause := context.Cause(ctx); cause != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, cause)) {
		return a.t.stopped(cause), nil
	}
	v := verdict{Error, fmt.Sprintf("cannot %s: %s", what, a.t.Explain(err))}
	if fatal(err) {
		return v, fmt.Errorf("%w: cannot %s: %w", errHarness, what, err)
	}
	return v, nil
}

// runCandidate runs the candidate's command in its fork.
func (a *attempt) runCandidate(ctx context.Context, fork *env.Fork) (ending, error) {
	c := a.candidate
	cmd := command{
		fork: fork, run: c.Run, script: c.Script, stdin: c.Stdin,
		name: fileName(c.Name, a.index) + ".candidate", workdir: c.Workdir,
		network: c.Network, timeout: time.Duration(c.Timeout), log: a.logPath(false),
		env:     a.t.environ(c.Env, c.Name, a.res.Attempt),
		started: func() { a.event(Event{Type: EventRunning}) },
		line:    func(s string, n int64) { a.event(Event{Type: EventOutput, Line: s, Dropped: n}) },
	}
	end, err := a.t.run(ctx, cmd)
	if err != nil {
		return end, err
	}
	a.res.Log = &cmd.log
	a.res.ExitCode, a.res.Signal = end.codes()
	a.event(Event{Type: EventExited, ExitCode: a.res.ExitCode, Signal: a.res.Signal, Duration: end.Duration.Seconds()})
	return end, nil
}

// judgeCandidate says whether the candidate did its part, or how it failed.
func (a *attempt) judgeCandidate(end ending) (verdict, bool) {
	switch {
	case len(end.Stuck) > 0:
		return verdict{Error, end.stuck()}, false
	case errors.Is(end.stopped, errExpired):
		return verdict{Timeout, fmt.Sprintf("timed out after %s", time.Duration(a.candidate.Timeout))}, false
	case end.stopped != nil:
		return a.t.stopped(end.stopped), false
	case end.full:
		return a.noRoom(end.reason()), false
	case !end.ok():
		return verdict{Failed, a.reason(end, a.candidate.Network, a.res.Log)}, false
	}
	return verdict{}, true
}

// reason is how a command failed, in words; log is its log.
func (a *attempt) reason(end ending, network specs.Network, log *string) string {
	text := end.reason()
	switch {
	case end.Limit != "":
	case network == specs.NetworkPrivate:
		text += cutOff(*log)
	case network != specs.NetworkNAT && min(a.t.Plan.Parallel, len(a.t.attempts)) > 1:
		text += clash(*log)
	}
	return text
}

// test runs the test in a fork of the frozen tree.
func (a *attempt) test(ctx context.Context, frozen env.Frozen) (verdict, error) {
	fork, err := a.t.Env.ForkFrozen(ctx, a.key("test"), frozen, level(a.t.Plan))
	if err != nil {
		return a.failure(ctx, "fork the frozen tree", err)
	}
	a.cleanup = append(a.cleanup, fork.Remove)
	cmd := a.t.testCommand(fork, a.candidate.Name, a.res.Attempt)
	cmd.log = a.logPath(true)
	cmd.started = func() { a.event(Event{Type: EventTesting}) }
	cmd.line = func(s string, n int64) { a.event(Event{Type: EventOutput, Test: true, Line: s, Dropped: n}) }
	end, err := a.t.run(ctx, cmd)
	if err != nil {
		return a.failure(ctx, "run the test", err)
	}
	a.res.TestLog = &cmd.log
	v := a.judgeTest(ctx, end)
	run := TestRun{Status: v.status, Duration: end.Duration.Seconds()}
	run.ExitCode, run.Signal = end.codes()
	a.res.Test = &Test{Network: string(a.t.Plan.Test.Network), Runs: []TestRun{run}}
	a.event(Event{Type: EventTested, Test: true, Status: v.status, ExitCode: run.ExitCode, Signal: run.Signal, Duration: run.Duration})
	return v, nil
}

// judgeTest turns the end of the test into a verdict.
func (a *attempt) judgeTest(ctx context.Context, end ending) verdict {
	failed := func() verdict {
		return verdict{Failed, "test failed: " + a.reason(end, a.t.Plan.Test.Network, a.res.TestLog)}
	}
	switch {
	case len(end.Stuck) > 0:
		return verdict{Error, "the test: " + end.stuck()}
	case errors.Is(end.stopped, errExpired):
		return verdict{Timeout, fmt.Sprintf("the test timed out after %s", time.Duration(a.t.Plan.Test.Timeout))}
	case end.stopped != nil:
		return a.t.stopped(end.stopped)
	case end.ok():
		return verdict{Passed, ""}
	case end.full:
		return a.noRoom("the test: " + end.reason())
	case !end.cannotRun():
		return failed()
	}
	base, err := a.t.baseTest(ctx)
	switch {
	case err != nil:
		v, _ := a.failure(ctx, "run the test on base", err)
		return v
	case len(base.Stuck) > 0:
		return verdict{Error, "the test on base: " + base.stuck()}
	case base.stopped != nil && !errors.Is(base.stopped, errExpired):
		return a.t.stopped(base.stopped)
	case base.cannotRun():
		return verdict{Error, "the test cannot run on base either: " + base.reason()}
	}
	return failed()
}

// testBase runs the test on a fork of base. A test that cannot run there either
// is the harness's fault, not that of a candidate.
func (t *tournament) testBase(ctx context.Context) (_ ending, err error) {
	fork, err := t.Env.Fork(ctx, forks.Key(t.res.Run+".base.test"), t.Base.ID, level(t.Plan))
	if err != nil {
		return ending{}, err
	}
	defer func() { err = errors.Join(err, fork.Remove(context.WithoutCancel(ctx))) }()
	cmd := t.testCommand(fork, "", 0)
	cmd.log = t.folder.path("base.test.log")
	return t.run(ctx, cmd)
}

// once makes of f a function that runs it at most once and gives every caller
// the same answer.
func once(f func(context.Context) (ending, error)) func(context.Context) (ending, error) {
	var o sync.Once
	var end ending
	var err error
	return func(ctx context.Context) (ending, error) {
		o.Do(func() { end, err = f(ctx) })
		return end, err
	}
}

// ending is how a command ended.
type ending struct {
	sandbox.Result
	// stopped is why it was stopped; nil if it ended by itself.
	stopped error
	// lastLine is the last line of its output, if it could not run.
	lastLine string
	// full says that it failed, by no limit, and that the disk was full.
	full bool
}

func (e ending) ok() bool { return e.ExitCode == 0 && e.Signal == 0 && e.Limit == "" }

// cannotRun says that something was not found or not executable.
func (e ending) cannotRun() bool {
	return e.Signal == 0 && e.Limit == "" && (e.ExitCode == exitNotFound || e.ExitCode == exitNotExecutable)
}

// The exit codes of a shell for a command that is not there, or no program
// (POSIX, 2.8.2).
const (
	exitNotExecutable = 126
	exitNotFound      = 127
)

// reason is the end in words.
func (e ending) reason() string {
	if e.NotStarted {
		return e.Reason
	}
	if e.Limit != "" {
		return e.Limit
	}
	if e.Signal != 0 {
		return "killed by " + signalName(e.Signal)
	}
	s := fmt.Sprintf("exit status %d", e.ExitCode)
	if e.cannotRun() && e.lastLine != "" {
		s += ": " + e.lastLine
	}
	return s
}

// stuck names what could not be ended.
func (e ending) stuck() string { return "cannot be ended: " + strings.Join(e.Stuck, ", ") }

func (e ending) codes() (code *int, signal *string) {
	if e.Signal != 0 {
		name := signalName(e.Signal)
		signal = &name
	}
	return &e.ExitCode, signal
}
