//go:build linux

// Package place makes a directory that is not of a store, such as a user's own
// project, equal to a snapshot.
//
// What must hold: all that takes space is written before anything in the
// directory changes, into private directories: one beside the source's index,
// where that is on the same file system, else one in each directory that gets
// new files. Files are then put in place by rename, so that whoever has the old
// one open, mapped or running keeps it. Directories that stay keep their inodes.
// Nothing is removed or replaced but what the snapshot that holds the present
// state ([forks.Source.Held]) has: all else, and what someone changes while
// Replace is at work, stays and is named. To be sure of that, what is to go is
// first exchanged or moved aside, then looked at, and put back if it was edited.
// What was not listed (because it is excluded, on another file system, or new)
// is never removed, nor is the directory that holds it. A Replace that failed before its first change says so
// ([forks.ErrUntouched]) and leaves everything as it was; one that was cut short
// later is mended by the next.
package place

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/step"
)

// Reader is what of a [forks.Driver] is needed here.
type Reader interface {
	Compare(ctx context.Context, base forks.ID, src forks.Source) (forks.Changes, error)
	Diff(ctx context.Context, a, b forks.ID) (forks.Changes, error)
	View(ctx context.Context, id forks.ID) (forks.View, error)
}

// Replace makes src.Dir equal to snapshot id; see [forks.Driver].
func Replace(ctx context.Context, from Reader, id forks.ID, src forks.Source) (c forks.Changes, err error) {
	r := &replacer{src: src, stage: -1, access: fsat.Access{CrossMounts: src.CrossFilesystems}, buf: make([]byte, fsat.BufferSize)}
	r.old, r.fresh = fsat.NewSetter(), fsat.NewSetter()
	r.fresh.Fresh = true
	defer func() {
		if err != nil && !r.begun {
			err = fmt.Errorf("%w; %w", err, forks.ErrUntouched)
		}
	}()
	if r.root, err = unix.Open(src.Dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return c, &os.PathError{Op: "open", Path: src.Dir, Err: err}
	}
	defer unix.Close(r.root)
	defer func() {
		if r.stage >= 0 {
			unix.Close(r.stage) // after a failure; the next Replace removes it
		}
	}()
	if err := r.clean(ctx); err != nil {
		return c, inFull(src.Dir, err)
	}
	found, err := from.Compare(ctx, id, src)
	if err != nil {
		return c, err
	}
	if r.view, err = from.View(ctx, id); err != nil {
		return c, err
	}
	defer r.view.Close()
	r.warn(found.Warnings...)
	mine, err := r.unheld(ctx, from)
	if err != nil {
		return c, err
	}
	if err := r.plan(found.List, mine); err != nil {
		return c, err
	}
	if err := r.nameExcluded(ctx, from, id); err != nil {
		return c, err
	}
	if err = r.run(ctx); err == nil {
		c.List = r.done()
	}
	r.nameKept()
	if n := len(r.notOwned); n > 0 {
		r.warn(fmt.Sprintf("%s%s: only another user can give it the owner or group that it has in the snapshot, where that stays recorded", r.notOwned[0], andMore(n-1)))
	}
	c.Warnings = r.warnings
	return c, err
}

// unheld lists what the directory has that the snapshot which holds its state
// has not. It is looked at after the comparison with what the directory is to
// become: whatever that saw is then either held or listed here.
func (r *replacer) unheld(ctx context.Context, from Reader) (map[string]forks.Change, error) {
	if r.src.Held == "" {
		return nil, nil
	}
	differ, err := from.Compare(ctx, r.src.Held, r.src)
	if err != nil {
		return nil, err
	}
	mine := make(map[string]forks.Change, len(differ.List))
	for _, c := range differ.List {
		mine[c.Path] = c
	}
	return mine, nil
}

// done lists what was changed.
func (r *replacer) done() []forks.Change {
	return slices.DeleteFunc(r.list, func(c forks.Change) bool {
		it := r.items[c.Path]
		return it.edited || it.ownMeta || r.withinKept(c.Path)
	})
}

func andMore(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

// inFull names the path that an error is about in full.
func inFull(dir string, err error) error {
	var pe *os.PathError
	if !errors.As(err, &pe) || filepath.IsAbs(pe.Path) {
		return err
	}
	pe.Path = filepath.Join(dir, pe.Path)
	return err
}

type replacer struct {
	src        forks.Source
	view       forks.View
	access     fsat.Access
	root       int // O_PATH
	top        *item
	items      map[string]*item
	excluded   func(dir, name string) bool
	list       []forks.Change
	old, fresh fsat.Setter
	copier     fsat.Copier
	buf        []byte
	groups     map[uint64]*group
	left       string // the name of private directories in src.Dir
	stage      int    // the private directory that is not in src.Dir, or -1
	stageDev   uint64
	aside      bin // in the stage
	made       int // how many names the private directories have
	// begun: something may have been left changed; changed: it was.
	begun, changed bool
	warnings       []string
	keptPaths      []string
	notOwned       []string // what could not be given its owner
}

// maxWarnings bounds the warnings of one Replace, and maxNamed how many paths
// are named for one reason.
const (
	maxWarnings = 50
	maxNamed    = 10
)

func (r *replacer) warn(lines ...string) {
	for _, l := range lines {
		if len(r.warnings) < maxWarnings {
			r.warnings = append(r.warnings, l)
		}
	}
}

// run does what was planned.
func (r *replacer) run(ctx context.Context) error {
	if len(r.top.kids) == 0 && !r.top.listed {
		return nil
	}
	r.begun = true
	err := r.prepare(ctx)
	if err == nil {
		err = r.at(r.root, r.top, func(fd int) error { return r.put(ctx, fd, r.top) })
		err = errors.Join(err, r.lookAgain(&r.aside))
	}
	err = inFull(r.src.Dir, err)
	switch {
	case err != nil && !r.changed:
		undo := r.at(r.root, r.top, func(fd int) error { return r.abandon(ctx, fd, r.top) })
		undo = errors.Join(undo, r.close(ctx))
		r.begun = undo != nil
		return errors.Join(err, undo)
	case err != nil:
		return err // the next Replace cleans up
	}
	step.At("place.replace.switched")
	if err := r.sync(); err != nil {
		return inFull(r.src.Dir, err)
	}
	return r.close(ctx)
}

// prepare checks what can be checked, and writes all that is new.
func (r *replacer) prepare(ctx context.Context) error {
	if err := r.at(r.root, r.top, func(fd int) error { return r.check(fd, r.top) }); err != nil {
		return err
	}
	step.At("place.replace.checked")
	if err := r.findGroups(); err != nil {
		return err
	}
	if err := r.openStage(ctx); err != nil {
		return err
	}
	step.At("place.replace.staged")
	if err := r.at(r.root, r.top, func(fd int) error { return r.write(ctx, fd, r.top) }); err != nil {
		return err
	}
	step.At("place.replace.written")
	return r.sync()
}

// sync flushes the file system of the directory: a name must not be there
// before the bytes that it stands for are.
func (r *replacer) sync() error {
	fd, err := r.access.OpenDir(r.root, ".")
	if err != nil {
		return &os.PathError{Op: "open", Path: ".", Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Syncfs(fd); err != nil {
		return &os.PathError{Op: "syncfs", Path: ".", Err: err}
	}
	return nil
}

// stagePath is where the stage is, if there is an index.
func (r *replacer) stagePath() string { return r.src.Index + ".stage" }

// openStage notes that private directories may be left from now on, and makes
// the one that is out of sight, where it is of use.
func (r *replacer) openStage(ctx context.Context) (err error) {
	r.left = layer.LeftoverName
	if r.src.Index == "" {
		return nil
	}
	var token [4]byte
	_, _ = rand.Read(token[:]) // it never fails
	if r.left, err = layer.NoteReplace(r.src.Index, hex.EncodeToString(token[:])); err != nil {
		return err
	}
	if r.src.CrossFilesystems {
		return nil
	}
	if err := os.Mkdir(r.stagePath(), 0o700); err != nil {
		return err
	}
	if r.stage, err = unix.Open(r.stagePath(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return &os.PathError{Op: "open", Path: r.stagePath(), Err: err}
	}
	var here, there unix.Statx_t
	for fd, stx := range map[int]*unix.Statx_t{r.stage: &here, r.root: &there} {
		if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, stx); err != nil {
			return &os.PathError{Op: "statx", Path: r.src.Dir, Err: err}
		}
	}
	r.aside.fd = r.stage
	r.stageDev = unix.Mkdev(here.Dev_major, here.Dev_minor)
	if here.Mnt_id != there.Mnt_id || here.Mask&unix.STATX_MNT_ID == 0 {
		return r.dropStage(ctx)
	}
	return nil
}

func (r *replacer) dropStage(ctx context.Context) error {
	if r.stage >= 0 {
		unix.Close(r.stage)
		r.stage = -1
	}
	dir, err := unix.Open(filepath.Dir(r.stagePath()), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: filepath.Dir(r.stagePath()), Err: err}
	}
	defer unix.Close(dir)
	return fsat.RemoveAll(context.WithoutCancel(ctx), dir, filepath.Base(r.stagePath()))
}

// close removes what Replace had for itself.
func (r *replacer) close(ctx context.Context) error {
	if r.src.Index == "" || r.left == "" {
		return nil
	}
	if err := r.dropStage(ctx); err != nil {
		return err
	}
	return layer.EndReplace(r.src.Index)
}

// clean removes what a Replace left that was cut short. Without an index the
// comparison lists it, and it goes with all that the snapshot has not.
func (r *replacer) clean(ctx context.Context) error {
	left := layer.Leftover(r.src.Index)
	if left == "" {
		if r.src.Index == "" {
			return nil
		}
		return r.dropStage(ctx)
	}
	top := &item{name: ".", path: "."}
	if err := r.at(r.root, top, func(fd int) error { return r.cleanDir(ctx, fd, ".", left) }); err != nil {
		return err
	}
	r.left = left
	err := r.close(ctx)
	r.left = ""
	step.At("place.replace.cleaned")
	return err
}

func (r *replacer) cleanDir(ctx context.Context, fd int, path, left string) error {
	var l fsat.List
	if err := l.Read(fd); err != nil {
		return &os.PathError{Op: "read", Path: path, Err: err}
	}
	var dirs []string
	for i := range l.Len() {
		name := string(l.Name(i))
		if t := l.Type(i); name != left && (t == unix.DT_DIR || t == unix.DT_UNKNOWN) {
			dirs = append(dirs, name)
		}
		if name != left {
			continue
		}
		if err := fsat.RemoveAll(ctx, fd, name); err != nil {
			return &os.PathError{Op: "clean up", Path: path, Err: err}
		}
	}
	for _, name := range dirs {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		sub, err := r.access.OpenDir(fd, name)
		if errors.Is(err, fsat.ErrMountPoint) || fsat.IsGone(err) || errors.Is(err, unix.EACCES) {
			continue // no new file was made there
		}
		if err != nil {
			return &os.PathError{Op: "open", Path: join(path, name), Err: err}
		}
		err = r.cleanDir(ctx, sub, join(path, name), left)
		unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}

func join(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// meta is what Setter gives to a path.
func meta(e *forks.Entry) *fsat.Meta {
	m := &fsat.Meta{Mode: e.Mode, UID: e.UID, GID: e.GID, MtimeSec: e.Mtime.Unix(), MtimeNsec: uint32(e.Mtime.Nanosecond())}
	for name, value := range e.Xattrs {
		m.Xattrs = append(m.Xattrs, fsat.Xattr{Name: name, Value: value})
	}
	slices.SortFunc(m.Xattrs, func(a, b fsat.Xattr) int { return strings.Compare(a.Name, b.Name) })
	return m
}
