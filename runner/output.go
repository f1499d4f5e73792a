package runner

import (
	"bytes"
	"io"
	"sync"
	"time"
)

const (
	// lineMax is the longest line, in bytes, that an event carries.
	lineMax = 4 << 10
	// lineRate is how many lines of output a second each command has as
	// events: more than anyone reads, and little enough that a command which
	// prints for ever neither fills an events file nor takes a CPU.
	lineRate = 1000
)

// lines turns a command's output into events of whole lines, at most lineRate
// a second, and counts the rest.
type lines struct {
	emit func(line string, dropped int64)
	now  func() time.Time

	buf     []byte
	cut     bool // the rest of the present line is too long for an event
	dropped int64
	window  time.Time
	left    int // lines that this window may still emit
}

func (l *lines) write(p []byte) {
	if now := l.now(); now.Sub(l.window) >= time.Second {
		l.window, l.left = now, lineRate
	}
	for len(p) > 0 {
		if l.left <= 0 {
			l.skip(p)
			return
		}
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			l.add(p)
			return
		}
		l.add(p[:i])
		l.end()
		p = p[i+1:]
	}
}

// skip counts the lines of p and keeps what follows the last of them.
func (l *lines) skip(p []byte) {
	i := bytes.LastIndexByte(p, '\n')
	if i >= 0 {
		l.dropped += int64(bytes.Count(p, []byte{'\n'}))
		l.buf, l.cut = l.buf[:0], false
	}
	l.add(p[i+1:])
}

func (l *lines) add(p []byte) {
	if l.cut {
		return
	}
	if room := lineMax - len(l.buf); len(p) > room {
		p, l.cut = p[:room], true
	}
	l.buf = append(l.buf, p...)
}

func (l *lines) end() {
	l.left--
	l.emit(string(bytes.TrimSuffix(l.buf, []byte{'\r'})), l.dropped)
	l.buf, l.cut, l.dropped = l.buf[:0], false, 0
}

// flush emits a last line that no newline ended, and what was dropped.
func (l *lines) flush() {
	if len(l.buf) > 0 || l.dropped > 0 {
		l.end()
	}
}

// tee writes a command's output to its log and to the events. A log that cannot
// be written, on a full disk for instance, must not make the command fail: the
// error is kept.
type tee struct {
	lines *lines

	mu  sync.Mutex
	log io.Writer
	err error
}

func (t *tee) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, err := t.log.Write(p); err != nil && t.err == nil {
		t.err = err
	}
	t.lines.write(p)
	return len(p), nil
}

// flush ends the last line and returns the first error of the log.
func (t *tee) flush() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines.flush()
	return t.err
}
