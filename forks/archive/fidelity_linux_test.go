package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// TestAsOrdinaryUser runs the other tests once more without root's powers.
func TestAsOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this is an ordinary user's run already")
	}
	const id = 54321
	top, err := os.MkdirTemp("", "archive-user-")
	assert.NilError(t, err)
	defer os.RemoveAll(top)
	program, err := os.ReadFile("/proc/self/exe")
	assert.NilError(t, err)
	exe, tmp := filepath.Join(top, "test"), filepath.Join(top, "tmp")
	assert.NilError(t, os.WriteFile(exe, program, 0o755))
	assert.NilError(t, os.Mkdir(tmp, 0o700))
	assert.NilError(t, os.Chown(tmp, id, id))
	assert.NilError(t, os.Chmod(top, 0o755))

	cmd := exec.Command(exe, "-test.run=^Test", "-test.skip=^TestAsOrdinaryUser$", "-test.v")
	cmd.Dir = tmp
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "HOME="+tmp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: id, Gid: id}}
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, "%s", out)
	assert.Assert(t, strings.Contains(string(out), "--- PASS: TestOwners"), "%s", out)
}

// manifest describes all of a tree that must survive, a line for each name.
func manifest(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	groups := map[uint64]int{}
	assert.NilError(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		fmt.Fprintf(&b, "%q %o %d:%d %d.%09d %x", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Rdev)
		if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if _, ok := groups[st.Ino]; !ok {
				groups[st.Ino] = len(groups)
			}
			fmt.Fprintf(&b, " group %d", groups[st.Ino])
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			fmt.Fprintf(&b, " %s", content(t, path, st))
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " -> %q", target)
		}
		b.WriteString(xattrs(t, path) + "\n")
		return nil
	}))
	return b.String()
}

func content(t testing.TB, path string, st unix.Stat_t) string {
	if st.Size > 64<<20 { // sparse
		return fmt.Sprintf("%d %v", st.Size, holes(t, path))
	}
	if os.Geteuid() != 0 && st.Mode&0o400 == 0 {
		return fmt.Sprintf("%d bytes that cannot be read", st.Size)
	}
	data, err := os.ReadFile(path)
	assert.NilError(t, err)
	return fmt.Sprintf("%d %x", st.Size, sha256.Sum256(data))
}

// holes lists where a file's data lies.
func holes(t testing.TB, path string) []piece {
	t.Helper()
	f, err := os.Open(path)
	assert.NilError(t, err)
	defer f.Close()
	var list []piece
	for off := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return list
		}
		assert.NilError(t, err)
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		assert.NilError(t, err)
		list = append(list, piece{from, to - from})
		off = to
	}
}

func xattrs(t testing.TB, path string) string {
	t.Helper()
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if err == unix.EOPNOTSUPP || err == unix.EACCES {
		return ""
	}
	assert.NilError(t, err)
	var b strings.Builder
	list := strings.Split(strings.Trim(string(names[:n]), "\x00"), "\x00")
	slices.Sort(list)
	for _, name := range list {
		if name == "" {
			continue
		}
		fmt.Fprintf(&b, " %s=%q", name, xattr(t, path, name))
	}
	return b.String()
}

func xattr(t testing.TB, path, name string) string {
	t.Helper()
	value := make([]byte, 64<<10)
	n, err := unix.Lgetxattr(path, name, value)
	assert.NilError(t, err, "%s of %s", name, path)
	return string(value[:n])
}

// hardTree makes a tree of everything that is hard to keep, as far as the
// present user may.
func hardTree(t testing.TB, dir string, xattrsToo bool) {
	t.Helper()
	root := os.Geteuid() == 0
	at := func(name string) string { return filepath.Join(dir, name) }
	do := func(err error) { t.Helper(); assert.NilError(t, err) }
	for _, d := range []string{"", "d", "ro", "sg", "sticky", "links/real", "acl"} {
		do(os.MkdirAll(at(d), 0o755))
	}
	for _, name := range []string{"plain", "d/one", "ro/f", "f000", "su", "nl\nline", "back\\slash", "esc\x1b[31m", "bad\xff", "-rf",
		strings.Repeat("n", 255), strings.Repeat("é", 127), "acl/f"} {
		do(os.WriteFile(at(name), []byte("content of "+name), 0o644))
	}
	do(os.MkdirAll(at(strings.Repeat(strings.Repeat("d", 100)+"/", 6)), 0o755))
	do(os.Link(at("d/one"), at("two")))
	do(os.Link(at("d/one"), at("sg/three")))
	for name, target := range map[string]string{"abs": "/etc/passwd", "up": "../../../../etc", "self": ".", "dangling": "gone//x/", "long": strings.Repeat("t/", 300)} {
		do(os.Symlink(target, at("links/"+name)))
	}
	do(unix.Mkfifo(at("pipe"), 0o600))
	sparse, err := os.Create(at("sparse"))
	do(err)
	do(sparse.Truncate(9 << 30))
	for _, off := range []int64{0, 1 << 30, 9<<30 - 4} {
		_, err := sparse.WriteAt([]byte("data"), off)
		do(err)
	}
	do(sparse.Close())
	if root {
		do(os.Lchown(at("links/abs"), 2000000000, 205001))
		do(os.Chown(at("su"), 1000, 1000))
		do(os.Chown(at("d"), 4000000, 5))
		do(unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		do(unix.Mknod(at("disk"), unix.S_IFBLK|0o660, int(unix.Mkdev(259, 70000))))
	}
	if xattrsToo {
		hardXattrs(t, dir)
	}
	for name, mode := range map[string]uint32{"ro": 0o555, "f000": 0, "su": 0o4755, "sg": 0o2775, "sticky": 0o1777, "": 0o751, "pipe": 0o622} {
		do(unix.Chmod(at(name), mode))
	}
	if xattrsToo && root { // chmod and chown would clear it
		do(unix.Setxattr(at("su"), "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	}
	for name, ts := range map[string]unix.Timespec{
		"plain": {Sec: -1104537600, Nsec: 500000000}, "d/one": {Sec: 7258118400, Nsec: 1}, "links/abs": {Sec: 978310861, Nsec: 7},
		"f000": {Sec: -1, Nsec: 999999999}, "ro": {Sec: 1320973871, Nsec: 111111111}, "pipe": {Sec: 5, Nsec: 5}, "": {Sec: 1620191105, Nsec: 123456789},
	} {
		do(unix.UtimesNanoAt(unix.AT_FDCWD, at(name), []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

func hardXattrs(t testing.TB, dir string) {
	t.Helper()
	binary := make([]byte, 256)
	for i := range binary {
		binary[i] = byte(i)
	}
	access, err := parseACL("user::rw-,user:65534:r--,group::r--,mask::r--,other::---")
	assert.NilError(t, err)
	inherit, err := parseACL("user::rwx,user:65534:rwx,group::r-x,mask::rwx,other::---")
	assert.NilError(t, err)
	for _, a := range []struct{ name, key, value string }{
		{"plain", "user.note", "a=b\n"}, {"plain", "user.bin", string(binary)}, {"d", "user.dir", "d"}, {"f000", "user.locked", "1"},
		{"ro", "user.locked", "2"}, {"", "user.root", "r"},
		{"acl/f", "system.posix_acl_access", access}, {"acl", "system.posix_acl_default", inherit}, {"acl", "system.posix_acl_access", inherit},
	} {
		err := unix.Setxattr(filepath.Join(dir, a.name), a.key, []byte(a.value), 0)
		if err == unix.EOPNOTSUPP {
			t.Skip("the file system of the temporary directory has no xattrs")
		}
		assert.NilError(t, err)
	}
}

// TestRoundTripWithGNUTar packs a hard tree with GNU tar and unpacks it here.
func TestRoundTripWithGNUTar(t *testing.T) {
	if out, err := exec.Command("tar", "--version").Output(); err != nil || !bytes.Contains(out, []byte("GNU tar")) {
		t.Skip("there is no GNU tar")
	}
	for _, c := range []struct {
		name   string
		xattrs bool
		args   []string
	}{
		{"pax", true, []string{"--format=pax", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner", "--sparse"}},
		{"pax sparse 0.0", false, []string{"--format=pax", "--sparse", "--sparse-version=0.0"}},
		{"pax sparse 0.1", false, []string{"--format=pax", "--sparse", "--sparse-version=0.1"}},
		{"gnu", false, []string{"--format=gnu", "--sparse"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			top := t.TempDir()
			from, to := filepath.Join(top, "from"), filepath.Join(top, "to")
			t.Cleanup(func() { _ = removeAll(top) })
			hardTree(t, from, c.xattrs)
			if os.Geteuid() != 0 { // tar could not read it
				assert.NilError(t, os.Chmod(filepath.Join(from, "f000"), 0o200|0o400))
			}
			cmd := exec.Command("tar", append(c.args, "-C", from, "-cf", filepath.Join(top, "t.tar"), ".")...)
			cmd.Env = append(os.Environ(), "LC_ALL=C")
			out, err := cmd.CombinedOutput()
			assert.NilError(t, err, "%s", out)
			assert.NilError(t, os.Mkdir(to, 0o700))
			defer unix.Umask(unix.Umask(0o077))
			f, err := os.Open(filepath.Join(top, "t.tar"))
			assert.NilError(t, err)
			defer f.Close()
			r, err := Extract(context.Background(), f, to, Options{})
			assert.NilError(t, err)
			assert.Equal(t, len(r.Warnings), 0, "%s", r.Warnings)
			assert.Equal(t, len(r.Owners), 0)
			want, got := manifest(t, from), manifest(t, to)
			if c.name == "gnu" { // the format has whole seconds only
				want, got = wholeSeconds(want), wholeSeconds(got)
			}
			assert.Equal(t, got, want)
		})
	}
}

var fraction = regexp.MustCompile(`(?m)^(".*" [0-7]+ \d+:\d+ -?\d+)\.\d{9} `)

func wholeSeconds(manifest string) string { return fraction.ReplaceAllString(manifest, "$1 ") }

// TestInheritedACLAndUmask: what the target's directory hands down does not
// reach the tree.
func TestInheritedACLAndUmask(t *testing.T) {
	top := t.TempDir()
	acl, err := parseACL("user::rwx,user:65534:rwx,group::rwx,mask::rwx,other::rwx")
	assert.NilError(t, err)
	if err := unix.Setxattr(top, "system.posix_acl_default", []byte(acl), 0); err != nil {
		t.Skipf("no ACLs in the temporary directory: %v", err)
	}
	assert.NilError(t, unix.Chmod(top, 0o2755))
	dir := filepath.Join(top, "tree")
	assert.NilError(t, os.Mkdir(dir, 0o700))
	defer unix.Umask(unix.Umask(0o027))
	_, err = Extract(context.Background(), bytes.NewReader(tarOf(t, file("d/a", "1"), directory("e"))), dir, Options{})
	assert.NilError(t, err)
	assert.Equal(t, list(t, dir), ". 40755\nd 40755\nd/a 100644 \"1\"\ne 40755\n")
	for _, name := range []string{"", "d", "d/a", "e"} {
		assert.Equal(t, xattrs(t, filepath.Join(dir, name)), "", name)
	}
}

// TestOwners: ids are set as root; otherwise they are handed back.
func TestOwners(t *testing.T) {
	own := func(m member, uid, gid int) member {
		m.Uid, m.Gid = uid, gid
		return m
	}
	me, mine := os.Geteuid(), os.Getegid()
	data := tarOf(t,
		own(directory("./"), 205001, 205002),
		own(file("a", "1"), 205001, 205001),
		own(file("mine", "1"), me, mine),
		own(symlink("l", "x"), 2000000000, 7),
		own(hardLink("b", "a"), 205001, 205001),
		own(hardLink("late", "z"), 9, 9),
		own(file("gone", "1"), 9, 9), own(file("gone", "1"), me, mine),
		own(file("dir/x", "1"), 9, 9), own(file("dir", "1"), 8, 8),
		own(file("z", "1"), 6, 5),
	)
	dir, r, err := unpack(t, data, Options{})
	assert.NilError(t, err)
	want := map[string][2]uint32{".": {205001, 205002}, "a": {205001, 205001}, "l": {2000000000, 7}, "b": {205001, 205001},
		"dir": {8, 8}, "z": {6, 5}, "late": {6, 5}}
	if me != 0 {
		assert.DeepEqual(t, r.Owners, want)
		return
	}
	assert.Equal(t, len(r.Owners), 0)
	want["mine"], want["gone"] = [2]uint32{0, 0}, [2]uint32{0, 0}
	for name, ids := range want {
		var st unix.Stat_t
		assert.NilError(t, unix.Lstat(filepath.Join(dir, name), &st))
		assert.Equal(t, [2]uint32{st.Uid, st.Gid}, ids, name)
	}
}

// TestWhatIsNotAllowedIsNamed: devices, capabilities and xattrs for root only.
func TestWhatIsNotAllowedIsNamed(t *testing.T) {
	node := member{tar.Header{Name: "null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}, ""}
	second := node
	second.Name = "zero"
	able := file("able", "1")
	able.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}
	dir, r, err := unpack(t, tarOf(t, node, second, able), Options{})
	assert.NilError(t, err)
	warned := strings.Join(r.Warnings, "\n")
	if os.Geteuid() == 0 {
		assert.Equal(t, warned, "")
		assert.Assert(t, xattr(t, filepath.Join(dir, "able"), "security.capability") != "")
		return
	}
	assert.Assert(t, strings.Contains(warned, `device nodes were left out: making them needs root: "null" and 1 more`), warned)
	assert.Assert(t, strings.Contains(warned, `file capabilities could not be set (operation not permitted): "able"`), warned)
	assert.Equal(t, r.Files, int64(1))
}

func TestXattrForms(t *testing.T) {
	f := file("f", "1")
	f.PAXRecords = map[string]string{
		"SCHILY.xattr.user.a":              "x=y\x00\n",
		"LIBARCHIVE.xattr.user.b%3Dc%20":   base64.RawStdEncoding.EncodeToString([]byte{0, 1, 255}),
		"SCHILY.xattr.user.overlay.opaque": "y",
		"SCHILY.acl.access":                "user::rw-\nuser:nobody:r--:205001\ngroup::r--\nmask::rw-\nother::---\n",
	}
	unknown := file("g", "1")
	unknown.PAXRecords = map[string]string{"SCHILY.acl.access": "user::rw-,user:no-such-user-here:r--,group::r--,mask::r--,other::---"}
	dir, r, err := unpack(t, tarOf(t, f, unknown), Options{})
	assert.NilError(t, err)
	at := filepath.Join(dir, "f")
	if len(r.Warnings) > 2 {
		t.Skipf("no xattrs here: %s", r.Warnings)
	}
	assert.Equal(t, xattr(t, at, "user.a"), "x=y\x00\n")
	assert.Equal(t, xattr(t, at, "user.b=c "), "\x00\x01\xff")
	want, err := parseACL("u::rw-,u:205001:r--,g::r--,m::rw-,o::---")
	assert.NilError(t, err)
	assert.Equal(t, xattr(t, at, "system.posix_acl_access"), want)
	assert.Equal(t, len(r.Warnings), 2)
	assert.Assert(t, strings.Contains(r.Warnings[0], "steer overlay") || strings.Contains(r.Warnings[1], "steer overlay"), "%s", r.Warnings)
	assert.Assert(t, strings.Contains(strings.Join(r.Warnings, "\n"), `ACLs that name unknown users or groups, or cannot be read, were left out: "g"`), "%s", r.Warnings)
	assert.Assert(t, !strings.Contains(xattrs(t, at), "overlay"))
}

// TestPAXFields: global headers, times, large ids, records that override.
func TestPAXFields(t *testing.T) {
	data := ended(
		pax(typeGlobal, record("mtime", "77.5")+record("comment", "a commit")+record("path", "x")),
		block(typeFile, "a", 0, "", nil),
		block(typePax, "x", 0, "", nil),
		block(typeFile, "b", 0, "", nil),
		paxFile("c", record("mtime", "-1.25")),
		paxFile("d", record("mtime", "1e9")+record("mtime", "12.0000000019")),
		paxFile("e", record("mtime", "-0.5")),
	)
	dir, _, err := unpack(t, data, Options{})
	assert.NilError(t, err)
	for name, want := range map[string]time.Time{
		"a": time.Unix(77, 5e8), "b": time.Unix(77, 5e8), "c": time.Unix(-2, 75e7), "d": time.Unix(12, 1), "e": time.Unix(-1, 5e8),
	} {
		st, err := os.Lstat(filepath.Join(dir, name))
		assert.NilError(t, err)
		assert.Assert(t, st.ModTime().Equal(want), "%s: %v, not %v", name, st.ModTime(), want)
	}
}

// record makes a PAX record, whose length counts its own digits.
func record(key, value string) string {
	rest := " " + key + "=" + value + "\n"
	n := len(rest) + 1
	for len(fmt.Sprint(n))+len(rest) != n {
		n++
	}
	return fmt.Sprint(n) + rest
}

func pax(kind byte, records string) []byte {
	return block(kind, "x", int64(len(records)), records, nil)
}

func paxFile(name, records string) []byte {
	return append(pax(typePax, records), block(typeFile, name, 0, "", nil)...)
}

// TestSparse: the pieces are where they were, holes stay holes, and lists that
// lie are refused.
func TestSparse(t *testing.T) {
	inline := func(list string, data string) string {
		return list + strings.Repeat("\x00", blockSize-len(list)) + data
	}
	v1 := record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") + record("GNU.sparse.name", "disk") + record("GNU.sparse.realsize", "1099511627776")
	sparse := func(records, body string) []byte {
		return ended(pax(typePax, records), block(typeFile, "./GNUSparseFile.0/disk", int64(len(body)), body, nil), block(typeFile, "z", 1, "1", nil))
	}
	dir, r, err := unpack(t, sparse(v1, inline("2\n1048576\n4096\n1099511627775\n1\n", strings.Repeat("d", 4096)+"e")), Options{MaxSize: 5000})
	assert.NilError(t, err)
	assert.Equal(t, r.Bytes, int64(4098))
	f, err := os.Open(filepath.Join(dir, "disk"))
	assert.NilError(t, err)
	defer f.Close()
	st, err := f.Stat()
	assert.NilError(t, err)
	assert.Equal(t, st.Size(), int64(1<<40))
	assert.Assert(t, st.Sys().(*syscall.Stat_t).Blocks < 1<<11)
	b := make([]byte, 4098)
	_, err = f.ReadAt(b, 1<<20-1)
	assert.NilError(t, err)
	assert.Equal(t, string(b), "\x00"+strings.Repeat("d", 4096)+"\x00")
	for name, c := range map[string][]byte{
		"overlap":           sparse(v1, inline("2\n5\n2\n6\n1\n", "abc")),
		"backwards":         sparse(v1, inline("2\n9\n1\n2\n2\n", "abc")),
		"beyond the end":    sparse(v1, inline("1\n1099511627775\n3\n", "abc")),
		"overflow":          sparse(v1, inline("1\n9223372036854775807\n3\n", "abc")),
		"negative":          sparse(v1, inline("1\n0\n-3\n", "abc")),
		"less data":         sparse(v1, inline("1\n0\n4\n", "abc")),
		"more data":         sparse(v1, inline("1\n0\n2\n", "abc")),
		"a list of letters": sparse(v1, inline("1\nx\n2\n", "abc")),
		"endless list":      sparse(v1, inline("4000000\n", "")),
		"endless number":    sparse(v1, inline(strings.Repeat("1", 500), "")),
		"impossible count":  sparse(v1, inline("99999999999\n", "")),
		"unknown version":   sparse(record("GNU.sparse.major", "2")+record("GNU.sparse.minor", "0"), "abc"),
		"no length":         sparse(record("GNU.sparse.map", "0,3"), "abc"),
		"odd map":           sparse(record("GNU.sparse.map", "0,3,4")+record("GNU.sparse.size", "9"), "abc"),
		"unordered pairs":   sparse(record("GNU.sparse.numbytes", "3")+record("GNU.sparse.offset", "0")+record("GNU.sparse.size", "9"), "abc"),
	} {
		_, _, err := unpack(t, c, Options{})
		assert.ErrorIs(t, err, ErrFormat, name)
	}
}

// removeAll removes a tree whose modes may bar the way.
func removeAll(dir string) error {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
	return os.RemoveAll(dir)
}

// TestDeeperThanPathMax: a path of more than 4096 bytes, and one replaced.
func TestDeeperThanPathMax(t *testing.T) {
	part := strings.Repeat("d", 200)
	deep := strings.Repeat(part+"/", 30)
	dir, r, err := unpack(t, tarOf(t, file("old/"+deep+"leaf", "1"), file("old", "2"), file(deep+"leaf", "deep"), hardLink(deep+"link", deep+"leaf")), Options{})
	assert.NilError(t, err)
	assert.Equal(t, r.Files, int64(4))
	at, err := os.OpenRoot(dir)
	assert.NilError(t, err)
	for range 30 {
		next, err := at.OpenRoot(part)
		assert.NilError(t, err)
		at.Close()
		at = next
	}
	defer at.Close()
	data, err := at.ReadFile("link")
	assert.NilError(t, err)
	assert.Equal(t, string(data), "deep")
	st, err := os.Stat(filepath.Join(dir, "old"))
	assert.NilError(t, err)
	assert.Assert(t, st.Mode().IsRegular())
}

func TestDirectoryMustBeEmpty(t *testing.T) {
	dir := t.TempDir()
	assert.NilError(t, os.Mkdir(filepath.Join(dir, "a"), 0o700))
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "a", "mine"), nil, 0o600))
	_, err := Extract(context.Background(), bytes.NewReader(tarOf(t, file("a", "1"))), dir, Options{})
	assert.ErrorIs(t, err, unix.ENOTEMPTY)
	_, err = os.Stat(filepath.Join(dir, "a", "mine"))
	assert.NilError(t, err)
}

func TestLargeZstdWindow(t *testing.T) {
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b, zstd.WithWindowSize(256<<20), zstd.WithSingleSegment(false))
	assert.NilError(t, err)
	_, err = w.Write(tarOf(t, file("a", strings.Repeat("text", 1<<20))))
	assert.NilError(t, err)
	assert.NilError(t, w.Close())
	_, _, err = unpack(t, b.Bytes(), Options{})
	assert.ErrorContains(t, err, "needs a zstd window above 128 MiB (decompress it first: zstd -dc --long=31)")
}

func TestUnsupportedXZ(t *testing.T) {
	packed := compressions["xz"](t, tarOf(t, file("a", "1")))
	filters := bytes.Clone(packed)
	filters[13] |= 1
	_, _, err := unpack(t, filters, Options{})
	assert.ErrorContains(t, err, "uses an xz filter that is not supported (decompress it first: xz -dc)")
	// Flags 0, filter 0x21, one byte of properties: the dictionary's size.
	assert.DeepEqual(t, packed[13:16], []byte{0, 0x21, 1})
	large := bytes.Clone(packed)
	large[16] = 39
	_, _, err = unpack(t, large, Options{})
	assert.ErrorContains(t, err, "needs an xz dictionary above 128 MiB (decompress it first: xz -dc)")
}
