//go:build linux

package fsat

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Xattr is one extended attribute.
type Xattr struct{ Name, Value string }

// Kept says whether an attribute belongs to a tree. Labels that the host's
// security policy gives, and what file systems keep for themselves, do not.
func Kept(name string) bool {
	switch {
	case strings.HasPrefix(name, "user."), name == ACLAccess, name == ACLDefault:
		return true
	case strings.HasPrefix(name, "trusted."):
		return !strings.HasPrefix(name, "trusted.SGI_") // XFS shows ACLs so, too
	case strings.HasPrefix(name, "security."):
		for _, label := range []string{"selinux", "ima", "evm", "apparmor", "SMACK64"} {
			if strings.HasPrefix(name[len("security."):], label) {
				return false
			}
		}
		return true
	}
	return false
}

// ForOverlay says whether an attribute would be taken for an overlay's own in
// one of its layers.
func ForOverlay(name string) bool {
	return strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.")
}

// Privileged says that only root can set (or read) the attribute.
func Privileged(name string) bool {
	return strings.HasPrefix(name, "trusted.") || strings.HasPrefix(name, "security.")
}

// The attributes that hold ACLs.
const (
	ACLAccess  = "system.posix_acl_access"
	ACLDefault = "system.posix_acl_default"
)

// Xattrs returns the kept attributes of the open file fd, ordered by name.
func Xattrs(fd int) ([]Xattr, error) {
	return xattrs(
		func(b []byte) (int, error) { return unix.Flistxattr(fd, b) },
		func(n string, b []byte) (int, error) { return unix.Fgetxattr(fd, n, b) })
}

// Xattrs returns the kept attributes of name, which is not opened.
func (a Access) Xattrs(dir int, name string) ([]Xattr, error) {
	path := procPath(dir) + "/" + name
	x, err := xattrs(
		func(b []byte) (int, error) { return unix.Llistxattr(path, b) },
		func(n string, b []byte) (int, error) { return unix.Lgetxattr(path, n, b) })
	if !errors.Is(err, unix.EACCES) {
		return x, err
	}
	return a.ownedXattrs(dir, name)
}

// ownedXattrs reads attributes that permissions refuse. Only regular files and
// directories have such as need the right to read, and only those are opened.
func (a Access) ownedXattrs(dir int, name string) ([]Xattr, error) {
	fd, err := a.openOwned(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if t := st.Mode & unix.S_IFMT; t == unix.S_IFREG || t == unix.S_IFDIR {
		open, err := a.openOwned(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC)
		if err != nil {
			return nil, err
		}
		defer unix.Close(open)
		return Xattrs(open)
	}
	path := procPath(fd)
	return xattrs(
		func(b []byte) (int, error) { return unix.Listxattr(path, b) },
		func(n string, b []byte) (int, error) { return unix.Getxattr(path, n, b) })
}

func xattrs(list func([]byte) (int, error), get func(string, []byte) (int, error)) ([]Xattr, error) {
	var small [256]byte
	names, err := grow(small[:], list)
	if errors.Is(err, unix.ENOTSUP) || len(names) == 0 {
		return nil, ignore(err, unix.ENOTSUP)
	}
	if err != nil {
		return nil, err
	}
	var found []Xattr
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		if !Kept(name) {
			continue
		}
		var room [256]byte
		value, err := grow(room[:], func(b []byte) (int, error) { return get(name, b) })
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EACCES) && ForOverlay(name) {
			continue // an overlay puts marks on directories that their owner may not read
		}
		if err != nil {
			return nil, fmt.Errorf("attribute %s: %w", name, err)
		}
		found = append(found, Xattr{name, string(value)})
	}
	slices.SortFunc(found, func(x, y Xattr) int { return strings.Compare(x.Name, y.Name) })
	return found, nil
}

// grow calls read with buf, and with larger buffers while they are too small.
func grow(buf []byte, read func([]byte) (int, error)) ([]byte, error) {
	for {
		n, err := read(buf)
		if err != unix.ERANGE {
			return buf[:max(n, 0)], err
		}
		buf = make([]byte, max(4*len(buf), 4096))
		if len(buf) > 1<<20 {
			return nil, unix.E2BIG
		}
	}
}

func ignore(err error, targets ...error) error {
	for _, t := range targets {
		if errors.Is(err, t) {
			return nil
		}
	}
	return err
}

// Meta is what a path has besides its contents.
type Meta struct {
	Mode      uint32
	UID, GID  uint32
	MtimeSec  int64
	MtimeNsec uint32
	Xattrs    []Xattr
}

// Setter gives paths their metadata, as far as the caller's rights allow.
type Setter struct {
	root     bool
	uid, gid uint32
	// Fresh: files were just made, in a directory that hands nothing down.
	Fresh bool
	// OwnGroup: who is not root keeps his own group, the only one that a user
	// namespace of his knows: files of another cannot be written in an overlay.
	OwnGroup bool
}

// NewSetter returns one for the process's present rights. Changing an owner
// needs CAP_CHOWN, which root in a restricted container may not have.
func NewSetter() Setter {
	return Setter{root: os.Geteuid() == 0, uid: uint32(os.Geteuid()), gid: uint32(os.Getegid())}
}

// Root says whether owners and devices can be set.
func (s Setter) Root() bool { return s.root }

// FD applies m to the open regular file or directory fd, whose stat is
// returned. The order is chown, chmod, xattrs, times: a chown clears suid bits
// and capabilities, everything else the times.
func (s Setter) FD(fd int, m *Meta, st *unix.Stat_t) error {
	if err := unix.Fstat(fd, st); err != nil {
		return err
	}
	if err := s.owner(m, st, func(uid, gid int) error { return unix.Fchown(fd, uid, gid) }); err != nil {
		return err
	}
	if !s.Fresh || len(m.Xattrs) > 0 {
		if err := s.dropOthers(fd, m.Xattrs); err != nil {
			return err
		}
	}
	if s.mustChmod(m, st) {
		if err := unix.Fchmod(fd, m.Mode&0o7777); err != nil {
			return err
		}
	}
	for _, x := range m.Xattrs {
		if err := s.xattrError(x.Name, s.setXattr(fd, x, m.Mode&0o7777)); err != nil {
			return err
		}
	}
	if err := SetTimes(fd, m); err != nil {
		return err
	}
	return unix.Fstat(fd, st)
}

// SetTimes gives the open file fd the times of m.
func SetTimes(fd int, m *Meta) error {
	ts := times(m)
	_, _, e := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&ts)), 0, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// setXattr sets an attribute of what has the given mode. Those of users need
// the right to write, which a read-only mode refuses even its owner.
func (s Setter) setXattr(fd int, x Xattr, mode uint32) error {
	err := unix.Fsetxattr(fd, x.Name, []byte(x.Value), 0)
	if err != unix.EACCES || s.root || mode&0o200 != 0 {
		return err
	}
	if err := unix.Fchmod(fd, mode|0o200); err != nil {
		return err
	}
	err = unix.Fsetxattr(fd, x.Name, []byte(x.Value), 0)
	if e := unix.Fchmod(fd, mode); e != nil {
		return e
	}
	return err
}

func (s Setter) mustChmod(m *Meta, st *unix.Stat_t) bool {
	return st.Mode&0o7777 != m.Mode&0o7777 || m.Mode&0o6000 != 0 || len(m.Xattrs) > 0 || !s.Fresh
}

// owner changes the owner where it differs. Who is not root can at most choose
// another of his groups; root of a user namespace can give no file to an id that
// it does not have.
func (s Setter) owner(m *Meta, st *unix.Stat_t, chown func(uid, gid int) error) error {
	gid := m.GID
	if s.OwnGroup && !s.root {
		gid = s.gid
	}
	switch {
	case s.root && (st.Uid != m.UID || st.Gid != gid):
		err := chown(int(m.UID), int(gid))
		if err == unix.EINVAL && !Mapped(m.UID, gid) {
			return nil
		}
		return err
	case st.Gid != gid:
		return ignore(chown(-1, int(gid)), unix.EPERM, unix.EINVAL)
	}
	return nil
}

// dropOthers removes the kept attributes that want does not name, such as an
// ACL that the parent's default ACL gave.
func (s Setter) dropOthers(fd int, want []Xattr) error {
	have, err := Xattrs(fd)
	if err != nil {
		return err
	}
	for _, x := range have {
		if slices.ContainsFunc(want, func(w Xattr) bool { return w.Name == x.Name }) || Privileged(x.Name) && !s.root {
			continue
		}
		if err := unix.Fremovexattr(fd, x.Name); err != nil && err != unix.ENODATA {
			return fmt.Errorf("remove attribute %s: %w", x.Name, err)
		}
	}
	return nil
}

// xattrError lets pass what the caller's rights or the file system cannot do
// and the record keeps.
func (s Setter) xattrError(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case err == unix.EPERM && !s.root, err == unix.EACCES && !s.root:
		return nil
	case err == unix.ENOTSUP:
		return nil
	}
	return fmt.Errorf("set attribute %s: %w", name, err)
}

// At applies m to name in dir, which is no regular file and no directory and
// stands where nobody else can swap it.
func (s Setter) At(dir int, name string, m *Meta, st *unix.Stat_t) error {
	if err := unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	err := s.owner(m, st, func(uid, gid int) error {
		return unix.Fchownat(dir, name, uid, gid, unix.AT_SYMLINK_NOFOLLOW)
	})
	if err != nil {
		return err
	}
	path := procPath(dir) + "/" + name
	if m.Mode&unix.S_IFMT != unix.S_IFLNK && s.mustChmod(m, st) {
		if err := unix.Chmod(path, m.Mode&0o7777); err != nil {
			return err
		}
	}
	for _, x := range m.Xattrs {
		err := unix.Lsetxattr(path, x.Name, []byte(x.Value), 0)
		if err = s.xattrError(x.Name, err); err != nil {
			return err
		}
	}
	ts := times(m)
	if err := unix.UtimesNanoAt(dir, name, ts[:], unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW)
}

// times sets atime like mtime: a file that was never read since it was written.
func times(m *Meta) [2]unix.Timespec {
	t := unix.Timespec{Sec: m.MtimeSec, Nsec: int64(m.MtimeNsec)}
	return [2]unix.Timespec{t, t}
}

// attribute flags of FS_IOC_SETFLAGS that forbid changes.
const lockedFlags = unix.STATX_ATTR_IMMUTABLE | unix.STATX_ATTR_APPEND

// Locked says whether name is immutable or append-only.
func Locked(dir int, name string) bool {
	var stx unix.Statx_t
	err := unix.Statx(dir, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH, 0, &stx)
	return err == nil && stx.Attributes&lockedFlags != 0
}

// FS_IMMUTABLE_FL and FS_APPEND_FL of linux/fs.h.
const (
	immutableFlag = 0x10
	appendFlag    = 0x20
)

// Unlock clears the immutable and append-only flags of the open file fd.
func Unlock(fd int) error {
	flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	clear := flags &^ (immutableFlag | appendFlag)
	if clear == flags {
		return unix.EPERM
	}
	return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, clear)
}

// Lock makes the open directory fd refuse changes, also root's, where the file
// system has a flag for that.
func Lock(fd int) {
	if flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS); err == nil {
		_ = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags|immutableFlag) // the mode says the same to all but root
	}
}
