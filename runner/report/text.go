package report

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/agentenv/agentenv/runner"
)

// Options say how text looks.
type Options struct {
	// Colours allows them.
	Colours bool
	// Verbose shows the commands' output while they run, and more at the end.
	Verbose bool
	// Told says that what is in force and the run's warnings were shown while
	// it ran.
	Told bool
	// Commands lists what each candidate ran.
	Commands bool
}

// nameWidth is the widest column for names, in letters; longer names stick out.
const nameWidth = 24

// colours of the words for how something ended (SGR).
var colours = map[string]string{
	string(runner.Passed): "32", string(runner.RunPromoted): "32",
	string(runner.Failed): "31", string(runner.Flaky): "31", string(runner.Tampered): "31",
	string(runner.Error): "35", string(runner.Timeout): "33",
	string(runner.Cancelled): "2", string(runner.RunInterrupted): "33", string(runner.Running): "36",
}

// paint colours s as the word of it says, if colours are allowed.
func (o Options) paint(word, s string) string {
	if c := colours[word]; o.Colours && c != "" {
		return "\x1b[" + c + "m" + s + "\x1b[0m"
	}
	return s
}

// Text writes plain lines while a tournament runs.
type Text struct {
	w     io.Writer
	opts  Options
	width int
}

// NewText writes to w.
func NewText(w io.Writer, opts Options) *Text { return &Text{w: w, opts: opts} }

// Event is a [runner.Sink]. A line that cannot be written is lost: a terminal
// that is gone must not end a tournament.
func (t *Text) Event(e runner.Event) {
	who := title(e.Candidate, e.Attempt, e.Of)
	switch e.Type {
	case runner.EventStarted:
		t.line("%s: %s from %s, %d at a time", clean(e.Name), count(e.Attempts, "attempt"), e.Base, min(e.Parallel, e.Attempts))
		t.line("%s", world(e.Isolation, e.Networks, e.Limits))
	case runner.EventQueued:
		t.width = min(max(t.width, utf8.RuneCountInString(who)), nameWidth)
	case runner.EventRunning:
		t.line("%s  running", pad(who, t.width))
	case runner.EventTesting:
		t.line("%s  testing", pad(who, t.width))
	case runner.EventStatus:
		if e.Status == runner.Cancelled && e.Duration == 0 {
			return // it never began; the table at the end has it
		}
		t.line("%s", strings.TrimRight(fmt.Sprintf("%s  %s  %6s  %s", pad(who, t.width), t.opts.status(e.Status), seconds(e.Duration), clean(e.Reason)), " "))
	case runner.EventWarning:
		t.line("warning: %s", clean(e.Reason))
	case runner.EventSaved:
		t.line("changes made during the run were saved as %s", *e.Snapshot)
	case runner.EventOutput:
		t.output(e, who)
	}
}

func (t *Text) output(e runner.Event, who string) {
	if !t.opts.Verbose {
		return
	}
	if e.Dropped > 0 {
		t.line("%s  | … %s left out, see the log …", pad(who, t.width), count(int(e.Dropped), "line"))
	}
	if e.Line != "" || e.Dropped == 0 {
		t.line("%s  | %s", pad(who, t.width), Line(e.Line, lineMost, t.opts.Colours))
	}
}

func (t *Text) line(format string, args ...any) {
	_, _ = fmt.Fprintf(t.w, format+"\n", args...)
}

// statusWidth is the length of the longest status.
const statusWidth = len(runner.Cancelled)

// status is a status, padded and coloured.
func (o Options) status(s runner.Status) string {
	return o.paint(string(s), pad(string(s), statusWidth))
}

// Result writes what a tournament came to: each attempt on a line, the winner,
// and where to look further.
func Result(w io.Writer, r *runner.Result, opts Options) error {
	b := &strings.Builder{}
	table(b, r, opts)
	if opts.Commands || opts.Verbose {
		commands(b, r)
	}
	if r.Winner == nil || opts.Verbose {
		tails(b, r, opts)
	}
	b.WriteString("\n" + verdict(r, opts) + "\n")
	if !opts.Told {
		told(b, r)
	}
	if dir := folder(r); dir != "" {
		fmt.Fprintf(b, "logs: %s\n", clean(dir))
	}
	if r.Status != runner.Running {
		leaks(b, r.Leaks)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func table(b *strings.Builder, r *runner.Result, opts Options) {
	of := attemptsOf(r)
	width := len("candidate")
	for _, a := range r.Attempts {
		width = min(max(width, utf8.RuneCountInString(title(a.Candidate, a.Attempt, of[a.Candidate]))), nameWidth)
	}
	row := func(who, status, took, changes, reason string) {
		b.WriteString(strings.TrimRight(fmt.Sprintf("%s  %s  %6s  %7s  %s", who, status, took, changes, reason), " ") + "\n")
	}
	row(pad("candidate", width), pad("status", statusWidth), "time", "changes", "reason")
	for _, a := range r.Attempts {
		took, changes, reason := "", "", ""
		if a.Duration > 0 {
			took = seconds(a.Duration)
		}
		if a.Changes != nil {
			changes = fmt.Sprint(*a.Changes)
		}
		if a.Reason != nil {
			reason = clean(*a.Reason)
		}
		row(pad(title(a.Candidate, a.Attempt, of[a.Candidate]), width), opts.status(a.Status), took, changes, reason)
	}
}

// told is what the user was told while the run went on.
func told(b *strings.Builder, r *runner.Result) {
	fmt.Fprintln(b, world(r.Isolation, networksOf(r), r.Limits))
	for _, line := range r.Warnings {
		fmt.Fprintf(b, "warning: %s\n", clean(line))
	}
}

// commands lists what each candidate ran.
func commands(b *strings.Builder, r *runner.Result) {
	last := ""
	for _, a := range r.Attempts {
		if a.Command == "" || a.Candidate == last {
			continue
		}
		if last == "" {
			b.WriteString("\ncommands:\n")
		}
		last = a.Candidate
		fmt.Fprintf(b, "  %s: %s\n", clean(a.Candidate), clean(a.Command))
	}
}

// attemptsOf counts the attempts of each candidate.
func attemptsOf(r *runner.Result) map[string]int {
	of := make(map[string]int)
	for _, a := range r.Attempts {
		of[a.Candidate]++
	}
	return of
}

// verdict is the one line that matters.
func verdict(r *runner.Result, opts Options) string {
	who := ""
	if r.Winner != nil {
		who = title(r.Winner.Candidate, r.Winner.Attempt, attemptsOf(r)[r.Winner.Candidate])
	}
	switch r.Status {
	case runner.RunPromoted:
		return opts.paint(string(r.Status), fmt.Sprintf("winner: %s → %s (HEAD)", who, r.Head))
	case runner.RunPassed:
		kept := "not kept"
		if r.Winner.Snapshot != nil {
			kept = string(*r.Winner.Snapshot)
		}
		return opts.paint(string(r.Status), fmt.Sprintf("winner: %s → %s", who, kept)) + fmt.Sprintf("; HEAD stays %s", r.Head)
	case runner.RunNoWinner:
		return fmt.Sprintf("no candidate passed; HEAD stays %s", r.Head)
	case runner.Running:
		return "running"
	}
	line := opts.paint(string(r.Status), string(r.Status))
	if r.Error != nil && *r.Error != string(r.Status) {
		line += ": " + clean(*r.Error)
	}
	switch {
	case r.Promoted:
		line += fmt.Sprintf("; HEAD is %s, the winner %s", r.Head, who)
	case r.Head != "":
		line += fmt.Sprintf("; HEAD stays %s", r.Head)
	}
	return line
}

func leaks(b *strings.Builder, l runner.Leaks) {
	if l.Unknown {
		b.WriteString("left over: not measured\n")
		return
	}
	fmt.Fprintf(b, "left over: %s, %s, %d bytes\n", processes(l.Processes), count(l.Mounts, "mount"), l.Bytes)
	for _, n := range l.Names {
		fmt.Fprintf(b, "  %s\n", clean(n))
	}
}

func processes(n int) string {
	if n == 1 {
		return "1 process"
	}
	return fmt.Sprintf("%d processes", n)
}

// folder is where the logs are.
func folder(r *runner.Result) string {
	for _, a := range r.Attempts {
		if a.Log != nil {
			return filepath.Dir(*a.Log)
		}
	}
	return ""
}

const (
	// tailLines is how much of a log is shown of an attempt that did not pass,
	// tailMost for how many attempts: about a screen in all.
	tailLines = 5
	tailMost  = 8
	// tailBytes is how far from the end of a log those lines are looked for.
	tailBytes = 8 << 10
	// lineMost bounds, in letters, a line of output that is shown while it is
	// printed, tailMostLetters one of those at the end: three lines of a screen.
	lineMost        = 4 << 10
	tailMostLetters = 240
)

// tails shows the ends of the logs of what failed.
func tails(b *strings.Builder, r *runner.Result, opts Options) {
	of := attemptsOf(r)
	shown, left := 0, 0
	for _, a := range r.Attempts {
		log, what := a.Log, "its command"
		if a.TestLog != nil {
			log, what = a.TestLog, "its test"
		}
		if a.Status == runner.Passed || a.Status == runner.Cancelled || log == nil {
			continue
		}
		lines, err := tail(*log)
		if err != nil || len(lines) == 0 {
			continue
		}
		if shown == tailMost {
			left++
			continue
		}
		shown++
		fmt.Fprintf(b, "\n%s, the last lines of %s:\n", title(a.Candidate, a.Attempt, of[a.Candidate]), what)
		for _, l := range lines {
			fmt.Fprintf(b, "  | %s\n", Line(l, tailMostLetters, opts.Colours))
		}
	}
	if left > 0 {
		fmt.Fprintf(b, "\n%d more have logs: agentenv runs logs %s CANDIDATE\n", left, r.Run)
	}
}

// tail returns the last lines of a log.
func tail(path string) ([]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	from := max(0, st.Size()-tailBytes)
	data, err := io.ReadAll(io.NewSectionReader(f, from, tailBytes))
	if err != nil {
		return nil, err
	}
	text := strings.TrimRight(string(data), "\r\n")
	if text == "" {
		return nil, nil
	}
	lines := strings.Split(text, "\n")
	switch {
	case from > 0 && len(lines) > 1:
		lines = lines[1:] // it may be the rest of a line
	case from > 0:
		// It is the rest of a line, and may begin within a letter.
		n := 0
		for n < min(utf8.UTFMax, len(text)) && !utf8.RuneStart(text[n]) {
			n++
		}
		lines[0] = "…" + text[n:]
	}
	return lines[max(0, len(lines)-tailLines):], nil
}

// Runs writes the list of `runs`, newest first.
func Runs(w io.Writer, runs []runner.Summary, opts Options) error {
	width := 0
	for _, r := range runs {
		width = max(width, len(r.Run))
	}
	var errs []error
	for _, r := range runs {
		_, err := fmt.Fprintf(w, "%s  %s  %s\n", pad(clean(r.Run), width), opts.paint(string(r.Status), pad(string(r.Status), len(runner.RunInterrupted))), r.Started.Local().Format(time.DateTime))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
