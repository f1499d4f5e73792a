//go:build linux

package forkstest

import (
	"crypto/sha256"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// Manifest is a reading of a tree: for each path one line with everything that
// a snapshot has to keep. A hard-link group is named by its first path.
type Manifest map[string]string

// Read reads the tree at dir. What permissions refuse is in its lines.
func Read(t testing.TB, dir string) Manifest {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	assert.NilError(t, err)
	r := &reader{t: t, m: Manifest{}, first: map[[2]uint64]string{}}
	var st unix.Stat_t
	assert.NilError(t, unix.Fstat(fd, &st))
	r.m["."] = fmt.Sprintf("%o %d:%d %s %s", st.Mode, st.Uid, st.Gid, stamp(&st), xattrs(fmt.Sprintf("/proc/self/fd/%d", fd), false))
	r.dir(fd, "")
	return r.m
}

type reader struct {
	t     testing.TB
	m     Manifest
	first map[[2]uint64]string
}

func stamp(st *unix.Stat_t) string { return fmt.Sprintf("%d.%09d", st.Mtim.Sec, st.Mtim.Nsec) }

// dir reads the open directory fd and closes it.
func (r *reader) dir(fd int, path string) {
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		r.m[path+"/?"] = err.Error()
		return
	}
	slices.Sort(names)
	for _, name := range names {
		r.entry(fd, name, path+name)
	}
}

func (r *reader) entry(dir int, name, path string) {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		r.m[path] = err.Error()
		return
	}
	line := fmt.Sprintf("%o %d:%d %s %s", st.Mode, st.Uid, st.Gid, stamp(&st), xattrs(fmt.Sprintf("/proc/self/fd/%d/%s", dir, name), true))
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		key := [2]uint64{st.Dev, st.Ino}
		if _, ok := r.first[key]; !ok {
			r.first[key] = path
		}
		line += fmt.Sprintf(" %d %s link=%q", st.Size, contents(dir, name, &st), r.first[key])
	case unix.S_IFLNK:
		buf := make([]byte, 4096)
		n, err := unix.Readlinkat(dir, name, buf)
		assert.NilError(r.t, err)
		line += fmt.Sprintf(" -> %q", buf[:n])
	case unix.S_IFBLK, unix.S_IFCHR:
		line += fmt.Sprintf(" %x", st.Rdev)
	case unix.S_IFDIR:
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			line += " " + err.Error()
			break
		}
		r.dir(fd, path+"/")
	}
	r.m[path] = line
}

// contents is a hash of a file's bytes; of a large file, of its ends and of
// whether it is sparse.
func contents(dir int, name string, st *unix.Stat_t) string {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err.Error()
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	h := sha256.New()
	if st.Size < 64<<20 {
		_, err = io.Copy(h, f)
	} else {
		b := make([]byte, 8192)
		_, _ = f.ReadAt(b[:4096], 0)
		_, err = f.ReadAt(b[4096:], st.Size-4096)
		h.Write(b)
		fmt.Fprint(h, st.Blocks*512 < 1<<20)
	}
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

func xattrs(path string, nofollow bool) string {
	list, get := unix.Listxattr, unix.Getxattr
	if nofollow {
		list, get = unix.Llistxattr, unix.Lgetxattr
	}
	buf := make([]byte, 65536)
	n, err := list(path, buf)
	if err == unix.ENOTSUP {
		return "[]"
	}
	if err != nil {
		return err.Error()
	}
	var all []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if name == "" || name == "security.selinux" || strings.HasPrefix(name, "trusted.SGI_") {
			continue
		}
		v := make([]byte, 65536)
		m, err := get(path, name, v)
		if err != nil {
			all = append(all, name+" "+err.Error())
			continue
		}
		all = append(all, fmt.Sprintf("%s=%x", name, v[:m]))
	}
	slices.Sort(all)
	return fmt.Sprint(all)
}

// Equal fails the test if the manifests differ, and shows where.
func Equal(t testing.TB, got, want Manifest) {
	t.Helper()
	if diff := Differences(want, got); len(diff) > 0 {
		var b strings.Builder
		for _, p := range diff[:min(len(diff), 20)] {
			fmt.Fprintf(&b, "%.200q\n  want %.300s\n  got  %.300s\n", p, want[p], got[p])
		}
		t.Fatalf("%d paths differ:\n%s", len(diff), b.String())
	}
}

// Differences lists the paths whose lines differ, in byte order.
func Differences(a, b Manifest) []string {
	var diff []string
	all := maps.Clone(a)
	maps.Copy(all, b)
	for p := range all {
		if a[p] != b[p] {
			diff = append(diff, p)
		}
	}
	slices.Sort(diff)
	return diff
}
