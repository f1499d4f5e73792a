package sandbox_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

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
	assert.Equal(t, len(entries), 2) // the log and its times
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
