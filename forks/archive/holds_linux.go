package archive

import (
	"bufio"
	"io"
	"slices"
)

// Holds says whether the tar r, compressed or not, has an entry with one of the
// names, which are as Extract would make them. It reads no further than that, or
// than where the archive is damaged, of which Extract tells.
func Holds(r io.Reader, names ...string) bool {
	in, _, err := open(r)
	if err != nil {
		return false
	}
	if c, ok := in.(io.Closer); ok {
		defer c.Close()
	}
	for t := (tarReader{in: bufio.NewReaderSize(in, chunkSize)}); ; {
		e, err := t.next()
		if err != nil {
			return false
		}
		if path, err := clean(e.name, e.name); err == nil && slices.Contains(names, path) {
			return true
		}
	}
}
