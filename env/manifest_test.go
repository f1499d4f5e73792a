package env_test

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// manifest describes a tree, a line a name, by the file system's own account:
// it is what must be equal after a round trip, and shares no code with what it
// checks.
func manifest(t assert.TestingT, root string) string {
	var out []string
	groups := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		line := fmt.Sprintf("%q %o %d:%d %d.%09d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", to)
		case d.Type().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %x", st.Size, sha256.Sum256(data))
			if st.Nlink > 1 {
				if groups[st.Ino] == "" {
					groups[st.Ino] = rel // the first name, in order, stands for the group
				}
				line += fmt.Sprintf(" links %d to %q", st.Nlink, groups[st.Ino])
			}
		}
		out = append(out, line+xattrs(path))
		return nil
	})
	assert.NilError(t, err)
	return strings.Join(out, "\n") + "\n"
}

func xattrs(path string) string {
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if err != nil || n == 0 {
		return ""
	}
	var out []string
	for _, name := range strings.Split(strings.TrimRight(string(names[:n]), "\x00"), "\x00") {
		val := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, val)
		if err != nil {
			out = append(out, name+"="+err.Error())
			continue
		}
		out = append(out, fmt.Sprintf("%s=%x", name, val[:n]))
	}
	sort.Strings(out)
	return " " + strings.Join(out, " ")
}
