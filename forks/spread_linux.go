package forks

import "golang.org/x/sys/unix"

// topDir is EXT4_TOPDIR_FL of the kernel's fs/ext4/ext4.h, chattr's T.
const topDir = 0x20000

// Spread asks the file system to put each directory that is made in dir into a
// region of its own. It is for directories in which much is made and removed in
// turn: ext4 gives no inode out again within a minute of its removal, but looks
// at each such anew, so that to make one takes longer with every one removed in
// the same region. File systems that do not know the request need none.
func Spread(dir string) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS); err == nil && flags&topDir == 0 {
		_ = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags|topDir)
	}
}
