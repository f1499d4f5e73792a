package sandbox

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

// timedLog is a log whose clock is set by hand.
func timedLog(t assert.TestingT, path string, limit int64) (*Log, *time.Time) {
	log, err := NewLog(path, limit)
	assert.NilError(t, err)
	now := time.UnixMilli(1_700_000_000_000)
	log.times.now = func() time.Time { return now }
	return log, &now
}

// stamps are the lines of a log with the milliseconds since the clock's start.
func stamps(t assert.TestingT, path string) map[string]int64 {
	data, err := os.ReadFile(path)
	assert.NilError(t, err)
	times, err := ReadTimes(path)
	assert.NilError(t, err)
	out, offset := map[string]int64{}, int64(0)
	for line := range strings.Lines(string(data)) {
		out[line] = times.At(offset).UnixMilli() - 1_700_000_000_000
		offset += int64(len(line))
	}
	return out
}

// Each line has the time at which its first byte was written, whatever is cut
// out of the middle, and also while the log is not closed yet.
func TestTimesOfLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(10, 2000).Draw(t, "limit")
		log, now := timedLog(t, path, limit)
		want := map[string]int64{}
		for i := range rapid.IntRange(0, 60).Draw(t, "lines") {
			line := fmt.Sprintf("%d%s\n", i, strings.Repeat("x", rapid.IntRange(0, 20).Draw(t, "length")))
			want[line] = now.UnixMilli() - 1_700_000_000_000
			cut := rapid.IntRange(0, len(line)-1).Draw(t, "cut")
			if cut > 0 {
				_, _ = log.Write([]byte(line[:cut]))
				*now = now.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "wait")) * time.Millisecond)
			}
			_, _ = log.Write([]byte(line[cut:]))
			*now = now.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "wait")) * time.Millisecond)
		}
		check := func() {
			for line, ms := range stamps(t, path) {
				if at, ok := want[line]; ok && at != ms {
					t.Fatalf("%q at %d, not %d", line, ms, at)
				}
			}
		}
		check() // as a crash leaves it
		assert.NilError(t, log.Close())
		check()
	})
}

// The times take bounded room, and are near the truth, however the output comes.
func TestTimesAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	const limit = 1 << 20
	log, now := timedLog(t, path, limit)
	for i := range 400_000 { // 8 bytes a millisecond
		fmt.Fprintf(log, "%07d\n", i)
		*now = now.Add(time.Millisecond)
	}
	assert.NilError(t, log.Close())
	st, err := os.Stat(path + timesSuffix)
	assert.NilError(t, err)
	assert.Assert(t, st.Size() <= int64(timesHead)+2*timesRecord*(timesBurst+limit/2/timesEvery), "%d bytes", st.Size())
	seen := 0
	for line, ms := range stamps(t, path) {
		var n int64
		if _, err := fmt.Sscanf(line, "%07d\n", &n); err == nil {
			assert.Assert(t, ms <= n && ms > n-20, "%q at %d", line, ms)
			seen++
		}
	}
	assert.Assert(t, seen > 100_000, "%d lines", seen)
}

// Dots that are printed one by one on a line take no record each.
func TestTimesOfDots(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log, now := timedLog(t, path, 0)
	for range 1000 {
		_, _ = log.Write([]byte("."))
		*now = now.Add(time.Millisecond)
	}
	_, _ = log.Write([]byte("\n"))
	*now = now.Add(time.Millisecond)
	_, _ = log.Write([]byte("end\n"))
	assert.NilError(t, log.Close())
	st, err := os.Stat(path + timesSuffix)
	assert.NilError(t, err)
	assert.Equal(t, st.Size(), int64(timesHead+2*timesRecord))
	assert.Equal(t, stamps(t, path)["end\n"], int64(1001))
}

// A log of an older version has no times, and a damaged file is no crash.
func TestNoTimes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	_, err := ReadTimes(path)
	assert.ErrorIs(t, err, fs.ErrNotExist)
	log, _ := timedLog(t, path, 100)
	_, _ = log.Write(bytes.Repeat([]byte("line\n"), 100))
	assert.NilError(t, log.Close())
	whole, err := os.ReadFile(path + timesSuffix)
	assert.NilError(t, err)
	for n := range whole {
		assert.NilError(t, os.WriteFile(path+timesSuffix, whole[:n], 0o600))
		times, err := ReadTimes(path)
		assert.Equal(t, err != nil, n < timesHead, "%d bytes", n)
		if err == nil {
			times.At(0)
			times.At(1 << 40)
		}
	}
}
