package sandbox_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"gotest.tools/v3/assert"
	"pgregory.net/rapid"

	"github.com/agentenv/agentenv/env/sandbox"
)

var droppedMark = regexp.MustCompile(`(?m)^\[… (\d+) bytes dropped …\]\n`)

// TestLogKeepsBothEnds: whatever is written, in whatever pieces, the log is
// all of it, or its beginning and its end with exactly the rest counted.
func TestLogKeepsBothEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(2, 400).Draw(t, "limit")
		lines := rapid.SliceOf(rapid.StringMatching(`[a-z]{0,60}\n?`)).Draw(t, "writes")
		log, err := sandbox.NewLog(path, limit)
		assert.NilError(t, err)
		for _, l := range lines {
			n, err := log.Write([]byte(l))
			assert.NilError(t, err)
			assert.Equal(t, n, len(l))
		}
		assert.NilError(t, log.Close())
		all := strings.Join(lines, "")
		got, err := os.ReadFile(path)
		assert.NilError(t, err)
		mark := droppedMark.FindSubmatchIndex(got)
		if mark == nil {
			assert.Equal(t, string(got), all)
			return
		}
		head, tail := string(got[:mark[0]]), string(got[mark[1]:])
		dropped, _ := strconv.Atoi(string(got[mark[2]:mark[3]]))
		if !strings.HasPrefix(all, head) {
			head = strings.TrimSuffix(head, "\n") // ended for the mark's sake
		}
		assert.Assert(t, strings.HasPrefix(all, head) && strings.HasSuffix(all, tail), "%q of %q", got, all)
		assert.Equal(t, len(head)+dropped+len(tail), len(all))
		assert.Assert(t, int64(len(head)+len(tail)) <= limit+1)
		assert.Assert(t, int64(len(all)) > limit/2*2)
	})
}

func TestLogCutsAtLines(t *testing.T) {
	dir := t.TempDir()
	log, err := sandbox.NewLog(dir+"/log", 1000)
	assert.NilError(t, err)
	for i := range 1000 {
		fmt.Fprintf(log, "line %d\n", i)
	}
	assert.NilError(t, log.Close())
	got, err := os.ReadFile(dir + "/log")
	assert.NilError(t, err)
	for line := range strings.Lines(string(got)) {
		assert.Assert(t, regexp.MustCompile(`^(line \d+|\[… \d+ bytes dropped …\])\n$`).MatchString(line), line)
	}
	assert.Assert(t, bytes.HasPrefix(got, []byte("line 0\n")) && bytes.HasSuffix(got, []byte("line 999\n")))
	entries, err := os.ReadDir(dir)
	assert.NilError(t, err)
	assert.Equal(t, len(entries), 1)
	_, err = log.Write([]byte("x"))
	assert.ErrorIs(t, err, os.ErrClosed)
}

// TestLogMemory: the memory of a log depends neither on its limit nor on what
// is written to it.
func TestLogMemory(t *testing.T) {
	log, err := sandbox.NewLog(filepath.Join(t.TempDir(), "log"), 0)
	assert.NilError(t, err)
	piece := bytes.Repeat([]byte("0123456789abcde\n"), 2048)
	allocs := testing.AllocsPerRun(2000, func() { _, _ = log.Write(piece) })
	assert.Assert(t, allocs < 1, "%v allocations a write", allocs)
	assert.NilError(t, log.Close())
}

func TestPrefixer(t *testing.T) {
	for _, c := range []struct {
		name, in, want string
		colours        bool
	}{
		{"lines", "one\ntwo\n", "p| one\np| two\n", false},
		{"no end", "one", "p| one\n", false},
		{"empty lines", "\n\n", "p| \np| \n", false},
		{"carriage return", "a\r\n10%\r20%\n", "p| a\np| 10%^M20%\n", false},
		{"control", "\x1b]0;title\a\x00\x7f\tx\n", "p| ^[]0;title^G^@^?\tx\n", false},
		{"colours kept", "\x1b[31mred\x1b[2J\n", "p| \x1b[31mred^[[2J\x1b[0m\n", true},
		{"colours dropped", "\x1b[31mred\n", "p| ^[[31mred\n", false},
		{"bad UTF-8", "caf\xe9 \xff\n", "p| caf\uFFFD \uFFFD\n", false},
		{"C1 and direction", "a\u009b2Jb\u202ec\n", "p| a<U+009B>2Jb<U+202E>c\n", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for size := 1; size <= len(c.in); size++ { // in pieces of any size
				var out bytes.Buffer
				w := sandbox.NewLinePrefixer(&out, c.colours).Writer("p| ")
				for b := []byte(c.in); len(b) > 0; b = b[min(size, len(b)):] {
					_, err := w.Write(b[:min(size, len(b))])
					assert.NilError(t, err)
				}
				assert.NilError(t, w.Close())
				assert.Equal(t, out.String(), c.want)
			}
		})
	}
}

func TestPrefixerCutsLongLines(t *testing.T) {
	var out bytes.Buffer
	w := sandbox.NewLinePrefixer(&out, false).Writer("")
	_, err := w.Write([]byte("x" + strings.Repeat("é", 100000) + "\nafter\n"))
	assert.NilError(t, err)
	lines := strings.Split(out.String(), "\n")
	assert.Assert(t, utf8.ValidString(out.String()) && !strings.Contains(out.String(), "\uFFFD"))
	assert.Assert(t, strings.HasSuffix(lines[0], "é [… line cut …]") && len(lines[0]) < 66<<10, "%d", len(lines[0]))
	assert.Equal(t, lines[1], "after")
}

// TestPrefixerKeepsLinesWhole: several commands at once never share a line.
func TestPrefixerKeepsLinesWhole(t *testing.T) {
	var out bytes.Buffer
	p := sandbox.NewLinePrefixer(&out, false)
	var wait sync.WaitGroup
	for i := range 4 {
		w := p.Writer(fmt.Sprintf("c%d| ", i))
		wait.Go(func() {
			line := []byte(strings.Repeat(strconv.Itoa(i), 5000) + "\n")
			for range 100 {
				for b := line; len(b) > 0; b = b[min(777, len(b)):] {
					_, _ = w.Write(b[:min(777, len(b))])
				}
			}
		})
	}
	wait.Wait()
	n := 0
	for line := range strings.Lines(out.String()) {
		i := line[1:2]
		assert.Equal(t, line, "c"+i+"| "+strings.Repeat(i, 5000)+"\n")
		n++
	}
	assert.Equal(t, n, 400)
}
