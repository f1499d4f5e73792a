package env

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// journalMax is the size in bytes past which a journal whose last operation
// is complete begins anew: some ten thousand operations.
const journalMax = 2 << 20

// journalOps are the operations that leave an intent. Recovery knows what to do
// about each; one that it does not know was begun by a newer agentenv.
var journalOps = []string{"commit", "checkout", "tournament"}

// intent is one line of the journal: what an operation is about to do, or,
// with Done, that the operation of that number is complete.
type intent struct {
	N    int       `json:"n"`
	Op   string    `json:"op,omitempty"`
	Time time.Time `json:"time,omitzero"`
	From ID        `json:"from,omitempty"`
	To   ID        `json:"to,omitempty"`
	// Node is the snapshot that a commit is about to add.
	Node *node `json:"node,omitempty"`
	// Aside says that HEAD does not move to Node.
	Aside bool `json:"aside,omitempty"`
	Done  bool `json:"done,omitempty"`
}

// journal is the open journal of an environment that is being changed.
type journal struct {
	f    *os.File
	last int
}

// journalTail is how much of a journal's end is read, in bytes: what is
// pending is the last intent, and a line is far shorter.
const journalTail = 64 << 10

// readPending returns the last intent of root's journal if it has no
// completion, or nil, and the number of the last line. A line cut short by a
// crash was never acted upon.
func readPending(root string) (*intent, int, error) {
	data, err := readTail(filepath.Join(root, journalName))
	if err != nil {
		return nil, 0, err
	}
	var pending *intent
	last := 0
	for line := range bytes.Lines(data) {
		var i intent
		if json.Unmarshal(line, &i) != nil {
			continue
		}
		last = max(last, i.N)
		if i.Done {
			pending = nil
		} else {
			pending = &i
		}
	}
	if pending != nil && !slices.Contains(journalOps, pending.Op) {
		return nil, 0, &Error{
			Kind: ErrDamaged,
			Msg:  fmt.Sprintf("%s: an operation %q was cut short, of which this agentenv (it knows %s) cannot tell what to do", root, pending.Op, strings.Join(journalOps, ", ")),
			Hint: "use the newer agentenv that began it",
		}
	}
	return pending, last, nil
}

// readTail reads the end of a file; one that is not there is empty.
func readTail(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, size-journalTail), journalTail))
}

// openJournal opens root's journal for appending.
func openJournal(root string, last int, fresh bool) (*journal, error) {
	path := filepath.Join(root, journalName)
	if st, err := os.Stat(path); err == nil && fresh && st.Size() > journalMax/2 {
		if err := os.Truncate(path, 0); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &journal{f: f, last: last}, nil
}

// begin records an intent durably and returns its number.
func (j *journal) begin(i intent) (int, error) {
	if !slices.Contains(journalOps, i.Op) {
		return 0, fmt.Errorf("internal: recovery does not know the operation %q", i.Op)
	}
	step("journal.begin.ready")
	j.last++
	i.N, i.Time = j.last, time.Now()
	if err := j.append(i); err != nil {
		return 0, err
	}
	step("journal.begin.written")
	if err := j.f.Sync(); err != nil {
		return 0, err
	}
	step("journal.begin.durable")
	return i.N, nil
}

// end records that the operation n is complete. It is not flushed: a lost
// completion makes recovery look at a state that needs nothing done.
func (j *journal) end(n int) error {
	step("journal.end.ready")
	err := j.append(intent{N: n, Done: true})
	step("journal.end.written")
	return err
}

func (j *journal) append(i intent) error {
	data, err := json.Marshal(i)
	if err != nil {
		return err
	}
	// A line that a crash cut short must not swallow this one.
	if _, err := j.f.Write(append(append([]byte("\n"), data...), '\n')); err != nil {
		return fmt.Errorf("write %s: %w", j.f.Name(), err)
	}
	return nil
}
