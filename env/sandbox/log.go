package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// DefaultLogLimit is the size in bytes of what a [Log] keeps when its limit is
// not set: enough for every test run that a person reads, and small enough for
// hundreds of attempts.
const DefaultLogLimit = 8 << 20

// maxLine is the length in bytes up to which lines are kept whole.
const maxLine = 64 << 10

// Log is a file that keeps the beginning and the end of what is written to it,
// each up to half of its limit, with one line between them that says how many
// bytes were dropped. Its memory does not grow with either. It is safe for
// concurrent use.
//
// Until Close the file holds the beginning only; the end waits in an unnamed
// file beside it.
type Log struct {
	mu   sync.Mutex
	half int64
	file *os.File
	size int64 // of the beginning
	line int64 // where the beginning's last line starts
	ring *os.File
	past int64 // how many bytes went to the ring, overwritten ones included
}

// NewLog creates the file, or empties it. A limit of 0 is [DefaultLogLimit].
func NewLog(path string, limit int64) (*Log, error) {
	if limit <= 0 {
		limit = DefaultLogLimit
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create log: %w", err)
	}
	return &Log{file: f, half: max(limit/2, 1)}, nil
}

// Write implements [io.Writer].
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return 0, os.ErrClosed
	}
	first := b[:min(int64(len(b)), l.half-l.size)]
	n, err := l.file.Write(first)
	if i := bytes.LastIndexByte(first[:n], '\n'); i >= 0 {
		l.line = l.size + int64(i) + 1
	}
	l.size += int64(n)
	if err != nil || n == len(b) {
		return n, err
	}
	if err := l.writeRing(b[n:]); err != nil {
		return n, err
	}
	return len(b), nil
}

func (l *Log) writeRing(b []byte) error {
	if l.ring == nil {
		f, err := os.CreateTemp(filepath.Dir(l.file.Name()), ".log-end-")
		if err != nil {
			return fmt.Errorf("create the end of log %s: %w", l.file.Name(), err)
		}
		// Without a name it needs no cleaning up, whatever happens to us. Where
		// an open file keeps its name, Close removes it.
		_ = os.Remove(f.Name())
		l.ring = f
	}
	if over := int64(len(b)) - l.half; over > 0 {
		l.past += over
		b = b[over:]
	}
	for len(b) > 0 {
		at := l.past % l.half
		n, err := l.ring.WriteAt(b[:min(int64(len(b)), l.half-at)], at)
		l.past += int64(n)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// Close puts the end behind the beginning and closes the file.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return os.ErrClosed
	}
	var err error
	if l.ring != nil {
		err = l.join()
		err = errors.Join(err, l.ring.Close())
		_ = os.Remove(l.ring.Name())
	}
	err = errors.Join(err, l.file.Close())
	l.file = nil
	return err
}

// join writes the end behind the beginning. Where something was dropped, both
// are cut at line ends, unless that would drop a line of more than maxLine.
func (l *Log) join() error {
	if l.past <= l.half {
		_, err := io.Copy(l.file, io.NewSectionReader(l.ring, 0, l.past))
		return err
	}
	dropped := l.past - l.half
	at := l.past % l.half
	end := io.MultiReader(io.NewSectionReader(l.ring, at, l.half-at), io.NewSectionReader(l.ring, 0, at))
	start := make([]byte, min(maxLine, l.half))
	n, err := io.ReadFull(end, start)
	if err != nil {
		return err
	}
	rest := start[:n]
	if i := bytes.IndexByte(rest, '\n'); i >= 0 {
		rest = rest[i+1:]
		dropped += int64(i) + 1
	}
	mark := "\n"
	if l.size-l.line <= maxLine {
		mark = ""
		dropped += l.size - l.line
		if err := l.file.Truncate(l.line); err != nil {
			return err
		}
		if _, err := l.file.Seek(l.line, io.SeekStart); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(l.file, "%s[… %d bytes dropped …]\n", mark, dropped); err != nil {
		return err
	}
	_, err = io.Copy(l.file, io.MultiReader(bytes.NewReader(rest), end))
	return err
}
