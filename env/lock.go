package env

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gofrs/flock"
)

// lockWait is how long a short operation waits for another one. It is longer
// than a commit of a large tree takes and short enough that a person who waits
// learns why.
const lockWait = time.Minute

// lockRetry is the pause between two tries for the lock.
const lockRetry = 20 * time.Millisecond

// lockSure is for how long the lock file must say the same before it is
// believed: what it says may be of a process that died, and whoever has the
// lock, or only looks whether somebody has it, may not have written yet.
const lockSure = 300 * time.Millisecond

// longOps hold the lock for as long as a user lets them: nobody waits for
// those.
var longOps = []string{"tournament", "shell", "supervise", "daemon"}

// holder is what the lock file says of the process that has the lock.
type holder struct {
	PID   int       `json:"pid"`
	Op    string    `json:"op"`
	Since time.Time `json:"since"`
}

// acquire takes the lock of root for op, waiting for short operations of
// others. notify, if not nil, is told once when there is someone to wait for.
func acquire(ctx context.Context, root, op string, notify func(string)) (*flock.Flock, error) {
	path := filepath.Join(root, lockName)
	l := flock.New(path, flock.SetPermissions(0o600))
	begun := time.Now()
	var by holder
	var since time.Time // by is what the file says
	for told := false; ; {
		ok, err := l.TryLock()
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", root, err)
		}
		if ok {
			writeHolder(path, op)
			return l, nil
		}
		h := readHolder(path)
		if !h.same(by) {
			by, since = h, time.Now()
		}
		sure := time.Since(since) >= lockSure
		if slices.Contains(longOps, h.Op) && sure || time.Since(begun) > lockWait {
			return nil, busy(root, h)
		}
		if !told && notify != nil && sure && h.PID != 0 && time.Since(begun) > time.Second {
			notify(fmt.Sprintf("waiting for `agentenv %s` (pid %d), which is using %s", h.Op, h.PID, root))
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(lockRetry):
		}
	}
}

func (h holder) same(o holder) bool {
	return h.PID == o.PID && h.Op == o.Op && h.Since.Equal(o.Since)
}

func busy(root string, h holder) error {
	by := "another process"
	if h.PID != 0 {
		by = fmt.Sprintf("`agentenv %s` (pid %d, since %s)", h.Op, h.PID, h.Since.Local().Format(time.TimeOnly))
	}
	return &Error{Kind: ErrBusy, Msg: root + " is in use by " + by, Hint: "wait until it ends, or stop it"}
}

// writeHolder says who has the lock. It is a courtesy: where it cannot be
// written, as on a full disk, what frees space must still be able to work. It
// is written over what was there, with blanks up to its end: a file that is cut
// short to be written anew is flushed by some file systems when it is closed.
func writeHolder(path, op string) {
	data, err := json.Marshal(holder{PID: os.Getpid(), Op: op, Since: time.Now()})
	if err != nil {
		return
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > int64(len(data)) {
		data = append(data, bytes.Repeat([]byte(" "), int(st.Size())-len(data))...)
	}
	_, _ = f.Write(data)
}

func readHolder(path string) holder {
	var h holder
	if data, err := os.ReadFile(path); err == nil {
		_ = json.Unmarshal(data, &h) // a holder that is just writing reads as nobody
	}
	return h
}

// held says whether some process has the lock of root.
func held(root string) bool {
	l := flock.New(filepath.Join(root, lockName), flock.SetFlag(os.O_RDONLY))
	ok, err := l.TryRLock()
	if err != nil {
		return false
	}
	if ok {
		_ = l.Unlock()
	}
	return !ok
}
