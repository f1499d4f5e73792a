//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The requests, object numbers and key types of linux/btrfs.h and
// linux/btrfs_tree.h that containerd/btrfs does not offer.
const (
	iocFsInfo           = 0x8400941f
	iocSnapDestroy      = 0x5000940f
	iocSync             = 0x9408
	iocTreeSearchV2     = 0xc0709411
	iocSubvolGetFlags   = 0x80089419
	iocSubvolSetFlags   = 0x4008941a
	iocGetSubvolInfo    = 0x81f8943c
	iocGetSubvolRootref = 0xd000943d
	iocInoLookupUser    = 0xd000943e

	subvolReadOnly = 2 // BTRFS_SUBVOL_RDONLY

	rootDir = 256 // BTRFS_FIRST_FREE_OBJECTID: the inode of a subvolume's root

	inodeItem   = 1
	inodeRef    = 12
	inodeExtref = 13
	extentData  = 108
)

func ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		if e == 0 {
			return nil
		}
		if e != unix.EINTR {
			return e
		}
	}
}

// subvol is what there is to know about a subvolume.
type subvol struct {
	id   uint64
	uuid [16]byte
	// generation is the transaction that changed it last, made the one that
	// made it.
	generation, made uint64
}

// subvolInfo asks about the subvolume that holds the open file fd.
func subvolInfo(fd int) (subvol, error) {
	var b [504]byte // struct btrfs_ioctl_get_subvol_info_args
	if err := ioctl(fd, iocGetSubvolInfo, unsafe.Pointer(&b)); err != nil {
		return subvol{}, os.NewSyscallError("ioctl GET_SUBVOL_INFO", err)
	}
	s := subvol{id: binary.NativeEndian.Uint64(b[0:]), generation: binary.NativeEndian.Uint64(b[0x118:]), made: binary.NativeEndian.Uint64(b[0x160:])}
	copy(s.uuid[:], b[0x128:])
	return s, nil
}

// setReadOnly makes the subvolume whose root is open read-only, or writable.
func setReadOnly(fd int, on bool) error {
	var flags uint64
	if err := ioctl(fd, iocSubvolGetFlags, unsafe.Pointer(&flags)); err != nil {
		return os.NewSyscallError("ioctl SUBVOL_GETFLAGS", err)
	}
	want := flags &^ subvolReadOnly
	if on {
		want |= subvolReadOnly
	}
	if want == flags {
		return nil
	}
	return os.NewSyscallError("ioctl SUBVOL_SETFLAGS", ioctl(fd, iocSubvolSetFlags, unsafe.Pointer(&want)))
}

// destroy deletes the subvolume name in the open directory dir. Its space comes
// back later.
func destroy(dir int, name string) error {
	var args [4096]byte // struct btrfs_ioctl_vol_args: 8 bytes, then the name
	if len(name) > 255 {
		return unix.ENAMETOOLONG
	}
	copy(args[8:], name)
	return ioctl(dir, iocSnapDestroy, unsafe.Pointer(&args))
}

// nested lists the subvolumes directly below the subvolume whose root is open,
// as paths relative to it.
func nested(fd int) ([]string, error) {
	var found []string
	var refs [4096]byte // struct btrfs_ioctl_get_subvol_rootref_args
	for {
		err := ioctl(fd, iocGetSubvolRootref, unsafe.Pointer(&refs))
		if err != nil && err != unix.EOVERFLOW {
			return nil, os.NewSyscallError("ioctl GET_SUBVOL_ROOTREF", err)
		}
		for i := range int(refs[8+255*16]) {
			id, dir := binary.NativeEndian.Uint64(refs[8+16*i:]), binary.NativeEndian.Uint64(refs[16+16*i:])
			path, err := lookupUser(fd, dir, id)
			if errors.Is(err, unix.ENOENT) {
				continue // deleted, and not yet gone
			}
			if err != nil {
				return nil, err
			}
			found = append(found, path)
		}
		if err == nil {
			return found, nil
		}
	}
}

// lookupUser returns the path of the subvolume id, which stands in the
// directory with the inode dir.
func lookupUser(fd int, dir, id uint64) (string, error) {
	var b [4096]byte // struct btrfs_ioctl_ino_lookup_user_args
	binary.NativeEndian.PutUint64(b[0:], dir)
	binary.NativeEndian.PutUint64(b[8:], id)
	if err := ioctl(fd, iocInoLookupUser, unsafe.Pointer(&b)); err != nil {
		return "", fmt.Errorf("a nested subvolume: %w", os.NewSyscallError("ioctl INO_LOOKUP_USER", err))
	}
	name, _, _ := bytes.Cut(b[16:272], []byte{0})
	path, _, _ := bytes.Cut(b[272:], []byte{0})
	return string(path) + string(name), nil
}

// searchKey is struct btrfs_ioctl_search_key with the buffer's size, which
// follows it in struct btrfs_ioctl_search_args_v2.
type searchKey struct {
	tree                   uint64
	minObject, maxObject   uint64
	minOffset, maxOffset   uint64
	minTransid, maxTransid uint64
	minType, maxType       uint32
	items, _               uint32
	_, _, _, _             uint64
	size                   uint64
}

// item is one that a search found; data is good until the callback returns.
type item struct {
	object, offset uint64
	kind           uint32
	data           []byte
}

// searchBuffer holds some hundred items.
const searchBuffer = 64 << 10

// search calls fn for the items of the subvolume of fd whose objects are
// between from and to, and which lie in blocks of generation since or later.
// It needs CAP_SYS_ADMIN.
func search(fd int, from, to, since uint64, fn func(item) error) error {
	buf := make([]uint64, (112+searchBuffer)/8)
	key := (*searchKey)(unsafe.Pointer(&buf[0]))
	b := unsafe.Slice((*byte)(unsafe.Pointer(&buf[0])), len(buf)*8)
	*key = searchKey{
		minObject: from, maxObject: to, maxOffset: ^uint64(0), minTransid: since, maxTransid: ^uint64(0),
		maxType: ^uint32(0), size: searchBuffer,
	}
	defer runtime.KeepAlive(buf)
	for {
		key.items = ^uint32(0)
		if err := ioctl(fd, iocTreeSearchV2, unsafe.Pointer(key)); err != nil {
			return os.NewSyscallError("ioctl TREE_SEARCH_V2", err)
		}
		if key.items == 0 {
			return nil
		}
		var last item
		at := 112
		for range key.items {
			last = item{
				object: binary.NativeEndian.Uint64(b[at+8:]), offset: binary.NativeEndian.Uint64(b[at+16:]),
				kind: binary.NativeEndian.Uint32(b[at+24:]),
			}
			size := int(binary.NativeEndian.Uint32(b[at+28:]))
			last.data = b[at+32 : at+32+size]
			at += 32 + size
			if err := fn(last); err != nil {
				return err
			}
		}
		if !key.after(last) {
			return nil
		}
	}
}

// after lets the next search begin behind the item; false if there is nothing.
func (k *searchKey) after(i item) bool {
	k.minObject, k.minType, k.minOffset = i.object, i.kind, i.offset+1
	if k.minOffset == 0 {
		k.minType++
	}
	return k.minObject <= k.maxObject
}

// sameFS says whether two open files are of one btrfs.
func sameFS(a, b int) bool {
	var x, y [1024]byte // struct btrfs_ioctl_fs_info_args: the fsid follows two words
	return ioctl(a, iocFsInfo, unsafe.Pointer(&x)) == nil && ioctl(b, iocFsInfo, unsafe.Pointer(&y)) == nil &&
		bytes.Equal(x[16:32], y[16:32])
}

// freeBytes is what the file system of fd has left.
func freeBytes(fd int) (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return 0, os.NewSyscallError("fstatfs", err)
	}
	return int64(fs.Bfree) * int64(fs.Bsize), nil
}

// birth returns when the inode name in dir was made; 0 if that is not known.
func birth(dir int, name string) int64 {
	var st unix.Statx_t
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_EMPTY_PATH | unix.AT_NO_AUTOMOUNT
	if unix.Statx(dir, name, flags, unix.STATX_BTIME, &st) != nil {
		return 0
	}
	return time.Unix(st.Btime.Sec, int64(st.Btime.Nsec)).UnixNano()
}
