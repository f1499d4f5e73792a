package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/specs"
)

// Options are what a tournament needs.
type Options struct {
	// Env is open and locked; nobody else uses it during the run.
	Env  *env.Env
	Plan *specs.Plan
	// Base is what the candidates start from.
	Base env.Snapshot
	// Saved is the snapshot in which the caller saved work before the run.
	Saved *env.ID
	// Caller is the caller's environment, of which little is passed on.
	Caller []string
	// HomeDir is the caller's home.
	HomeDir string
	// Sinks are the readers of what happens.
	Sinks []Sink
	// Hurry, when closed, takes the grace away from what is being stopped. It
	// may be nil.
	Hurry <-chan struct{}
	// Explain says in one line what an error of the harness is about and what
	// mends it; nil leaves it at the error's own words.
	Explain func(error) string
	// Notices sends what the environment's executor has to say to fn, until back
	// is called; nil leaves it where it goes.
	Notices func(fn func(line string)) (back func())
	// Now is the clock; nil is time.Now.
	Now func() time.Time
}

// ErrInterrupted says that the run's context was cancelled from outside before
// a winner was promoted.
var ErrInterrupted = errors.New("interrupted")

// interruption is [ErrInterrupted] in the words of its cause.
type interruption struct{ error }

func (interruption) Is(target error) bool { return target == ErrInterrupted }
func (i interruption) Unwrap() error      { return i.error }

// Why attempts are stopped, besides an interrupt.
var (
	errWon     = errors.New("another attempt won")
	errTotal   = errors.New("the tournament's time is up")
	errExpired = errors.New("the command's time is up")
)

// tie is the longest time between two passes that counts as none: one
// scheduling step, the kernel's tick at CONFIG_HZ=1000.
const tie = time.Millisecond

// Run runs a tournament. The result is nil only if the run could not begin. The
// error is nil if the tournament has an answer, also when nobody passed or every
// attempt ended in an error ([Result.Status] says which); otherwise it wraps
// [ErrInterrupted] or says what of the harness failed.
func Run(ctx context.Context, o Options) (*Result, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Explain == nil {
		o.Explain = error.Error
	}
	if err := check(o); err != nil {
		return nil, err
	}
	t, err := begin(o)
	if err != nil {
		return nil, err
	}
	if o.Notices != nil {
		defer o.Notices(func(line string) { t.warn("%s", line) })()
	}
	err = t.compete(ctx)
	return t.finish(ctx, t.settle(ctx, err))
}

// tournament is one run in progress.
type tournament struct {
	Options
	folder   *folder
	bus      *bus
	res      *Result
	attempts []*attempt
	baseTest func(context.Context) (ending, error)
	root     string // without symlinks, as /proc shows it
	before   traces
	// passes carries the attempts whose tests passed to the judge.
	passes chan pass
	winner *attempt

	mu       sync.Mutex
	warnings []string
}

// pass is an attempt whose test passed, and when.
type pass struct {
	attempt *attempt
	at      time.Time
}

// begin makes the run's folder and says that the run has started.
func begin(o Options) (*tournament, error) {
	f, err := newFolder(o.Env.RunsDir(), o.Plan, o.Now())
	if err != nil {
		return nil, err
	}
	t := &tournament{Options: o, folder: f}
	t.res = &Result{
		Run: f.run, Name: o.Plan.Name, Status: RunFailed, Base: o.Base.ID, Head: o.Env.Head().ID,
		Saved: o.Saved, Started: o.Now(), Isolation: string(o.Plan.Isolation),
		Network: string(o.Plan.Network), Limits: inForce(o.Plan),
		Attempts: []Attempt{}, Warnings: []string{},
	}
	for i := range o.Plan.Candidates {
		c := &o.Plan.Candidates[i]
		for n := 1; n <= max(c.Repeat, 1); n++ {
			t.attempts = append(t.attempts, newAttempt(t, c, n))
		}
	}
	t.passes = make(chan pass, len(t.attempts))
	t.baseTest = once(t.testBase)
	t.root = realPath(o.Env.Root())
	t.before = tracesBelow(t.root)
	t.bus = newBus(f.run, o.Now, append([]Sink{f.record}, o.Sinks...))
	t.bus.send(Event{
		Type: EventStarted, Name: t.res.Name, Base: t.res.Base,
		Attempts: len(t.attempts), Parallel: o.Plan.Parallel,
		Isolation: t.res.Isolation, Networks: networks(o.Plan), Limits: t.res.Limits,
	})
	return t, nil
}

// compete runs the attempts, and returns when all of them have ended. An error
// means that the harness failed.
func (t *tournament) compete(ctx context.Context) error {
	if d := time.Duration(t.Plan.Timeout); d > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, d, errTotal)
		defer stop()
	}
	g, ctx := errgroup.WithContext(ctx)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	judged := make(chan struct{})
	go func() {
		defer close(judged)
		t.judge(func() { cancel(errWon) })
	}()
	for _, a := range t.attempts {
		a.event(Event{Type: EventQueued})
	}
	slots := make(chan struct{}, t.slots())
	for _, a := range t.attempts {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil { // a free slot and the end may come together
			a.end(t.stopped(context.Cause(ctx)))
			continue
		}
		g.Go(func() error {
			defer func() { <-slots }()
			return a.run(ctx)
		})
	}
	err := g.Wait()
	close(t.passes)
	<-judged
	return err
}

// judge waits for the first pass by the clock, and a tie's length for others:
// of those the earliest in the plan wins. The rest are cancelled at once.
func (t *tournament) judge(cancel func()) {
	first, ok := <-t.passes
	if !ok {
		return
	}
	best := first.attempt
	over := time.NewTimer(tie)
	defer over.Stop()
	for waiting := true; waiting; {
		select {
		case p, ok := <-t.passes:
			waiting = ok
			if ok && p.attempt.index < best.index && p.at.Sub(first.at) <= tie {
				best = p.attempt
			}
		case <-over.C:
			waiting = false
		}
	}
	t.winner = best
	cancel()
	best.event(Event{Type: EventWinner})
}

// settle promotes or keeps the winner and lets the other frozen trees go. The
// error is of the run so far, or its own.
func (t *tournament) settle(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && err == nil {
		err = interruption{cause}
	}
	clean := context.WithoutCancel(ctx)
	if t.winner != nil && err == nil {
		err = t.crown(clean, t.winner)
	}
	for _, a := range t.attempts {
		if a.frozen == nil || a.res.Snapshot != nil {
			continue
		}
		if derr := t.Env.Drop(clean, *a.frozen); derr != nil {
			t.warn("the tree of %s could not be removed: %v", a.title(), derr)
		}
	}
	return err
}

// crown promotes the winner, or keeps it, as the plan says.
func (t *tournament) crown(ctx context.Context, a *attempt) (err error) {
	t.res.Winner = &Winner{Candidate: a.res.Candidate, Attempt: a.res.Attempt}
	message := t.Plan.Name + ": " + a.title()
	for _, w := range a.frozen.Changes.Warnings {
		t.warn("%s: %s", a.title(), w)
	}
	switch {
	case t.Plan.Promote == specs.PromoteTrue:
		var saved *env.Snapshot
		back := t.Env.Divert(func(line string) { t.warn("%s", line) })
		_, saved, err = t.Env.Promote(ctx, *a.frozen, message)
		back()
		if saved != nil {
			t.res.Saved = &saved.ID
			t.bus.send(Event{Type: EventSaved, Snapshot: &saved.ID})
		}
		if err != nil {
			err = fmt.Errorf("promote %s: %w", a.title(), err)
		}
	case t.Plan.Keep != specs.KeepNone:
		if _, err = t.Env.Keep(*a.frozen, message); err != nil {
			err = fmt.Errorf("keep %s: %w", a.title(), err)
		}
	}
	// Whatever failed, the history says how far it came.
	id := a.frozen.ID
	if _, rerr := t.Env.Resolve(string(id)); rerr == nil {
		a.res.Snapshot, t.res.Winner.Snapshot = &id, &id
	}
	if t.Env.Head().ID == id {
		t.res.Promoted = true
		a.event(Event{Type: EventPromoted, Snapshot: &id})
	}
	return err
}

// finish measures what is left, sums up, writes the result and tells the
// readers.
func (t *tournament) finish(ctx context.Context, err error) (*Result, error) {
	r := t.res
	r.Head = t.Env.Head().ID
	for _, a := range t.attempts {
		r.Attempts = append(r.Attempts, a.res)
	}
	leaks, lerr := t.measure(context.WithoutCancel(ctx))
	if lerr != nil {
		t.warn("what was left behind could not be measured: %v", lerr)
	}
	r.Leaks = leaks
	if ferr := t.folder.failed.Load(); ferr != nil {
		t.warn("%s is not complete: %v", t.folder.path(eventsName), bare(*ferr))
	}
	r.Duration = t.since(r.Started)
	r.Warnings = append(r.Warnings, t.warnings...)
	r.sumUp(err, t.Explain)
	if werr := t.folder.write(r); werr != nil {
		err = errors.Join(err, werr)
	}
	t.bus.send(Event{Type: EventLeaks, Leaks: &leaks})
	t.bus.send(Event{Type: EventEnded, Result: r})
	t.bus.close()
	return r, errors.Join(err, t.folder.close())
}

// sumUp sets the status and the error of a run that ended with err, in the words
// of explain.
func (r *Result) sumUp(err error, explain func(error) string) {
	failed := r.Count(Error)
	switch {
	case errors.Is(err, ErrInterrupted):
		r.Status = RunInterrupted
	case errors.Is(err, env.ErrConflict) && r.Winner != nil:
		r.Status = RunPassed
	case err != nil:
		r.Status = RunFailed
	case r.Promoted:
		r.Status = RunPromoted
	case r.Winner != nil:
		r.Status = RunPassed
	case failed > 0:
		r.Status = RunFailed
		err = fmt.Errorf("nobody passed, and %d of %d attempts could not be run: %s", failed, len(r.Attempts), r.firstError())
	default:
		r.Status = RunNoWinner
	}
	if err != nil {
		text := oneLine(explain(err))
		r.Error = &text
	}
}

// oneLine makes one line of the several that joined errors have.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

// firstError is the reason of the first attempt that the harness could not run.
func (r *Result) firstError() string {
	for _, a := range r.Attempts {
		if a.Status == Error && a.Reason != nil {
			return a.Candidate + ": " + *a.Reason
		}
	}
	return ""
}

// warn tells the user something once.
func (t *tournament) warn(format string, args ...any) {
	text := oneLine(fmt.Sprintf(format, args...))
	t.mu.Lock()
	known := slices.Contains(t.warnings, text)
	if !known {
		t.warnings = append(t.warnings, text)
	}
	t.mu.Unlock()
	if known {
		return
	}
	t.bus.send(Event{Type: EventWarning, Reason: text})
}

// since is the time from start to now in seconds.
func (t *tournament) since(start time.Time) float64 { return t.Now().Sub(start).Seconds() }

// stopped is the verdict on an attempt that was stopped because of cause.
func (t *tournament) stopped(cause error) verdict {
	switch {
	case errors.Is(cause, errTotal):
		return verdict{Timeout, fmt.Sprintf("the tournament's timeout of %s passed", time.Duration(t.Plan.Timeout))}
	case errors.Is(cause, errWon):
		return verdict{Cancelled, "another attempt passed first"}
	case errors.Is(cause, errHarness):
		return verdict{Cancelled, "the run failed"}
	}
	return verdict{Cancelled, "interrupted"}
}

// errHarness marks an error that ends the whole run.
var errHarness = errors.New("the harness failed")

// fatal says whether err will befall every attempt: the store is damaged.
func fatal(err error) bool {
	return errors.Is(err, forks.ErrDamaged) || errors.Is(err, env.ErrDamaged)
}
