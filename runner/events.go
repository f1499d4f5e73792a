package runner

import (
	"sync"
	"time"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/specs"
)

// EventType says what happened.
type EventType string

// The events of a run, in the order in which an attempt meets them.
const (
	// EventStarted: the run began; Name, Base, Attempts, Parallel and what is in
	// force are set.
	EventStarted EventType = "started"
	// EventQueued: an attempt waits for a slot.
	EventQueued EventType = "queued"
	// EventForked: its fork is ready; Duration is what that took.
	EventForked EventType = "forked"
	// EventRunning: its candidate's command was started.
	EventRunning EventType = "running"
	// EventOutput: a line of output, of the test if Test is true, cut to 4 KiB
	// with … at its end; of one that was rewritten in place, as progress is
	// shown, the last writing. Dropped counts lines before it that were left
	// out.
	EventOutput EventType = "output"
	// EventExited: the candidate ended, with everything it started.
	EventExited EventType = "exited"
	// EventFrozen: its tree is kept; Changes is set.
	EventFrozen EventType = "frozen"
	// EventTesting and EventTested: the test was started, and ended.
	EventTesting EventType = "testing"
	EventTested  EventType = "tested"
	// EventStatus: the attempt has its verdict.
	EventStatus EventType = "status"
	// EventWinner: an attempt won; the others are being cancelled.
	EventWinner EventType = "winner"
	// EventSaved: work that no snapshot held was saved as Snapshot.
	EventSaved EventType = "saved"
	// EventPromoted: HEAD is Snapshot.
	EventPromoted EventType = "promoted"
	// EventWarning: Reason is something the user should know.
	EventWarning EventType = "warning"
	// EventLeaks: what was left behind was measured.
	EventLeaks EventType = "leaks"
	// EventEnded: the last event; Result is the whole result.
	EventEnded EventType = "ended"
)

// Event is one thing that happened. Fields that do not apply are absent.
type Event struct {
	Time     time.Time `json:"time"`
	Type     EventType `json:"type"`
	Run      string    `json:"run"`
	Name     string    `json:"name,omitempty"`
	Base     env.ID    `json:"base,omitempty"`
	Attempts int       `json:"attempts,omitempty"`
	Parallel int       `json:"parallel,omitempty"`
	// Isolation, Networks and Limits are in force; Networks are those of all
	// commands, the plan's first, each once.
	Isolation string        `json:"isolation,omitempty"`
	Networks  []string      `json:"networks,omitempty"`
	Limits    *specs.Limits `json:"limits,omitempty"`
	Candidate string        `json:"candidate,omitempty"`
	// Attempt counts from 1; Of is how many attempts its candidate has.
	Attempt  int     `json:"attempt,omitempty"`
	Of       int     `json:"of,omitempty"`
	Test     bool    `json:"test,omitempty"`
	Line     string  `json:"line,omitempty"`
	Dropped  int64   `json:"dropped,omitempty"`
	Status   Status  `json:"status,omitempty"`
	ExitCode *int    `json:"exit_code,omitempty"`
	Signal   *string `json:"signal,omitempty"`
	Reason   string  `json:"reason,omitempty"`
	Changes  *int    `json:"changes,omitempty"`
	Snapshot *env.ID `json:"snapshot,omitempty"`
	// Duration is in seconds.
	Duration float64 `json:"duration,omitempty"`
	Leaks    *Leaks  `json:"leaks,omitempty"`
	Result   *Result `json:"result,omitempty"`
}

// Sink is a reader of events. It is called with one event at a time, in order,
// from a goroutine of its own. One that is slow misses lines of output, and
// nothing else; one that is stuck is left behind when the run ends.
type Sink func(Event)

// queuedLines is how many output events wait for a sink before further ones
// are dropped: at 4 KiB each, 2 MiB.
const queuedLines = 512

// drainWait is how long the end of a run waits for a sink that takes no event,
// drainMax how long for one that is merely slow.
const (
	drainWait = 2 * time.Second
	drainMax  = 10 * time.Second
)

// bus hands events to sinks without ever waiting for one.
type bus struct {
	run    string
	now    func() time.Time
	mu     sync.Mutex
	queues []*queue
}

func newBus(run string, now func() time.Time, sinks []Sink) *bus {
	b := &bus{run: run, now: now}
	for _, s := range sinks {
		if s != nil {
			b.queues = append(b.queues, newQueue(s))
		}
	}
	return b
}

// send stamps an event and hands it on. The lock makes the order of events one
// and the same for every sink.
func (b *bus) send(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e.Time, e.Run = b.now(), b.run
	for _, q := range b.queues {
		q.put(e)
	}
}

// close waits until every sink has had everything, but not for ever.
func (b *bus) close() {
	for _, q := range b.queues {
		q.close()
	}
}

// queue is what waits for one sink.
type queue struct {
	mu      sync.Mutex
	events  []Event
	lines   int
	dropped map[outputKey]int64
	closed  bool
	wake    chan struct{}
	taken   chan struct{}
	done    chan struct{}
}

// outputKey names a command whose lines are counted.
type outputKey struct {
	candidate string
	attempt   int
	test      bool
}

func keyOf(e Event) outputKey { return outputKey{e.Candidate, e.Attempt, e.Test} }

func newQueue(s Sink) *queue {
	q := &queue{
		dropped: make(map[outputKey]int64),
		wake:    make(chan struct{}, 1), taken: make(chan struct{}, 1), done: make(chan struct{}),
	}
	go q.deliver(s)
	return q
}

func (q *queue) put(e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e.Type == EventOutput {
		k := keyOf(e)
		if q.lines >= queuedLines {
			q.dropped[k] += e.Dropped
			if e.Line != "" {
				q.dropped[k]++
			}
			return
		}
		e.Dropped += q.dropped[k]
		delete(q.dropped, k)
		q.lines++
	} else if e.Candidate != "" {
		q.tellDropped(e)
	}
	q.events = append(q.events, e)
	poke(q.wake)
}

// tellDropped says, before e, what was dropped of the commands of e's attempt
// and not told with a later line.
func (q *queue) tellDropped(e Event) {
	for _, test := range []bool{false, true} {
		k := outputKey{e.Candidate, e.Attempt, test}
		if n := q.dropped[k]; n > 0 {
			delete(q.dropped, k)
			q.events = append(q.events, Event{
				Time: e.Time, Run: e.Run, Type: EventOutput,
				Candidate: e.Candidate, Attempt: e.Attempt, Of: e.Of, Test: test, Dropped: n,
			})
		}
	}
}

// take returns what waits, and whether nothing will follow.
func (q *queue) take() ([]Event, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	events := q.events
	q.events, q.lines = nil, 0
	return events, q.closed
}

func (q *queue) deliver(s Sink) {
	defer close(q.done)
	for range q.wake {
		events, last := q.take()
		for _, e := range events {
			s(e)
			poke(q.taken)
		}
		if last {
			return
		}
	}
}

func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	poke(q.wake)
	end := time.After(drainMax)
	for {
		select {
		case <-q.done:
			return
		case <-q.taken:
		case <-time.After(drainWait):
			return
		case <-end:
			return
		}
	}
}

// poke wakes whoever waits on c; one poke is as good as many.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
