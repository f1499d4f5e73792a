package runner

import (
	"time"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/specs"
)

// Status is how an attempt, or one run of its test, ended.
type Status string

// The seven words of CONTRACT §4.
const (
	Passed Status = "passed"
	// Failed: the candidate or the test said no.
	Failed   Status = "failed"
	Flaky    Status = "flaky"
	Tampered Status = "tampered"
	Timeout  Status = "timeout"
	// Cancelled: another attempt won, or the run was interrupted.
	Cancelled Status = "cancelled"
	// Error: the harness could not run the attempt.
	Error Status = "error"
)

// RunStatus is how a whole tournament stands, in one word.
type RunStatus string

// The words that `runs` shows.
const (
	// RunPromoted: there is a winner and it is HEAD.
	RunPromoted RunStatus = "promoted"
	// RunPassed: there is a winner, and it was not to be promoted.
	RunPassed RunStatus = "passed"
	// RunNoWinner: every candidate said no.
	RunNoWinner RunStatus = "no-winner"
	// RunFailed: the harness failed, or nobody passed and at least one
	// attempt ended in an error, so that the answer is not known.
	RunFailed RunStatus = "failed"
	// RunInterrupted: a signal ended it, or its process died.
	RunInterrupted RunStatus = "interrupted"
	// Running: its process is alive.
	Running RunStatus = "running"
)

// Result is what a tournament came to: the document of CONTRACT §5.
type Result struct {
	Run  string `json:"run"`
	Name string `json:"name"`
	// Status and Error sum the run up; Error is nil unless the harness failed
	// or was interrupted.
	Status RunStatus `json:"status"`
	Error  *string   `json:"error"`
	Base   env.ID    `json:"base"`
	// Head is HEAD at the end.
	Head     env.ID  `json:"head"`
	Winner   *Winner `json:"winner"`
	Promoted bool    `json:"promoted"`
	// Saved is the snapshot that holds work which no snapshot held.
	Saved   *env.ID   `json:"saved"`
	Started time.Time `json:"started"`
	// Duration is in seconds, as all durations here.
	Duration float64 `json:"duration"`
	// Isolation is the level that commands ran at, Network what they saw of the
	// network, unless an attempt or its test says otherwise.
	Isolation string `json:"isolation"`
	Network   string `json:"network"`
	// Limits are those in force for each command: less than the plan's where it
	// says best-effort and this machine cannot do more. Nil is none.
	Limits   *specs.Limits `json:"limits"`
	Attempts []Attempt     `json:"attempts"`
	Leaks    Leaks         `json:"leaks"`
	// Warnings are what the user should know besides, one line each.
	Warnings []string `json:"warnings"`

	// open are attempts of a run that is alive which have no verdict yet, but
	// have logs.
	open []Attempt
}

// Winner names the attempt that won.
type Winner struct {
	Candidate string `json:"candidate"`
	Attempt   int    `json:"attempt"`
	// Snapshot is nil when the winner was neither promoted nor kept.
	Snapshot *env.ID `json:"snapshot"`
}

// Attempt is one run of a candidate.
type Attempt struct {
	Candidate string `json:"candidate"`
	// Command is the first line of what the candidate runs, cut to
	// [commandMax] characters; empty in results of before it was noted.
	Command string `json:"command,omitempty"`
	// Attempt counts from 1.
	Attempt int `json:"attempt"`
	// Network is the candidate's own; empty in results of before it was noted.
	Network string `json:"network,omitempty"`
	Status  Status `json:"status"`
	// ExitCode and Signal are the candidate's; nil if it did not run, or was
	// not ended by a signal. After signal N the code is 128+N.
	ExitCode *int    `json:"exit_code"`
	Signal   *string `json:"signal"`
	// Reason is one line; nil for an attempt that passed.
	Reason *string `json:"reason"`
	// Snapshot is set if the history lists the attempt's tree.
	Snapshot *env.ID `json:"snapshot"`
	// Changes is how many paths the candidate changed; nil if its tree was not
	// frozen.
	Changes *int `json:"changes"`
	// Queued is how long the attempt waited for a slot, Fork how long its fork
	// took, Duration how long it took from slot to verdict.
	Queued   float64 `json:"queued"`
	Fork     float64 `json:"fork"`
	Duration float64 `json:"duration"`
	// Test is nil if the test did not run.
	Test     *Test    `json:"test"`
	Score    *float64 `json:"score"`
	Tampered []string `json:"tampered"`
	// Log and TestLog are absolute paths; nil if there is no such log.
	Log     *string `json:"log"`
	TestLog *string `json:"test_log"`
}

// Test is what the test said of an attempt.
type Test struct {
	// Network is the test's own; empty in results of before it was noted.
	Network string    `json:"network,omitempty"`
	Runs    []TestRun `json:"runs"`
}

// TestRun is one run of the test.
type TestRun struct {
	Status   Status  `json:"status"`
	ExitCode *int    `json:"exit_code"`
	Signal   *string `json:"signal"`
	Duration float64 `json:"duration"`
}

// Leaks counts what a run left behind; all zero is the only right result.
type Leaks struct {
	Processes int `json:"processes"`
	Mounts    int `json:"mounts"`
	// Bytes are on disk, below the root, in no snapshot and no run folder.
	Bytes int64 `json:"bytes"`
	// Names are the leakers, one line each, bounded in number.
	Names []string `json:"names"`

	// Unknown says that nothing was counted: the run's process died before, or it
	// goes on.
	Unknown bool `json:"-"`
}

// Count returns how many attempts ended with status s.
func (r *Result) Count(s Status) int {
	n := 0
	for i := range r.Attempts {
		if r.Attempts[i].Status == s {
			n++
		}
	}
	return n
}
