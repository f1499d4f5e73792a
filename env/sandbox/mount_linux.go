package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount attributes that the layouts use. Nothing but the few nodes of our own
// /dev may be opened as a device, so nodev stands nearly everywhere.
const (
	attrData   = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID
	attrSealed = attrData | unix.MOUNT_ATTR_RDONLY
	attrProc   = attrData | unix.MOUNT_ATTR_NOEXEC
)

// option is one key of a file system's configuration; a key without a value
// is a flag.
type option struct{ key, value string }

// newFS makes a detached mount of a fresh file system.
func newFS(fstype string, attrs int, opts ...option) (int, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen "+fstype, err)
	}
	defer unix.Close(fs)
	for _, o := range opts {
		if o.value == "" {
			err = unix.FsconfigSetFlag(fs, o.key)
		} else {
			err = unix.FsconfigSetString(fs, o.key, o.value)
		}
		if err != nil {
			return -1, fmt.Errorf("%s option %s: %w", fstype, o.key, withLog(fs, err))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("mount %s: %w", fstype, withLog(fs, err))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w", fstype, withLog(fs, err))
	}
	return mnt, nil
}

// withLog adds what the kernel wrote about the failure to the file system's
// context, if anything.
func withLog(fs int, err error) error {
	buf := make([]byte, 512)
	n, rerr := unix.Read(fs, buf)
	if rerr != nil || n <= 2 {
		return err
	}
	return fmt.Errorf("%w (%s)", err, strings.TrimSpace(string(buf[2:n])))
}

// cloneTree makes a detached, recursive bind of p below dir. Recursive
// always: in a user namespace a bind that would uncover what lies below a
// mount is refused with EINVAL.
func cloneTree(dir int, p string, attrs uint64) (int, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_RECURSIVE)
	if p == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	mnt, err := unix.OpenTree(dir, p, flags)
	if err != nil {
		return -1, &os.PathError{Op: "bind", Path: p, Err: err}
	}
	if err := setAttrs(mnt, attrs); err != nil {
		unix.Close(mnt)
		return -1, &os.PathError{Op: "set mount attributes", Path: p, Err: err}
	}
	return mnt, nil
}

// setAttrs adds attributes to a mount and all below it, and cuts them off from
// what happens to the mounts they were copied from.
func setAttrs(mnt int, attrs uint64) error {
	return unix.MountSetattr(mnt, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE,
		&unix.MountAttr{Attr_set: attrs, Propagation: unix.MS_PRIVATE})
}

// attach puts a detached mount over what target refers to.
func attach(mnt, target int) error {
	err := unix.MoveMount(mnt, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	return os.NewSyscallError("move_mount", err)
}

// mountID says on which mount fd lies.
func mountID(fd int) (uint64, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st)
	return st.Mnt_id, os.NewSyscallError("statx", err)
}

// root is the file system that a command is to see, while it is being put
// together.
type root struct {
	fd  int // its top, not yet our own root
	top int // what becomes our root: the same, or a directory around it
	// own names the mounts made for this command alone, where a mount point
	// may be made; everywhere else it would show up in the tree or on the host.
	own map[string]bool
	// sealed names those that become read-only when all is in place.
	sealed map[string]bool
}

func newRoot() *root {
	return &root{own: map[string]bool{}, sealed: map[string]bool{}}
}

// maxGraft is how many entries a directory may have that is rebuilt to make
// room for a mount point: each becomes a mount, and a mount namespace may have
// 100,000 of them (fs.mount-max).
const maxGraft = 4096

var errMountPoint = errors.New("there is nothing to mount over, and making it would write to what is mounted there")

// open resolves p inside the new root, links included.
func (r *root) open(p string) (int, error) {
	fd, err := unix.Openat2(r.fd, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: p, Err: err}
	}
	return fd, nil
}

// openDir opens p if it is a directory reached without links. It returns -1
// if there is none.
func (r *root) openDir(p string) int {
	fd, err := unix.Openat2(r.fd, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC | unix.O_DIRECTORY,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1
	}
	return fd
}

// mount attaches mnt at p, which must be there or be one that can be made.
// A mount that is ours alone is noted so. mnt stays open.
func (r *root) mount(mnt int, p string, ours bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(mnt, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	at, err := r.ensure(p, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if err := attach(mnt, at); err != nil {
		return fmt.Errorf("mount on %s: %w", p, err)
	}
	delete(r.sealed, p)
	r.own[p] = ours
	return nil
}

// isOwn says whether at lies on a mount of ours. Names are compared by the
// mount they lead to now: a graft replaces mounts by copies of them.
func (r *root) isOwn(at int) (bool, error) {
	id, err := mountID(at)
	if err != nil {
		return false, err
	}
	for p, ours := range r.own {
		if !ours {
			continue
		}
		fd, err := r.open(p)
		if err != nil {
			continue // hidden by a later mount
		}
		other, err := mountID(fd)
		unix.Close(fd)
		if err == nil && other == id {
			return true, nil
		}
	}
	return false, nil
}

// mountFS makes a fresh file system of this command alone and attaches it at p.
func (r *root) mountFS(p, fstype string, attrs int, opts ...option) error {
	mnt, err := newFS(fstype, attrs, opts...)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return r.mount(mnt, p, true)
}

// ensure opens the mount point p, a directory or a file. Where it is missing
// it is made, if that changes neither the host nor the tree.
func (r *root) ensure(p string, dir bool) (int, error) {
	for range strings.Count(p, "/") + 2 {
		fd, err := r.open(p)
		if err == nil {
			return fd, checkKind(fd, p, dir)
		}
		if !errors.Is(err, unix.ENOENT) {
			return -1, err
		}
		if err := r.extend(p, dir); err != nil {
			return -1, err
		}
	}
	return -1, &os.PathError{Op: "make mount point", Path: p, Err: errors.New("a link on the way leads nowhere")}
}

func checkKind(fd int, p string, dir bool) error {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil && (st.Mode&unix.S_IFMT == unix.S_IFDIR) != dir {
		err = unix.ENOTDIR
		if !dir {
			err = unix.EISDIR
		}
	}
	if err != nil {
		unix.Close(fd)
		return &os.PathError{Op: "mount on", Path: p, Err: err}
	}
	return nil
}

// extend makes the first missing component of p, or makes its parent one in
// which it can be made.
func (r *root) extend(p string, dir bool) error {
	missing := p
	parent := path.Dir(p)
	at, err := r.open(parent)
	for errors.Is(err, unix.ENOENT) && parent != "/" {
		missing, parent, dir = parent, path.Dir(parent), true
		at, err = r.open(parent)
	}
	if err != nil {
		return err
	}
	defer unix.Close(at)
	ours, err := r.isOwn(at)
	if err != nil {
		return err
	}
	if ours {
		return makeEntry(at, path.Base(missing), dir)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(at, &st); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if st.Flags&unix.ST_RDONLY == 0 {
		return &os.PathError{Op: "make mount point", Path: missing, Err: errMountPoint}
	}
	return r.graft(at, parent)
}

func makeEntry(at int, name string, dir bool) error {
	if dir {
		if err := unix.Mkdirat(at, name, 0o755); err != nil {
			return &os.PathError{Op: "mkdir", Path: name, Err: err}
		}
		return nil
	}
	fd, err := unix.Openat(at, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return &os.PathError{Op: "create", Path: name, Err: err}
	}
	return unix.Close(fd)
}

// graft puts a directory of our own over the read-only directory at (p is its
// name), with everything that is in it, so that more can be put beside that.
func (r *root) graft(at int, p string) error {
	names, err := readNames(at)
	if err != nil {
		return err
	}
	if len(names) > maxGraft {
		return &os.PathError{Op: "make a mount point in", Path: p, Err: fmt.Errorf("it has more than %d entries", maxGraft)}
	}
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	skel, err := newFS("tmpfs", attrData, option{"mode", fmt.Sprintf("%o", st.Mode&0o7777)})
	if err != nil {
		return err
	}
	if err := attach(skel, at); err != nil {
		return fmt.Errorf("mount on %s: %w", p, err)
	}
	for _, name := range names {
		if err := rebind(at, skel, name); err != nil {
			return err
		}
	}
	r.own[p], r.sealed[p] = true, true
	if p != "/" {
		return unix.Close(skel)
	}
	if r.top == r.fd {
		r.top = skel
	}
	r.fd = skel
	return nil
}

// seal makes read-only what must be so for the command.
func (r *root) seal() error {
	for p := range r.sealed {
		fd, err := r.open(p)
		if err != nil {
			return err
		}
		err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
		unix.Close(fd)
		if err != nil {
			return &os.PathError{Op: "make read-only", Path: p, Err: err}
		}
	}
	return nil
}

// rebind makes name of the directory from appear in the directory to.
func rebind(from, to int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return copyLink(from, to, name)
	}
	if err := makeEntry(to, name, st.Mode&unix.S_IFMT == unix.S_IFDIR); err != nil {
		return err
	}
	mnt, err := cloneTree(from, name, 0)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return attachAt(mnt, to, name)
}

// attachAt attaches mnt over name in the directory dir.
func attachAt(mnt, dir int, name string) error {
	at, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(at)
	return attach(mnt, at)
}

func copyLink(from, to int, name string) error {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(from, name, buf)
	if err == nil {
		err = unix.Symlinkat(string(buf[:n]), to, name)
	}
	if err != nil {
		return &os.PathError{Op: "copy link", Path: name, Err: err}
	}
	return nil
}

// readNames lists the directory that the O_PATH descriptor at refers to.
func readNames(at int) ([]string, error) {
	fd, err := unix.Openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open directory", err)
	}
	f := os.NewFile(uintptr(fd), "directory")
	defer f.Close()
	return f.Readdirnames(-1)
}

// enter makes the new root the root of this process and lets go of the old.
func (r *root) enter() error {
	if err := unix.Fchdir(r.top); err != nil {
		return os.NewSyscallError("fchdir", err)
	}
	// With "." twice the old root lies on top of the new one for a moment;
	// no directory for it is needed in the tree.
	if err := unix.PivotRoot(".", "."); err != nil {
		return os.NewSyscallError("pivot_root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return os.NewSyscallError("umount of the old root", err)
	}
	return os.Chdir("/")
}
