package sandbox

import (
	"bytes"
	"slices"
	"strings"
)

// screen notes in which modes a command's output left the terminal, so that
// they can be undone when the command could not do so itself.
type screen struct {
	on    modes
	state byte   // what the next byte belongs to: a text, escape or csi
	seq   []byte // the parameters of an unfinished control sequence
}

// modes is a set of what a terminal can be left in.
type modes uint32

// The states of screen.
const (
	text = iota
	escape
	csi
)

// maxSequence is far longer than a control sequence that matters, in bytes.
const maxSequence = 64

// What a terminal can be left in, one bit of modes each: first what has no
// number, with what undoes it; then the DEC private modes. All are those of
// xterm's "Control Sequences", but kitty's.
var (
	undoOther = []string{
		"\x1b[m",   // colours
		"\x1b>",    // application keypad
		"\x1b[<u",  // kitty's keyboard protocol
		"\x1b[>4m", // modifyOtherKeys
	}
	// privateModes are in the order in which they are undone: the alternate
	// screen last, so that the others are undone where they were done.
	privateModes = []string{
		"1",                                 // application cursor keys
		"9", "1000", "1001", "1002", "1003", // mouse
		"1005", "1006", "1015", "1016", // how it is told
		"1004", // focus
		"2004", // bracketed paste
		"2026", // synchronized output
		cursorMode,
		"47", "1047", "1049", // alternate screen
	}
)

// cursorMode is on when the terminal is sane, all others off.
const cursorMode = "25"

// The modes without a number.
const (
	modeColour modes = 1 << iota
	modeKeypad
	modeKitty
	modeOtherKeys
)

// see follows one piece of the output.
func (s *screen) see(b []byte) {
	for len(b) > 0 {
		if s.state == text {
			i := bytes.IndexByte(b, '\x1b')
			if i < 0 {
				return
			}
			s.state, b = escape, b[i+1:]
			continue
		}
		c := b[0]
		b = b[1:]
		switch {
		case c == '\x1b':
			s.state = escape
		case s.state == escape:
			s.escaped(c)
		case c >= '@' && c <= '~':
			s.state = text
			s.control(string(s.seq), c)
		case len(s.seq) == maxSequence:
			s.state = text
		case c >= ' ': // a control character within is none of the sequence
			s.seq = append(s.seq, c)
		}
	}
}

// escaped follows the byte after an ESC.
func (s *screen) escaped(c byte) {
	s.state = text
	switch c {
	case '[':
		s.state, s.seq = csi, s.seq[:0]
	case 'c': // full reset
		s.on = 0
	case '=', '>':
		s.set(modeKeypad, c == '=')
	}
}

// control follows a whole control sequence.
func (s *screen) control(seq string, final byte) {
	switch {
	case final == 'm' && strings.HasPrefix(seq, ">4"):
		_, how, _ := strings.Cut(seq, ";")
		s.set(modeOtherKeys, strings.Trim(how, "0") != "")
	case final == 'm' && strings.Trim(seq, "0123456789;:") == "":
		s.set(modeColour, strings.Trim(seq, "0;") != "")
	case final == 'u' && (strings.HasPrefix(seq, ">") || strings.HasPrefix(seq, "<")):
		s.set(modeKitty, seq[0] == '>')
	case (final == 'h' || final == 'l') && strings.HasPrefix(seq, "?"):
		for number := range strings.SplitSeq(seq[1:], ";") {
			s.private(number, final == 'h')
		}
	}
}

func (s *screen) private(number string, on bool) {
	if i := slices.Index(privateModes, number); i >= 0 {
		s.set(1<<(len(undoOther)+i), on != (number == cursorMode))
	}
}

func (s *screen) set(m modes, on bool) {
	s.on &^= m
	if on {
		s.on |= m
	}
}

// undo is what makes a terminal sane again in which the modes are on.
func (m modes) undo() string {
	var b strings.Builder
	for i, undo := range undoOther {
		if m&(1<<i) != 0 {
			b.WriteString(undo)
		}
	}
	for i, number := range privateModes {
		switch {
		case m&(1<<(len(undoOther)+i)) == 0:
		case number == cursorMode:
			b.WriteString("\x1b[?" + number + "h")
		default:
			b.WriteString("\x1b[?" + number + "l")
		}
	}
	return b.String()
}
