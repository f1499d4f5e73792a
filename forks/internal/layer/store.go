//go:build linux

package layer

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// cachedStates is how many whole states a store keeps in memory.
const cachedStates = 4

// Store is a store's directory. It is safe for use by several goroutines.
type Store struct {
	// Dir is the absolute path of the store's root.
	Dir string
	// Copier copies the store's files.
	Copier fsat.Copier

	// collecting is held by whoever removes layers: between a look at what is
	// needed and the removal, nobody else may remove.
	collecting sync.Mutex

	mu     sync.Mutex
	nodes  *fsat.Dir
	states []cached // the last used last
	bases  map[forks.ID]forks.ID
	tables map[forks.ID]table
}

type cached struct {
	id    forks.ID
	state *State
}

// NewStore returns the store whose root is dir. Nothing is made on disk before
// something is stored.
func NewStore(dir string) *Store {
	return &Store{Dir: dir, bases: make(map[forks.ID]forks.ID), tables: make(map[forks.ID]table)}
}

// Close lets go of what the store holds open.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes != nil {
		s.nodes.Release()
	}
	s.nodes, s.states = nil, nil
	return nil
}

// Access is how the store's own trees are read.
var Access = fsat.Access{Chmod: true}

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.Dir}, elem...)...)
}

// NodePath is the directory of snapshot id.
func (s *Store) NodePath(id forks.ID) string { return s.path("nodes", string(id)) }

// makeDir makes a directory of the store: for the owner alone, and handing no
// ACL down to what is made in it.
func makeDir(path string) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, acl := range []string{fsat.ACLDefault, fsat.ACLAccess} {
		if err := unix.Removexattr(path, acl); err != nil && err != unix.ENODATA && err != unix.ENOTSUP {
			return &os.PathError{Op: "remove ACL", Path: path, Err: err}
		}
	}
	return os.Chmod(path, 0o700)
}

// Stage is a directory in which something is made, out of sight. While the
// process that made it lives, no Sweep takes it away.
type Stage struct {
	Path string
	// FD is the open directory, which holds the lock.
	FD    int
	store *Store
}

// NewStage makes one, and the store's directories where they are missing.
func (s *Store) NewStage() (*Stage, error) {
	for {
		st, err := s.tryStage()
		if errors.Is(err, fs.ErrNotExist) {
			err = s.makeDirs()
			if err == nil {
				continue
			}
		}
		if !errors.Is(err, fs.ErrExist) {
			return st, err
		}
	}
}

func (s *Store) makeDirs() error {
	if err := makeDir(s.Dir); err != nil {
		return err
	}
	for _, d := range []string{"nodes", "forks", "tmp"} {
		if err := makeDir(s.path(d)); err != nil {
			return err
		}
	}
	forks.Spread(s.path("tmp"))
	return nil
}

func (s *Store) tryStage() (*Stage, error) {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	path := s.path("tmp", hex.EncodeToString(b[:]))
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	// A Sweep may have come between mkdir and this and removed it.
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		unix.Close(fd)
		return nil, fs.ErrExist
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Nlink == 0 {
		unix.Close(fd)
		return nil, fs.ErrNotExist
	}
	return &Stage{Path: path, FD: fd, store: s}, nil
}

// Mkdir makes a directory in the stage and returns it opened.
func (st *Stage) Mkdir(name string) (*fsat.Dir, error) {
	path := filepath.Join(st.Path, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fsat.NewDir(fd), nil
}

// Remove takes the stage away with all that is still in it. It is done also
// when ctx has ended.
func (st *Stage) Remove(ctx context.Context) error {
	defer unix.Close(st.FD)
	tmp, err := unix.Open(filepath.Dir(st.Path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(tmp)
	return fsat.RemoveAll(context.WithoutCancel(ctx), tmp, filepath.Base(st.Path))
}

// Publish makes the stage's directory "node", which is complete and durable,
// the snapshot id.
func (st *Stage) Publish(id, base forks.ID) error {
	return st.store.place(filepath.Join(st.Path, "node"), id, base)
}

// place makes the directory at path the snapshot id.
func (s *Store) place(path string, id, base forks.ID) error {
	err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, s.NodePath(id), unix.RENAME_NOREPLACE)
	if err == unix.EINVAL { // a file system without the flag
		err = os.Rename(path, s.NodePath(id))
	}
	if errors.Is(err, fs.ErrExist) {
		return forks.ErrExists
	}
	if err != nil {
		return &os.PathError{Op: "rename to", Path: s.NodePath(id), Err: err}
	}
	s.mu.Lock()
	s.bases[id] = base
	s.mu.Unlock()
	return fsat.SyncDir(s.path("nodes"))
}

// readRecord reads snapshot id's record.
func (s *Store) readRecord(id forks.ID) (Header, *State, error) {
	b, err := os.ReadFile(filepath.Join(s.NodePath(id), "record"))
	if errors.Is(err, fs.ErrNotExist) {
		return Header{}, nil, s.missing(id)
	}
	if err != nil {
		return Header{}, nil, fmt.Errorf("snapshot %s: %w", id, unreadable(err))
	}
	h, delta, err := DecodeRecord(b)
	if err == nil && h.ID != id {
		err = damaged("the record is that of " + string(h.ID))
	}
	if err != nil {
		return h, nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	return h, delta, nil
}

// unreadable tells an error of the caller's rights from one of the store.
func unreadable(err error) error {
	for _, e := range []error{unix.EISDIR, unix.ENOTDIR, unix.EIO, io.EOF} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %w", forks.ErrDamaged, err)
		}
	}
	return err
}

// Whole returns nil if the layers of snapshot id are there, and their records
// as they were written; else an error that names the one that is not.
func (s *Store) Whole(id forks.ID) error {
	chain, err := s.Chain(id)
	if err != nil {
		return err
	}
	for _, at := range chain {
		if err := s.wholeLayer(at); err != nil {
			return fmt.Errorf("snapshot %s: %w", at, err)
		}
	}
	return nil
}

func (s *Store) wholeLayer(id forks.ID) error {
	fi, err := os.Lstat(filepath.Join(s.NodePath(id), "tree"))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.IsDir() {
		return damaged("its tree is missing")
	}
	if err != nil {
		return unreadable(err)
	}
	sum, large, err := s.recordSum(id)
	if err != nil {
		return unreadable(err)
	}
	if large { // a lookup of this very record stands for it
		if _, err := openLookup(filepath.Join(s.NodePath(id), "lookup"), id, sum); err == nil {
			return nil
		}
	}
	b, err := os.ReadFile(filepath.Join(s.NodePath(id), "record"))
	if errors.Is(err, fs.ErrNotExist) {
		return damaged("its record is missing")
	}
	if err != nil {
		return unreadable(err)
	}
	_, _, at, err := decodeHeader(b)
	if err != nil {
		return err
	}
	return checkSum(b, at)
}

// missing says what it means that snapshot id has no record.
func (s *Store) missing(id forks.ID) error {
	if _, err := os.Lstat(s.NodePath(id)); err == nil {
		return fmt.Errorf("snapshot %s: %w", id, damaged("its record is missing"))
	}
	return fmt.Errorf("snapshot %s: %w", id, forks.ErrNotFound)
}

// LostBase says what it means that snapshot id, which something is built upon,
// cannot be found.
func LostBase(id forks.ID, err error) error {
	if errors.Is(err, forks.ErrNotFound) {
		return fmt.Errorf("snapshot %s: %w", id, damaged("it is missing"))
	}
	return err
}

// Exists returns nil if the snapshot id is there and not removed.
func (s *Store) Exists(id forks.ID) error {
	if err := id.Check(); err != nil {
		return fmt.Errorf("%w: %w", forks.ErrNotFound, err)
	}
	if _, err := os.Lstat(s.NodePath(id)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return forks.ErrNotFound
		}
		return err
	}
	if s.isRemoved(id) {
		return forks.ErrNotFound
	}
	return nil
}

// State returns the whole tree of snapshot id, removed or not. It is shared:
// who wants to change it takes a [State.Clone].
func (s *Store) State(id forks.ID) (*State, error) {
	if state := s.cachedState(id); state != nil {
		return state, nil
	}
	var chain []*State
	seen := make(map[forks.ID]bool)
	for at := id; at != ""; {
		if state := s.cachedState(at); state != nil {
			chain = append(chain, state)
			break
		}
		if seen[at] {
			return nil, fmt.Errorf("snapshot %s: %w", at, damaged("its base is built upon it"))
		}
		seen[at] = true
		h, delta, err := s.readRecord(at)
		if err != nil && at != id {
			return nil, fmt.Errorf("snapshot %s: %w: its base: %v", id, forks.ErrDamaged, LostBase(at, err))
		}
		if err != nil {
			return nil, err
		}
		chain = append(chain, delta)
		at = h.Base
	}
	slices.Reverse(chain)
	state, err := Fold(chain)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	s.remember(id, state)
	return state, nil
}

// Clone returns a copy whose nodes can be changed.
func (s *State) Clone() *State {
	c := *s
	c.Nodes = slices.Clone(s.Nodes)
	return &c
}

func (s *Store) cachedState(id forks.ID) *State {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range s.states {
		if c.id == id {
			s.states = append(append(s.states[:i:i], s.states[i+1:]...), c)
			return c.state
		}
	}
	return nil
}

func (s *Store) remember(id forks.ID, state *State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.states) >= cachedStates {
		s.states = append(s.states[:0:0], s.states[1:]...)
	}
	s.states = append(s.states, cached{id, state})
}

func (s *Store) forget(id forks.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.bases, id)
	delete(s.tables, id)
	s.states = slices.DeleteFunc(s.states, func(c cached) bool { return c.id == id })
}

// nodesDir returns the open directory nodes/, which the caller releases.
func (s *Store) nodesDir() (*fsat.Dir, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes == nil {
		fd, err := unix.Open(s.path("nodes"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: s.path("nodes"), Err: err}
		}
		s.nodes = fsat.NewDir(fd)
	}
	s.nodes.Hold(1)
	return s.nodes, nil
}

// OpenFile opens the bytes of the regular file at path in layer id.
func (s *Store) OpenFile(id forks.ID, path string) (int, error) {
	d, err := s.nodesDir()
	if err != nil {
		return -1, err
	}
	defer d.Release()
	full := string(id) + "/tree/" + path
	fd := -1
	err = unix.ENAMETOOLONG
	if len(full) < unix.PathMax {
		fd, err = Access.Open(d.FD, full, unix.O_RDONLY)
	}
	if errors.Is(err, unix.ENAMETOOLONG) || errors.Is(err, unix.EACCES) {
		fd, err = openSteps(d.FD, full)
	}
	if err != nil {
		return -1, s.unreadable(id, path, err)
	}
	return fd, nil
}

func (s *Store) unreadable(id forks.ID, path string, err error) error {
	if fsat.IsGone(err) {
		err = damaged("the file's bytes are missing")
	}
	return fmt.Errorf("snapshot %s: %s: %w", id, path, err)
}

// openSteps opens a path element by element.
func openSteps(dir int, path string) (int, error) {
	at, err := unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 3)
	for err == nil {
		name, rest, more := strings.Cut(path, "/")
		flags := unix.O_PATH | unix.O_DIRECTORY
		if !more {
			flags = unix.O_RDONLY
		}
		var next int
		next, err = Access.Open(at, name, flags)
		unix.Close(at)
		if !more {
			return next, err
		}
		at, path = next, rest
	}
	return -1, err
}

// Snapshots lists the ids that are there and not removed.
func (s *Store) Snapshots() ([]forks.ID, error) {
	all, err := s.all()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, s.isRemoved), nil
}

// all lists the ids of all layers.
func (s *Store) all() ([]forks.ID, error) {
	names, err := readNames(s.path("nodes"))
	if err != nil {
		return nil, err
	}
	var ids []forks.ID
	for _, n := range names {
		if id := forks.ID(n); id.Check() == nil {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

func readNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

func (s *Store) isRemoved(id forks.ID) bool {
	_, err := os.Lstat(filepath.Join(s.NodePath(id), "removed"))
	return err == nil
}

// baseOf returns the base of a layer from the header of its record.
func (s *Store) baseOf(id forks.ID) (forks.ID, error) {
	s.mu.Lock()
	base, ok := s.bases[id]
	s.mu.Unlock()
	if ok {
		return base, nil
	}
	f, err := os.Open(filepath.Join(s.NodePath(id), "record"))
	if err != nil {
		return "", unreadable(err)
	}
	defer f.Close()
	b := make([]byte, headerSize)
	n, err := io.ReadFull(f, b)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return "", unreadable(err)
	}
	h, err := DecodeHeader(b[:n])
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	s.bases[id] = h.Base
	s.mu.Unlock()
	return h.Base, nil
}

// RemoveSnapshot marks the snapshot id as removed and frees what nothing needs
// any more.
func (s *Store) RemoveSnapshot(ctx context.Context, id forks.ID) error {
	if id.Check() != nil {
		return nil
	}
	s.collecting.Lock()
	defer s.collecting.Unlock()
	f, err := os.OpenFile(filepath.Join(s.NodePath(id), "removed"), os.O_WRONLY|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if errors.Is(err, unix.ENOTDIR) { // what stands there never was one
		return os.Remove(s.NodePath(id))
	}
	if err != nil {
		return err
	}
	f.Close()
	err = fsat.SyncDir(s.NodePath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another process saw the mark and was faster
	}
	if err != nil {
		return err
	}
	return s.collect(ctx)
}

// CollectFrom is Collect after a fork let go of the snapshots ids: if none of
// them is removed, nothing has become free.
func (s *Store) CollectFrom(ctx context.Context, ids ...forks.ID) error {
	if !slices.ContainsFunc(ids, s.isRemoved) {
		return nil
	}
	return s.Collect(ctx)
}

// Collect frees the removed layers that no layer and no fork is built upon.
func (s *Store) Collect(ctx context.Context) error {
	s.collecting.Lock()
	defer s.collecting.Unlock()
	return s.collect(ctx)
}

func (s *Store) collect(ctx context.Context) error {
	for {
		free, err := s.unneeded()
		if err != nil || len(free) == 0 {
			return err
		}
		n, err := s.free(ctx)
		if err != nil || n == 0 {
			return err
		}
	}
}

// unneeded lists the removed layers that nothing is built upon.
func (s *Store) unneeded() ([]forks.ID, error) {
	all, err := s.all()
	if err != nil {
		return nil, err
	}
	var removed []forks.ID
	for _, id := range all {
		if s.isRemoved(id) {
			removed = append(removed, id)
		}
	}
	if len(removed) == 0 {
		return nil, nil
	}
	needed := make(map[forks.ID]bool)
	for _, id := range all {
		base, err := s.baseOf(id)
		if err != nil && !s.isRemoved(id) {
			return nil, nil // a damaged snapshot may be built upon any
		}
		needed[base] = true
	}
	err = s.neededByForks(needed)
	if errors.Is(err, forks.ErrDamaged) {
		return nil, nil // and so may a damaged fork
	}
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(removed, func(id forks.ID) bool { return needed[id] }), nil
}

// neededByForks adds what the forks are built upon, and the trees that were
// replaced while they were mounted.
func (s *Store) neededByForks(needed map[forks.ID]bool) error {
	keys, err := s.Forks()
	if err != nil {
		return err
	}
	for _, k := range keys {
		if base, _, err := s.ForkBase(k); err == nil {
			needed[base] = true
		}
		st, err := s.Stack(k)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("fork %s: %w", k, err)
		}
		needed[st.Base], needed[st.Lower] = true, true
	}
	old, err := filepath.Glob(s.path("tmp", "*", "stack"))
	if err != nil {
		return err
	}
	for _, dir := range old {
		var st Stack
		if st.read(dir) == nil { // else not yet, or not any more, a stack
			needed[st.Lower] = true
		}
	}
	return nil
}

// free moves the unneeded layers out of nodes/, while nobody is picking layers
// to build upon, and then removes them.
func (s *Store) free(ctx context.Context) (n int, err error) {
	st, err := s.NewStage()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, st.Remove(ctx)) }()
	unlock, err := s.lockLayers(unix.LOCK_EX)
	if err != nil {
		return 0, err
	}
	defer unlock()
	ids, err := s.unneeded()
	if err != nil {
		return 0, err
	}
	for _, id := range ids {
		step.At("layer.free.chosen")
		err := os.Rename(s.NodePath(id), filepath.Join(st.Path, "node-"+string(id)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return n, err
		}
		s.forget(id)
		n++
	}
	unlock()
	return n, nil
}

// Sweep removes what a crash left in tmp/ and the layers that nothing needs,
// and returns the bytes that were allocated to them.
func (s *Store) Sweep(ctx context.Context) (int64, error) {
	names, err := readNames(s.path("tmp"))
	if err != nil || names == nil {
		return 0, err
	}
	tmp, err := unix.Open(s.path("tmp"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: s.path("tmp"), Err: err}
	}
	defer unix.Close(tmp)
	var freed int64
	for _, name := range names {
		n, err := sweepOne(ctx, tmp, s.path("tmp"), name)
		if err != nil {
			return freed, err
		}
		freed += n
	}
	before, err := s.unneeded()
	if err != nil {
		return freed, err
	}
	for _, id := range before {
		freed += fsat.DiskUsageAt(unix.AT_FDCWD, s.NodePath(id))
	}
	return freed, s.Collect(ctx)
}

func sweepOne(ctx context.Context, tmp int, dir, name string) (int64, error) {
	fd, err := unix.Openat(tmp, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
			return 0, nil // its maker is at work
		}
	}
	if InUse(filepath.Join(dir, name, "stack")) {
		return 0, nil // processes stand in a tree that was replaced
	}
	size := fsat.DiskUsageAt(tmp, name)
	return size, fsat.RemoveAll(ctx, tmp, name)
}
