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
	mount, err := st.Mount()
	if err != nil {
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
	st, err := d.store.MakeStack(ctx, key, base, func(dir *os.File) error { return d.holds.Made(key, dir) })
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
	return u.Changes()
}

func (d *driver) commitStack(ctx context.Context, st *layer.Stack, key forks.Key, id forks.ID, intent func() error) (forks.Changes, error) {
	u, err := d.store.ScanUpper(ctx, st)
	if err != nil {
		return forks.Changes{}, err
	}
	defer u.Close()
	return d.store.CommitUpper(ctx, u, id, d.live(key), intent)
}

// checkoutStack also lets what is attached stand in the new tree.
func (d *driver) checkoutStack(ctx context.Context, key forks.Key, id forks.ID) error {
	dir, _ := d.store.ForkDir(key)
	// Root is told by the kernel; others by the lock alone.
	used := os.Geteuid() != 0 && (d.holds.InUse(key) || d.holds.Try(key, dir) != nil)
	attached := d.mounted(key)
	if err := d.detach(key); err != nil {
		return err
	}
	step.At("stack.checkout.detached")
	busy, err := d.store.CheckoutStack(ctx, key, id, used)
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
		return fmt.Errorf("%w: only root can mount a tree on the host; it is seen inside `agentenv exec` and `agentenv shell`", forks.ErrUnsupported)
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
		return fmt.Errorf("%w: mounting the tree on the host is forbidden here; it is seen inside `agentenv exec` and `agentenv shell`: %w", forks.ErrUnsupported, err)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := bare(mount.Dir); err != nil {
		return err
	}
	step.At("stack.attach.directory")
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, mount.Dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "mount", Path: mount.Dir, Err: err}
	}
	step.At("stack.attach.mounted")
	return nil
}

// bare makes the directory that the tree is mounted on. After a reboot it is
// there without the tree; then it is to refuse writes, also root's.
func bare(path string) error {
	if err := os.Mkdir(path, 0o555); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(dir)
	fsat.Lock(dir)
	return nil
}

func (d *driver) Detach(_ context.Context, key forks.Key) (err error) {
	defer wrap(d, "detach", key, &err)
	if key.Check() != nil {
		return nil
	}
	return d.detach(key)
}

// detach takes the tree away from its path.
func (d *driver) detach(key forks.Key) error {
	if err := d.unmount(key); err != nil {
		return err
	}
	if d.plain(key) {
		return nil // it stays
	}
	return noDir(d.place(key))
}

// unmount undoes the mount of attach. Processes that stand in the tree keep it.
func (d *driver) unmount(key forks.Key) error {
	path := d.place(key)
	for d.mounted(key) {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		if err == unix.EBUSY {
			err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		if err != nil {
			return &os.PathError{Op: "unmount", Path: path, Err: err}
		}
		step.At("stack.detach.unmounted")
	}
	return nil
}

// noDir removes the bare directory: a write to the path is to fail.
func noDir(path string) error {
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	_ = fsat.Unlock(dir) // it may have no such flag
	unix.Close(dir)
	return os.Remove(path)
}
