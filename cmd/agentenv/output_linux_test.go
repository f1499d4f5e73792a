package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/creack/pty"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/runner"
)

// repository is a directory of the person with a file and an environment.
func (p *person) repository(t *testing.T) string {
	dir := filepath.Join(p.home, "repo")
	assert.NilError(t, os.Mkdir(dir, 0o755))
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "a"), []byte("a\n"), 0o644))
	p.own(t, dir)
	p.must(t, dir, "agentenv", "init", "--from", ".")
	return dir
}

// peakOf runs a tournament in dir to its end and returns the largest resident
// size that agentenv had, in KiB, and its result.
func (p *person) peakOf(t *testing.T, dir string, args ...string) (int, *runner.Result) {
	t.Helper()
	c := p.command(dir, "agentenv", append([]string{"--json", "tournament"}, args...)...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	assert.NilError(t, c.Start())
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	peak := 0
	for tick := time.NewTicker(20 * time.Millisecond); ; <-tick.C {
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid)) // it may be gone
		for line := range strings.Lines(string(status)) {
			var kib int
			if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kib); err == nil {
				peak = max(peak, kib)
			}
		}
		select {
		case err := <-ended:
			var res runner.Result
			assert.NilError(t, json.Unmarshal(out.Bytes(), &res), "%v\n%s%s", err, errs.String(), out.String())
			return peak, &res
		default:
		}
	}
}

// However much candidates print, it takes next to no memory, their logs are
// bounded with both ends and what was dropped, and they are not held up (OL03,
// PF17).
func TestOutputTakesNoMemory(t *testing.T) {
	envtest.Census(t)
	size := int64(100 << 20)
	if envtest.Long() {
		size = 2 << 30
	}
	asEach(t, func(t *testing.T, p *person) {
		dir := p.repository(t)
		idle, _ := p.peakOf(t, dir, "--parallel", "4", "--test", "false", "--", "sleep 1", "sleep 1", "sleep 1", "sleep 1")
		lines := fmt.Sprintf("echo first; yes 0123456789abcdef | head -c %d; echo; echo last; exit 1", size)
		bytes := fmt.Sprintf("head -c %d /dev/zero; echo; echo last; exit 1", size)
		progress := fmt.Sprintf(`echo first; yes 50%% | tr '\n' '\r' | head -c %d; echo; echo last; exit 1`, size)
		loud, res := p.peakOf(t, dir, "--parallel", "4", "--test", "true", "--", lines, lines, bytes, progress)
		t.Logf("%d KiB idle, %d KiB at most while 4 candidates print %d MiB each in %.1f s", idle, loud, size>>20, res.Duration)
		assert.Assert(t, loud-idle <= 32<<10, "%d KiB idle, %d KiB at most", idle, loud)
		for _, a := range res.Attempts {
			assert.Equal(t, a.Status, runner.Failed)
			st, err := os.Stat(*a.Log)
			assert.NilError(t, err)
			assert.Assert(t, st.Size() <= sandbox.DefaultLogLimit+200, "%d bytes", st.Size())
			times, err := os.Stat(*a.Log + ".times")
			assert.NilError(t, err)
			assert.Assert(t, times.Size() <= sandbox.DefaultLogLimit/3, "%d bytes", times.Size())
			text, err := os.ReadFile(*a.Log)
			assert.NilError(t, err)
			assert.Assert(t, strings.HasSuffix(string(text), "\nlast\n") && strings.Contains(string(text), " bytes dropped …]\n"), a.Candidate)
		}
	})
}

// What four candidates print at once comes in whole lines with their names and
// whole letters, whatever it is (OL05), and no control character but the colours
// that a terminal may have.
func TestOutputOnATerminal(t *testing.T) {
	envtest.Census(t)
	asEach(t, func(t *testing.T, p *person) {
		dir := p.repository(t)
		wide := `i=0; l=$(printf 'é%.0s' $(seq 1000)); while [ $i -lt 200 ]; do echo "$l$l$l"; i=$((i+1)); done; exit 1`
		odd := `printf 'caf\351 \033[31mred\033[2J\033]0;title\007 \302\2331mx \000nul\n'; printf '10%%\r99%%\033[K\rdone\r\n'; exit 1`
		args := []string{"-v", "tournament", "--parallel", "4", "--test", "true", "--", wide, wide, wide, odd}
		out := p.onTerminal(t, dir, args...)
		whole := "  | " + strings.Repeat("é", 2048) + "…" // of 6,000 bytes the first 4 KiB
		seen := 0
		for l := range strings.SplitSeq(strings.ReplaceAll(out, "\r\n", "\n"), "\n") {
			assert.Assert(t, utf8.ValidString(l) && !strings.ContainsAny(l, "\r\a\x00"), "%q", l)
			if strings.HasPrefix(l, "c") && strings.Contains(l, "éé") {
				assert.Assert(t, slices.Contains([]string{"c1", "c2", "c3"}, l[:2]) && l[2:] == whole, "%q", l)
				seen++
			}
		}
		assert.Assert(t, seen > 100, "%d lines", seen)
		assert.Assert(t, strings.Contains(out, "c4  | caf\uFFFD \x1b[31mred x ^@nul\x1b[0m\r\n"), out)
		assert.Assert(t, strings.Contains(out, "c4  | done\r\n"))
		assert.Equal(t, strings.Count(out, "c4  | "), 2, "and nothing of what was rewritten")
		assert.Equal(t, len(regexp.MustCompile(`\x1b($|[^\[]|\[[0-9;]*[^0-9;m])`).FindAllString(out, -1)), 0, out)

		plain := p.onTerminal(t, dir, slices.Concat([]string{"--color", "never"}, args)...)
		assert.Assert(t, !strings.Contains(plain, "\x1b"))
		// A log on a terminal likewise; elsewhere it is as it was printed.
		assert.Equal(t, p.onTerminal(t, dir, "runs", "logs", "last", "c4"), "caf\uFFFD \x1b[31mred x ^@nul\x1b[0m\r\ndone\r\n")
		assert.Equal(t, p.must(t, dir, "agentenv", "runs", "logs", "last", "c4"),
			"caf\xe9 \x1b[31mred\x1b[2J\x1b]0;title\a \xc2\x9b1mx \x00nul\n10%\r99%\x1b[K\rdone\r")
	})
}

// onTerminal runs agentenv with a terminal as its output, and returns what the
// terminal got.
func (p *person) onTerminal(t *testing.T, dir string, args ...string) string {
	t.Helper()
	keys, tty, err := pty.Open()
	assert.NilError(t, err)
	defer keys.Close()
	c := p.command(dir, "agentenv", args...)
	c.Env = append(c.Env, "TERM=xterm")
	c.Stdout, c.Stderr = tty, tty
	assert.NilError(t, c.Start())
	tty.Close()
	var out bytes.Buffer
	_, _ = io.Copy(&out, keys) // EIO when the last writer is gone
	_ = c.Wait()               // nobody passes
	return out.String()
}

// With --json stdout is one document, however it ends and whatever is printed
// (OL06).
func TestOutputIsOneDocument(t *testing.T) {
	envtest.Census(t)
	p := newPerson(t, "self", os.Getuid())
	dir := p.repository(t)
	loud := `head -c 100000 /dev/urandom; head -c 100000 /dev/urandom >&2; printf '{"a":1}\n'; `
	for want, args := range map[string][]string{
		`"status":"promoted"`:    {"--test", loud + "true", "--", loud + "touch b"},
		`"status":"no-winner"`:   {"--test", loud + "false", "--", loud + "exit 1", loud},
		`"status":"timeout"`:     {"--timeout", "200ms", "--grace", "100ms", "--test", "true", "--", loud + "sleep 60"},
		`"code":"usage"`:         {"--timeout", "200", "--test", "true", "--", "true"},
		`"code":"isolation"`:     {"-f", "plan.yaml"},
		`"signal":"SIGSEGV"`:     {"-v", "--test", "true", "--", loud + "kill -SEGV $$"},
		`"reason":"exit status`:  {"--test", "true", "--", "no-such-program"},
		`"reason":"test failed:`: {"--test", "exit 3", "--", "true"},
		`"status":"error"`:       {"--test", "./no-such-test", "--", "true"},
	} {
		assert.NilError(t, os.WriteFile(filepath.Join(dir, "plan.yaml"), []byte("candidates: ['true']\ntest: 'true'\nlimits: {nofile: 999999999}\n"), 0o644))
		out, _, _ := p.run(t, dir, "agentenv", append([]string{"--json", "tournament"}, args...)...)
		var doc bytes.Buffer
		assert.NilError(t, json.Compact(&doc, []byte(out)), out)
		assert.Assert(t, strings.Contains(doc.String(), want), "%s\n%s", want, out)
	}
}
