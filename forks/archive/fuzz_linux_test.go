package archive

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
)

// FuzzExtract: whatever the bytes are, nothing outside of the directory
// changes, and the directory can be removed afterwards.
func FuzzExtract(f *testing.F) {
	whole := tarOf(f, directory("d"), file("d/a", "1"), symlink("l", "../out"), hardLink("h", "d/a"), file("d", "2"))
	f.Add(whole)
	f.Add(gzipped(f, whole))
	for _, pack := range compressions {
		f.Add(pack(f, whole))
	}
	f.Add(tarOf(f, symlink("esc", "../out"), file("esc/secret", "x")))
	f.Add(tarOf(f, file("../out/secret", "x"), hardLink("h", "../out/secret")))
	f.Add(ended(paxFile("a", record("mtime", "-1.5")+record("SCHILY.xattr.user.x", "1")+record("SCHILY.acl.access", "u::rwx"))))
	f.Add(ended(pax(typePax, record("GNU.sparse.major", "1")+record("GNU.sparse.minor", "0")+record("GNU.sparse.realsize", "99")),
		block(typeFile, "s", 513, "1\n9\n1\n"+string(make([]byte, 506))+"x", nil)))
	f.Add(ended(block(typeSparse, "s", 1, "x", func(h []byte) { copy(h[386:], octal(9)); copy(h[398:], octal(1)); copy(h[483:], octal(99)) })))
	f.Add(ended(block(typeLongName, "././@LongLink", 5, "long\x00", nil), block(typeFile, "short", 0, "", nil)))
	f.Fuzz(func(t *testing.T, data []byte) {
		top := t.TempDir()
		dir, out := filepath.Join(top, "tree"), filepath.Join(top, "out")
		for _, d := range []string{dir, out} {
			assert.NilError(t, os.Mkdir(d, 0o700))
		}
		assert.NilError(t, os.WriteFile(filepath.Join(out, "secret"), []byte("secret"), 0o600))
		before := manifest(t, out)
		// Checksums are hard to guess: without them every change is refused.
		sealAll(data)
		_, _ = Extract(context.Background(), bytes.NewReader(data), dir, Options{MaxSize: 1 << 20})
		assert.Equal(t, manifest(t, out), before)
		entries, err := os.ReadDir(top)
		assert.NilError(t, err)
		assert.Equal(t, len(entries), 2)
		assert.NilError(t, removeAll(dir))
	})
}

// sealAll makes every block that looks like a header a valid one.
func sealAll(data []byte) {
	for ; len(data) >= blockSize; data = data[blockSize:] {
		if string(data[257:262]) == "ustar" {
			seal(data)
		}
	}
}
