package env

import (
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
	deadline := time.Now().Add(lockWait)
	for told := false; ; {
		ok, err := l.TryLock()
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", root, err)
		}
		if ok {
			return l, writeHolder(path, op)
		}
		h := readHolder(path)
		if slices.Contains(longOps, h.Op) || time.Now().After(deadline) {
			return nil, busy(root, h)
		}
		if !told && notify != nil && time.Until(deadline) < lockWait-time.Second {
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

func busy(root string, h holder) error {
	return &Error{
		Kind: ErrBusy,
		Msg:  fmt.Sprintf("%s is in use by `agentenv %s` (pid %d, since %s)", root, h.Op, h.PID, h.Since.Local().Format(time.TimeOnly)),
		Hint: "wait until it ends, or stop it",
	}
}

func writeHolder(path, op string) error {
	data, err := json.Marshal(holder{PID: os.Getpid(), Op: op, Since: time.Now()})
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
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
