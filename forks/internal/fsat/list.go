//go:build linux

package fsat

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// List holds the names of one directory, in byte order. Its buffers are used
// again by the next Read.
type List struct {
	buf   []byte
	data  []byte
	names []listed
}

type listed struct {
	ino  uint64
	off  uint32
	size uint8
	kind uint8
}

// Read reads the directory fd from its present position to its end.
func (l *List) Read(fd int) error {
	if l.buf == nil {
		l.buf = make([]byte, 64<<10)
	}
	l.data, l.names = l.data[:0], l.names[:0]
	for {
		n, err := unix.Getdents(fd, l.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n <= 0 {
			break
		}
		l.parse(l.buf[:n])
	}
	slices.SortFunc(l.names, func(a, b listed) int {
		return bytes.Compare(l.data[a.off:a.off+uint32(a.size)], l.data[b.off:b.off+uint32(b.size)])
	})
	return nil
}

// parse takes the names from linux_dirent64 structures: ino and offset of 8
// bytes each, a record length of 2, a type of 1, and the name.
func (l *List) parse(b []byte) {
	for len(b) >= 19 {
		size := int(binary.NativeEndian.Uint16(b[16:]))
		name := b[19:size]
		end := bytes.IndexByte(name, 0)
		if end < 0 {
			end = len(name)
		}
		ino := binary.NativeEndian.Uint64(b)
		if s := string(name[:end]); ino != 0 && s != "." && s != ".." {
			l.names = append(l.names, listed{ino, uint32(len(l.data)), uint8(end), b[18]})
			l.data = append(append(l.data, name[:end]...), 0)
		}
		b = b[size:]
	}
}

// Len is the number of names.
func (l *List) Len() int { return len(l.names) }

// Name returns name i; it is good until the next Read.
func (l *List) Name(i int) []byte {
	n := l.names[i]
	return l.data[n.off : n.off+uint32(n.size)]
}

// Ino returns the inode of name i; of a mount point, that of the directory
// below it.
func (l *List) Ino(i int) uint64 { return l.names[i].ino }

// Ptr returns the NUL-terminated name i.
func (l *List) Ptr(i int) *byte { return &l.data[l.names[i].off] }

// Type returns the DT_ constant of name i, DT_UNKNOWN where the file system
// does not tell.
func (l *List) Type(i int) uint8 { return l.names[i].kind }
