//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// mountsIn lists the mount points in a tree, relative to it.
func mountsIn(tree string) ([]string, error) {
	mounts, err := fsat.Mounts(tree)
	var found []string
	for _, m := range mounts {
		found = append(found, m.Path)
	}
	return found, err
}

// unmounted refuses a tree in which something is mounted: with the tree, the
// kernel would take the mount away.
func unmounted(tree string) error {
	mounts, err := mountsIn(tree)
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%s: is a mount point, and the whole tree must change: unmount it first", mounts[0])
	}
	return err
}

// maxNamed is how many processes a warning names.
const maxNamed = 5

// leftBehind names the processes whose working directory is in the tree that
// another one has taken the place of.
func leftBehind(old string) []string {
	var st unix.Stat_t
	if unix.Lstat(old, &st) != nil {
		return nil
	}
	dirs, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return nil
	}
	var pids []string
	for _, cwd := range dirs {
		var at unix.Stat_t
		if unix.Stat(cwd, &at) == nil && at.Dev == st.Dev {
			pids = append(pids, strings.Split(cwd, "/")[2])
		}
	}
	if len(pids) == 0 {
		return nil
	}
	named := strings.Join(pids[:min(len(pids), maxNamed)], ", ")
	if len(pids) > maxNamed {
		named += fmt.Sprintf(" and %d more", len(pids)-maxNamed)
	}
	return []string{fmt.Sprintf("the tree was replaced: the working directory of process %s is one of the old tree, which is gone; cd to it again", named)}
}

// removeTree removes name in the directory dir, which is a subvolume or a
// directory, with the subvolumes below it. It is done also when ctx has ended.
func (d *driver) removeTree(ctx context.Context, dir, name string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	if err := d.removeAt(context.WithoutCancel(ctx), fd, name); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

func (d *driver) removeAt(ctx context.Context, dir int, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Ino == rootDir && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		done, err := d.removeSubvolume(ctx, dir, name)
		if done || err != nil {
			return err
		}
	}
	return fsat.RemoveAll(ctx, dir, name)
}

// removeSubvolume deletes a subvolume with those below it. It returns false if
// this user may not, and has to remove what is in it: the kernel lets root
// alone delete subvolumes unless mounted with user_subvol_rm_allowed, and
// everybody remove an empty one like a directory.
func (d *driver) removeSubvolume(ctx context.Context, dir int, name string) (bool, error) {
	fd, err := trees.OpenDir(dir, name)
	if err != nil {
		return false, &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	inner, err := nested(fd)
	if err != nil {
		return false, err
	}
	if len(inner) > 0 {
		if err := setReadOnly(fd, false); err != nil {
			return false, err
		}
	}
	for _, n := range inner {
		if err := d.removeNested(ctx, fd, n); err != nil {
			return false, err
		}
	}
	err = d.destroy(dir, name)
	if refused(err) { // whoever may delete may not delete a read-only one
		if err := setReadOnly(fd, false); err != nil {
			return false, err
		}
		err = d.destroy(dir, name)
	}
	switch {
	case err == nil || err == unix.ENOENT:
		return true, nil
	case refused(err):
		return false, nil
	}
	return false, &os.PathError{Op: "delete subvolume", Path: name, Err: err}
}

func refused(err error) bool { return err == unix.EPERM || err == unix.EACCES || err == unix.EROFS }

func (d *driver) destroy(dir int, name string) error {
	d.making.Lock()
	defer d.making.Unlock()
	return destroy(dir, name)
}

func (d *driver) removeNested(ctx context.Context, root int, path string) error {
	s := &side{root: root}
	dir, name, err := s.parent(path)
	if err != nil || dir < 0 {
		return err
	}
	defer unix.Close(dir)
	return d.removeAt(ctx, dir, name)
}

// removeStage takes a stage away with the subvolumes in it.
func (d *driver) removeStage(ctx context.Context, st *layer.Stage) error {
	err := d.removeTrees(ctx, st.Path)
	return errors.Join(err, st.Remove(ctx))
}

// removeTrees removes the subvolumes in the directories of a stage.
func (d *driver) removeTrees(ctx context.Context, stage string) error {
	subs, err := os.ReadDir(stage)
	if err != nil {
		return err
	}
	for _, sub := range subs {
		if !sub.IsDir() {
			continue
		}
		for _, name := range []string{"tree", "current", nextName} {
			if err := d.removeTree(ctx, filepath.Join(stage, sub.Name()), name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *driver) RemoveFork(ctx context.Context, key forks.Key) (err error) {
	defer wrap("remove", key, &err)
	if key.Check() != nil {
		return nil
	}
	dir, name := d.store.ForkDir(key)
	if err := d.holds.Try(key, dir); errors.Is(err, forks.ErrNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	if err := unmounted(filepath.Join(dir, name)); err != nil {
		d.holds.Drop(key)
		return err
	}
	if err := d.takeAway(ctx, key); err != nil {
		return err
	}
	return d.collect(ctx)
}

// takeAway removes a fork, which is held, and lets go of it.
func (d *driver) takeAway(ctx context.Context, key forks.Key) error {
	defer d.holds.Drop(key)
	dir, _ := d.store.ForkDir(key)
	st, err := d.store.NewStage()
	if err != nil {
		return err
	}
	err = os.Rename(dir, filepath.Join(st.Path, "fork"))
	step.At("btrfs.remove-fork.moved")
	d.warn(key, nil)
	return errors.Join(err, d.removeStage(ctx, st))
}

// RemoveSnapshot marks the snapshot and gives it back once no fork has it as
// its base: what a fork changed is told by its base.
func (d *driver) RemoveSnapshot(ctx context.Context, id forks.ID) (err error) {
	defer wrap("remove", id, &err)
	if id.Check() != nil {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(d.store.NodePath(id), removedName), os.O_WRONLY|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	err = fsat.SyncDir(d.store.NodePath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another process saw the mark and was faster
	}
	if err != nil {
		return err
	}
	step.At("btrfs.remove-snapshot.marked")
	d.needing.Lock()
	d.kept = true
	d.needing.Unlock()
	return d.collect(ctx)
}

// removedName marks a snapshot as removed; package layer knows the name.
const removedName = "removed"

// collect gives back the removed snapshots that no fork needs.
func (d *driver) collect(ctx context.Context) error {
	d.needing.Lock()
	defer d.needing.Unlock()
	if !d.kept {
		return nil
	}
	marks, err := filepath.Glob(filepath.Join(d.store.NodePath("*"), removedName))
	if err != nil {
		return err
	}
	needed, err := d.bases()
	if err != nil {
		return err
	}
	d.kept = false
	for _, m := range marks {
		id := forks.ID(filepath.Base(filepath.Dir(m)))
		if needed[id] {
			d.kept = true
			continue
		}
		if err := d.free(ctx, id); err != nil {
			d.kept = true
			return err
		}
	}
	return nil
}

// bases has the bases of all forks.
func (d *driver) bases() (map[forks.ID]bool, error) {
	keys, err := d.store.Forks()
	if err != nil {
		return nil, err
	}
	needed := make(map[forks.ID]bool)
	for _, k := range keys {
		base, err := d.forkBase(k)
		if errors.Is(err, forks.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("fork %s: %w", k, err)
		}
		needed[base] = true
	}
	return needed, nil
}

// free moves a snapshot out of nodes/ at once and then removes it.
func (d *driver) free(ctx context.Context, id forks.ID) error {
	st, err := d.store.NewStage()
	if err != nil {
		return err
	}
	err = os.Rename(d.store.NodePath(id), filepath.Join(st.Path, "node"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	step.At("btrfs.remove-snapshot.moved")
	return errors.Join(err, d.removeStage(ctx, st))
}

// Sweep removes what a crash left, and what was removed and is needed no more.
// The kernel frees deleted subvolumes later; Sweep waits a little for it and
// returns by how much the free space of the file system grew.
func (d *driver) Sweep(ctx context.Context) (n int64, err error) {
	defer wrap("sweep", d.store.Dir, &err)
	fd, err := unix.Open(d.store.Dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: d.store.Dir, Err: err}
	}
	defer unix.Close(fd)
	before, err := freeBytes(fd)
	if err != nil {
		return 0, err
	}
	some, err := d.sweep(ctx)
	if err != nil || !some {
		return 0, err
	}
	after, err := settledFree(ctx, fd)
	return max(after-before, 0), err
}

// sweep says whether there was anything.
func (d *driver) sweep(ctx context.Context) (bool, error) {
	tmp := filepath.Join(d.store.Dir, "tmp")
	stages, err := os.ReadDir(tmp)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	some := false
	for _, s := range stages {
		did, err := d.sweepStage(ctx, tmp, s.Name())
		if err != nil {
			return some, err
		}
		some = some || did
	}
	did, err := d.sweepNext(ctx)
	if err != nil {
		return some, err
	}
	d.needing.Lock()
	d.kept = true
	d.needing.Unlock()
	marks, _ := filepath.Glob(filepath.Join(d.store.NodePath("*"), removedName))
	return some || did || len(marks) > 0, d.collect(ctx)
}

func (d *driver) sweepStage(ctx context.Context, tmp, name string) (bool, error) {
	path := filepath.Join(tmp, name)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil {
			return false, nil // its maker is at work
		}
		err := d.removeTrees(ctx, path)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil // its maker took it away
		}
		if err != nil {
			return false, err
		}
	}
	return true, d.removeTree(ctx, tmp, name)
}

// sweepNext removes what a checkout that was cut short left beside a tree.
func (d *driver) sweepNext(ctx context.Context) (bool, error) {
	d.needing.Lock()
	defer d.needing.Unlock()
	keys, err := d.store.Forks()
	if err != nil {
		return false, err
	}
	some := false
	for _, k := range keys {
		dir, _ := d.store.ForkDir(k)
		if _, err := os.Lstat(filepath.Join(dir, nextName)); err != nil {
			continue
		}
		some = true
		if err := d.removeTree(ctx, dir, nextName); err != nil {
			return some, err
		}
	}
	return some, nil
}

// How long to wait for the kernel to free what was deleted, and how often to
// look.
const (
	freeingTime  = 5 * time.Second
	freeingTicks = 50 * time.Millisecond
)

// settledFree returns the free space once it has stopped growing.
func settledFree(ctx context.Context, fd int) (int64, error) {
	end := time.Now().Add(freeingTime)
	last, steady := int64(-1), 0
	for {
		// Unlike syncfs it wakes the thread that frees deleted subvolumes.
		if err := ioctl(fd, iocSync, nil); err != nil {
			return 0, os.NewSyscallError("ioctl SYNC", err)
		}
		free, err := freeBytes(fd)
		if err != nil {
			return 0, err
		}
		if free == last {
			steady++
		} else {
			last, steady = free, 0
		}
		if steady >= 3 || time.Now().After(end) {
			return free, nil
		}
		select {
		case <-ctx.Done():
			return free, nil
		case <-time.After(freeingTicks):
		}
	}
}
