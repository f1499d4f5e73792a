package copytree

import (
	"context"
	"fmt"
	"os"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer/driver"
	"golang.org/x/sys/unix"
)

// Name is the word users write for this driver.
const Name = "copy"

// Backend returns the driver.
func Backend() forks.Backend { return forks.Backend{Name: Name, Probe: probe, Open: open} }

func open(_ context.Context, dir string) (forks.Driver, error) {
	return driver.Open(dir, driver.Options{Name: Name})
}

func probe(_ context.Context, dir string) forks.Probe {
	p := forks.Probe{Name: Name, Lost: "the driver that needs nothing but a file system"}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		p.Detail = (&os.PathError{Op: "statfs", Path: dir, Err: err}).Error()
		return p
	}
	if _, err := os.Stat("/proc/self/fd"); err != nil {
		p.Detail, p.Fix = "/proc is not mounted", "mount -t proc proc /proc"
		return p
	}
	clone, err := fsat.CanClone(dir)
	if err != nil {
		p.Detail, p.Fix = err.Error(), "choose another root with --root"
		return p
	}
	p.OK, p.Lost = true, ""
	p.Detail = "files share their blocks on " + fsName(fs.Type)
	if !clone {
		p.Detail = fmt.Sprintf("no reflink on %s, files are copied", fsName(fs.Type))
	}
	return p
}

// fsName names a file system by the magic of linux/magic.h.
func fsName(magic int64) string {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	}
	return fmt.Sprintf("file system 0x%x", magic)
}
