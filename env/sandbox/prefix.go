package sandbox

import (
	"fmt"
	"io"
	"sync"
	"unicode/utf8"
)

// LinePrefixer lets several commands write to one terminal: whole lines, each
// with the prefix of its command, in one Write each. What a terminal would
// act on is made visible instead: control characters (ESC as ^[), those that
// turn the direction of writing, bytes that are no UTF-8. A line of more than
// 64 KiB is cut and marked. It is safe for concurrent use.
type LinePrefixer struct {
	mu      sync.Mutex
	w       io.Writer
	colours bool
}

// NewLinePrefixer writes to w. With colours, sequences that only set colours
// and weights (SGR) stay, and are reset at the end of their line.
func NewLinePrefixer(w io.Writer, colours bool) *LinePrefixer {
	return &LinePrefixer{w: w, colours: colours}
}

// Writer gives a writer whose lines get the prefix. Its Close writes a last
// line that has no end; it does not close what is below.
func (p *LinePrefixer) Writer(prefix string) io.WriteCloser {
	return &prefixed{to: p, prefix: prefix}
}

const cutMark = " [… line cut …]"

// prefixed collects one line of one command.
type prefixed struct {
	to     *LinePrefixer
	prefix string
	mu     sync.Mutex
	line   []byte
	cut    bool
}

// Write implements [io.Writer].
func (w *prefixed) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, c := range b {
		switch {
		case c == '\n':
			if err := w.flush(); err != nil {
				return i, err
			}
		case len(w.line) < maxLine:
			w.line = append(w.line, c)
		default:
			w.cut = true
		}
	}
	return len(b), nil
}

// Close implements [io.Closer].
func (w *prefixed) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.line) == 0 {
		return nil
	}
	return w.flush()
}

func (w *prefixed) flush() error {
	line := w.line
	if w.cut {
		line = wholeRunes(line)
	} else if n := len(line); n > 0 && line[n-1] == '\r' {
		line = line[:n-1]
	}
	out := append([]byte(w.prefix), neutralise(line, w.to.colours)...)
	if w.cut {
		out = append(out, cutMark...)
	}
	w.line, w.cut = w.line[:0], false
	w.to.mu.Lock()
	defer w.to.mu.Unlock()
	_, err := w.to.w.Write(append(out, '\n'))
	return err
}

// wholeRunes drops the beginning of a letter from the end of b.
func wholeRunes(b []byte) []byte {
	for i := 1; i <= utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}

// neutralise makes visible what a terminal would act on.
func neutralise(line []byte, colours bool) []byte {
	out := make([]byte, 0, len(line)+16)
	coloured := false
	for len(line) > 0 {
		if n := sgrLength(line); n > 0 && colours {
			out = append(out, line[:n]...)
			line, coloured = line[n:], true
			continue
		}
		r, n := utf8.DecodeRune(line)
		switch {
		case r == utf8.RuneError && n == 1:
			out = append(out, "\uFFFD"...)
		case r == '\t':
			out = append(out, '\t')
		case r < 0x20 || r == 0x7f:
			out = append(out, '^', byte(r)^0x40)
		case r >= 0x80 && r < 0xa0, turnsText(r):
			out = fmt.Appendf(out, "<U+%04X>", r)
		default:
			out = append(out, line[:n]...)
		}
		line = line[n:]
	}
	if coloured {
		out = append(out, "\x1b[0m"...)
	}
	return out
}

// turnsText says whether r changes the direction or order of the text around
// it, or breaks the line.
func turnsText(r rune) bool {
	return r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 ||
		r == 0x200e || r == 0x200f || r == 0x2028 || r == 0x2029 || r == 0x061c
}

// sgrLength is the length of the SGR sequence that b begins with, else 0.
func sgrLength(b []byte) int {
	if len(b) < 3 || b[0] != 0x1b || b[1] != '[' {
		return 0
	}
	for i, c := range b[2:] {
		switch {
		case c == 'm':
			return i + 3
		case c != ';' && c != ':' && (c < '0' || c > '9'):
			return 0
		}
	}
	return 0
}
