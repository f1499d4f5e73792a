package env

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// ProbeIsolation tries whether commands can be run at a level. It does so in
// the environment at root, where the next command removes what is left when
// this process is killed; without one, in the directory for temporary files, or
// where there is none, in the directory nearest to root.
func ProbeIsolation(root string, level sandbox.Level) error {
	if !Exists(root) {
		return probeOutside(root, level)
	}
	var err error
	trial(root, func(dir string) {
		if dir == root { // nothing can be made there
			err = probeOutside(root, level)
		} else {
			err = sandbox.ProbeIn(level, dir)
		}
	})
	return err
}

func probeOutside(root string, level sandbox.Level) error {
	if tempWorks() {
		return sandbox.Probe(level) // which removes what killed probes left
	}
	dir, err := MakeTemp(root, ".agentenv-probe-")
	if err != nil {
		return err
	}
	defer sandbox.RemoveScratch(dir)
	return sandbox.ProbeIn(level, dir)
}

func tempWorks() bool {
	st, err := os.Stat(os.TempDir())
	return err == nil && st.IsDir() && writable(os.TempDir())
}

// MakeTemp makes a directory for temporary files, or where there is no place for
// them, in the directory nearest to root, which may be empty.
func MakeTemp(root, prefix string) (string, error) {
	dir, err := os.MkdirTemp("", prefix)
	if err == nil {
		return dir, nil
	}
	if root != "" {
		if dir, rerr := os.MkdirTemp(Nearest(root), prefix); rerr == nil {
			return dir, nil
		}
	}
	return "", NoTemp(err)
}

// Nearest is the directory that is nearest to a path, above it if it is not there.
func Nearest(path string) string {
	for path != filepath.Dir(path) {
		if _, err := os.Stat(path); err == nil {
			break
		}
		path = filepath.Dir(path)
	}
	return path
}

// NoTemp is the error that nothing could be made in the directory for temporary
// files.
func NoTemp(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	msg := fmt.Sprintf("no temporary file can be made in %s: %v", os.TempDir(), err)
	return &Error{Kind: forks.ErrUnsupported, Msg: msg, Hint: "set TMPDIR to a directory that can be written"}
}
