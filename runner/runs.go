package runner

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gofrs/flock"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/specs"
)

// Summary is one line of `runs`.
type Summary struct {
	Run     string    `json:"run"`
	Name    string    `json:"name"`
	Started time.Time `json:"started"`
	Status  RunStatus `json:"status"`
}

// List returns the runs in runsDir, newest first. It needs no lock and writes
// nothing.
func List(runsDir string) ([]Summary, error) {
	names, err := runNames(runsDir)
	if err != nil {
		return nil, err
	}
	out := make([]Summary, 0, len(names))
	for _, run := range names {
		r, err := load(filepath.Join(runsDir, run))
		if errors.Is(err, env.ErrDamaged) { // it must not hide the others
			r, err = &Result{Run: run, Status: RunFailed}, nil
		}
		if err != nil {
			return nil, err
		}
		out = append(out, Summary{Run: r.Run, Name: r.Name, Started: r.Started, Status: r.Status})
	}
	slices.SortStableFunc(out, func(a, b Summary) int { return b.Started.Compare(a.Started) })
	return out, nil
}

// Find returns the full name of the run that is called so or whose name alone
// begins so.
func Find(runsDir, run string) (string, error) {
	names, err := runNames(runsDir)
	if err != nil {
		return "", err
	}
	if slices.Contains(names, run) {
		return run, nil
	}
	found := slices.DeleteFunc(names, func(n string) bool { return run == "" || !strings.HasPrefix(n, run) })
	switch len(found) {
	case 0:
		return "", &env.Error{Kind: env.ErrNotFound, Msg: fmt.Sprintf("no run %q", run), Hint: "see `agentenv runs`"}
	case 1:
		return found[0], nil
	}
	return "", &env.Error{Kind: env.ErrAmbiguous, Msg: fmt.Sprintf("%q is the beginning of %d runs: %s", run, len(found), strings.Join(found[:min(len(found), 5)], ", "))}
}

func runNames(runsDir string) ([]string, error) {
	entries, err := os.ReadDir(runsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the runs: %w", err)
	}
	var names []string
	for _, d := range entries {
		if d.IsDir() && !strings.HasPrefix(d.Name(), ".") {
			names = append(names, d.Name())
		}
	}
	return names, nil
}

// Load returns what is known of a run, found as by [Find]: its result, or, if
// it has none yet, what its events tell. Paths of logs are those of today.
func Load(runsDir, run string) (*Result, error) {
	name, err := Find(runsDir, run)
	if err != nil {
		return nil, err
	}
	return load(filepath.Join(runsDir, name))
}

func load(dir string) (*Result, error) {
	r := &Result{}
	// Alive is asked first: a run that ends now has its result when it is
	// asked second.
	alive := isAlive(dir)
	data, err := os.ReadFile(filepath.Join(dir, resultName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r, err = reconstruct(dir, alive)
	case err == nil:
		if err = json.Unmarshal(data, r); err != nil {
			err = &env.Error{Kind: env.ErrDamaged, Msg: filepath.Join(dir, resultName) + " cannot be read", Cause: err}
		}
	}
	if err != nil {
		return nil, err
	}
	for i := range r.Attempts {
		for _, p := range []*string{r.Attempts[i].Log, r.Attempts[i].TestLog} {
			if p != nil {
				*p = filepath.Join(dir, filepath.Base(*p)) // the root may have been moved
			}
		}
	}
	return r, nil
}

// isAlive says whether the process of the run in dir lives.
func isAlive(dir string) bool {
	l := flock.New(filepath.Join(dir, eventsName), flock.SetFlag(os.O_RDONLY))
	free, err := l.TryRLock()
	if err == nil && free {
		_ = l.Unlock() // closing the descriptor is all it does
	}
	return err == nil && !free
}

// reconstruct makes a result of the events of a run that has none. An attempt
// that had no verdict when its process died was cancelled; one of a run that is
// alive has none yet and is not listed.
func reconstruct(dir string, alive bool) (*Result, error) {
	r := &Result{
		Run: filepath.Base(dir), Status: RunInterrupted, Attempts: []Attempt{},
		Leaks: Leaks{Names: []string{}, Unknown: true}, Warnings: []string{},
	}
	if alive {
		r.Status = Running
	} else {
		text := "the run's process died before it ended"
		r.Error = &text
	}
	if st, err := os.Stat(dir); err == nil {
		r.Started = st.ModTime()
	}
	var plan specs.Plan
	if data, err := os.ReadFile(filepath.Join(dir, planName)); err == nil {
		_ = json.Unmarshal(data, &plan) // a plan that was cut short tells nothing
	}
	r.Name, r.Isolation, r.Network = plan.Name, string(plan.Isolation), string(plan.Network)
	var open []*Attempt
	err := readEvents(filepath.Join(dir, eventsName), func(e Event) { open = r.replay(e, open, dir) })
	for _, a := range open {
		for i := range plan.Candidates {
			if plan.Candidates[i].Name == a.Candidate {
				a.Command, a.Network = commandLine(&plan.Candidates[i]), string(plan.Candidates[i].Network)
			}
		}
		if a.Status == "" && alive {
			r.open = append(r.open, *a)
			continue
		}
		if a.Status == "" {
			a.Status, a.Reason = Cancelled, r.Error
		}
		r.Attempts = append(r.Attempts, *a)
	}
	return r, err
}

// replay adds what e tells.
func (r *Result) replay(e Event, open []*Attempt, dir string) []*Attempt {
	if e.Type == EventStarted {
		r.Started, r.Base, r.Head, r.Limits = e.Time, e.Base, e.Base, e.Limits
	}
	if e.Type == EventQueued {
		return append(open, &Attempt{Candidate: e.Candidate, Attempt: e.Attempt, Tampered: []string{}})
	}
	i := slices.IndexFunc(open, func(a *Attempt) bool { return a.Candidate == e.Candidate && a.Attempt == e.Attempt })
	if i < 0 {
		return open
	}
	a := open[i]
	log := func(kind string) *string {
		p := filepath.Join(dir, fmt.Sprintf("%s.%d%s", fileName(e.Candidate, i), e.Attempt, kind))
		return &p
	}
	switch e.Type {
	case EventForked:
		a.Queued, a.Fork = e.Time.Sub(r.Started).Seconds()-e.Duration, e.Duration
	case EventRunning:
		a.Log = log(".log")
	case EventExited:
		a.ExitCode, a.Signal = e.ExitCode, e.Signal
	case EventFrozen:
		a.Changes = e.Changes
	case EventTesting:
		a.TestLog = log(".test.log")
	case EventTested:
		a.Test = &Test{Runs: []TestRun{{Status: e.Status, ExitCode: e.ExitCode, Signal: e.Signal, Duration: e.Duration}}}
	case EventStatus:
		a.Status, a.Duration = e.Status, e.Duration
		if e.Reason != "" {
			a.Reason = &e.Reason
		}
	}
	return open
}

// readEvents calls fn for each event of a file; a line that a crash cut short
// ends it.
func readEvents(path string, fn func(Event)) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	d := json.NewDecoder(bufio.NewReader(f))
	for {
		var e Event
		if d.Decode(&e) != nil {
			return nil
		}
		fn(e)
	}
}

// LogPath returns the path of the log of a candidate, or of its test, and the
// candidate's name. With several attempts the candidate is written NAME.N; NAME
// alone is its first. An empty candidate is the winner, or else the first that
// has such a log.
func LogPath(r *Result, candidate string, test bool) (path, name string, err error) {
	if candidate == "" && r.Winner != nil {
		candidate = r.Winner.Candidate + "." + strconv.Itoa(r.Winner.Attempt)
	}
	known := false
	for _, a := range slices.Concat(r.Attempts, r.open) {
		if candidate != "" && candidate != a.Candidate && candidate != a.Candidate+"."+strconv.Itoa(a.Attempt) {
			continue
		}
		known = true
		p := a.Log
		if test {
			p = a.TestLog
		}
		if p != nil {
			return *p, a.Candidate, nil
		}
	}
	if !known && candidate != "" {
		return "", "", &env.Error{Kind: env.ErrNotFound, Msg: fmt.Sprintf("no candidate %q in the run %s", candidate, r.Run), Hint: "see `agentenv runs show " + r.Run + "`"}
	}
	what := "command"
	if test {
		what = "test"
	}
	return "", "", &env.Error{Kind: env.ErrNotFound, Msg: fmt.Sprintf("there is no log: the %s did not run", what), Hint: "see `agentenv runs show " + r.Run + "`"}
}
