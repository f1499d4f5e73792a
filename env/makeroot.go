package env

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// ownNames are all that agentenv ever puts into a root. A directory with
// anything else in it is not taken for one.
var ownNames = []string{metaName, lockName, reserveName, journalName, runsName, scratchName, "nodes", "work", "forks", "tmp", inPlaceName, socketName}

// isOwn says whether a name in a root is agentenv's.
func isOwn(name string) bool {
	return slices.Contains(ownNames, name) || strings.HasPrefix(name, metaTemp)
}

// makeRoot makes the directory root, closed to others before anything is in
// it, and returns the topmost directory that it had to make, or "".
func makeRoot(root string) (made string, err error) {
	entries, err := os.ReadDir(root)
	if err == nil {
		for _, d := range entries {
			if !isOwn(d.Name()) {
				return "", &Error{Kind: ErrExists, Msg: fmt.Sprintf("%s holds files that are not agentenv's (%s)", root, d.Name()), Hint: "choose an empty or new directory with --root"}
			}
		}
		return "", os.Chmod(root, 0o700)
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return "", &Error{Kind: ErrUsage, Msg: root + " is not a directory", Hint: "choose another root with --root"}
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("make the root: %w", err)
	}
	for made = root; ; made = filepath.Dir(made) {
		if _, err := os.Lstat(filepath.Dir(made)); err == nil {
			break
		}
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return "", fmt.Errorf("make the root: %w", err)
	}
	step("init.root-made")
	return made, syncNames(root, made)
}

// unmake takes a root away again that could not be filled. made is what
// makeRoot made; a directory that was there stays.
func (e *Env) unmake(made string) error {
	if e.lock == nil || Exists(e.root) {
		return e.Close() // another init has it
	}
	var errs []error
	if e.driver != nil { // it holds the forks that are to go
		errs = append(errs, e.driver.Close())
		e.driver = nil
	}
	errs = append(errs, e.clearLeftovers(context.Background()), os.Remove(filepath.Join(e.root, lockName)), e.Close())
	e.journal, e.lock = nil, nil
	for dir := e.root; made != ""; dir = filepath.Dir(dir) {
		if os.Remove(dir) != nil || dir == made {
			break // a directory that others use by now stays
		}
	}
	return errors.Join(errs...)
}

// clearLeftovers removes what a first snapshot that never came to be left in
// root. The lock is held.
func (e *Env) clearLeftovers(ctx context.Context) error {
	for _, b := range e.opts.Backends {
		if !exists(filepath.Join(e.root, "nodes")) {
			break
		}
		if d, err := b.Open(ctx, e.root); err == nil {
			emptyStore(ctx, d)
			_ = d.Close() // all that it held is gone
		}
	}
	for _, name := range ownNames {
		if name == lockName {
			continue
		}
		if err := sandbox.RemoveScratch(filepath.Join(e.root, name)); err != nil {
			return err
		}
		step("init.cleared-one")
	}
	return sweepMeta(e.root)
}

// emptyStore lets a driver remove what only it can, such as subvolumes, if the
// store is its own: nothing says which one was at work. What it leaves, and why,
// shows when the rest is removed.
func emptyStore(ctx context.Context, d forks.Driver) {
	keys, _ := d.Forks(ctx)
	for _, k := range keys {
		_ = d.RemoveFork(ctx, k)
		step("init.cleared-fork")
	}
	ids, _ := d.Snapshots(ctx)
	for _, id := range ids {
		_ = d.RemoveSnapshot(ctx, id)
		step("init.cleared-snapshot")
	}
	_, _ = d.Sweep(ctx)
	step("init.swept")
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// syncNames makes the names of the directories from root up to made durable. A
// directory that may be written but not read is left to its file system.
func syncNames(root, made string) error {
	for dir := root; ; dir = filepath.Dir(dir) {
		if err := syncDir(filepath.Dir(dir)); err != nil && !errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("make the root: %w", err)
		}
		if dir == made {
			return nil
		}
	}
}
