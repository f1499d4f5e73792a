package runner

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/google/renameio/v2"

	"github.com/agentenv/agentenv/specs"
)

// The files of a run's folder that are not logs.
const (
	planName   = "plan.json"
	eventsName = "events.ndjson"
	resultName = "result.json"
)

// nameMax bounds the part of a run's id that is the plan's name, so that the
// id fits into the key of a fork.
const nameMax = 40

// folder is the directory of one run.
type folder struct {
	run, dir string
	// lock on the events file says that the run is alive; it goes with the
	// process.
	lock   *flock.Flock
	events *os.File
	failed atomic.Pointer[error] // the first failure to record an event
}

// newFolder makes the folder of a new run. Its id is NAME-DATE-TIME-RANDOM:
// readable, in the order of time for one plan, and never one that is taken.
func newFolder(runs string, plan *specs.Plan, now time.Time) (*folder, error) {
	if err := os.MkdirAll(runs, 0o700); err != nil {
		return nil, fmt.Errorf("make the run's folder: %w", err)
	}
	f := &folder{}
	for {
		f.run = runID(plan.Name, now)
		f.dir = filepath.Join(runs, f.run)
		err := os.Mkdir(f.dir, 0o700)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("make the run's folder: %w", err)
		}
	}
	if err := f.fill(plan); err != nil {
		return nil, errors.Join(err, f.close(), os.RemoveAll(f.dir))
	}
	return f, nil
}

func runID(name string, now time.Time) string {
	b := make([]byte, 2)
	rand.Read(b) // never fails: crypto/rand ends the program instead
	if len(name) > nameMax {
		name = name[:nameMax]
	}
	id := now.UTC().Format("20060102-150405") + "-" + hex.EncodeToString(b)
	if name = strings.Trim(unusable.ReplaceAllString(strings.ToLower(name), "-"), "-._"); name != "" {
		id = name + "-" + id
	}
	return id
}

// unusable is what an id, which becomes a file's name and the key of a fork, does
// not take over from a name.
var unusable = regexp.MustCompile(`[^a-z0-9._-]+`)

// fill writes the plan and opens the events.
func (f *folder) fill(plan *specs.Plan) error {
	data, err := json.MarshalIndent(plan, "", "  ")
	if err != nil {
		return fmt.Errorf("write the plan: %w", err)
	}
	if _, err := f.put(planName, append(data, '\n'), 0o600); err != nil {
		return err
	}
	path := f.path(eventsName)
	if f.events, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o600); err != nil {
		return err
	}
	f.lock = flock.New(path)
	return f.lock.Lock()
}

// path is where a file of the folder is.
func (f *folder) path(name string) string { return filepath.Join(f.dir, name) }

// put writes a small file of the folder; one that is there already was put for
// another attempt of the same candidate and stays.
func (f *folder) put(name string, data []byte, mode os.FileMode) (string, error) {
	path := f.path(name)
	if _, err := os.Lstat(path); err == nil {
		return path, nil
	}
	// A program that is being started inherits, for a moment, a descriptor that
	// is open for writing, and the file cannot be executed while it does.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := renameio.WriteFile(path, data, mode); err != nil {
		return "", fmt.Errorf("write %s: %w", path, bare(err))
	}
	return path, nil
}

// bare is an error without the name of the file that it befell: that of a
// temporary file tells nobody anything, and others are named already.
func bare(err error) error {
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// record keeps an event. Lines of output are in the logs already.
func (f *folder) record(e Event) {
	if e.Type == EventOutput || e.Type == EventEnded {
		return
	}
	data, err := json.Marshal(e)
	if err == nil {
		_, err = f.events.Write(append(data, '\n'))
	}
	if err != nil {
		f.failed.CompareAndSwap(nil, &err)
	}
}

// write replaces the run's result atomically.
func (f *folder) write(r *Result) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = renameio.WriteFile(f.path(resultName), append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the result of %s: %w", f.run, bare(err))
	}
	return nil
}

// close lets go of the folder; the run no longer counts as alive.
func (f *folder) close() error {
	var errs []error
	if f.events != nil {
		errs = append(errs, f.events.Close())
	}
	if f.lock != nil {
		errs = append(errs, f.lock.Unlock())
	}
	return errors.Join(errs...)
}

// plainName is a candidate's name that can be a file's.
var plainName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$`)

// fileName is what an attempt's files are called: its candidate's name, or, if
// that cannot be a file's, its own place in the plan, which no name looks like.
func fileName(name string, index int) string {
	if plainName.MatchString(name) {
		return name
	}
	return fmt.Sprintf("@%d", index+1)
}
