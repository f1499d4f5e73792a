//go:build linux

package layer

import (
	"fmt"
	"io"
	"os"

	"github.com/agentenv/agentenv/forks"
)

// View opens snapshot id for reading.
func (s *Store) View(id forks.ID) (forks.View, error) {
	if err := s.Exists(id); err != nil {
		return nil, err
	}
	state, err := s.State(id)
	if err != nil {
		return nil, err
	}
	return &view{s, state}, nil
}

type view struct {
	store *Store
	state *State
}

func (v *view) Lookup(path string) (forks.Entry, error) {
	i, ok := v.state.Find(path)
	if !ok {
		return forks.Entry{}, fmt.Errorf("%s: %w", path, forks.ErrNotFound)
	}
	return v.state.Entry(i, path), nil
}

func (v *view) Walk(fn func(forks.Entry) error) error {
	for i := uint32(0); i < uint32(len(v.state.Nodes)); {
		err := fn(v.state.Entry(i, v.state.Path(i)))
		switch {
		case err == forks.SkipDir:
			i = v.state.Nodes[i].End
		case err != nil:
			return err
		default:
			i++
		}
	}
	return nil
}

func (v *view) Open(path string) (io.ReadSeekCloser, error) {
	i, ok := v.state.Find(path)
	if !ok {
		return nil, fmt.Errorf("%s: %w", path, forks.ErrNotFound)
	}
	if !v.state.Nodes[i].IsReg() {
		return nil, fmt.Errorf("%s: %w: not a regular file", path, forks.ErrUnsupported)
	}
	fd, err := v.store.OpenFile(v.state.LayerOf(i), path)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func (v *view) Close() error { return nil }

// Diff lists what changed from snapshot a to snapshot b.
func (s *Store) Diff(a, b forks.ID) (forks.Changes, error) {
	var states [2]*State
	for i, id := range []forks.ID{a, b} {
		if err := s.Exists(id); err != nil {
			return forks.Changes{}, fmt.Errorf("snapshot %s: %w", id, err)
		}
		state, err := s.State(id)
		if err != nil {
			return forks.Changes{}, err
		}
		states[i] = state
	}
	list, err := Compare(states[0], states[1], false, s.SameStored)
	return forks.Changes{List: list}, err
}
