//go:build linux

package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/step"
)

// unsettled, at the end of a fork's base link, says that the tree is neither
// the base nor anything else: something that changes it was cut short.
const unsettled = "!"

// ForkDir returns the directory of a fork and the name of its tree there.
func (s *Store) ForkDir(key forks.Key) (dir, tree string) {
	if key == forks.Work {
		return s.path("work"), "current"
	}
	return s.path("forks", string(key)), "tree"
}

// ForkBase returns the base of a fork, and whether the fork is settled. The
// base is the text of a symlink, which is replaced as a whole and never empty
// after a loss of power.
func (s *Store) ForkBase(key forks.Key) (base forks.ID, settled bool, err error) {
	if err := key.Check(); err != nil {
		return "", false, fmt.Errorf("%w: %w", forks.ErrNotFound, err)
	}
	dir, _ := s.ForkDir(key)
	text, err := os.Readlink(filepath.Join(dir, "base"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, forks.ErrNotFound
	}
	if err != nil {
		return "", false, err
	}
	base = forks.ID(strings.TrimSuffix(text, unsettled))
	if base.Check() != nil {
		return "", false, damaged("the fork's base is unreadable")
	}
	return base, string(base) == text, nil
}

// SetForkBase replaces a fork's base by way of the stage.
func (st *Stage) SetForkBase(dir string, base forks.ID, settled bool) error {
	text := string(base)
	if !settled {
		text += unsettled
	}
	tmp := filepath.Join(st.Path, "base")
	if err := os.Symlink(text, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, "base"))
}

// SaveForkIndex replaces a fork's index.
func (st *Stage) SaveForkIndex(dir string, base forks.ID, index *State) error {
	tmp := filepath.Join(st.Path, "index")
	if err := SaveIndex(tmp, base, index); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, "index"))
}

// MakeForkBase makes what a fork has of its base in the stage, so that no more
// space is needed to put it in place.
func (st *Stage) MakeForkBase(base forks.ID, index *State) error {
	if err := SaveIndex(filepath.Join(st.Path, "index"), base, index); err != nil {
		return err
	}
	return os.Symlink(string(base), filepath.Join(st.Path, "base"))
}

// PlaceForkBase puts what MakeForkBase made into the fork's directory dir.
func (st *Stage) PlaceForkBase(dir string) error {
	for _, name := range []string{"index", "base"} {
		if err := os.Rename(filepath.Join(st.Path, name), filepath.Join(dir, name)); err != nil {
			return err
		}
		step.At("fork.base." + name)
	}
	return nil
}

// ForkState returns the index of a settled fork, with trust; or, where there
// is none to be believed, the state of its base. The caller may change it.
func (s *Store) ForkState(key forks.Key, base forks.ID, settled bool) (state *State, trust bool, err error) {
	dir, _ := s.ForkDir(key)
	if settled {
		of, index, err := LoadIndex(filepath.Join(dir, "index"))
		if err == nil && of == base {
			return index, true, nil
		}
	}
	state, err = s.State(base)
	if err != nil {
		return nil, false, LostBase(base, err)
	}
	return state.Clone(), false, nil
}

// Forks lists the keys of the store's forks.
func (s *Store) Forks() ([]forks.Key, error) {
	names, err := readNames(s.path("forks"))
	if err != nil {
		return nil, err
	}
	var keys []forks.Key
	if _, err := os.Lstat(s.path("work")); err == nil {
		keys = append(keys, forks.Work)
	}
	for _, n := range names {
		if k := forks.Key(n); k.Check() == nil && k != forks.Work {
			keys = append(keys, k)
		}
	}
	return keys, nil
}
