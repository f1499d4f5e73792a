//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	library "github.com/containerd/btrfs/v2"

	"github.com/agentenv/agentenv/forks"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// probe makes a subvolume, a snapshot of it, and deletes both.
func probe(ctx context.Context, dir string) forks.Probe {
	p := forks.Probe{Name: Name, Lost: lost}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		p.Detail = (&os.PathError{Op: "statfs", Path: dir, Err: err}).Error()
		return p
	}
	if fs.Type != unix.BTRFS_SUPER_MAGIC {
		// Nothing is wrong with that, so there is nothing to mend.
		p.Detail = fmt.Sprintf("not here: %s is on %s", dir, fileSystem(dir))
		if !kernelHas() {
			p.Detail += ", and this kernel has no btrfs"
		}
		return p
	}
	tmp, err := os.MkdirTemp(dir, ".probe")
	if err != nil {
		p.Detail, p.Fix = err.Error(), fixOf(err)
		return p
	}
	slow, err := try(ctx, tmp)
	if e := os.RemoveAll(tmp); err == nil {
		err = e
	}
	if err != nil {
		p.Detail, p.Fix = err.Error(), fixOf(err)
		return p
	}
	p.OK, p.Lost, p.Detail = true, "", "snapshots are made, and deleted, at once"
	if slow {
		p.Detail = "snapshots are made at once; deleting one takes time for each of its files, since the file system is mounted without user_subvol_rm_allowed"
		p.Fix = "mount -o remount,user_subvol_rm_allowed " + dir
	}
	return p
}

// fileSystem is the type of the file system that dir lies on.
func fileSystem(dir string) string {
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	mounts, err := mountinfo.GetMounts(mountinfo.ParentsFilter(dir))
	if err != nil {
		return "another file system"
	}
	var at *mountinfo.Info
	for _, m := range mounts { // the later lies over the earlier
		if at == nil || len(m.Mountpoint) >= len(at.Mountpoint) {
			at = m
		}
	}
	if at == nil {
		return "another file system"
	}
	return at.FSType
}

// kernelHas reads whether the kernel has btrfs: it may be built in.
func kernelHas() bool {
	b, err := os.ReadFile("/proc/filesystems")
	return err != nil || strings.Contains(string(b), "\tbtrfs\n")
}

// try does once what the driver does; slow says that subvolumes have to be
// emptied before they go.
func try(ctx context.Context, dir string) (slow bool, err error) {
	d := &driver{}
	defer func() {
		for _, name := range []string{"a", "b"} {
			err = errors.Join(err, d.removeTree(ctx, dir, name))
		}
	}()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := library.SubvolCreate(a); err != nil {
		return false, fmt.Errorf("make a subvolume: %w", err)
	}
	if err := library.SubvolSnapshot(b, a, true); err != nil {
		return false, fmt.Errorf("make a snapshot: %w", err)
	}
	fd, err := openTree(a)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	if _, err := subvolInfo(fd); err != nil {
		return false, err
	}
	in, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(in)
	err = destroy(in, "a")
	if err == unix.EPERM || err == unix.EACCES {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("delete a subvolume: %w", err)
	}
	return false, nil
}

func fixOf(err error) string {
	switch {
	case errors.Is(err, unix.EDQUOT):
		return "raise the limit of the quota group: btrfs qgroup limit"
	case errors.Is(err, unix.ENOTTY):
		return "a kernel of 4.18 or later"
	case errors.Is(err, unix.EROFS):
		return "mount the file system writable: mount -o remount,rw"
	}
	return "choose another root with --root, or another --backend"
}
