package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
)

// explain adds to an error of the system what it is about, as far as that is
// the file system that a root lies on or a limit of this process, and what to
// do about it.
func explain(root string, err error) error {
	if errors.Is(err, sandbox.ErrSandbox) {
		return err // what mends it says it all
	}
	hint := ""
	at, elsewhere := placeOfError(root, err)
	switch {
	case errors.Is(err, unix.ENOSPC):
		hint = roomOn(at) + ": make room" + waysOut(root, elsewhere) + elsewhere
	case errors.Is(err, unix.EDQUOT):
		hint = "your quota is used up; " + roomOn(at) + ": make room or have the quota raised" + waysOut(root, elsewhere) + elsewhere
	case errors.Is(err, unix.EROFS):
		mount, _ := fileSystemOf(at)
		hint = fmt.Sprintf("the file system at %s is read-only: mount it writable", mount) + elsewhere
	case errors.Is(err, unix.EIO):
		mount, _ := fileSystemOf(at)
		hint = fmt.Sprintf("the device below the file system at %s reports errors (see `dmesg`): what was stored before is as it was", mount)
	case errors.Is(err, unix.EMFILE):
		var lim unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) // 0 then
		hint = fmt.Sprintf("a process may have %d files open here: raise it with `ulimit -n %d`", lim.Cur, max(4096, 4*lim.Cur))
	case errors.Is(err, unix.ENFILE):
		hint = "the whole machine may have no more files open: raise it with `sysctl fs.file-max`"
	default:
		return err
	}
	return &hintedError{err, hint}
}

// waysOut says how agentenv itself makes room where the environment at root
// takes it.
func waysOut(root, elsewhere string) string {
	if elsewhere == "" || !env.Exists(root) {
		return ""
	}
	return ", with `agentenv delete REF`, or with `agentenv checkout HEAD --discard` if unsaved work fills it"
}

// placeOfError returns the path whose file system an error is about: the root,
// where another root may help, or the path that the error names, such as one of
// a work tree in place. An error of a copy may name what was read: of the two
// file systems it is the one with less room, or the read-only one.
func placeOfError(root string, err error) (at, elsewhere string) {
	at, elsewhere = root, ", or choose a root elsewhere with --root"
	var pe *fs.PathError
	if !errors.As(err, &pe) || !filepath.IsAbs(pe.Path) {
		return at, elsewhere
	}
	_, ours := fileSystemOf(root)
	mount, named := fileSystemOf(pe.Path)
	less := int64(named.Bavail)*named.Bsize < int64(ours.Bavail)*ours.Bsize || named.Files > 0 && named.Ffree == 0
	readOnly := named.Flags&unix.ST_RDONLY > ours.Flags&unix.ST_RDONLY
	if errors.Is(err, unix.EROFS) && readOnly || named.Fsid != ours.Fsid && !errors.Is(err, unix.EROFS) && less {
		return mount, ""
	}
	return at, elsewhere
}

// roomOn says how much room there is on the file system of a path.
func roomOn(path string) string {
	mount, st := fileSystemOf(path)
	free := humanBytes(int64(st.Bavail) * st.Bsize)
	if st.Files > 0 { // btrfs has no such limit
		free += fmt.Sprintf(" and %d inodes", st.Ffree)
	}
	return fmt.Sprintf("the file system at %s (%s in all) has %s free now", mount, humanBytes(int64(st.Blocks)*st.Bsize), free)
}

// fileSystemOf returns where the file system of a path is mounted, which may
// not be there, and what the kernel says of it.
func fileSystemOf(path string) (mount string, st unix.Statfs_t) {
	for unix.Statfs(path, &st) != nil && path != filepath.Dir(path) {
		path = filepath.Dir(path)
	}
	infos, err := mountinfo.GetMounts(mountinfo.ParentsFilter(path))
	if err != nil {
		return path, st
	}
	mount = "/"
	for _, m := range infos {
		if len(m.Mountpoint) > len(mount) {
			mount = m.Mountpoint
		}
	}
	return mount, st
}
