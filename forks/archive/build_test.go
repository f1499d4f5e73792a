package archive

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"testing"

	"gotest.tools/v3/assert"
)

// member is one member of a tar made for a test.
type member struct {
	tar.Header
	body string
}

func file(name, body string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, body}
}

func directory(name string) member {
	return member{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func symlink(name, target string) member {
	return member{tar.Header{Name: name, Linkname: target, Typeflag: tar.TypeSymlink, Mode: 0o777}, ""}
}

func hardLink(name, target string) member {
	return member{tar.Header{Name: name, Linkname: target, Typeflag: tar.TypeLink, Mode: 0o644}, ""}
}

// tarOf makes a tar of members, owned by whoever runs the test.
func tarOf(t testing.TB, members ...member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		if m.Typeflag == tar.TypeReg {
			m.Size = int64(len(m.body))
		}
		if m.PAXRecords != nil {
			m.Format = tar.FormatPAX
		}
		assert.NilError(t, w.WriteHeader(&m.Header))
		_, err := w.Write([]byte(m.body))
		assert.NilError(t, err)
	}
	assert.NilError(t, w.Close())
	return b.Bytes()
}

// block makes a header by hand, for what archive/tar refuses to write, and
// pads body to whole blocks after it.
func block(kind byte, name string, size int64, body string, change func(h []byte)) []byte {
	h := make([]byte, blockSize)
	copy(h, name)
	copy(h[100:], "0000644\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	copy(h[124:], octal(size))
	copy(h[136:], octal(0))
	h[156] = kind
	copy(h[257:], "ustar\x0000")
	if change != nil {
		change(h)
	}
	seal(h)
	b := append(h, body...)
	return append(b, make([]byte, -len(body)&(blockSize-1))...)
}

// octal writes a number as a header field of 12 bytes; a large one in GNU's
// binary form.
func octal(n int64) string {
	if n >= 1<<33 {
		return string(binary.BigEndian.AppendUint64([]byte{0x80, 0, 0, 0}, uint64(n)))
	}
	b := []byte("00000000000 ")
	for i := 10; i >= 0; i-- {
		b[i] = byte('0' + n&7)
		n >>= 3
	}
	return string(b)
}

// seal writes a header's checksum.
func seal(h []byte) {
	copy(h[148:156], "        ")
	sum := 0
	for _, c := range h[:blockSize] {
		sum += int(c)
	}
	copy(h[148:], octal(int64(sum))[5:11]+"\x00 ")
}

// ended joins hand-made members and ends them.
func ended(parts ...[]byte) []byte {
	return append(bytes.Join(parts, nil), make([]byte, 2*blockSize)...)
}
