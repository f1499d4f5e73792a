package report

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line makes of a line that a command printed, without its newline, what may be
// shown: what a terminal would show in the end of a line that was rewritten in
// place, cut to at most so many letters, with nothing in it that acts on the
// terminal. Of the sequences of control characters colours stay, if they may,
// and are taken back at the end; the rest is left out.
func Line(line string, most int, colours bool) string {
	s := screen{rest: line, most: most, colours: colours}
	for s.rest != "" {
		s.step()
	}
	if s.letters > s.most {
		s.out.WriteString("…")
	}
	if s.style != "" {
		s.out.WriteString(reset)
	}
	return defused(s.out.String())
}

// reset takes back every colour and style (ECMA-48, SGR).
const reset = "\x1b[0m"

// styleMax bounds, in bytes, the colours and styles that are remembered for what
// is written over the line: more than any program has in force at once.
const styleMax = 256

// screen is a line of a terminal on which text appears.
type screen struct {
	rest    string
	most    int
	colours bool

	out     strings.Builder
	letters int
	// style holds the sequences in force since the last reset.
	style string
	// home: the cursor stands at the line's beginning again, and what comes
	// next takes the place of what is there.
	home bool
	// endless: what is left holds no end of a control string.
	endless bool
}

// step takes the next letter, control character or sequence.
func (s *screen) step() {
	r, n := utf8.DecodeRuneInString(s.rest)
	broken := r == utf8.RuneError && n == 1
	if broken && s.rest[0] < 0xa0 { // a C1 control as one byte, or half a letter
		if seq := s.sequence(rune(s.rest[0]), s.rest[1:]); seq > 0 {
			s.rest = s.rest[1+seq:]
			return
		}
	}
	s.rest = s.rest[n:]
	switch {
	case broken:
		s.put(string(utf8.RuneError))
	case r == 0x1b:
		s.escape()
	case r >= 0x80 && r < 0xa0:
		s.rest = s.rest[max(0, s.sequence(r, s.rest)):]
	case r == '\r':
		s.home = true
	case r == '\a', r == '\b':
	case r == '\t':
		s.put("\t")
	case r < 0x20 || r == 0x7f:
		s.put("^" + string(r^0x40)) // as cat -v writes it
	case !unicode.IsGraphic(r):
		s.put(fmt.Sprintf("<U+%04X>", r))
	default:
		s.put(string(r))
	}
}

// put shows one letter, or what stands for it.
func (s *screen) put(text string) {
	if s.home {
		s.erase()
	}
	if s.letters++; s.letters <= s.most {
		s.out.WriteString(text)
	}
}

// erase empties the line; the style stays in force.
func (s *screen) erase() {
	s.out.Reset()
	s.out.WriteString(s.style)
	s.letters, s.home = 0, false
}

// escape takes what follows an ESC.
func (s *screen) escape() {
	if s.rest == "" {
		return
	}
	c := s.rest[0]
	if c < 0x20 || c > 0x7e {
		return // a lone ESC
	}
	rest := s.rest[1:]
	switch {
	case c == '[':
		n := s.sequence(csi, rest)
		if n < 0 { // cut off by the line's end or by another control character
			n = parameters(rest)
		} else {
			s.control(rest[:n])
		}
		s.rest = rest[n:]
	case strings.IndexByte("]P_^X", c) >= 0:
		if n := s.sequence(rune(c)+0x40, rest); n >= 0 {
			s.rest = rest[n:]
		} else {
			s.rest = "" // as a terminal, which waits for its end
		}
	default: // of two characters, or with some of 0x20 to 0x2f between them
		for c < 0x30 && rest != "" && rest[0] >= 0x20 && rest[0] <= 0x7e {
			c, rest = rest[0], rest[1:]
		}
		s.rest = rest
	}
}

// control acts on the rest of a sequence that ESC [ began: it keeps colours and
// styles, and knows when the line is erased and when it begins anew.
func (s *screen) control(seq string) {
	last := len(seq) - 1
	args, final := seq[:last], seq[last]
	switch {
	case final == 'K' && (args == "2" || s.home && (args == "" || args == "0")):
		home := s.home
		s.erase()
		s.home = home
	case final == 'G' && (args == "" || args == "0" || args == "1"):
		s.home = true
	case final == 'm' && s.colours && strings.Trim(args, "0123456789;:") == "":
		s.paint("\x1b["+seq, strings.Trim(args, "0;") == "")
	}
}

// paint puts a sequence of colour where it changes something.
func (s *screen) paint(seq string, resets bool) {
	switch {
	case resets && s.style == "":
		return
	case resets:
		s.style, seq = "", reset
	case len(s.style)+len(seq) > styleMax:
		s.style = seq
	default:
		s.style += seq
	}
	s.out.WriteString(seq)
}

// The C1 control characters that begin a sequence (ECMA-48).
const (
	dcs, sos, csi, st, osc, pm, apc = 0x90, 0x98, 0x9b, 0x9c, 0x9d, 0x9e, 0x9f
)

// sequence is how long what belongs to the control character c is that stands
// before rest, with its end: 0 if c stands alone, less if the end is not there.
func (s *screen) sequence(c rune, rest string) int {
	switch c {
	case csi:
		n := parameters(rest)
		if n < len(rest) && rest[n] >= 0x40 && rest[n] <= 0x7e {
			return n + 1
		}
		return -1
	case osc, dcs, sos, pm, apc:
		if s.endless {
			return -1
		}
		n := stringEnd(rest)
		s.endless = n < 0
		return n
	}
	return 0
}

// parameters is the length of the part of a control sequence before its last
// character.
func parameters(s string) int {
	n := 0
	for n < len(s) && s[n] >= 0x20 && s[n] <= 0x3f {
		n++
	}
	return n
}

// stringEnd is where a control string ends: after a ST, or a BEL, which xterm
// takes for one; -1 if it does not.
func stringEnd(s string) int {
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == '\a', r == st, n == 1 && s[i] == st:
			return i + n
		case r == 0x1b && strings.HasPrefix(s[i+1:], "\\"):
			return i + 2
		case r == 0x18 || r == 0x1a: // CAN and SUB call it off
			return i + n
		}
		i += n
	}
	return -1
}

// defused takes apart what GitHub's runner takes for a command anywhere in a
// line.
func defused(s string) string { return strings.ReplaceAll(s, "##[", "## [") }
