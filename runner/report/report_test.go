package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"gotest.tools/v3/assert"
	"pgregory.net/rapid"

	"github.com/agentenv/agentenv/runner"
	"github.com/agentenv/agentenv/specs"
)

func ptr[T any](v T) *T { return &v }

// sample is a result with one attempt of each kind; its logs are in dir.
func sample(t *testing.T) *runner.Result {
	dir := t.TempDir()
	log := func(name, text string) *string {
		p := filepath.Join(dir, name)
		assert.NilError(t, os.WriteFile(p, []byte(text), 0o600))
		return &p
	}
	return &runner.Result{
		Run: "fix-1", Name: "fix", Status: runner.RunPromoted, Base: "aaaa000011112222", Head: "bbbb000011112222",
		Winner:   &runner.Winner{Candidate: "right", Attempt: 1},
		Promoted: true, Duration: 75, Isolation: "namespaces", Warnings: []string{},
		Attempts: []runner.Attempt{
			{Candidate: "wrong", Attempt: 1, Status: runner.Failed, Reason: ptr("test failed: exit status 1"), Changes: ptr(1), Duration: 1.234, Log: log("a", "patching\n"), TestLog: log("b", "1\n2\n3\n4\n5\n--- FAIL: TestParse\n")},
			{Candidate: "right", Attempt: 1, Status: runner.Passed, Changes: ptr(12), Duration: 62, Log: log("c", "")},
			{Candidate: "a\x1b[2Jb", Attempt: 1, Status: runner.Timeout, Reason: ptr("timed out after 5m"), Duration: 300, Log: log("d", "\x1b]0;evil\x07 caf\xe9 ##[error]x\n")},
			{Candidate: "twice", Attempt: 1, Status: runner.Cancelled, Reason: ptr("another attempt passed first"), Duration: 0.5},
			{Candidate: "twice", Attempt: 2, Status: runner.Error, Reason: ptr("cannot fork the base: no space left on device"), Duration: 0.01},
		},
		Leaks: runner.Leaks{Names: []string{}},
	}
}

func text(t *testing.T, r *runner.Result, opts Options) string {
	var b bytes.Buffer
	assert.NilError(t, Result(&b, r, opts))
	return b.String()
}

func TestResultWithWinner(t *testing.T) {
	r := sample(t)
	got := text(t, r, Options{})
	want := `candidate    status       time  changes  reason
wrong        failed       1.2s        1  test failed: exit status 1
right        passed      1m02s       12
"a\x1b[2Jb"  timeout     5m00s           timed out after 5m
twice #1     cancelled   500ms           another attempt passed first
twice #2     error        10ms           cannot fork the base: no space left on device

winner: right → bbbb000011112222 (HEAD)
isolation: namespaces; limits: none
logs: DIR
left over: 0 processes, 0 mounts, 0 bytes
`
	assert.Equal(t, strings.ReplaceAll(got, filepath.Dir(*r.Attempts[0].Log), "DIR"), want)
}

func TestResultWithoutWinner(t *testing.T) {
	r := sample(t)
	r.Winner, r.Promoted, r.Status, r.Head = nil, false, runner.RunNoWinner, r.Base
	r.Leaks = runner.Leaks{Processes: 1, Mounts: 2, Bytes: 4096, Names: []string{"process 12 (sl\x1beep)"}}
	r.Warnings = []string{"something"}
	r.Network, r.Attempts[1].Network, r.Attempts[0].Test = "private", "nat", &runner.Test{Network: "host"}
	r.Limits = &specs.Limits{Memory: 512 << 20, Enforce: specs.BestEffort}
	r.Attempts[0].Command, r.Attempts[1].Command = "patch <a\x1b", "true"
	assert.Assert(t, !strings.Contains(text(t, r, Options{Told: true}), "warning: "))
	unknown := *r
	unknown.Leaks = runner.Leaks{Names: []string{}, Unknown: true}
	assert.Assert(t, strings.HasSuffix(text(t, &unknown, Options{}), "\nleft over: not measured\n"))
	assert.Assert(t, strings.Contains(text(t, r, Options{Commands: true}), "\ncommands:\n  wrong: patch <a^[\n  right: true\n"))
	got := text(t, r, Options{})
	for _, want := range []string{
		"\nwrong, the last lines of its test:\n  | 2\n  | 3\n  | 4\n  | 5\n  | --- FAIL: TestParse\n",
		"the last lines of its command:\n  |  caf\uFFFD ## [error]x\n",
		"\nno candidate passed; HEAD stays aaaa000011112222\nisolation: namespaces; network: private, host, nat; limits: 512MiB of memory\nwarning: something\n",
		"left over: 1 process, 2 mounts, 4096 bytes\n  process 12 (sl^[eep)\n",
	} {
		assert.Assert(t, strings.Contains(got, want), "%s\nis missing in\n%s", want, got)
	}
}

func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		status runner.RunStatus
		err    string
		winner bool
		want   string
	}{
		{runner.RunPassed, "", true, "winner: right → not kept; HEAD stays aaaa"},
		{runner.RunFailed, "disk\x07 full", false, "failed: disk^G full; HEAD stays aaaa"},
		{runner.RunInterrupted, "interrupted", false, "interrupted; HEAD stays aaaa"},
		{runner.RunInterrupted, "terminated", false, "interrupted: terminated; HEAD stays aaaa"},
		{runner.Running, "", false, "running"},
	} {
		r := &runner.Result{Status: c.status, Head: "aaaa"}
		if c.winner {
			r.Winner = &runner.Winner{Candidate: "right", Attempt: 1}
		}
		if c.err != "" {
			r.Error = &c.err
		}
		assert.Equal(t, verdict(r, Options{}), c.want)
	}
}

// Whatever a candidate is called or prints, only our own colours are sequences,
// and only when they are asked for.
func TestNothingActsOnTheTerminal(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		evil := rapid.SliceOfN(rapid.Byte(), 0, 60).Draw(rt, "bytes")
		s := string(evil) + "\x1b[31m\u202e\u0085##[error]"
		var b bytes.Buffer
		live := NewText(&b, Options{Verbose: true})
		for _, typ := range []runner.EventType{runner.EventStarted, runner.EventQueued, runner.EventRunning, runner.EventOutput, runner.EventTesting, runner.EventStatus, runner.EventWarning} {
			live.Event(runner.Event{Type: typ, Name: s, Candidate: s, Attempt: 1, Of: 1, Line: s, Reason: s, Status: runner.Failed})
		}
		r := &runner.Result{Name: s, Status: runner.RunFailed, Error: &s, Warnings: []string{s}, Leaks: runner.Leaks{Names: []string{s}},
			Attempts: []runner.Attempt{{Candidate: s, Attempt: 1, Status: runner.Failed, Reason: &s, Log: &s}}}
		if err := Result(&b, r, Options{}); err != nil {
			rt.Fatal(err)
		}
		for _, c := range b.String() {
			if c != '\n' && c != '\t' && !unicode.IsGraphic(c) {
				rt.Fatalf("%q in %q", c, b.String())
			}
		}
		if strings.Contains(b.String(), "##[") {
			rt.Fatalf("a command for GitHub's runner in %q", b.String())
		}
	})
}

func TestColoursOnlyWhenAsked(t *testing.T) {
	r := sample(t)
	assert.Assert(t, !strings.Contains(text(t, r, Options{}), "\x1b"))
	assert.Assert(t, strings.Contains(text(t, r, Options{Colours: true}), "\x1b[32mpassed   \x1b[0m"))
}

func TestLiveText(t *testing.T) {
	events := []runner.Event{
		{Type: runner.EventStarted, Name: "fix", Attempts: 2, Parallel: 8, Base: "aaaa", Isolation: "namespaces", Networks: []string{"host"}},
		{Type: runner.EventQueued, Candidate: "right", Attempt: 1, Of: 1},
		{Type: runner.EventQueued, Candidate: "no", Attempt: 1, Of: 1},
		{Type: runner.EventRunning, Candidate: "no", Attempt: 1, Of: 1},
		{Type: runner.EventOutput, Candidate: "no", Attempt: 1, Of: 1, Line: "hello", Dropped: 3},
		{Type: runner.EventStatus, Candidate: "no", Attempt: 1, Of: 1, Status: runner.Failed, Reason: "exit status 3", Duration: 0.1},
		{Type: runner.EventTesting, Candidate: "right", Attempt: 1, Of: 1},
		{Type: runner.EventStatus, Candidate: "right", Attempt: 1, Of: 1, Status: runner.Passed, Duration: 2},
	}
	play := func(o Options) string {
		var b bytes.Buffer
		live := NewText(&b, o)
		for _, e := range events {
			live.Event(e)
		}
		return b.String()
	}
	assert.Equal(t, play(Options{}), `fix: 2 attempts from aaaa, 2 at a time
isolation: namespaces; network: host; limits: none
no     running
no     failed      100ms  exit status 3
right  testing
right  passed       2.0s
`)
	assert.Assert(t, strings.Contains(play(Options{Verbose: true}), "no     | … 3 lines left out, see the log …\nno     | hello\n"))
}

func TestLimits(t *testing.T) {
	assert.Equal(t, limits(nil), "none")
	assert.Equal(t, limits(&specs.Limits{CPUs: 1, PIDs: 1, NoFile: 20}), "1 CPU, 1 process, 20 open files")
	assert.Equal(t, limits(&specs.Limits{CPUs: 0.5, Memory: 3 << 29, PIDs: 512, Disk: 4e9, NoFile: 1024}),
		"0.5 CPUs, 1.5GiB of memory, 512 processes, 3.7GiB of disk, 1024 open files")
}

func TestTailReadsOnlyTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	long := strings.Repeat("é", 5000)
	assert.NilError(t, os.WriteFile(path, []byte(strings.Repeat("early\n", 10000)+long+"\nlast\r\n\n"), 0o600))
	lines, err := tail(path)
	assert.NilError(t, err)
	assert.DeepEqual(t, lines, []string{"last"}) // the long line began too early
	assert.NilError(t, os.WriteFile(path, []byte("x\n"+long), 0o600))
	lines, err = tail(path)
	assert.NilError(t, err)
	assert.DeepEqual(t, lines, []string{"…" + long[len(long)-8192:]})
	assert.NilError(t, os.WriteFile(path, []byte("x\n"+long+"y"), 0o600))
	lines, err = tail(path)
	assert.NilError(t, err)
	assert.DeepEqual(t, lines, []string{"…" + long[len(long)-8190:] + "y"})
	assert.NilError(t, os.WriteFile(path, []byte("x\n"+long[:2000]), 0o600))
	lines, err = tail(path)
	assert.NilError(t, err)
	assert.DeepEqual(t, lines, []string{"x", long[:2000]})
}

func TestSeconds(t *testing.T) {
	for in, want := range map[float64]string{0: "0ms", 0.0123: "12ms", 0.9994: "999ms", 0.9996: "1.0s", 9.96: "10.0s", 59.9: "59.9s", 59.97: "1m00s", 3599.6: "1h00m", 7260: "2h01m"} {
		assert.Equal(t, seconds(in), want)
	}
}

// failing is a writer that fails from the second write on.
type failing struct{ n int }

func (f *failing) Write(p []byte) (int, error) {
	if f.n++; f.n > 1 {
		return 0, errors.New("no space")
	}
	return len(p), nil
}

func TestStreamAndJSON(t *testing.T) {
	var b bytes.Buffer
	s := NewStream(&b)
	s.Event(runner.Event{Type: runner.EventOutput, Candidate: "<a>", Line: "x\xff\n\x1b", Time: time.Unix(1, 5)})
	s.Event(runner.Event{Type: runner.EventEnded, Result: sample(t)})
	assert.NilError(t, s.Err())
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	assert.Equal(t, len(lines), 2)
	var e runner.Event
	assert.NilError(t, json.Unmarshal([]byte(lines[0]), &e))
	assert.Equal(t, e.Candidate, "<a>")
	assert.Equal(t, e.Line, "x\uFFFD\n\x1b")
	assert.NilError(t, json.Unmarshal([]byte(lines[1]), &e))
	assert.Equal(t, len(e.Result.Attempts), 5)

	b.Reset()
	assert.NilError(t, JSON(&b, sample(t)))
	var doc map[string]any
	assert.NilError(t, json.Unmarshal(b.Bytes(), &doc))
	for _, key := range strings.Fields("run name base head winner promoted saved started duration isolation attempts leaks") {
		_, ok := doc[key]
		assert.Assert(t, ok, key)
	}
	attempt := doc["attempts"].([]any)[3].(map[string]any)
	for _, key := range strings.Fields("candidate attempt status exit_code signal reason snapshot changes queued fork duration test score tampered log test_log") {
		_, ok := attempt[key]
		assert.Assert(t, ok, key)
	}

	f := NewStream(&failing{})
	for range 3 {
		f.Event(runner.Event{})
	}
	assert.ErrorContains(t, f.Err(), "no space")
}

func TestRuns(t *testing.T) {
	var b bytes.Buffer
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	assert.NilError(t, Runs(&b, []runner.Summary{{Run: "a-1", Status: runner.RunPromoted, Started: at}, {Run: "bcd-2", Status: runner.RunInterrupted, Started: at}}, Options{}))
	assert.Equal(t, b.String(), "a-1    promoted     2026-01-02 03:04:05\nbcd-2  interrupted  2026-01-02 03:04:05\n")
}
