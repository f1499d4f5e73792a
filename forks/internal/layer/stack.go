//go:build linux

package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// MaxLayers is how many layers a mount has at most. 64 mount in about half a
// millisecond; the kernel's limit is 500 (OVL_MAX_STACK).
const MaxLayers = 64

// Stack is a fork that is an overlay: frozen layers and a private directory
// above them. Nothing needs to be mounted to read or to commit it.
//
//	KEY/stack/tree/   the upper
//	KEY/stack/work/   the kernel's own
//	KEY/stack/lower   the snapshot whose layers are below it; a symlink's text
//	KEY/stack/base    the fork's base, which is the last commit; likewise
//	KEY/stack/index   what the upper held at that commit (a cache)
//	KEY/next          while the upper becomes a layer: that layer's id
//
// A symlink's text is never half written, and layers never change what they
// are built upon, so that a name stands for the whole list of layers.
//
// The stack changes by renames of stack/ alone. Where there is none, a commit
// was cut short after it had made stack/ the layer named by next: the fork is
// that snapshot, with an empty upper.
type Stack struct {
	// Base is the fork's base.
	Base forks.ID
	// Lower is the snapshot that was the base when the stack was made.
	Lower forks.ID
	// bare: stack/ is missing.
	bare  bool
	store *Store
	key   forks.Key
}

// stackTries is how often a stack is looked for while it moves.
const stackTries = 100

func (s *Store) stackPath(key forks.Key, elem ...string) string {
	dir, _ := s.ForkDir(key)
	return filepath.Join(append([]string{dir, "stack"}, elem...)...)
}

func (s *Store) nextPath(key forks.Key) string {
	dir, _ := s.ForkDir(key)
	return filepath.Join(dir, "next")
}

// Stack reads the stack of the fork key. It is [fs.ErrNotExist] if the fork is
// none, or is not there.
func (s *Store) Stack(key forks.Key) (*Stack, error) {
	if err := key.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	for try := 1; ; try++ {
		st := &Stack{store: s, key: key}
		err := st.read(s.stackPath(key))
		if !errors.Is(err, fs.ErrNotExist) {
			return st, err
		}
		next, err := os.Readlink(s.nextPath(key))
		if err == nil {
			st.Base, st.Lower, st.bare = forks.ID(next), forks.ID(next), true
			return st, nil
		}
		dir, _ := s.ForkDir(key)
		if _, gone := os.Lstat(dir); gone != nil {
			return nil, err
		}
		if try == stackTries {
			if _, gone := os.Lstat(s.stackPath(key)); gone == nil {
				err = damaged("the fork's base is missing")
			}
			return st, err
		}
		if _, plain := os.Lstat(filepath.Join(dir, "base")); plain == nil {
			return nil, err
		}
		// Commits began and ended between the looks.
	}
}

// read reads the stack in the directory dir.
func (st *Stack) read(dir string) error {
	for name, id := range map[string]*forks.ID{"base": &st.Base, "lower": &st.Lower} {
		text, err := os.Readlink(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		*id = forks.ID(text)
		if id.Check() != nil {
			return damaged("the fork's " + name + " is unreadable")
		}
	}
	return nil
}

// Mount says how the fork is mounted. With an error, which is
// [forks.ErrDamaged] and names the snapshot, it has no layers.
func (st *Stack) Mount() (forks.Mount, error) {
	chain, err := st.store.Chain(st.Lower)
	err = LostBase(st.Lower, err)
	dir, name := st.store.ForkDir(st.key)
	rel, _ := filepath.Rel(st.store.Dir, st.store.stackPath(st.key)) // both are absolute
	o := &forks.Overlay{
		Dir: st.store.Dir, Upper: rel + "/tree", Work: rel + "/work",
		Volatile: st.key != forks.Work,
	}
	for _, id := range chain {
		o.Lower = append(o.Lower, "nodes/"+string(id)+"/tree")
	}
	return forks.Mount{Dir: filepath.Join(dir, name), Overlay: o}, err
}

// Chain returns the layers of snapshot id, itself first.
func (s *Store) Chain(id forks.ID) ([]forks.ID, error) {
	var chain []forks.ID
	for at := id; at != ""; {
		if len(chain) > maxChain {
			return nil, fmt.Errorf("snapshot %s: %w", id, damaged("its base is built upon it"))
		}
		chain = append(chain, at)
		base, err := s.baseOf(at)
		if err != nil {
			return nil, s.badLayer(at, id, err)
		}
		at = base
	}
	return chain, nil
}

// badLayer says what it means that the record of layer at, of snapshot id,
// could not be read.
func (s *Store) badLayer(at, id forks.ID, err error) error {
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("snapshot %s: %w", at, err)
	case at == id:
		return s.missing(at)
	}
	return LostBase(at, s.missing(at))
}

// maxChain bounds the way to the first snapshot. Stores that were written
// before chains were kept short have longer ones than MaxLayers.
const maxChain = 1 << 20

// lockLayers takes the store's lock on its layers: shared by who picks layers
// to build upon, until that can be seen; alone by who removes them. flock(2)
// on the directory of the layers, so it ends with the process.
func (s *Store) lockLayers(how int) (unlock func(), err error) {
	fd, err := unix.Open(s.path("nodes"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: s.path("nodes"), Err: err}
	}
	for {
		err = unix.Flock(fd, how)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "lock", Path: s.path("nodes"), Err: err}
	}
	return sync.OnceFunc(func() { unix.Close(fd) }), nil
}

// Mark changes whenever the stack of the fork key is another.
func (s *Store) Mark(key forks.Key) uint64 {
	var st unix.Stat_t
	if unix.Lstat(s.stackPath(key), &st) != nil {
		return math.MaxUint64
	}
	// A rename sets the ctime, so that a number that is used again is told.
	return st.Ino ^ uint64(st.Ctim.Nano())<<20
}

// MakeStack makes the fork key as an overlay over snapshot base. hold is given
// the open directory of the fork before others can see it, and keeps it.
func (s *Store) MakeStack(ctx context.Context, key forks.Key, base forks.ID, hold func(*os.File) error) (st *Stack, err error) {
	unlock, err := s.lockLayers(unix.LOCK_SH)
	if errors.Is(err, fs.ErrNotExist) {
		err = forks.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := s.Exists(base); err != nil {
		return nil, fmt.Errorf("base %s: %w", base, err)
	}
	stage, err := s.NewStage()
	if err != nil {
		return nil, err
	}
	st, err = s.makeStack(stage, key, base, hold)
	if err != nil {
		return nil, errors.Join(err, stage.Remove(ctx))
	}
	return st, nil
}

// makeStack makes the stage itself the fork.
func (s *Store) makeStack(stage *Stage, key forks.Key, base forks.ID, hold func(*os.File) error) (*Stack, error) {
	if err := s.buildTop(stage, base, key == forks.Work); err != nil {
		return nil, err
	}
	step.At("stack.fork.made")
	dir, _ := s.ForkDir(key)
	fd, err := unix.FcntlInt(uintptr(stage.FD), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	lock := os.NewFile(uintptr(fd), dir)
	if err := hold(lock); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	err = unix.Renameat2(unix.AT_FDCWD, stage.Path, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL { // a file system without the flag
		err = os.Rename(stage.Path, dir)
	}
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, fs.ErrExist) {
		return nil, forks.ErrExists
	}
	if err != nil {
		return nil, &os.PathError{Op: "rename to", Path: dir, Err: err}
	}
	unix.Close(stage.FD) // the lock stays with the copy
	step.At("stack.fork.placed")
	if key == forks.Work {
		if err := fsat.SyncDir(s.Dir); err != nil {
			return nil, err
		}
	}
	return &Stack{Base: base, Lower: base, store: s, key: key}, nil
}

// buildTop makes stack/ in the stage, over snapshot base.
func (s *Store) buildTop(stage *Stage, base forks.ID, durable bool) error {
	nodes, err := s.nodesDir()
	if err != nil {
		return err
	}
	defer nodes.Release()
	root, err := Access.OpenDir(nodes.FD, string(base)+"/tree")
	if err != nil {
		return s.unreadable(base, ".", err)
	}
	defer unix.Close(root)
	chain, err := s.Chain(base)
	if err != nil {
		return err
	}
	if len(chain) > MaxLayers {
		return &TooManyLayers{ID: base, Layers: len(chain)}
	}
	return s.buildStack(stage, base, root, durable)
}

// TooManyLayers: a snapshot was stored before chains were kept short, and its
// layers are more than a mount takes. It wraps [forks.ErrUnsupported].
type TooManyLayers struct {
	ID     forks.ID
	Layers int
}

func (e *TooManyLayers) Error() string {
	return fmt.Sprintf("%v: snapshot %s has %d layers, a mount takes %d; a new snapshot of it has fewer", forks.ErrUnsupported, e.ID, e.Layers, MaxLayers)
}

func (e *TooManyLayers) Unwrap() error { return forks.ErrUnsupported }

// buildStack makes stack/ in the stage, over snapshot base, whose open root is
// root.
func (s *Store) buildStack(stage *Stage, base forks.ID, root int, durable bool) error {
	for _, name := range []string{"stack", "stack/tree", "stack/work"} {
		if err := unix.Mkdirat(stage.FD, name, 0o700); err != nil {
			return &os.PathError{Op: "mkdir", Path: filepath.Join(stage.Path, name), Err: err}
		}
	}
	for _, name := range []string{"stack/base", "stack/lower"} {
		if err := unix.Symlinkat(string(base), stage.FD, name); err != nil {
			return &os.PathError{Op: "symlink", Path: filepath.Join(stage.Path, name), Err: err}
		}
	}
	if err := copyRoot(stage.FD, "stack/tree", root); err != nil || !durable {
		return err
	}
	for _, name := range []string{"stack/tree", "stack", "."} {
		if err := fsat.SyncDir(filepath.Join(stage.Path, name)); err != nil {
			return err
		}
	}
	return nil
}

// copyRoot gives the new upper name the metadata of the open root of what is
// below it, since an overlay takes them from its upper.
func copyRoot(dir int, name string, from int) error {
	var st, made unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	xattrs, err := fsat.Xattrs(from)
	if err != nil {
		return err
	}
	to, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(to)
	set := fsat.NewSetter()
	set.Fresh, set.OwnGroup = true, true
	meta := layerMeta(fsat.Meta{
		Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		MtimeSec: st.Mtim.Sec, MtimeNsec: uint32(st.Mtim.Nsec), Xattrs: xattrs,
	})
	if err := set.FD(to, &meta, &made); err != nil {
		return fmt.Errorf("the tree's root: %w", err)
	}
	return nil
}

// Ready brings the fork into a state in which it can be mounted: it ends a
// commit that was cut short, and gives the kernel an empty directory to work
// in. The caller holds the fork.
func (s *Store) Ready(ctx context.Context, key forks.Key) error {
	if err := s.finish(ctx, key); err != nil {
		return err
	}
	if err := os.Remove(s.stackPath(key, "record")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	work := s.stackPath(key, "work")
	names, err := readNames(work)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		err := os.Mkdir(work, 0o700) // missing after a commit that was cut short
		return ignoreIf(errors.Is(err, fs.ErrExist), err)
	}
	if lingers(s.stackPath(key)) {
		return nil // mounted where we do not see it; who mounts is told
	}
	if err := removeWork(ctx, s.stackPath(key)); err != nil {
		return err
	}
	return os.Mkdir(work, 0o700)
}

// mountPatience is how long to wait for the end of a mount: that of processes
// which were killed goes a moment after them.
const mountPatience = time.Second

// lingers waits until the upper of the stack at path is not mounted any more,
// and says whether it still is.
func lingers(path string) bool {
	for end := time.Now().Add(mountPatience); InUse(path); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return true
		}
	}
	return false
}

// Lingers says whether the fork's upper is mounted, and goes on being so.
func (s *Store) Lingers(key forks.Key) bool { return lingers(s.stackPath(key)) }

// removeWork removes the kernel's directory of the stack at path.
func removeWork(ctx context.Context, path string) error {
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(dir)
	return fsat.RemoveAll(ctx, dir, "work")
}

// finish ends or undoes a commit that was cut short.
func (s *Store) finish(ctx context.Context, key forks.Key) error {
	next, err := os.Readlink(s.nextPath(key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := os.Lstat(s.stackPath(key)); errors.Is(err, fs.ErrNotExist) {
		return s.remake(ctx, key, forks.ID(next))
	} else if err != nil {
		return err
	}
	return s.dropNext(key, forks.ID(next))
}

// remake gives a fork whose stack became layer id a new one.
func (s *Store) remake(ctx context.Context, key forks.Key, id forks.ID) error {
	stage, err := s.NewStage()
	if err != nil {
		return err
	}
	if err = s.buildTop(stage, id, key == forks.Work); err == nil {
		err = s.moveOn(stage, key, id)
	}
	return errors.Join(err, stage.Remove(ctx))
}

// moveOn gives the fork, whose stack has become layer id, the stack that was
// made in the stage.
func (s *Store) moveOn(stage *Stage, key forks.Key, id forks.ID) error {
	at := s.stackPath(key)
	if err := os.Rename(filepath.Join(stage.Path, "stack"), at); err != nil {
		return &os.PathError{Op: "rename to", Path: at, Err: err}
	}
	step.At("stack.commit.new-placed")
	return s.dropNext(key, id)
}

// dropNext ends a commit: what only a fork's stack has is taken out of the
// layer.
func (s *Store) dropNext(key forks.Key, id forks.ID) error {
	for _, name := range []string{"base", "lower", "index"} {
		err := os.Remove(filepath.Join(s.NodePath(id), name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	step.At("stack.commit.cleaned")
	if err := os.Remove(s.nextPath(key)); err != nil {
		return err
	}
	step.At("stack.commit.done")
	return nil
}

// InUse says whether the upper of the stack at path is mounted anywhere, in
// whatever mount namespace: then the kernel refuses a mount with an index on
// it. Who may not mount gets false.
func InUse(path string) bool {
	o := forks.Overlay{Dir: path, Upper: "tree", Work: "work"}
	return errors.Is(o.Free(), forks.ErrInUse)
}
