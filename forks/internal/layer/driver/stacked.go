//go:build linux

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// lingerWarning says what a process that stood in the tree has to do.
const lingerWarning = "processes still stand in the tree as it was before the checkout and do not see the new one: they must `cd` to it again"

func (d *driver) stackTree(key forks.Key, st *layer.Stack) (forks.Tree, error) {
	// With a damaged base the fork is there still, to be checked out or removed.
	mount, err := st.Mount()
	if err != nil && !errors.Is(err, forks.ErrDamaged) {
		return forks.Tree{}, err
	}
	if d.mounted(key) {
		mount.Overlay = nil
	}
	t := forks.Tree{Key: key, Base: st.Base, Mount: mount}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lingered[key] {
		t.Warnings = []string{lingerWarning}
	}
	return t, nil
}

func (d *driver) forkStack(ctx context.Context, key forks.Key, base forks.ID) (forks.Tree, error) {
	st, err := d.store.MakeStack(ctx, key, base, func(dir *os.File) error {
		if key == forks.Work {
			if err := placeGuard(int(dir.Fd()), string(key)); err != nil {
				return err
			}
		}
		return d.holds.Made(key, dir)
	})
	if err != nil {
		d.holds.Drop(key)
		return forks.Tree{}, err
	}
	return d.stackTree(key, st)
}

// live says whether anybody may have the fork's upper mounted.
func (d *driver) live(key forks.Key) bool {
	dir, _ := d.store.ForkDir(key)
	return d.holds.InUse(key) || d.mounted(key) || d.holds.Try(key, dir) != nil || d.store.Lingers(key)
}

// statusTries and statusPause bound how often Status looks again.
const (
	statusTries = 40
	statusPause = time.Millisecond
)

// statusStack looks again if a commit came in between.
func (d *driver) statusStack(ctx context.Context, key forks.Key) (c forks.Changes, err error) {
	for try := 1; ; try++ {
		mark := d.store.Mark(key)
		c, err = d.upperChanges(ctx, key)
		if mark == d.store.Mark(key) || try == statusTries {
			return c, err
		}
		select {
		case <-ctx.Done():
			return c, context.Cause(ctx)
		case <-time.After(statusPause):
		}
	}
}

func (d *driver) upperChanges(ctx context.Context, key forks.Key) (forks.Changes, error) {
	st, err := d.store.Stack(key)
	if err != nil {
		return forks.Changes{}, err
	}
	u, err := d.store.ScanUpper(ctx, st)
	if err != nil {
		return forks.Changes{}, err
	}
	defer u.Close()
	if err := d.leftOut(key, u); err != nil {
		return forks.Changes{}, err
	}
	return u.Changes()
}

// leftOut names what is mounted below the tree.
func (d *driver) leftOut(key forks.Key, u *layer.Upper) error {
	mounts, err := d.mountsBelow(key)
	for _, m := range mounts {
		u.LeftOut(m)
	}
	return err
}

func (d *driver) commitStack(ctx context.Context, st *layer.Stack, key forks.Key, id forks.ID, intent func() error) (forks.Changes, error) {
	u, err := d.store.ScanUpper(ctx, st)
	if err != nil {
		return forks.Changes{}, err
	}
	defer u.Close()
	if err := d.leftOut(key, u); err != nil {
		return forks.Changes{}, err
	}
	return d.store.CommitUpper(ctx, u, id, d.live(key), intent)
}

// checkoutStack also lets what is attached stand in the new tree.
func (d *driver) checkoutStack(ctx context.Context, key forks.Key, id forks.ID) error {
	dir, _ := d.store.ForkDir(key)
	// Root is told by the kernel; others by the lock alone.
	used := os.Geteuid() != 0 && (d.holds.InUse(key) || d.holds.Try(key, dir) != nil)
	attached := d.mounted(key)
	stood, err := d.detach(key)
	if err != nil {
		return err
	}
	step.At("stack.checkout.detached")
	busy, err := d.store.CheckoutStack(ctx, key, id, used || stood)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.lingered[key] = attached && busy
	d.mu.Unlock()
	if attached {
		return d.attach(ctx, key)
	}
	return nil
}

// place is where the tree stands on the host.
func (d *driver) place(key forks.Key) string {
	dir, name := d.store.ForkDir(key)
	return filepath.Join(dir, name)
}

// plain says whether the fork is a plain tree.
func (d *driver) plain(key forks.Key) bool {
	dir, _ := d.store.ForkDir(key)
	_, err := os.Lstat(filepath.Join(dir, "base"))
	return err == nil
}

// mounted says whether the overlay stands at the fork's path in our mount
// namespace. Whatever somebody mounted on a plain tree is not ours.
func (d *driver) mounted(key forks.Key) bool {
	if d.plain(key) {
		return false
	}
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, d.place(key), unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	if err != nil || st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return false
	}
	var sfs unix.Statfs_t
	return unix.Statfs(d.place(key), &sfs) == nil && sfs.Type == unix.OVERLAYFS_SUPER_MAGIC
}

func (d *driver) Attach(ctx context.Context, key forks.Key) (t forks.Tree, err error) {
	defer wrap(d, "attach", key, &err)
	st, err := d.stack(key)
	if err != nil || st == nil {
		return orTree(d, key, err)
	}
	if !d.mounted(key) {
		dir, _ := d.store.ForkDir(key)
		if err := d.holds.Take(ctx, key, dir); err != nil {
			return t, err
		}
		if d.holds.InUse(key) {
			return t, forks.ErrInUse // by whom it is mounted elsewhere
		}
		if err := d.attach(ctx, key); err != nil {
			return t, err
		}
	}
	if st, err = d.store.Stack(key); err != nil {
		return t, err
	}
	return d.stackTree(key, st)
}

// orTree is Tree for what stands on the host anyway.
func orTree(d *driver, key forks.Key, err error) (forks.Tree, error) {
	if err != nil {
		return forks.Tree{}, err
	}
	return d.Tree(key)
}

func (d *driver) attach(ctx context.Context, key forks.Key) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: only root can mount a tree on the host; it is seen inside `agentenv exec`", forks.ErrUnsupported)
	}
	if err := d.store.Ready(ctx, key); err != nil {
		return err
	}
	st, err := d.store.Stack(key)
	if err != nil {
		return err
	}
	mount, err := st.Mount()
	if err != nil {
		return err
	}
	mount.Overlay.Volatile = false
	fd, err := mount.Open()
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: mounting the tree on the host is forbidden here; it is seen inside `agentenv exec`: %w", forks.ErrUnsupported, err)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := makeBare(mount.Dir); err != nil {
		return err
	}
	step.At("stack.attach.directory")
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, mount.Dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "mount", Path: mount.Dir, Err: err}
	}
	step.At("stack.attach.mounted")
	return nil
}

func (d *driver) Detach(_ context.Context, key forks.Key) (err error) {
	defer wrap(d, "detach", key, &err)
	if key.Check() != nil {
		return nil
	}
	_, err = d.detach(key)
	return err
}

// detach takes the tree away from its path. It returns true if processes stood
// in it.
func (d *driver) detach(key forks.Key) (stood bool, err error) {
	if d.plain(key) {
		return false, nil // it stays
	}
	if stood, err = d.unmount(key); err != nil || key != forks.Work || !d.Mounted {
		return stood, err
	}
	return stood, d.guard()
}

// unmount undoes the mount of attach. It returns true if processes stand in the
// tree, which keep it.
func (d *driver) unmount(key forks.Key) (stood bool, err error) {
	path := d.place(key)
	if err := d.uncovered(key); err != nil {
		return false, err
	}
	for d.mounted(key) {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		if err == unix.EBUSY {
			if err := d.uncovered(key); err != nil {
				return false, err // mounted meanwhile
			}
			stood = true
			err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		if err != nil {
			return stood, &os.PathError{Op: "unmount", Path: path, Err: err}
		}
		step.At("stack.detach.unmounted")
	}
	return stood, nil
}

// mountsBelow lists what others mounted upon the fork's tree and below it,
// relative to it.
func (d *driver) mountsBelow(key forks.Key) ([]string, error) {
	plain := d.plain(key)
	if !plain && key != forks.Work {
		return nil, nil // it stands nowhere
	}
	mounts, err := fsat.Mounts(d.place(key))
	ours := !plain
	var found []string
	for _, m := range mounts {
		if ours && m.Path == "." && m.Type == "overlay" {
			ours = false // the first is what attach mounted
			continue
		}
		found = append(found, m.Path)
	}
	return found, err
}

// uncovered refuses a tree in which somebody mounted something: with the tree,
// that would go.
func (d *driver) uncovered(key forks.Key) error {
	mounts, err := d.mountsBelow(key)
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%s is mounted below the work tree: unmount it first", filepath.Join(d.place(key), mounts[0]))
	}
	return err
}
