//go:build linux

package forkstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// Write makes files below dir: a path that ends with a slash is a directory.
func Write(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for path, content := range files {
		full := filepath.Join(dir, path)
		if strings.HasSuffix(path, "/") {
			assert.NilError(t, os.MkdirAll(full, 0o755))
			continue
		}
		assert.NilError(t, os.MkdirAll(filepath.Dir(full), 0o755))
		assert.NilError(t, os.WriteFile(full, []byte(content), 0o644))
		// Another case, at the same time, may be at work under its own umask.
		assert.NilError(t, os.Chmod(full, 0o644))
	}
}

// setTime sets a path's mtime, a symlink's own.
func setTime(t testing.TB, path string, at time.Time) {
	t.Helper()
	ts := unix.NsecToTimespec(at.UnixNano())
	assert.NilError(t, unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
}

// TrickyTree makes a directory with everything that a snapshot must keep, as
// far as the caller may make it. With unreadable, it holds directories and files
// of mode 000.
func TrickyTree(t testing.TB, dir string, unreadable bool) {
	t.Helper()
	Write(t, dir, map[string]string{
		"plain": "plain", "empty": "", "empty dir/": "", ".hidden/.git/index": "x",
		"links/a/one": "v1", "links/b/": "", "names/nl\nline": "1", "names/cr\rx": "2", "names/-rf": "3",
		"names/ lead": "4", "names/trail ": "5", "names/back\\slash": "6", "names/q\"uote": "7", "names/$HOME": "8",
		"names/\xff\xfe": "9", "names/e\u0301": "10", "names/\u00e9": "11", "names/esc\x1b[31m": "12",
		"names/" + strings.Repeat("n", 255): "255", "names/a-b": "", "names/a/b": "", "names/a.b": "",
		"modes/ro/f": "r", "modes/sticky/": "", "modes/setgid/": "", "modes/suid": "s",
		"times/old": "o", "times/future": "f", "times/ns": "n", "times/dir/x": "x", "attr/f": "x", "acl/in/f": "a",
		"big": strings.Repeat("0123456789abcdef", 1<<16),
	})
	p := func(name string) string { return filepath.Join(dir, name) }
	assert.NilError(t, os.Link(p("links/a/one"), p("links/b/two")))
	assert.NilError(t, os.Link(p("links/a/one"), p("three")))
	for name, target := range map[string]string{
		"loop1": "loop2", "loop2": "loop1", "self": ".", "abs": "/etc/passwd", "up": "../../../../etc", "dangling": "gone", "names/ln\n": "\xff",
	} {
		assert.NilError(t, os.Symlink(target, p(name)))
	}
	assert.NilError(t, unix.Mkfifo(p("pipe"), 0o640))
	assert.NilError(t, unix.Mknod(p("socket"), unix.S_IFSOCK|0o755, 0))
	sparse(t, p("sparse"))
	deep(t, dir, 30)
	attributes(t, dir)
	if os.Geteuid() == 0 {
		rootOnly(t, dir)
	}
	for name, mode := range map[string]uint32{"modes/sticky": 0o1777, "modes/setgid": 0o2775, "modes/suid": 0o4755, "modes/ro": 0o555} {
		assert.NilError(t, unix.Chmod(p(name), mode))
	}
	if unreadable {
		Write(t, dir, map[string]string{"modes/d000/sub/f": "secret", "modes/f000": "z", "modes/f200": "z"})
		for name, mode := range map[string]uint32{"modes/d000": 0, "modes/f000": 0, "modes/f200": 0o200} {
			assert.NilError(t, unix.Chmod(p(name), mode))
		}
	}
	setTime(t, p("times/old"), time.Date(1935, 1, 1, 0, 0, 0, 500000000, time.UTC))
	setTime(t, p("times/future"), time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC))
	setTime(t, p("times/ns"), time.Unix(1620191105, 123456789))
	setTime(t, p("dangling"), time.Unix(978310861, 7))
	setTime(t, p("times/dir"), time.Unix(1321009871, 111111111))
	setTime(t, dir, time.Unix(1234567890, 987654321))
}

// sparse makes a file of 10 GiB with a few bytes at either end; where a file
// may not be so large, a smaller one.
func sparse(t testing.TB, path string) {
	t.Helper()
	f, err := os.Create(path)
	assert.NilError(t, err)
	defer f.Close()
	size := int64(10 << 30)
	if f.Truncate(size) != nil {
		size = 1 << 30
		assert.NilError(t, f.Truncate(size))
	}
	_, err = f.WriteAt([]byte("head"), 0)
	assert.NilError(t, err)
	_, err = f.WriteAt([]byte("tail"), size-4)
	assert.NilError(t, err)
}

// deep makes n directories with names of 200 bytes, one in the other: with 30,
// longer than PATH_MAX.
func deep(t testing.TB, dir string, n int) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for range n {
		assert.NilError(t, err)
		name := strings.Repeat("d", 200)
		assert.NilError(t, unix.Mkdirat(fd, name, 0o755))
		next, e := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(fd)
		fd, err = next, e
	}
	assert.NilError(t, err)
	defer unix.Close(fd)
	leaf, err := unix.Openat(fd, "leaf", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o644)
	assert.NilError(t, err)
	_, err = unix.Write(leaf, []byte("deep"))
	assert.NilError(t, err)
	assert.NilError(t, unix.Close(leaf))
}

// attributes sets xattrs and ACLs where the file system has them.
func attributes(t testing.TB, dir string) {
	t.Helper()
	p := func(name string) string { return filepath.Join(dir, name) }
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for _, path := range []string{p("attr/f"), p("attr"), dir} {
		err := unix.Setxattr(path, "user.note", []byte("a=b"), 0)
		if err == unix.ENOTSUP {
			t.Log("no user attributes on this file system")
			break
		}
		assert.NilError(t, err)
		assert.NilError(t, unix.Setxattr(path, "user.bin", all, 0))
	}
	if _, err := exec.LookPath("setfacl"); err != nil {
		t.Log("setfacl is missing (package acl): no ACLs")
		return
	}
	out, err := exec.Command("sh", "-c", `setfacl -m u:$2:rwX,d:u:$2:rwX,d:o::--- "$1/acl" && setfacl -m u:$2:r-- "$1/acl/in/f"`,
		"sh", dir, strconv.Itoa(aclUser())).CombinedOutput()
	assert.NilError(t, err, string(out))
}

// aclUser is an uid that this process can write into an ACL: in a user namespace
// there may be none but its own.
func aclUser() int {
	if id := os.Geteuid(); id != 0 {
		return id
	}
	return 65534
}

// rootOnly makes what only root can: owners, devices, capabilities, trusted
// attributes.
func rootOnly(t testing.TB, dir string) {
	t.Helper()
	p := func(name string) string { return filepath.Join(dir, name) }
	Write(t, dir, map[string]string{"root/tool": "#!/bin/sh\n", "root/big ids": "", "root/owned/f": ""})
	for name, id := range map[string]int{"root/tool": 1000, "modes/suid": 1001, "root/big ids": 3000000000, "root/owned": 1002, "abs": 1003, "pipe": 1004} {
		assert.NilError(t, os.Lchown(p(name), id, id))
	}
	assert.NilError(t, os.Chmod(p("root/tool"), 0o755))
	// cap_net_raw=ep, as of linux/capability.h: revision 2 with the effective bit.
	capability := []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	assert.NilError(t, unix.Setxattr(p("root/tool"), "security.capability", capability, 0))
	assert.NilError(t, unix.Setxattr(p("plain"), "trusted.note", []byte("t"), 0))
	assert.NilError(t, unix.Lsetxattr(p("dangling"), "trusted.link", []byte("l"), 0))
	assert.NilError(t, unix.Mknod(p("root/null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	assert.NilError(t, unix.Mknod(p("root/block"), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 250))))
}
