package env

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/copytree"
)

func openedJournal(t *testing.T, root string) *journal {
	_, last, err := readPending(root)
	assert.NilError(t, err)
	j, err := openJournal(root, last, false)
	assert.NilError(t, err)
	t.Cleanup(func() { _ = j.f.Close() })
	return j
}

func TestJournalKeepsWhatIsPending(t *testing.T) {
	root := t.TempDir()
	j := openedJournal(t, root)
	n, err := j.begin(intent{Op: "commit", To: "aaaa"})
	assert.NilError(t, err)
	assert.NilError(t, j.end(n))
	pending, _, err := readPending(root)
	assert.NilError(t, err)
	assert.Assert(t, pending == nil)
	n, err = j.begin(intent{Op: "checkout", To: "bbbb"})
	assert.NilError(t, err)
	pending, last, err := readPending(root)
	assert.NilError(t, err)
	assert.Assert(t, pending != nil && pending.Op == "checkout" && pending.To == "bbbb" && pending.N == n && last == n)
}

// A crash cuts lines short or leaves a run of zeros; what follows is read.
func TestJournalTornLines(t *testing.T) {
	path := func(root string) string { return filepath.Join(root, journalName) }
	for _, torn := range []string{`{"n":7,"op":"chec`, "\x00\x00\x00\x00\x00\x00", `{"n":7,"op":"tournament","node":{"id":"x`, "{", "\n\n\n"} {
		root := t.TempDir()
		j := openedJournal(t, root)
		_, err := j.begin(intent{Op: "commit", To: "aaaa"})
		assert.NilError(t, err)
		appendFile(t, path(root), torn)
		pending, last, err := readPending(root)
		assert.NilError(t, err, "%q", torn)
		assert.Assert(t, pending != nil && pending.Op == "commit", "%q", torn)

		j = openedJournal(t, root)
		assert.NilError(t, j.end(pending.N))
		n, err := j.begin(intent{Op: "checkout"})
		assert.NilError(t, err)
		assert.Assert(t, n > last)
		pending, _, err = readPending(root)
		assert.NilError(t, err)
		assert.Assert(t, pending != nil && pending.Op == "checkout", "%q", torn)
	}
}

// What a newer agentenv began is not for this one to finish.
func TestJournalOfANewerAgentenv(t *testing.T) {
	root := t.TempDir()
	writeFile(t, filepath.Join(root, journalName), `{"n":3,"op":"transmute"}`+"\n")
	_, _, err := readPending(root)
	assert.Assert(t, errors.Is(err, ErrDamaged))
	assert.ErrorContains(t, err, `"transmute"`)
	assert.ErrorContains(t, err, "newer agentenv")
	appendFile(t, filepath.Join(root, journalName), `{"n":3,"done":true}`+"\n")
	_, _, err = readPending(root)
	assert.NilError(t, err)

	j := openedJournal(t, root)
	_, err = j.begin(intent{Op: "transmute"})
	assert.ErrorContains(t, err, "recovery does not know")
}

// A journal does not grow for ever, and is never cut while something in it is
// pending.
func TestJournalBeginsAnew(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, journalName)
	j := openedJournal(t, root)
	filler := make([]byte, journalMax/2)
	appendFile(t, path, string(filler)+"\n")
	n, err := j.begin(intent{Op: "commit"})
	assert.NilError(t, err)
	grown, err := os.Stat(path)
	assert.NilError(t, err)

	_, err = openJournal(root, n, false)
	assert.NilError(t, err)
	st, err := os.Stat(path)
	assert.NilError(t, err)
	assert.Equal(t, st.Size(), grown.Size())

	j, err = openJournal(root, n, true)
	assert.NilError(t, err)
	st, err = os.Stat(path)
	assert.NilError(t, err)
	assert.Equal(t, st.Size(), int64(0))
	next, err := j.begin(intent{Op: "commit"})
	assert.NilError(t, err)
	assert.Equal(t, next, n+1)
}

// What the lock file says of a process that died is not believed, not even if
// it was at something long, while another holds the lock for a moment.
func TestLockFileOfTheDead(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, lockName)
	stale := `{"pid":1,"op":"tournament","since":"2020-01-01T00:00:00Z"}` // a pid that lives
	writeFile(t, path, stale)
	l, err := acquire(context.Background(), root, "commit", nil)
	assert.NilError(t, err)
	assert.Equal(t, readHolder(path).PID, os.Getpid())
	// What was longer is written over, not cut short and grown again.
	writeFile(t, path, strings.Repeat("{", 500))
	writeHolder(path, "commit")
	assert.Equal(t, readHolder(path).PID, os.Getpid())
	st, err := os.Stat(path)
	assert.NilError(t, err)
	assert.Equal(t, st.Size(), int64(500))

	// The holder has not written yet.
	writeFile(t, path, stale)
	go func() {
		time.Sleep(lockSure / 2)
		_ = l.Unlock()
	}()
	l2, err := acquire(context.Background(), root, "commit", nil)
	assert.NilError(t, err)

	// Somebody is at something long.
	writeHolder(path, "tournament")
	begun := time.Now()
	_, err = acquire(context.Background(), root, "commit", nil)
	assert.Assert(t, errors.Is(err, ErrBusy))
	assert.ErrorContains(t, err, "agentenv tournament")
	assert.Assert(t, time.Since(begun) < lockWait/4)
	assert.NilError(t, l2.Unlock())

	for _, content := range []string{"", "{", "\x00\x00", stale + stale} {
		writeFile(t, path, content)
		l, err := acquire(context.Background(), root, "commit", nil)
		assert.NilError(t, err, "%q", content)
		assert.NilError(t, l.Unlock())
	}
}

// A commit is finished only where the work tree builds upon it, and listed
// once.
func TestRecoveryFinishesACommitOnce(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	assert.NilError(t, os.Mkdir(src, 0o755))
	writeFile(t, filepath.Join(src, "f"), "1")
	opts := Options{Backends: []forks.Backend{copytree.Backend()}}
	root := filepath.Join(dir, "root")
	e, err := Init(ctx, root, InitOptions{From: src}, opts)
	assert.NilError(t, err)
	writeFile(t, filepath.Join(e.WorkTree(), "f"), "22")
	old := e.meta
	s, _, err := e.Commit(ctx, "second", false)
	assert.NilError(t, err)
	n := *e.meta.find(s.ID)
	// As if the process had been killed before the history was replaced.
	_, err = old.write(root)
	assert.NilError(t, err)
	_, err = e.journal.begin(intent{Op: "commit", To: s.ID, Node: &n})
	assert.NilError(t, err)
	assert.NilError(t, e.Close())

	for range 3 {
		r, err := Open(ctx, root, opts)
		assert.NilError(t, err)
		assert.Equal(t, r.Head().ID, s.ID)
		assert.Equal(t, len(r.Log()), 2)
		assert.NilError(t, r.Close())
	}
	for range 3 {
		e, err := Lock(ctx, root, "test", opts)
		assert.NilError(t, err)
		assert.Equal(t, e.Head().ID, s.ID)
		assert.Equal(t, len(e.Log()), 2)
		pending, _, err := readPending(root)
		assert.NilError(t, err)
		assert.Assert(t, pending == nil)
		assert.NilError(t, e.Close())
	}
}

// With an older meta.json put back, what only the work tree and its base hold is
// saved.
func TestRecoveryWithAnOlderHistory(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	src, root := filepath.Join(dir, "src"), filepath.Join(dir, "root")
	assert.NilError(t, os.Mkdir(src, 0o755))
	writeFile(t, filepath.Join(src, "f"), "1")
	opts := Options{Backends: []forks.Backend{copytree.Backend()}}
	e, err := Init(ctx, root, InitOptions{From: src}, opts)
	assert.NilError(t, err)
	old := e.meta
	writeFile(t, filepath.Join(e.WorkTree(), "f"), "22")
	s, _, err := e.Commit(ctx, "second", false)
	assert.NilError(t, err)
	writeFile(t, filepath.Join(e.WorkTree(), "f"), "333")
	_, err = old.write(root)
	assert.NilError(t, err)
	assert.NilError(t, e.Close())

	e, err = Lock(ctx, root, "test", opts)
	assert.NilError(t, err)
	defer e.Close()
	assert.Equal(t, e.Head().ID, old.Head)
	log := e.Log()
	assert.Equal(t, len(log), 3)
	assert.Equal(t, log[1].ID, s.ID)
	for i, want := range []string{"333", "22", "1"} {
		v, err := e.View(ctx, log[i].ID)
		assert.NilError(t, err)
		f, err := v.Open("f")
		assert.NilError(t, err)
		got, err := io.ReadAll(f)
		assert.NilError(t, err)
		assert.Equal(t, string(got), want)
		assert.NilError(t, errors.Join(f.Close(), v.Close()))
	}
	got, err := os.ReadFile(filepath.Join(e.WorkTree(), "f"))
	assert.NilError(t, err)
	assert.Equal(t, string(got), "1")
}
