package runner

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

func readLog(t *testing.T, path *string) string {
	t.Helper()
	data, err := os.ReadFile(*path)
	assert.NilError(t, err)
	return string(data)
}

// Whatever a command prints, both streams are in its log byte by byte and in
// order, to the last one (OL02, CMD_BADUTF8).
func TestLogsAreExact(t *testing.T) {
	long := strings.Repeat("x", 300_000)
	inOrder := strings.Repeat("out\nerr\n", 300)
	cases := []struct{ run, want string }{
		{`head -c 300000 /dev/zero | tr '\0' x; echo; echo after; exit 1`, long + "\nafter\n"},
		{`head -c 300000 /dev/zero | tr '\0' x; exit 1`, long},
		{`printf 'caf\351 \033[31mred\033[0m \000nul ]]> &<\r\n\302\r'; exit 1`, "caf\xe9 \x1b[31mred\x1b[0m \x00nul ]]> &<\r\n\xc2\r"},
		{`i=0; while [ $i -lt 300 ]; do echo out; echo err >&2; i=$((i+1)); done; exit 1`, inOrder},
		{`exit 1`, ""},
	}
	var runs []string
	for _, c := range cases {
		runs = append(runs, c.run)
	}
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		r, err := w.run(t.Context(), plan("true", runs...))
		assert.NilError(t, err)
		for i, a := range r.Attempts {
			got := readLog(t, a.Log)
			assert.Assert(t, got == cases[i].want, "%s: %d bytes, not %d", cases[i].run, len(got), len(cases[i].want))
		}
	})
}

// The last lines before an exit are never lost (OL04), and each log has its
// times.
func TestLastLinesAreKept(t *testing.T) {
	attempts := 20
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		attempts = 500
	}
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		p := plan("true", "seq 1 20000; exit 1")
		p.Candidates[0].Repeat, p.Parallel = attempts, 4
		start := time.Now()
		r, err := w.run(t.Context(), p)
		assert.NilError(t, err)
		assert.Equal(t, r.Count(Failed), attempts)
		for _, a := range r.Attempts {
			text := readLog(t, a.Log)
			assert.Assert(t, strings.HasSuffix(text, "\n19999\n20000\n"), "attempt %d lost the end after %d bytes", a.Attempt, len(text))
			times, err := sandbox.ReadTimes(*a.Log)
			assert.NilError(t, err)
			first, last := times.At(0), times.At(int64(len(text)-1))
			assert.Assert(t, !first.Before(start.Truncate(time.Millisecond)) && !last.Before(first) && !last.After(time.Now()), "%s %s", first, last)
		}
	})
}

// An attempt ends when its command ends, whoever else holds its pipe: a
// child in the background, or a process outside that was handed a descriptor
// and writes on.
func TestHeldPipe(t *testing.T) {
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		mark := fmt.Sprintf("1.%d", time.Now().UnixNano())
		p := plan("true", "sleep 60 & setsid sleep 60 & (setsid sleep 60 &); echo first; sleep "+mark+"; echo last; exit 1")
		handed := make(chan *os.File, 1)
		go func() { handed <- descriptorOf(mark) }()
		r, err := w.run(t.Context(), p)
		assert.NilError(t, err)
		f := <-handed
		if f == nil {
			t.Fatal("the descriptor was not found")
		}
		defer f.Close()
		assert.Equal(t, statuses(r), "failed")
		// The command takes 2 s, what it left behind a minute, what is outside for
		// ever; the rest is for busy machines.
		assert.Assert(t, r.Attempts[0].Duration < 10, "it took %v s", r.Attempts[0].Duration)
		text := readLog(t, r.Attempts[0].Log)
		assert.Assert(t, strings.HasPrefix(text, "first\n") && strings.Contains(text, "last\n"), text)
	})
}

// descriptorOf opens, for writing, the standard output of the process that has
// mark as an argument, and writes to it until it is closed.
func descriptorOf(mark string) *os.File {
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, path := range files {
			data, _ := os.ReadFile(path) // it may be gone
			if string(data) != "sleep\x00"+mark+"\x00" {
				continue
			}
			f, err := os.OpenFile(filepath.Join(filepath.Dir(path), "fd/1"), os.O_WRONLY, 0)
			if err != nil {
				continue
			}
			go func() {
				for {
					if _, err := f.WriteString("outside\n"); err != nil {
						return
					}
					time.Sleep(time.Millisecond)
				}
			}()
			return f
		}
	}
	return nil
}
