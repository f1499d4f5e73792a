package archive

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"testing"

	"gotest.tools/v3/assert"
)

func TestHolds(t *testing.T) {
	var plain, packed bytes.Buffer
	w := tar.NewWriter(&plain)
	for _, name := range []string{"./etc/x", "./usr/bin/sh", "other"} {
		assert.NilError(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: 3, Typeflag: tar.TypeReg}))
		_, err := w.Write([]byte("abc"))
		assert.NilError(t, err)
	}
	assert.NilError(t, w.Close())
	z := gzip.NewWriter(&packed)
	_, err := z.Write(plain.Bytes())
	assert.NilError(t, err)
	assert.NilError(t, z.Close())
	for _, data := range [][]byte{plain.Bytes(), packed.Bytes()} {
		assert.Assert(t, Holds(bytes.NewReader(data), "bin/sh", "usr/bin/sh"))
		assert.Assert(t, !Holds(bytes.NewReader(data), "sh", "usr/bin"))
	}
	for _, data := range []string{"", "no tar", string(plain.Bytes()[:700])} {
		assert.Assert(t, !Holds(bytes.NewReader([]byte(data)), "usr/bin/sh"), data)
	}
}
