package archive

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inode is a way to reach a file's metadata: by descriptor, or by its name in
// a directory for what must not be opened.
type inode struct {
	fd   int
	base string // "" for fd itself
}

// describe sets the metadata of an open file or directory.
func (x *extractor) describe(fd int, path string, e *entry) error {
	return x.set(inode{fd: fd}, path, e)
}

// describeAt sets the metadata of base in parent: a symlink, FIFO or device.
func (x *extractor) describeAt(parent int, base, path string, e *entry) error {
	return x.set(inode{parent, base}, path, e)
}

// set goes in the order that loses nothing: chown clears suid, sgid and
// capabilities, chmod is what gives an ACL its mask, and each of them counts
// as a change. Only user xattrs come before chmod: to set one takes the right
// to write, which the mode may take from an ordinary user.
func (x *extractor) set(at inode, path string, e *entry) error {
	if e != implied || os.Geteuid() == 0 {
		if err := x.chown(at, path, e); err != nil {
			return err
		}
	}
	x.setXattrs(at, e, true)
	if e.kind != typeSymlink {
		if err := at.chmod(e.mode); err != nil {
			return failed(e.label(path), "cannot be given its mode", err)
		}
	}
	x.setXattrs(at, e, false)
	if e == implied {
		return nil
	}
	if err := at.utimes(e.sec, e.nsec); err != nil {
		return failed(e.label(path), "cannot be given its time", err)
	}
	return nil
}

// label is the name to show for e.
func (e *entry) label(path string) string {
	if e.name != "" {
		return e.name
	}
	return path
}

// chown sets the owner, or remembers it where that is not allowed, or where
// the id means nothing in this user namespace.
func (x *extractor) chown(at inode, path string, e *entry) error {
	var err error
	if at.base == "" {
		err = unix.Fchown(at.fd, int(e.uid), int(e.gid))
	} else {
		err = unix.Fchownat(at.fd, at.base, int(e.uid), int(e.gid), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == unix.EPERM || err == unix.EINVAL {
		if x.result.Owners == nil {
			x.result.Owners = map[string][2]uint32{}
		}
		x.result.Owners[path] = [2]uint32{e.uid, e.gid}
		return nil
	}
	if err != nil {
		return failed(e.label(path), "cannot be given its owner", err)
	}
	return nil
}

func (at inode) chmod(mode uint32) error {
	if at.base == "" {
		return unix.Fchmod(at.fd, mode)
	}
	// This follows symlinks, but nobody else writes here and base is none.
	return unix.Fchmodat(at.fd, at.base, mode, 0)
}

// utimes sets the modification time and leaves the time of access.
func (at inode) utimes(sec, nsec int64) error {
	mtime, err := unix.TimeToTimespec(time.Unix(sec, nsec))
	if err != nil {
		return err
	}
	times := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, mtime}
	if at.base == "" {
		// A null path stands for the descriptor itself; AT_EMPTY_PATH, which
		// says the same, is only understood since Linux 5.8.
		_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(at.fd), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0)
		if errno != 0 {
			return errno
		}
		return nil
	}
	return unix.UtimesNanoAt(at.fd, at.base, times[:], unix.AT_SYMLINK_NOFOLLOW)
}

// setXattrs sets the xattrs of e that begin with "user.", or all others. One
// that cannot be set is a warning.
func (x *extractor) setXattrs(at inode, e *entry, user bool) {
	if len(e.xattrs) == 0 {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(e.xattrs)) {
		if strings.HasPrefix(name, "user.") != user {
			continue
		}
		if strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
			// Inside a layer these would mark directories opaque or redirect them.
			x.warn.add("xattrs that steer overlay file systems were left out", e.name)
			continue
		}
		if err := at.setXattr(name, []byte(e.xattrs[name])); err != nil {
			x.warn.add(xattrKind(name)+" could not be set ("+err.Error()+")", e.name)
		}
	}
}

// xattrKind names a class of xattrs by a fixed text.
func xattrKind(name string) string {
	switch {
	case name == "security.capability":
		return "file capabilities"
	case strings.HasPrefix(name, "system.posix_acl_"):
		return "ACLs"
	}
	for _, space := range []string{"user", "trusted", "security", "system"} {
		if strings.HasPrefix(name, space+".") {
			return space + " xattrs"
		}
	}
	return "xattrs of an unknown kind"
}

func (at inode) setXattr(name string, value []byte) error {
	if at.base == "" {
		return unix.Fsetxattr(at.fd, name, value, 0)
	}
	// There is no call that takes a directory and a name before Linux 6.13.
	return unix.Lsetxattr("/proc/self/fd/"+strconv.Itoa(at.fd)+"/"+at.base, name, value, 0)
}
