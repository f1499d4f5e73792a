package archive

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

const (
	chunkSize = 256 << 10
	// chunks is how many chunks are decompressed ahead of the writer.
	chunks = 4
	// maxWindow bounds what a decompressor keeps of its past output, and so the
	// memory that a few bytes of input can claim: what zstd itself takes
	// without being told more (--long=27), and twice what xz -9 needs.
	maxWindow = 128 << 20
)

// source remembers the error of the reader below a decompressor, to tell a
// disk that cannot be read from an archive that is damaged.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// open returns the tar inside r, whatever it is compressed with, and the name
// of that compression, "" for none.
func open(r io.Reader) (io.Reader, string, error) {
	in := bufio.NewReaderSize(r, chunkSize)
	head, err := in.Peek(6)
	if err != nil && err != io.EOF {
		return nil, "", err
	}
	switch {
	case len(head) == 0:
		return nil, "", &Error{Kind: ErrFormat, Reason: "is empty, not a tar"}
	case bytes.HasPrefix(head, []byte("\x1f\x8b")):
		zr, err := gzip.NewReader(in)
		if err != nil {
			return nil, "gzip", err
		}
		zr.Multistream(false)
		return &members{in: in, zr: zr}, "gzip", nil
	case isZstd(head):
		zr, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(2), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, "zstd", err
		}
		return zr.IOReadCloser(), "zstd", nil
	case bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		if err := checkXZ(in); err != nil {
			return nil, "xz", err
		}
		zr, err := xz.NewReader(in)
		return zr, "xz", err
	case bytes.HasPrefix(head, []byte("BZh")):
		return bzip2.NewReader(in), "bzip2", nil
	}
	return in, "", nil
}

// checkXZ looks at the header of the first block for what the decoder cannot
// do: filters for machine code, and dictionaries above maxWindow, which it
// would allocate at once. See https://tukaani.org/xz/xz-file-format.txt, 3.1
// and 5.3.1.
func checkXZ(in *bufio.Reader) error {
	const streamHeader = 12
	head, _ := in.Peek(streamHeader + 4)
	if len(head) < streamHeader+4 || head[streamHeader] == 0 {
		return nil // cut, or without a block: the decoder says so
	}
	if flags := head[streamHeader+1]; flags&3 != 0 {
		return &Error{Kind: ErrFormat, Reason: "uses an xz filter that is not supported (decompress it first: xz -dc)"}
	}
	block, _ := in.Peek(streamHeader + 4*(int(head[streamHeader])+1))
	flags, rest := head[streamHeader+1], block[streamHeader+2:]
	for _, sizeGiven := range []byte{0x40, 0x80} {
		if flags&sizeGiven != 0 {
			_, n := binary.Uvarint(rest)
			rest = rest[max(n, 0):]
		}
	}
	const lzma2, dictionaryOf4GiB = 0x21, 40
	if len(rest) < 3 || rest[0] != lzma2 || rest[2] > dictionaryOf4GiB {
		return nil // damaged: the decoder says so
	}
	if bits := rest[2]; (2|uint64(bits&1))<<(bits/2+11) > maxWindow {
		return tooMuchMemory("an xz dictionary", "xz -dc")
	}
	return nil
}

func tooMuchMemory(what, mend string) error {
	return &Error{Kind: ErrFormat, Reason: fmt.Sprintf("needs %s above %d MiB (decompress it first: %s)", what, maxWindow>>20, mend)}
}

// isZstd knows a frame, and the skippable frame that pzstd begins with.
func isZstd(head []byte) bool {
	return bytes.HasPrefix(head, []byte("\x28\xb5\x2f\xfd")) ||
		len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte("\x2a\x4d\x18"))
}

// members reads gzip members one after the other and ends at whatever follows
// that is not one, as gzip does: files padded with zeros are common.
type members struct {
	in *bufio.Reader
	zr *gzip.Reader
}

func (m *members) Read(p []byte) (int, error) {
	for {
		n, err := m.zr.Read(p)
		if err != io.EOF {
			return n, err
		}
		if n > 0 {
			return n, nil
		}
		if head, _ := m.in.Peek(2); !bytes.Equal(head, []byte("\x1f\x8b")) {
			return 0, io.EOF
		}
		if err := m.zr.Reset(m.in); err != nil {
			return 0, err
		}
		m.zr.Multistream(false)
	}
}

// stream is the decompressed archive, read ahead by a goroutine of its own,
// so that decompressing and writing overlap and a read that never returns (a
// pipe nobody writes to) does not keep a cancelled call from returning. That
// goroutine ends when the context is done and its present read has returned.
type stream struct {
	ctx   context.Context
	full  chan []byte
	empty chan []byte
	rest  []byte
	whole []byte
	// err is set before full is closed and read after.
	err error
	// Compression is known once the first byte was read.
	compression string
}

func newStream(ctx context.Context, r io.Reader) *stream {
	s := &stream{ctx: ctx, full: make(chan []byte, chunks), empty: make(chan []byte, chunks)}
	for range chunks {
		s.empty <- make([]byte, chunkSize)
	}
	go s.pump(r)
	return s
}

func (s *stream) pump(r io.Reader) {
	defer close(s.full)
	src := &source{r: r}
	in, compression, err := open(src)
	s.compression = compression
	if c, ok := in.(io.Closer); ok {
		defer c.Close()
	}
	for err == nil {
		var buf []byte
		select {
		case buf = <-s.empty:
		case <-s.ctx.Done():
			s.err = s.ctx.Err()
			return
		}
		n := 0
		for n < len(buf) && err == nil {
			var m int
			m, err = in.Read(buf[n:])
			n += m
		}
		if n > 0 {
			s.full <- buf[:n] // never blocks: there are no more buffers than places
		}
	}
	s.err = streamError(src.err, err, compression)
}

// streamError says in one line what ended a stream.
func streamError(below, err error, compression string) error {
	var refused *Error
	switch {
	case below != nil:
		return fmt.Errorf("read the archive: %w", below)
	case err == io.EOF, errors.As(err, &refused):
		return err
	case compression == "":
		return fmt.Errorf("read the archive: %w", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return &Error{Kind: ErrFormat, Reason: "is cut: its " + compression + " stream ends too early"}
	case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
		return tooMuchMemory("a zstd window", "zstd -dc --long=31")
	}
	return &Error{Kind: ErrFormat, Reason: "is damaged: its " + compression + " stream cannot be read", Err: err}
}

func (s *stream) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		if s.whole != nil {
			s.empty <- s.whole[:chunkSize]
			s.whole = nil
		}
		select {
		case buf, ok := <-s.full:
			if !ok {
				return 0, s.err
			}
			s.whole, s.rest = buf, buf
		case <-s.ctx.Done():
			return 0, context.Cause(s.ctx)
		}
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// found describes what the first bytes of something that is not a tar are.
func found(head []byte) string {
	if len(head) == 0 {
		return "empty"
	}
	for _, known := range []struct{ magic, is string }{
		{"PK\x03\x04", "a zip archive"}, {"PK\x05\x06", "an empty zip archive"},
		{"7z\xbc\xaf\x27\x1c", "a 7z archive"}, {"Rar!\x1a\x07", "a rar archive"},
		{"!<arch>\n", "an ar archive (such as a .deb)"}, {"\xed\xab\xee\xdb", "an rpm package"},
		{"070701", "a cpio archive"}, {"070702", "a cpio archive"}, {"070707", "a cpio archive"},
		{"hsqs", "a squashfs image"}, {"\x7fELF", "an ELF program"}, {"MZ", "a Windows program"},
		{"SQLite format 3\x00", "an SQLite database"}, {"QFI\xfb", "a qcow2 disk image"},
		{"version https://git-lfs", "a Git LFS pointer and not the file (run `git lfs pull`)"},
		{"\x1f\x8b", "gzip data"}, {"\x28\xb5\x2f\xfd", "zstd data"}, {"\xfd7zXZ", "xz data"}, {"BZh", "bzip2 data"},
		{"\x04\x22\x4d\x18", "lz4 data (decompress it first: lz4 -dc)"}, {"LZIP", "lzip data (decompress it first: lzip -dc)"},
		{"\x1f\x9d", "compress data (decompress it first: zcat)"}, {"\x5d\x00\x00", "lzma data (decompress it first: xz -dc)"},
		{"%PDF-", "a PDF file"}, {"#!", "a script"},
	} {
		if bytes.HasPrefix(head, []byte(known.magic)) {
			return known.is
		}
	}
	text := bytes.ToLower(bytes.TrimSpace(bytes.TrimPrefix(head, []byte("\xef\xbb\xbf"))))
	switch {
	case bytes.HasPrefix(text, []byte("<!doctype html")), bytes.HasPrefix(text, []byte("<html")), bytes.HasPrefix(text, []byte("<head")):
		return "an HTML page (a download that failed?)"
	case bytes.HasPrefix(text, []byte("<")):
		return "an XML or HTML document"
	case bytes.HasPrefix(text, []byte("{")), bytes.HasPrefix(text, []byte("[")):
		return "a JSON document"
	case isText(head):
		return "a text"
	}
	return "unknown data"
}

func isText(head []byte) bool {
	for _, c := range head {
		if c < ' ' && c != '\n' && c != '\r' && c != '\t' {
			return false
		}
	}
	return true
}
