package runner

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/specs"
)

func TestRunIDs(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct{ name, want string }{
		{"fix-parser", "fix-parser-20260102-030405-"},
		{"", "20260102-030405-"},
		{"../../etc", "etc-20260102-030405-"},
		{"Größe 9", "gr-e-9-20260102-030405-"},
		{strings.Repeat("n", 300), strings.Repeat("n", nameMax) + "-20260102-030405-"},
	} {
		id := runID(c.name, now)
		assert.Equal(t, id[:len(id)-4], c.want)
	}
	// Many runs in one second have folders of their own, closed to others.
	dir := filepath.Join(t.TempDir(), "runs")
	seen := map[string]bool{}
	for range 50 {
		f, err := newFolder(dir, &specs.Plan{Name: "p"}, now)
		assert.NilError(t, err)
		assert.NilError(t, f.close())
		assert.Assert(t, !seen[f.run])
		seen[f.run] = true
	}
	st, err := os.Stat(dir)
	assert.NilError(t, err)
	assert.Equal(t, st.Mode().Perm(), os.FileMode(0o700))
}

func TestListFindAndLogs(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	runs, err := List(w.env.RunsDir())
	assert.NilError(t, err)
	assert.Equal(t, len(runs), 0)

	p := newPlan("cat out; exit 1", "echo one; echo 1 >out", "exit 4")
	p.Candidates[1].Name = "../sly name"
	first, err := w.run(t.Context(), p)
	assert.NilError(t, err)
	second, err := w.run(t.Context(), newPlan("true", "true"))
	assert.NilError(t, err)
	runs, err = List(w.env.RunsDir())
	assert.NilError(t, err)
	assert.Equal(t, len(runs), 2)
	assert.Equal(t, runs[0].Run, second.Run)
	assert.Equal(t, runs[0].Status, RunPromoted)
	assert.Equal(t, runs[1].Status, RunNoWinner)
	assert.Equal(t, runs[1].Name, "trial")

	_, err = Find(w.env.RunsDir(), "trial-")
	assert.Assert(t, errors.Is(err, env.ErrAmbiguous), "%v", err)
	for _, no := range []string{"other", "", "..", "../runs"} {
		_, err = Find(w.env.RunsDir(), no)
		assert.Assert(t, errors.Is(err, env.ErrNotFound), "%q: %v", no, err)
	}
	same, err := Load(w.env.RunsDir(), first.Run[:len(first.Run)-1])
	if err == nil { // unless the last digit alone tells the two apart
		assert.Equal(t, same.Run, first.Run)
	}

	log := func(candidate string, test bool) string {
		path, _, err := LogPath(first, candidate, test)
		assert.NilError(t, err)
		assert.Equal(t, filepath.Dir(path), filepath.Join(w.env.RunsDir(), first.Run))
		data, err := os.ReadFile(path)
		assert.NilError(t, err)
		return string(data)
	}
	assert.Equal(t, log("c1", false), "one\n")
	assert.Equal(t, log("c1.1", true), "1\n")
	assert.Equal(t, log("", false), "one\n")
	assert.Equal(t, log("../sly name", false), "")
	_, _, err = LogPath(first, "../sly name", true)
	assert.ErrorContains(t, err, "did not run")
	_, _, err = LogPath(first, "nobody", false)
	assert.ErrorContains(t, err, "no candidate")
}

// The log of a run whose root was moved is found where it is now.
func TestMovedRoot(t *testing.T) {
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	r, err := w.run(t.Context(), newPlan("true", "echo hello"))
	assert.NilError(t, err)
	moved := filepath.Join(t.TempDir(), "runs")
	assert.NilError(t, os.Rename(w.env.RunsDir(), moved))
	m, err := Load(moved, r.Run)
	assert.NilError(t, err)
	path, who, err := LogPath(m, "c1", false)
	assert.NilError(t, err)
	assert.Equal(t, who, "c1")
	data, err := os.ReadFile(path)
	assert.NilError(t, err)
	assert.Equal(t, string(data), "hello\n")
}

// A run that died early, or whose result cannot be read, is told as what it is.
func TestIncompleteRuns(t *testing.T) {
	dir := t.TempDir()
	f, err := newFolder(dir, newPlan("true", "true"), time.Now())
	assert.NilError(t, err)
	r, err := Load(dir, f.run)
	assert.NilError(t, err)
	assert.Equal(t, r.Status, Running)
	assert.NilError(t, f.close())
	r, err = Load(dir, f.run)
	assert.NilError(t, err)
	assert.Equal(t, r.Status, RunInterrupted)
	assert.Equal(t, r.Name, "trial")
	assert.Assert(t, r.Leaks.Unknown)
	assert.NilError(t, os.Mkdir(filepath.Join(dir, "bare"), 0o700))
	r, err = Load(dir, "bare")
	assert.NilError(t, err)
	assert.Equal(t, r.Status, RunInterrupted)
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "bare", resultName), []byte("{"), 0o600))
	_, err = Load(dir, "bare")
	assert.Assert(t, errors.Is(err, env.ErrDamaged), "%v", err)
	runs, err := List(dir)
	assert.NilError(t, err)
	assert.Equal(t, len(runs), 2)
	assert.Equal(t, runs[1].Run, "bare")
	assert.Equal(t, runs[1].Status, RunFailed)
}
