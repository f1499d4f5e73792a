package overlay

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/layer/driver"
	"github.com/moby/sys/userns"
	"golang.org/x/sys/unix"
)

// probe mounts, works in and stacks a small overlay in dir.
func probe(ctx context.Context, dir string) forks.Probe {
	p := forks.Probe{Name: Name, Lost: "forks and checkouts in constant time"}
	err := driver.Try(ctx, dir)
	if err != nil {
		p.Detail, p.Fix = thisMachine(dir).explain(err)
		return p
	}
	p.OK, p.Lost = true, ""
	p.Detail = "overlays can be mounted here, by root on the host"
	if os.Geteuid() != 0 || userns.RunningInUserNS() {
		p.Detail = "overlays can be mounted here, in a user namespace"
	}
	return p
}

// machine is what tells why overlays are refused.
type machine struct {
	dir     string
	fs      int64  // the magic of the file system of dir
	release string // of the kernel
	known   bool   // the kernel knows overlays
	// setting reads a file below /proc/sys; "" if there is none.
	setting func(name string) string
}

func thisMachine(dir string) machine {
	m := machine{dir: dir, setting: func(name string) string {
		b, _ := os.ReadFile("/proc/sys/" + name) // many kernels lack many of them
		return strings.TrimSpace(string(b))
	}}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) == nil {
		m.fs = fs.Type
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.release = unix.ByteSliceToString(u.Release[:])
	}
	list, _ := os.ReadFile("/proc/filesystems")
	m.known = strings.Contains(string(list), "\toverlay\n")
	return m
}

const otherRoot = "choose a root on ext4, XFS, btrfs or a recent tmpfs with --root"

// explain says in one line what is missing, and what mends it.
func (m machine) explain(err error) (detail, fix string) {
	var te *driver.TryError
	if !errors.As(err, &te) {
		return err.Error(), "choose another root with --root"
	}
	switch {
	case te.Step == "namespace":
		return m.explainNamespace(te)
	case te.Step == "attribute":
		if m.fs == unix.TMPFS_MAGIC {
			return "tmpfs keeps user attributes, which overlays need, from Linux 6.6 on; this is " + m.release, otherRoot
		}
		return fmt.Sprintf("the file system of %s keeps no user attributes: %v", m.dir, te.Err), otherRoot
	case te.Step != "mount":
		return fmt.Sprintf("an overlay in %s does not work: %v", m.dir, te), otherRoot
	case m.fs == unix.OVERLAYFS_SUPER_MAGIC:
		return m.dir + " lies on an overlay, as everything in a container does, and an overlay cannot hold another's changes",
			fmt.Sprintf("mount a volume at the root (docker run -v agentenv:%s …), or choose another with --root", m.dir)
	case errors.Is(te, unix.ENODEV) || !m.known && !errors.Is(te, unix.EPERM):
		return "this kernel has no overlay file system loaded", "sudo modprobe overlay"
	case errors.Is(te, unix.ENOSYS):
		return "the kernel, or a seccomp filter such as a container's, refuses the mount calls: Linux 5.2 or later has them", "run without that filter, or update the kernel"
	case errors.Is(te, unix.EPERM) || errors.Is(te, unix.EACCES):
		return m.explainRefusal(te)
	}
	return fmt.Sprintf("the file system of %s cannot hold an overlay's changes: %v", m.dir, te.Err), otherRoot
}

// explainNamespace: there is no user namespace in which to mount.
func (m machine) explainNamespace(te *driver.TryError) (detail, fix string) {
	for _, k := range knobs {
		if m.setting(k.name) == k.bad {
			return k.detail, k.fix
		}
	}
	return fmt.Sprintf("user namespaces are refused here, and only root mounts without one: %v", te.Err), "run as root, or outside the container or chroot that forbids it"
}

// explainRefusal: the mount itself was forbidden.
func (m machine) explainRefusal(te *driver.TryError) (detail, fix string) {
	if te.Own && older(m.release, 5, 11) {
		return "overlays in user namespaces need Linux 5.11; this is " + m.release, "update the kernel, or run as root"
	}
	for _, k := range knobs {
		if m.setting(k.name) == k.bad {
			return k.detail, k.fix
		}
	}
	return fmt.Sprintf("mounting is forbidden here, as in containers: %v", te.Err), "run the container with --privileged, or with --cap-add SYS_ADMIN --security-opt apparmor=unconfined --security-opt seccomp=unconfined"
}

// knobs are the kernel's settings that keep users from mounting, with the value
// that does. See user_namespaces(7), and for the last two Debian's and Ubuntu's
// kernels.
var knobs = []struct{ name, bad, detail, fix string }{
	{"user/max_user_namespaces", "0", "user namespaces are switched off", "sudo sysctl user.max_user_namespaces=15000"},
	{"user/max_mnt_namespaces", "0", "mount namespaces are switched off", "sudo sysctl user.max_mnt_namespaces=15000"},
	{"kernel/unprivileged_userns_clone", "0", "user namespaces are for root only here", "sudo sysctl kernel.unprivileged_userns_clone=1"},
	{"kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor takes the rights away that a user namespace gives", "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
}

// older says whether a kernel's release is before major.minor. One that cannot
// be read is not.
func older(release string, major, minor int) bool {
	var a, b int
	if _, err := fmt.Sscanf(release, "%d.%d", &a, &b); err != nil {
		return false
	}
	return a < major || a == major && b < minor
}
