package env

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/agentenv/agentenv/env/sandbox"
)

// ownNames are all that agentenv ever puts into a root. A directory with
// anything else in it is not taken for one.
var ownNames = []string{metaName, lockName, journalName, runsName, scratchName, "nodes", "work", "forks", "tmp"}

// makeRoot makes the directory root, closed to others before anything is in
// it, and returns the topmost directory that it had to make, or "".
func makeRoot(root string) (made string, err error) {
	entries, err := os.ReadDir(root)
	if err == nil {
		for _, d := range entries {
			if !slices.Contains(ownNames, d.Name()) {
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
	return made, nil
}

// unmake takes a root away again that could not be filled. made is what
// makeRoot made; a directory that was there stays.
func (e *Env) unmake(made string) error {
	if e.lock == nil || Exists(e.root) {
		return e.Close() // another init has it
	}
	errs := []error{clearLeftovers(e.root), os.Remove(filepath.Join(e.root, lockName)), e.Close()}
	e.driver, e.journal, e.lock = nil, nil, nil
	for dir := e.root; made != ""; dir = filepath.Dir(dir) {
		if os.Remove(dir) != nil || dir == made {
			break // a directory that others use by now stays
		}
	}
	return errors.Join(errs...)
}

// clearLeftovers removes what a first snapshot that never came to be left in
// root. The lock is held.
func clearLeftovers(root string) error {
	for _, name := range ownNames {
		if name == lockName {
			continue
		}
		if err := sandbox.RemoveScratch(filepath.Join(root, name)); err != nil {
			return err
		}
	}
	return nil
}
