package runner

import (
	"bytes"
	"io"
	"sync"
	"time"
	"unicode/utf8"
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
// a second, and counts the rest. Of a line that was rewritten in place, as
// progress is shown, it is the last writing.
type lines struct {
	emit func(line string, dropped int64)
	now  func() time.Time

	buf     []byte
	cut     bool // the rest of the present line is too long for an event
	home    bool // after a carriage return: what comes next replaces the line
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
		l.clear()
	}
	l.add(p[i+1:])
}

func (l *lines) clear() { l.buf, l.cut, l.home = l.buf[:0], false, false }

// add adds a part of a line.
func (l *lines) add(p []byte) {
	for returned := true; returned; {
		var text []byte
		text, p, returned = bytes.Cut(p, []byte{'\r'})
		if len(text) > 0 && l.home {
			l.clear()
		}
		l.put(text)
		l.home = l.home || returned
	}
}

func (l *lines) put(p []byte) {
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
	text := string(l.buf)
	if l.cut {
		text = string(wholeLetters(l.buf)) + "…"
	}
	l.emit(text, l.dropped)
	l.dropped = 0
	l.clear()
}

// wholeLetters is b without the beginning of a letter that its end cuts.
func wholeLetters(b []byte) []byte {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if start := len(b) - n; utf8.RuneStart(b[start]) {
			if utf8.FullRune(b[start:]) {
				break
			}
			return b[:start]
		}
	}
	return b
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
