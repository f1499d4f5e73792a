//go:build linux

package layer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/bmatcuk/doublestar/v4"
	"golang.org/x/sys/unix"
)

// keptSources is how many snapshots keep the index of the directory they were
// captured from.
const keptSources = 4

// Capture stores the directory src as snapshot id; see [forks.Driver].
func (s *Store) Capture(ctx context.Context, id, base forks.ID, src forks.Source) (forks.Changes, error) {
	if err := s.Available(id); err != nil {
		return forks.Changes{}, err
	}
	root, err := openSource(src.Dir)
	if err != nil {
		return forks.Changes{}, err
	}
	defer unix.Close(root)
	if unfinishedApply(root) {
		return forks.Changes{}, fmt.Errorf("%w in %s: run `agentenv apply` again, or remove %s there", forks.ErrUnfinished, src.Dir, applyName)
	}
	scan, o, err := s.scanSource(ctx, root, base, src)
	if err != nil {
		return forks.Changes{}, err
	}
	scan.Delta.own(src.Owners)
	st, err := s.NewStage()
	if err != nil {
		return forks.Changes{}, err
	}
	changes, err := s.captureStage(ctx, st, root, scan, id, base, src, o)
	return changes, errors.Join(err, st.Remove(ctx))
}

func (s *Store) captureStage(ctx context.Context, st *Stage, root int, scan *Scan, id, base forks.ID, src forks.Source, o ScanOptions) (forks.Changes, error) {
	delta := scan.Delta
	if delta == nil {
		delta = unchanged()
	}
	delta, bytes, err := st.Write(ctx, root, delta, WriteOptions{ID: id, BaseID: base, Base: o.Base, Access: o.Access, Progress: src.Progress}, &scan.Warnings)
	if err != nil {
		return forks.Changes{}, sourceError(src.Dir, err)
	}
	whole := delta
	if o.Base != nil {
		if whole, err = Merge(o.Base, delta, true); err != nil {
			return forks.Changes{}, err
		}
	}
	list, err := Changes(o.Base, delta)
	if err != nil {
		return forks.Changes{}, err
	}
	if base, err = st.Shorten(ctx, id, base, whole); err != nil {
		return forks.Changes{}, err
	}
	if src.Index == "" {
		if err := SaveIndex(filepath.Join(st.Path, "node", "source"), id, whole); err != nil {
			return forks.Changes{}, err
		}
	}
	if err := st.Publish(id, base); err != nil {
		return forks.Changes{}, err
	}
	saveKnown(src, whole)
	s.remember(id, whole)
	s.dropOldSources()
	return forks.Changes{List: list, Bytes: bytes, Warnings: scan.Warnings.Lines()}, nil
}

// scanSource compares the open source directory with base, or takes all of it
// if there is none.
func (s *Store) scanSource(ctx context.Context, root int, base forks.ID, src forks.Source) (scan *Scan, o ScanOptions, err error) {
	o = ScanOptions{InPlace: src.Index != "", Progress: src.Progress, Access: fsat.Access{CrossMounts: src.CrossFilesystems}}
	if base != "" {
		if err := s.Exists(base); err != nil {
			return nil, o, fmt.Errorf("base %s: %w", base, err)
		}
		if o.Base, o.Trust, err = s.knownState(base, src); err != nil {
			return nil, o, err
		}
		o.Same = s.SameAsStored(o.Base)
	}
	if o.Excluded, o.SkipDirs, err = s.exclusions(src); err != nil {
		return nil, o, err
	}
	if scan, err = ScanTree(ctx, root, o); err != nil {
		return nil, o, sourceError(src.Dir, err)
	}
	if src.Index != "" {
		err = scan.keepUnseen(o.Base, o.Excluded)
	}
	return scan, o, err
}

// Compare returns what the directory src has changed against the snapshot base.
func (s *Store) Compare(ctx context.Context, base forks.ID, src forks.Source) (c forks.Changes, err error) {
	root, err := openSource(src.Dir)
	if err != nil {
		return c, err
	}
	defer unix.Close(root)
	scan, o, err := s.scanSource(ctx, root, base, src)
	if err != nil {
		return c, err
	}
	c.Warnings = scan.Warnings.Lines()
	if scan.Delta != nil {
		if c.List, err = Changes(o.Base, scan.Delta); err != nil {
			return c, err
		}
	}
	return c, s.knowMore(src, scan, o.Base)
}

// own records the owners that the caller knows better than the inodes do.
func (s *State) own(owners map[string][2]uint32) {
	if s == nil || len(owners) == 0 {
		return
	}
	for i := range s.Nodes {
		if o, ok := owners[s.Path(uint32(i))]; ok {
			s.Nodes[i].UID, s.Nodes[i].GID = o[0], o[1]
		}
	}
}

// unchanged is the difference between two equal states.
func unchanged() *State {
	b := NewBuilder(1)
	b.Add(0, "", Node{Mode: unix.S_IFDIR, Flags: Through, Layer: NoLayer}, nil)
	b.s.setEnds()
	return &b.s
}

// Available returns an error unless the id can be used for a new snapshot.
func (s *Store) Available(id forks.ID) error {
	if err := id.Check(); err != nil {
		return fmt.Errorf("%w: %w", forks.ErrUnsupported, err)
	}
	if _, err := os.Lstat(s.NodePath(id)); err == nil {
		return forks.ErrExists
	}
	return nil
}

// openSource opens the directory to capture, which may be reached through
// symlinks.
func openSource(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == unix.EACCES {
		var parent int
		parent, err = unix.Open(filepath.Dir(filepath.Clean(dir)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(parent)
			fd, err = fsat.Access{CrossMounts: true}.OpenDir(parent, filepath.Base(filepath.Clean(dir)))
		}
	}
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return fd, nil
}

// sourceError names the path in full.
func sourceError(dir string, err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) && !filepath.IsAbs(pe.Path) {
		return &os.PathError{Op: pe.Op, Path: filepath.Join(dir, pe.Path), Err: pe.Err}
	}
	return err
}

// sourceState returns the index that was kept with a captured snapshot, with
// trust, or its state.
func (s *Store) sourceState(id forks.ID) (*State, bool, error) {
	of, index, err := LoadIndex(filepath.Join(s.NodePath(id), "source"))
	if err == nil && of == id {
		return index, true, nil
	}
	state, err := s.State(id)
	if err != nil {
		return nil, false, err
	}
	return state.Clone(), false, nil
}

// dropOldSources keeps the newest source indexes only: they are as large as
// the tree's list of files.
func (s *Store) dropOldSources() {
	paths, err := filepath.Glob(s.path("nodes", "*", "source"))
	if err != nil || len(paths) <= keptSources {
		return
	}
	age := make(map[string]int64)
	for _, p := range paths {
		if fi, err := os.Lstat(p); err == nil {
			age[p] = fi.ModTime().UnixNano()
		}
	}
	sort.Slice(paths, func(i, j int) bool { return age[paths[i]] > age[paths[j]] })
	for _, p := range paths[keptSources:] {
		_ = os.Remove(p) // a cache
	}
}

// SameAsStored returns the comparison of open files with the bytes of state.
func (s *Store) SameAsStored(state *State) func(uint32, func() string, string, int) (bool, error) {
	return func(node uint32, dir func() string, name string, fd int) (bool, error) {
		size := state.Nodes[node].Size
		if size == 0 {
			return true, nil
		}
		stored, err := s.OpenFile(state.LayerOf(node), join(dir(), name))
		if err != nil {
			return false, err
		}
		defer unix.Close(stored)
		a, b := buffers.Get().(*[]byte), buffers.Get().(*[]byte)
		defer buffers.Put(a)
		defer buffers.Put(b)
		return fsat.Same(stored, fd, size, *a, *b)
	}
}

// exclusions is [Exclusions] for a source of this store, which leaves the store
// out.
func (s *Store) exclusions(src forks.Source) (func(dir, name string) bool, map[FileID]bool, error) {
	src.Skip = append([]string{s.Dir}, src.Skip...)
	return Exclusions(src)
}

// Exclusions compiles what a source leaves out: patterns, and paths that are
// known by their names, directories also by what they are. The function is nil
// if it would never say yes.
func Exclusions(src forks.Source) (func(dir, name string) bool, map[FileID]bool, error) {
	var patterns []string
	for _, p := range src.Exclude {
		p = strings.TrimSuffix(strings.TrimPrefix(p, "./"), "/")
		if !strings.Contains(p, "/") {
			p = "**/" + p
		}
		p = strings.TrimPrefix(p, "/")
		if !doublestar.ValidatePattern(p) {
			return nil, nil, fmt.Errorf("%w: exclude pattern %q is malformed", forks.ErrUnsupported, p)
		}
		patterns = append(patterns, p)
	}
	top, err := filepath.EvalSymlinks(src.Dir)
	if err != nil {
		return nil, nil, err
	}
	skip, dirs := make(map[string]bool), make(map[FileID]bool)
	for _, p := range src.Skip {
		if rel, err := filepath.Rel(top, p); err == nil && rel != "." && rel != ".." && !strings.HasPrefix(rel, "../") {
			skip[rel] = true
		}
		var st unix.Stat_t
		if unix.Stat(p, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			dirs[FileID{st.Dev, st.Ino}] = true
		}
	}
	leftover := Leftover(src.Index)
	if len(skip) == 0 && len(patterns) == 0 && leftover == "" {
		return nil, dirs, nil
	}
	return func(dir, name string) bool {
		path := join(dir, name)
		if skip[path] || name == leftover {
			return true
		}
		for _, p := range patterns {
			if ok, _ := doublestar.Match(p, path); ok { // validated above
				return true
			}
		}
		return false
	}, dirs, nil
}
