package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
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
// bytes were dropped. When its lines were written stands in a file beside it,
// which [ReadTimes] reads. Its memory does not grow with either. It is safe for
// concurrent use.
//
// Until Close the file holds the beginning only; the end waits in an unnamed
// file beside it.
type Log struct {
	mu    sync.Mutex
	text  ends
	line  int64 // where the beginning's last line starts
	times *timesWriter
}

// NewLog creates the file, or empties it. A limit of 0 is [DefaultLogLimit].
func NewLog(path string, limit int64) (*Log, error) {
	if limit <= 0 {
		limit = DefaultLogLimit
	}
	f, err := createLog(path)
	if err != nil {
		return nil, err
	}
	half := max(limit/2, 1)
	times, err := newTimesWriter(path, half)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &Log{text: ends{file: f, half: half}, times: times}, nil
}

func createLog(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create log: %w", err)
	}
	return f, nil
}

// Write implements [io.Writer].
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text.file == nil {
		return 0, os.ErrClosed
	}
	l.times.note(l.text.size+l.text.past, b)
	before := l.text.size
	n, err := l.text.write(b)
	if i := bytes.LastIndexByte(b[:l.text.size-before], '\n'); i >= 0 {
		l.line = before + int64(i) + 1
	}
	return n, err
}

// Close puts the end behind the beginning and closes the file.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text.file == nil {
		return os.ErrClosed
	}
	cut, err := l.join()
	return errors.Join(err, l.text.close(), l.times.close(cut))
}

// join writes the end behind the beginning, and says where. Where something was
// dropped, both are cut at line ends, unless that would drop a line of more
// than maxLine.
func (l *Log) join() (cut, error) {
	t := &l.text
	if t.past <= t.half {
		return cut{t.size, t.size, t.size}, t.append(t.end())
	}
	dropped := t.past - t.half
	end := t.end()
	start := make([]byte, min(maxLine, t.half))
	n, err := io.ReadFull(end, start)
	if err != nil {
		return cut{}, err
	}
	rest := start[:n]
	if i := bytes.IndexByte(rest, '\n'); i >= 0 {
		rest = rest[i+1:]
		dropped += int64(i) + 1
	}
	at, mark := t.size, "\n"
	if t.size-l.line <= maxLine {
		at, mark = l.line, ""
		dropped += t.size - l.line
		if err := t.file.Truncate(l.line); err != nil {
			return cut{}, err
		}
		if _, err := t.file.Seek(l.line, io.SeekStart); err != nil {
			return cut{}, err
		}
	}
	mark += fmt.Sprintf("[… %d bytes dropped …]\n", dropped)
	c := cut{at, at + int64(len(mark)), at + dropped}
	return c, t.append(io.MultiReader(strings.NewReader(mark), bytes.NewReader(rest), end))
}

// ends is a file that keeps the first and the last half bytes of what is
// written to it: the first in the file, the last in a ring, an unnamed file.
type ends struct {
	half int64
	file *os.File
	size int64 // of what the file has
	ring *os.File
	past int64 // how many bytes went to the ring, overwritten ones included
}

func (e *ends) write(b []byte) (int, error) {
	n, err := e.file.Write(b[:min(int64(len(b)), e.half-e.size)])
	e.size += int64(n)
	if err != nil || n == len(b) {
		return n, err
	}
	if err := e.writeRing(b[n:]); err != nil {
		return n, err
	}
	return len(b), nil
}

func (e *ends) writeRing(b []byte) error {
	if e.ring == nil {
		f, err := os.CreateTemp(filepath.Dir(e.file.Name()), ".log-end-")
		if err != nil {
			return fmt.Errorf("create the end of log %s: %w", e.file.Name(), err)
		}
		// Without a name it needs no cleaning up, whatever happens to us. Where
		// an open file keeps its name, close removes it.
		_ = os.Remove(f.Name())
		e.ring = f
	}
	if over := int64(len(b)) - e.half; over > 0 {
		e.past += over
		b = b[over:]
	}
	for len(b) > 0 {
		at := e.past % e.half
		n, err := e.ring.WriteAt(b[:min(int64(len(b)), e.half-at)], at)
		e.past += int64(n)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// end is what the ring holds, in order.
func (e *ends) end() io.Reader {
	if e.past <= e.half {
		return io.NewSectionReader(e.ring, 0, e.past)
	}
	at := e.past % e.half
	return io.MultiReader(io.NewSectionReader(e.ring, at, e.half-at), io.NewSectionReader(e.ring, 0, at))
}

func (e *ends) append(r io.Reader) error {
	_, err := io.Copy(e.file, r)
	return err
}

func (e *ends) close() error {
	var err error
	if e.ring != nil {
		err = e.ring.Close()
		_ = os.Remove(e.ring.Name())
	}
	err = errors.Join(err, e.file.Close())
	e.file = nil
	return err
}
