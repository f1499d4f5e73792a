package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// unpack extracts data into tree, an empty directory in a new one of the
// test, and returns it with the result.
func unpack(t testing.TB, data []byte, opts Options) (string, Result, error) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	t.Cleanup(func() { _ = removeAll(dir) })
	assert.NilError(t, os.Mkdir(dir, 0o700))
	r, err := Extract(context.Background(), bytes.NewReader(data), dir, opts)
	return dir, r, err
}

// list describes a tree: a line for each path with type, mode, and a file's
// content or a symlink's target, "=" and the path of an earlier hard link.
func list(t testing.TB, dir string) string {
	t.Helper()
	var b strings.Builder
	seen := map[uint64]string{}
	assert.NilError(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		what := ""
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			what = fmt.Sprintf(" %q", content)
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			what = " -> " + target
		}
		if first, ok := seen[st.Ino]; ok {
			what = " = " + first
		}
		seen[st.Ino] = rel
		fmt.Fprintf(&b, "%s %o%s\n", rel, st.Mode, what)
		return nil
	}))
	return b.String()
}

func TestContradictions(t *testing.T) {
	root := directory("./")
	root.Mode = 0o1750
	for _, c := range []struct {
		name string
		tar  []byte
		want string
		warn string
	}{
		{"root entry", tarOf(t, root, file("./a", "1")), ". 41750\na 100644 \"1\"\n", ""},
		{"no root entry", tarOf(t, file("a", "1")), ". 40755\na 100644 \"1\"\n", ""},
		{"no entries", tarOf(t), ". 40755\n", ""},
		{"missing parents", tarOf(t, file("a/b/c", "1")), ". 40755\na 40755\na/b 40755\na/b/c 100644 \"1\"\n", ""},
		{"parent described later", tarOf(t, file("a/b", "1"), member{tar.Header{Name: "a", Typeflag: tar.TypeDir, Mode: 0o2711}, ""}),
			". 40755\na 42711\na/b 100644 \"1\"\n", ""},
		{"odd but inner names", tarOf(t, file(".//a///./b", "1")), ". 40755\na 40755\na/b 100644 \"1\"\n", ""},
		{"file twice", tarOf(t, file("a", "first"), hardLink("b", "a"), file("a", "2")), ". 40755\na 100644 \"2\"\nb 100644 \"first\"\n", ""},
		{"directory twice", tarOf(t, directory("a"), file("a/x", "1"), directory("a/")), ". 40755\na 40755\na/x 100644 \"1\"\n", ""},
		{"directory to file", tarOf(t, directory("a"), file("a/x/y", "1"), file("a", "2")), ". 40755\na 100644 \"2\"\n", ""},
		{"directory just left to file", tarOf(t, file("a/b/c", "1"), file("a/b", "2"), file("a/d", "3")),
			". 40755\na 40755\na/b 100644 \"2\"\na/d 100644 \"3\"\n", ""},
		{"directory to symlink", tarOf(t, file("a/x", "1"), symlink("a", "/etc")), ". 40755\na 120777 -> /etc\n", ""},
		{"symlink to directory", tarOf(t, symlink("a", "/etc"), directory("a"), file("a/x", "1")), ". 40755\na 40755\na/x 100644 \"1\"\n", ""},
		{"symlink to file", tarOf(t, symlink("a", "b"), file("a", "1")), ". 40755\na 100644 \"1\"\n", ""},
		{"file to fifo", tarOf(t, file("a", "1"), member{tar.Header{Name: "a", Typeflag: tar.TypeFifo, Mode: 0o622}, ""}), ". 40755\na 10622\n", ""},
		{"entry below a file", tarOf(t, file("a", "1"), file("a/b", "2")), ". 40755\na 40755\na/b 100644 \"2\"\n", `replaced by directories, since later entries lie below them: "a"`},
		{"entry below a fifo", tarOf(t, member{tar.Header{Name: "a", Typeflag: tar.TypeFifo, Mode: 0o622}, ""}, directory("a/b")), ". 40755\na 40755\na/b 40755\n", "replaced by directories"},
		{"symlinks that lead out", tarOf(t, symlink("vi", "/etc/alternatives/vi"), symlink("up", "../../../etc"), symlink("x", "a//b/")),
			". 40755\nup 120777 -> ../../../etc\nvi 120777 -> /etc/alternatives/vi\nx 120777 -> a//b/\n", ""},
		{"whiteouts are files", tarOf(t, file("a/.wh.b", ""), file("a/.wh..wh..opq", "")), ". 40755\na 40755\na/.wh..wh..opq 100644 \"\"\na/.wh.b 100644 \"\"\n", ""},
		{"hard link", tarOf(t, file("a", "1"), hardLink("d/b", "./a")), ". 40755\na 100644 \"1\"\nd 40755\nd/b 100644 = a\n", ""},
		{"hard link to a symlink", tarOf(t, symlink("a", "/etc/passwd"), hardLink("b", "a")), ". 40755\na 120777 -> /etc/passwd\nb 120777 = a\n", ""},
		{"hard link to itself", tarOf(t, file("a", "1"), hardLink("a", "a")), ". 40755\na 100644 \"1\"\n", ""},
		{"hard link to what comes later", tarOf(t, hardLink("a", "c"), hardLink("b", "a"), file("c", "1")), ". 40755\na 100644 \"1\"\nb 100644 = a\nc 100644 = b\n", ""},
		{"hard link in a later replaced directory", tarOf(t, hardLink("d/a", "c"), file("d", "2"), file("c", "1")), ". 40755\nc 100644 \"1\"\nd 100644 \"2\"\n", ""},
		{"hard link replaced before its target", tarOf(t, hardLink("a", "c"), file("a", "2"), file("c", "1")), ". 40755\na 100644 \"2\"\nc 100644 \"1\"\n", ""},
		{"hard link over a directory", tarOf(t, file("a", "1"), file("d/x", "2"), hardLink("d", "a")), ". 40755\na 100644 \"1\"\nd 100644 = a\n", ""},
		{"empty name", ended(block(typeFile, "", 3, "abc", nil), block(typeFile, "b", 1, "1", nil)), ". 40755\nb 100644 \"1\"\n", "without a name"},
		{"trailing garbage", append(tarOf(t, file("a", "1")), "garbage"...), ". 40755\na 100644 \"1\"\n", "follows the end mark"},
		{"trailing zeros", append(tarOf(t, file("a", "1")), make([]byte, 9999)...), ". 40755\na 100644 \"1\"\n", ""},
		{"one zero block at the end", append(block(typeFile, "a", 1, "1", nil), make([]byte, blockSize)...), ". 40755\na 100644 \"1\"\n", ""},
		{"old directory", ended(block(typeOldFile, "a/", 0, "", func(h []byte) { copy(h[257:265], make([]byte, 8)); copy(h[100:], "0000755") })), ". 40755\na 40755\n", ""},
		{"unknown type", ended(block('Q', "a", 1, "1", nil)), ". 40755\na 100644 \"1\"\n", "unknown type"},
		{"size of a symlink", ended(block(typeSymlink, "a", 700, "", func(h []byte) { copy(h[157:], "t") }), block(typeFile, "b", 1, "1", nil)),
			". 40755\na 120777 -> t\nb 100644 \"1\"\n", ""},
		{"dump directory", ended(block(typeDumpDir, "a/", 5, "Yb\x00\x00\x00", func(h []byte) { copy(h[100:], "0000755") }), block(typeFile, "a/b", 1, "1", nil)), ". 40755\na 40755\na/b 100644 \"1\"\n", ""},
		{"volume label", ended(block(typeLabel, "backup", 0, "", nil), block(typeFile, "b", 1, "1", nil)), ". 40755\nb 100644 \"1\"\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, r, err := unpack(t, c.tar, Options{})
			assert.NilError(t, err)
			assert.Equal(t, list(t, dir), c.want)
			warned := strings.Join(r.Warnings, "\n")
			if c.warn == "" {
				assert.Equal(t, warned, "")
			} else {
				assert.Assert(t, strings.Contains(warned, c.warn), warned)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	good := tarOf(t, file("a", strings.Repeat("0123456789abcdef", 400)), file("b", "1"))
	damagedHeader := bytes.Clone(good)
	damagedHeader[13*blockSize+blockSize+3] ^= 1
	device := member{tar.Header{Name: "w", Typeflag: tar.TypeChar, Mode: 0o600}, ""}
	for _, c := range []struct {
		name string
		data []byte
		kind error
		want string
	}{
		{"symlink then below", tarOf(t, symlink("esc", "../out"), file("esc/pwn", "x")), ErrUnsafe, `entry "esc/pwn" is refused: it leads through the symlink "esc"`},
		{"inner symlink then below", tarOf(t, directory("d"), symlink("l", "d"), file("l/x/y", "x")), ErrUnsafe, `entry "l/x/y" is refused: it leads through the symlink "l"`},
		{"directory swapped for a symlink", tarOf(t, file("d/x", "1"), symlink("d", "../out"), file("d/pwn", "x")), ErrUnsafe, `"d/pwn"`},
		{"dots", tarOf(t, file("../out/pwn", "x")), ErrUnsafe, `entry "../out/pwn" is refused: its name holds ".."`},
		{"inner dots", tarOf(t, file("a/../../out/pwn", "x")), ErrUnsafe, `entry "a/../../out/pwn" is refused`},
		{"absolute", tarOf(t, file("/tmp/pwn", "x")), ErrUnsafe, `entry "/tmp/pwn" is refused: its name is absolute`},
		{"hard link out", tarOf(t, hardLink("l", "../out/secret")), ErrUnsafe, `entry "l" is refused: the link's target "../out/secret" holds ".."`},
		{"hard link to absolute", tarOf(t, hardLink("l", "/etc/passwd")), ErrUnsafe, `entry "l" is refused: the link's target "/etc/passwd" is absolute`},
		{"hard link through symlink", tarOf(t, symlink("s", "../out"), hardLink("l", "s/secret")), ErrUnsafe, `entry "l" is refused: it leads through the symlink "s"`},
		{"late hard link through symlink", tarOf(t, hardLink("l", "s/secret"), symlink("s", "../out")), ErrUnsafe, `entry "l" is refused`},
		{"root as symlink", tarOf(t, symlink("./", "/etc")), ErrUnsafe, `entry "./" would replace the tree's root`},
		{"overlay whiteout", tarOf(t, device), ErrUnsafe, `entry "w" is refused: a character device 0:0`},
		{"hard link to nothing", tarOf(t, hardLink("l", "gone")), ErrFormat, `entry "l" is a hard link to "gone", which is not in the archive`},
		{"ring of hard links", tarOf(t, hardLink("a", "b"), hardLink("b", "c"), hardLink("c", "a")), ErrFormat, `entry "a" is a hard link to`},
		{"hard link to a directory", tarOf(t, directory("d"), hardLink("l", "d")), ErrFormat, `"d", which is a directory`},
		{"hard link to the root", tarOf(t, hardLink("l", ".")), ErrFormat, `hard link to the tree's root`},
		{"hard link over its target's parent", tarOf(t, file("d/x", "1"), hardLink("d", "d/x")), nil, `entry "d" cannot be linked to "d/x": no such file`},
		{"control characters in a name", tarOf(t, file("../\x1b[31m\n", "x")), ErrUnsafe, `entry "../\x1b[31m\n" is refused`},
		{"long part", tarOf(t, file(strings.Repeat("n", 256), "x")), nil, "no part of a name can be longer than 255 bytes"},
		{"empty", nil, ErrFormat, "is empty, not a tar"},
		{"one byte", []byte("x"), ErrFormat, "is a text, not a tar"},
		{"zip", append([]byte("PK\x03\x04"), make([]byte, 2000)...), ErrFormat, "is a zip archive, not a tar"},
		{"html", []byte("\n<!DOCTYPE html><html><body>404</body></html>"), ErrFormat, "is an HTML page (a download that failed?), not a tar"},
		{"json", []byte(`{"message":"Not Found"}`), ErrFormat, "is a JSON document, not a tar"},
		{"LFS", []byte("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), ErrFormat, "git lfs pull"},
		{"gzip of text", gzipped(t, []byte("hello\n")), ErrFormat, "is a text, not a tar"},
		{"gzip of nothing", gzipped(t, nil), ErrFormat, "is empty, not a tar"},
		{"gzip twice", gzipped(t, gzipped(t, good)), ErrFormat, "is gzip data, not a tar"},
		{"noise", bytes.Repeat([]byte{0x83, 0x01}, 700), ErrFormat, "is unknown data, not a tar"},
		{"cut in a file", good[:5*blockSize+17], ErrFormat, `entry "a" is cut: the archive ends in the middle of it`},
		{"cut in padding", good[:14*blockSize-200], ErrFormat, `is cut`},
		{"cut in a header", good[:14*blockSize+100], ErrFormat, `is cut: it ends in a header after entry "a"`},
		{"cut between entries", good[:14*blockSize], ErrFormat, `is cut: it ends after entry "a" without the end mark of a tar`},
		{"damaged header", damagedHeader, ErrFormat, `is damaged: what comes after entry "a" is not a tar header`},
		{"cut gzip", gzipped(t, good)[:60], ErrFormat, "is cut: its gzip stream ends too early"},
		{"wrong size", ended(block(typeFile, "a", 0, "", func(h []byte) { copy(h[124:136], "12x45       ") })), ErrFormat, `entry "a" has a size that is not a number`},
		{"negative size", ended(block(typeFile, "a", 0, "", func(h []byte) { copy(h[124:136], bytes.Repeat([]byte{0xff}, 12)) })), ErrFormat, `entry "a" has the impossible size -1`},
		{"too large a size", ended(block(typeFile, "a", 0, "", func(h []byte) { copy(h[124:136], octal(1<<63-1)) })), ErrFormat, "impossible size"},
		{"uid beyond Linux", ended(block(typePax, "x", 19, "19 uid=99999999999\n", nil), block(typeFile, "a", 0, "", nil)), ErrFormat, `owner id 99999999999`},
		{"wrong PAX length", ended(block(typePax, "x", 10, "99 path=a\n", nil), block(typeFile, "a", 0, "", nil)), ErrFormat, "is damaged: it has an extended header that cannot be read"},
		{"zero byte in a PAX path", ended(block(typePax, "x", 12, "12 path=a\x00b\n", nil), block(typeFile, "a", 0, "", nil)), ErrFormat, "zero byte"},
		{"huge PAX header", ended(block(typePax, "x", maxRecord+1, "", nil)), ErrFormat, "extended header of"},
		{"multi-volume", ended(block(typeSplit, "a", 0, "", nil)), ErrFormat, "multi-volume"},
		{"symlink without target", ended(block(typeSymlink, "a", 0, "", nil)), ErrFormat, "without a target"},
	} {
		t.Run(c.name, func(t *testing.T) {
			top := t.TempDir()
			dir, out := filepath.Join(top, "tree"), filepath.Join(top, "out")
			for _, d := range []string{dir, out} {
				assert.NilError(t, os.Mkdir(d, 0o700))
			}
			secret := filepath.Join(out, "secret")
			assert.NilError(t, os.WriteFile(secret, []byte("secret"), 0o600))
			_, err := Extract(context.Background(), bytes.NewReader(c.data), dir, Options{})
			assert.ErrorContains(t, err, c.want)
			assert.Assert(t, !strings.Contains(err.Error(), "\n"), "one line")
			if c.kind != nil {
				assert.ErrorIs(t, err, c.kind)
			}
			assert.Equal(t, list(t, out), ". 40700\nsecret 100600 \"secret\"\n")
			var st unix.Stat_t
			assert.NilError(t, unix.Lstat(secret, &st))
			assert.Equal(t, int(st.Nlink), 1)
		})
	}
}

// TestCutAnywhere: no prefix of an archive that lacks data is taken for whole.
func TestCutAnywhere(t *testing.T) {
	whole := tarOf(t, directory("d"), file("d/a", "1"), symlink("d/l", "a"), file("b", strings.Repeat("x", 600)))
	end := len(whole) - 2*blockSize
	for n := 0; n <= end; n += 64 {
		_, _, err := unpack(t, whole[:n], Options{})
		assert.ErrorIs(t, err, ErrFormat, "the first %d of %d bytes", n, len(whole))
	}
	for name, pack := range compressions {
		packed := pack(t, whole)
		for n := 1; n < len(packed); n += 7 {
			_, _, err := unpack(t, packed[:n], Options{})
			assert.ErrorIs(t, err, ErrFormat, "the first %d of %d bytes of %s", n, len(packed), name)
		}
	}
}

var compressions = map[string]func(t testing.TB, data []byte) []byte{
	"gzip": gzipped,
	"zstd": func(t testing.TB, data []byte) []byte {
		return compressed(t, data, func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) })
	},
	"xz": func(t testing.TB, data []byte) []byte {
		return compressed(t, data, func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) })
	},
}

func gzipped(t testing.TB, data []byte) []byte {
	return compressed(t, data, func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil })
}

func compressed(t testing.TB, data []byte, open func(w io.Writer) (io.WriteCloser, error)) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := open(&b)
	assert.NilError(t, err)
	_, err = w.Write(data)
	assert.NilError(t, err)
	assert.NilError(t, w.Close())
	return b.Bytes()
}

func TestCompressions(t *testing.T) {
	data := tarOf(t, file("a", strings.Repeat("text ", 100_000)), file("b", "1"))
	half := len(data)/2 + 3
	packed := map[string][]byte{
		"plain":                      data,
		"two gzip members":           append(gzipped(t, data[:half]), gzipped(t, data[half:])...),
		"an empty member in the way": bytes.Join([][]byte{gzipped(t, data[:half]), gzipped(t, nil), gzipped(t, data[half:])}, nil),
		"gzip padded with zeros":     append(gzipped(t, data), make([]byte, 3)...),
		"zstd after a skipped frame": append([]byte("\x50\x2a\x4d\x18\x03\x00\x00\x00abc"), compressions["zstd"](t, data)...),
		"two zstd frames":            append(compressions["zstd"](t, data[:half]), compressions["zstd"](t, data[half:])...),
		"two xz streams":             append(compressions["xz"](t, data[:half]), compressions["xz"](t, data[half:])...),
		"xz with padding at its end": append(compressions["xz"](t, data), make([]byte, 8)...),
		"gzip with text after it":    append(gzipped(t, data), "\n"...),
	}
	for name, pack := range compressions {
		packed[name] = pack(t, data)
	}
	for name, data := range packed {
		t.Run(name, func(t *testing.T) {
			_, r, err := unpack(t, data, Options{})
			assert.NilError(t, err)
			assert.Equal(t, r.Files, int64(2))
			assert.Equal(t, r.Bytes, int64(500_001))
		})
	}
}

func TestChecksumOfTheStreamIsVerified(t *testing.T) {
	packed := gzipped(t, tarOf(t, file("a", "1")))
	packed[len(packed)-8] ^= 1
	_, _, err := unpack(t, packed, Options{})
	assert.ErrorIs(t, err, ErrFormat)
	assert.ErrorContains(t, err, "is damaged: its gzip stream cannot be read")
}

func TestSizeIsBounded(t *testing.T) {
	declared := ended(block(typeFile, "big", 1<<40, "x", nil))
	_, r, err := unpack(t, declared, Options{MaxSize: 1 << 20})
	assert.ErrorIs(t, err, ErrTooLarge)
	assert.ErrorContains(t, err, `entry "big" holds 1099511627776 bytes, but only 1048576 more are allowed`)
	assert.Equal(t, r.Bytes, int64(0))

	_, _, err = unpack(t, ended(block(typeFile, "big", 1<<60, "x", nil)), Options{})
	assert.ErrorIs(t, err, ErrTooLarge)
	assert.ErrorContains(t, err, "more are free")

	several := tarOf(t, file("a", strings.Repeat("x", 600)), file("b", strings.Repeat("x", 600)))
	_, _, err = unpack(t, several, Options{MaxSize: 1000})
	assert.ErrorContains(t, err, `entry "b" holds 600 bytes, but only 400 more are allowed`)
	_, _, err = unpack(t, several, Options{MaxSize: 1200})
	assert.NilError(t, err)
}

func TestCancel(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	go func() { // an archive that stops in the middle of a file, and a writer that stays
		_, _ = w.Write(tarOf(t, file("a", strings.Repeat("x", 1<<20)))[:chunkSize])
	}()
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	_, err := Extract(ctx, r, t.TempDir(), Options{})
	assert.ErrorIs(t, err, context.Canceled)
	assert.Assert(t, time.Since(began) < 5*time.Second)
}

func TestReadErrorIsNotDamage(t *testing.T) {
	broken := errors.New("disk on fire")
	for name, data := range map[string][]byte{"plain": tarOf(t, file("a", strings.Repeat("x", 9999))), "gzip": gzipped(t, tarOf(t, file("a", "1")))} {
		r := io.MultiReader(bytes.NewReader(data[:len(data)/2]), failing{broken})
		_, err := Extract(context.Background(), r, t.TempDir(), Options{})
		assert.ErrorIs(t, err, broken, name)
		assert.Assert(t, !errors.Is(err, ErrFormat), name)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestProgress(t *testing.T) {
	var files, size int64
	_, r, err := unpack(t, tarOf(t, file("a", "123"), directory("d")), Options{Progress: func(f, b int64) { files, size = f, b }})
	assert.NilError(t, err)
	assert.Equal(t, files, int64(2))
	assert.Equal(t, size, int64(3))
	assert.Equal(t, r.Files, files)
}
