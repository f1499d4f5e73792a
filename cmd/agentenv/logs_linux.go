package main

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/runner"
	"github.com/agentenv/agentenv/runner/report"
)

type logFlags struct{ test, timestamps bool }

// stamp is RFC 3339 with milliseconds, always of the same length.
const stamp = "2006-01-02T15:04:05.000Z07:00"

// shownMost bounds, in letters, a line of a log that is shown on a terminal.
const shownMost = 64 << 10

func (a *App) runLogs(e *env.Env, run, candidate string, x logFlags) error {
	res, err := loadRun(e, run)
	if err != nil {
		return err
	}
	path, name, err := runner.LogPath(res, candidate, x.test)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	doc := map[string]any{"run": res.Run, "candidate": name, "test": x.test}
	if !x.timestamps && (a.json || !isTerminal(a.Stdout)) {
		return a.content(doc, f)
	}
	show, err := a.showLine()
	if err != nil {
		return err
	}
	var times *sandbox.Times
	if x.timestamps {
		times, err = sandbox.ReadTimes(path)
		if errors.Is(err, fs.ErrNotExist) {
			a.say("when the lines of this log were written was not recorded")
		} else if err != nil {
			return err
		}
	}
	if a.json {
		return a.logLines(doc, f, times)
	}
	w := bufio.NewWriter(a.Stdout)
	err = eachLine(f, times, func(at time.Time, line string) {
		if !at.IsZero() {
			w.WriteString(at.UTC().Format(stamp) + " ")
		}
		w.WriteString(show(line))
	})
	return errors.Join(err, w.Flush()) // which has the first error of writing
}

// showLine returns what makes of a line what stdout gets: on a terminal nothing
// that acts on it, elsewhere the line as it is.
func (a *App) showLine() (func(line string) string, error) {
	if !isTerminal(a.Stdout) {
		return func(line string) string { return line }, nil
	}
	colours, err := a.colours(a.Stdout)
	return func(line string) string {
		return report.Line(strings.TrimSuffix(line, "\n"), shownMost, colours) + "\n"
	}, err
}

// logLines prints the lines of a log, and when each was written, as JSON.
func (a *App) logLines(doc map[string]any, r io.Reader, times *sandbox.Times) error {
	lines := []map[string]any{}
	err := eachLine(r, times, func(at time.Time, line string) {
		one := map[string]any{"time": nil}
		if !at.IsZero() {
			one["time"] = at.UTC().Format(stamp)
		}
		if line = strings.TrimSuffix(line, "\n"); utf8.ValidString(line) {
			one["line"] = line
		} else {
			one["line_b64"] = []byte(line)
		}
		lines = append(lines, one)
	})
	if err != nil {
		return err
	}
	doc["lines"] = lines
	return a.printJSON(doc)
}

// eachLine calls fn for each line of a log, with its newline if it has one; the
// time is zero if it is not known.
func eachLine(r io.Reader, times *sandbox.Times, fn func(at time.Time, line string)) error {
	in := bufio.NewReader(r)
	for offset := int64(0); ; {
		line, err := in.ReadString('\n')
		if line != "" {
			var at time.Time
			if times != nil {
				at = times.At(offset)
			}
			fn(at, line)
			offset += int64(len(line))
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
