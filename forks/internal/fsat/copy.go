//go:build linux

package fsat

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// copyRange is the most that one copy_file_range is asked for: the kernel does
// at most 2 GiB less a page a call, and a cancelled copy should end soon.
const copyRange = 1 << 30

// smallFile is up to where a file is read and written through a buffer: one
// call of each for most files, and no search for holes.
const smallFile = 256 << 10

// execChunk bounds how long an executable is held open for writing: meanwhile
// no process can be started.
const execChunk = 64 << 20

// Copier copies file contents. It is safe for use by several goroutines.
type Copier struct {
	noClone atomic.Bool
	noRange atomic.Bool
}

// New describes a file to be made by [Copier.File].
type New struct {
	Dir  int
	Name string
	Meta *Meta
	// Size is how long the source is thought to be; with Live it is copied to
	// its end, wherever that is.
	Size int64
	Live bool
}

// File makes the regular file n from the open file src, in a directory where
// nobody else can swap it, with all its metadata. buf is scratch space of at
// least smallFile bytes. It returns the number of bytes copied and the new
// file's stat.
func (c *Copier) File(n New, src int, buf []byte, set Setter, st *unix.Stat_t) (int64, error) {
	exec := n.Meta.Mode&0o111 != 0
	if exec && n.Size > execChunk && c.noClone.Load() {
		return c.bigExec(n, src, buf, set, st)
	}
	if exec {
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
	}
	fd, err := create(n)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	size, err := c.data(fd, src, n.Size, n.Live, buf)
	if err != nil {
		return size, err
	}
	return size, set.FD(fd, n.Meta, st)
}

func create(n New) (int, error) {
	// The owner must be able to write; other bits as they will be, which the
	// umask may forbid and Setter then mends.
	fd, err := unix.Openat(n.Dir, n.Name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, n.Meta.Mode&0o777)
	return fd, explain(err)
}

// bigExec copies in pieces and closes the file between them, since a child
// forked meanwhile would hold it open for writing until its exec, and starting
// the copy would fail with "text file busy".
func (c *Copier) bigExec(n New, src int, buf []byte, set Setter, st *unix.Stat_t) (int64, error) {
	private := *n.Meta
	private.Mode = private.Mode&unix.S_IFMT | 0o600
	var done int64
	for first := true; first || done < n.Size; first = false {
		err := c.piece(n, &private, src, done, min(execChunk, n.Size-done), first, buf)
		if err != nil {
			return done, err
		}
		done = min(done+execChunk, n.Size)
	}
	fd, err := unix.Openat(n.Dir, n.Name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return done, err
	}
	defer unix.Close(fd)
	return done, set.FD(fd, n.Meta, st)
}

func (c *Copier) piece(n New, private *Meta, src int, off, size int64, first bool, buf []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	var fd int
	var err error
	if first {
		fd, err = create(New{Dir: n.Dir, Name: n.Name, Meta: private})
	} else {
		fd, err = unix.Openat(n.Dir, n.Name, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if first {
		if err := unix.Ftruncate(fd, n.Size); err != nil {
			return err
		}
	}
	return c.segments(fd, src, off, off+size, buf)
}

// data copies src to the empty file dst.
func (c *Copier) data(dst, src int, size int64, live bool, buf []byte) (int64, error) {
	if size == 0 && !live {
		return 0, nil
	}
	if size > 0 && !c.noClone.Load() {
		err := unix.IoctlFileClone(dst, src)
		if err == nil {
			return cloned(dst, size, live)
		}
		switch err {
		case unix.EOPNOTSUPP, unix.EXDEV, unix.ENOTTY, unix.ENOSYS:
			c.noClone.Store(true)
		case unix.ENOSPC, unix.EDQUOT:
			return 0, err
		}
	}
	if size <= smallFile {
		return readWrite(dst, src, size, live, buf)
	}
	if live {
		var st unix.Stat_t
		if err := unix.Fstat(src, &st); err != nil {
			return 0, err
		}
		size = st.Size
	}
	if err := unix.Ftruncate(dst, size); err != nil {
		return 0, err
	}
	return size, c.segments(dst, src, 0, size, buf)
}

func cloned(dst int, size int64, live bool) (int64, error) {
	if !live {
		return size, nil
	}
	var st unix.Stat_t
	err := unix.Fstat(dst, &st)
	return st.Size, err
}

// readWrite copies a small file through buf, to its end if live.
func readWrite(dst, src int, size int64, live bool, buf []byte) (int64, error) {
	var done int64
	for live || done < size {
		n, err := unix.Pread(src, buf, done)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return done, err
		}
		if n == 0 {
			break
		}
		if err := pwrite(dst, buf[:n], done); err != nil {
			return done, err
		}
		done += int64(n)
		if live && n < len(buf) && done >= size {
			break
		}
	}
	if !live && done < size {
		return done, fmt.Errorf("the file ends after %d of %d bytes: %w", done, size, io.ErrUnexpectedEOF)
	}
	return done, nil
}

func pwrite(fd int, b []byte, off int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(fd, b, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// segments copies what src holds between off and end, and leaves its holes out.
func (c *Copier) segments(dst, src int, off, end int64, buf []byte) error {
	for off < end {
		start, err := unix.Seek(src, off, unix.SEEK_DATA)
		if err == unix.ENXIO || err == nil && start >= end {
			return nil
		}
		stop := end
		if err == nil {
			if stop, err = unix.Seek(src, start, unix.SEEK_HOLE); err != nil {
				return err
			}
		} else {
			start = off // no SEEK_DATA here: all is data
		}
		stop = min(stop, end)
		if err := c.bytes(dst, src, start, stop, buf); err != nil {
			return err
		}
		off = stop
	}
	return nil
}

func (c *Copier) bytes(dst, src int, off, end int64, buf []byte) error {
	for off < end && !c.noRange.Load() {
		in, out := off, off
		n, err := unix.CopyFileRange(src, &in, dst, &out, int(min(end-off, copyRange)), 0)
		switch {
		case err == unix.EINTR:
		case err == unix.ENOSPC || err == unix.EDQUOT || err == unix.EFBIG:
			return err
		case err != nil:
			c.noRange.Store(errors.Is(err, unix.ENOSYS))
			return plain(dst, src, off, end, buf)
		case n == 0:
			return plain(dst, src, off, end, buf)
		}
		off += int64(max(n, 0))
	}
	return plain(dst, src, off, end, buf)
}

func plain(dst, src int, off, end int64, buf []byte) error {
	for off < end {
		n, err := unix.Pread(src, buf[:min(int64(len(buf)), end-off)], off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return nil // it became shorter; the hole at the end stands for that
		}
		if err := pwrite(dst, buf[:n], off); err != nil {
			return err
		}
		off += int64(n)
	}
	return nil
}

// BufferSize is what the buffers given to this package have.
const BufferSize = smallFile

// Same compares the contents of two open files from their start to size bytes,
// holes skipped where both have them.
func Same(a, b int, size int64, bufA, bufB []byte) (bool, error) {
	for off := int64(0); off < size; {
		off = skipHole(a, b, off, size)
		if off >= size {
			break
		}
		n, err := fill(a, bufA, off)
		if err != nil {
			return false, err
		}
		m, err := fill(b, bufB, off)
		if err != nil {
			return false, err
		}
		if n != m || n == 0 || string(bufA[:n]) != string(bufB[:m]) {
			return false, nil
		}
		off += int64(n)
	}
	return true, nil
}

// skipHole returns where the first of both files has data, off itself in
// files too small for that to pay.
func skipHole(a, b int, off, size int64) int64 {
	if size < 1<<20 {
		return off
	}
	next := func(fd int) int64 {
		at, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return size
		}
		if err != nil {
			return off
		}
		return at
	}
	return min(next(a), next(b))
}

func fill(fd int, buf []byte, off int64) (int, error) {
	n := 0
	for n < len(buf) {
		m, err := unix.Pread(fd, buf[n:], off+int64(n))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return n, err
		}
		if m == 0 {
			break
		}
		n += m
	}
	return n, nil
}

// CanClone says whether files in the directory dir can share their blocks.
func CanClone(dir string) (bool, error) {
	a, err := os.CreateTemp(dir, "a")
	if err != nil {
		return false, err
	}
	defer os.Remove(a.Name())
	defer a.Close()
	if _, err := a.Write(make([]byte, 8192)); err != nil {
		return false, err
	}
	b, err := os.CreateTemp(dir, "b")
	if err != nil {
		return false, err
	}
	defer os.Remove(b.Name())
	defer b.Close()
	return unix.IoctlFileClone(int(b.Fd()), int(a.Fd())) == nil, nil
}
