package env

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// scratchMark stands in a scratch directory's name between the key of the fork
// it is for and what makes it unique. No key holds one.
const scratchMark = "+"

// scratch makes an empty directory for an operation that holds the lock.
func (e *Env) scratch() (string, error) { return e.makeScratch("") }

// scratchFor makes an empty directory for the mounts of one command in a fork.
// It is made after the fork and removed before it.
func (e *Env) scratchFor(key forks.Key) (string, error) {
	return e.makeScratch(string(key) + scratchMark)
}

func (e *Env) makeScratch(prefix string) (string, error) {
	dir := filepath.Join(e.root, scratchName)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	forks.Spread(dir)
	return os.MkdirTemp(dir, prefix)
}

// sweepScratch removes the scratch directories that nobody uses. The lock is
// held, and the forks of the dead are removed: a fork that is there is some
// command's that needs no lock, and so is its scratch directory. The work tree
// needs the lock.
func (e *Env) sweepScratch() error {
	dir := filepath.Join(e.root, scratchName)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, d := range entries {
		if err := e.sweepOne(dir, d.Name()); err != nil {
			return fmt.Errorf("remove what an interrupted command left: %w", err)
		}
	}
	return nil
}

func (e *Env) sweepOne(dir, name string) error {
	if strings.HasPrefix(name, trialMark) {
		lock := flockDir(filepath.Join(dir, name))
		if lock == nil {
			return nil // a reader is trying a driver
		}
		defer lock.Close()
	}
	key, _, ok := strings.Cut(name, scratchMark)
	if ok && forks.Key(key) != forks.Work {
		if _, err := e.driver.Tree(forks.Key(key)); !isNotFound(err) {
			return nil
		}
	}
	return sandbox.RemoveScratch(filepath.Join(dir, name))
}
