package specs

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// quoteIt is the advice for every text that YAML takes for something else.
const quoteIt = "put it in single quotes, or on the next line under |"

// source is a plan's text: UTF-8, no BOM, lines that end in LF.
type source struct {
	text   string
	lines  []string
	starts []int // the offset of each line in text

	// The last place that was looked up, so that going through a long line
	// from left to right costs its length once, not once for each value.
	last   place
	offset int
}

func newSource(text string) *source {
	s := &source{text: text, lines: strings.Split(text, "\n")}
	offset := 0
	for _, line := range s.lines {
		s.starts = append(s.starts, offset)
		offset += len(line) + 1
	}
	return s
}

// offsetOf is a place's offset in the text.
func (s *source) offsetOf(at place) int {
	if at.line < 1 || at.line > len(s.lines) {
		return len(s.text)
	}
	if s.last.line != at.line || s.last.col > at.col || s.offset == 0 {
		s.last, s.offset = place{line: at.line, col: 1}, s.starts[at.line-1]
	}
	end := s.starts[at.line-1] + len(s.lines[at.line-1])
	for ; s.last.col < at.col && s.offset < end; s.last.col++ {
		_, size := utf8.DecodeRuneInString(s.text[s.offset:])
		s.offset += size
	}
	return s.offset
}

// content are the lines that hold more than blanks, comments and markers.
func (s *source) content() []string {
	var out []string
	for _, line := range s.lines {
		t := strings.TrimSpace(line)
		if t != "" && t[0] != '#' && t != "---" && t != "..." {
			out = append(out, line)
		}
	}
	return out
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// readSource checks the text as text, before it is read as YAML.
func readSource(r *report, data []byte) *source {
	top := place{line: 1, col: 1}
	if len(data) > maxFile {
		r.errorf(top, "the plan is larger than 1 MiB")
		return nil
	}
	if bytes.HasPrefix(data, []byte{0xff, 0xfe}) || bytes.HasPrefix(data, []byte{0xfe, 0xff}) {
		r.errorf(top, "not UTF-8 (this looks like UTF-16): save the plan as UTF-8")
		return nil
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	s := newSource(strings.ReplaceAll(string(data), "\r\n", "\n"))
	before := len(r.list)
	for i, line := range s.lines {
		if col, msg := badCharacter(line); msg != "" {
			r.errorf(place{line: i + 1, col: col}, "%s", msg)
		}
		if len(r.list)-before >= 10 {
			break // a binary file: ten lines of it say enough
		}
	}
	if len(r.list) > before {
		return nil
	}
	s.documents(r)
	if len(r.list) > before {
		return nil
	}
	return s
}

// badCharacter finds what no plan may hold, and what YAML would silently take
// for the end of a line.
func badCharacter(line string) (col int, msg string) {
	for i, c := range line {
		col++
		switch {
		case c == utf8.RuneError && strings.HasPrefix(line[i:], "\ufffd"):
		case c == utf8.RuneError:
			return col, "not UTF-8: save the plan as UTF-8"
		case c == '\r':
			return col, "a carriage return inside the line: end lines with LF or CRLF"
		case c == 0x85 || c == 0x2028 || c == 0x2029:
			return col, fmt.Sprintf("the character U+%04X, which YAML takes for the end of a line: remove it, or write \"\\u%04x\" in double quotes", c, c)
		case c == 0xfeff:
			return col, "a byte order mark inside the text (U+FEFF): remove it"
		case c < 0x20 && c != '\t' || c >= 0x7f && c < 0xa0 || c == 0xfffe || c == 0xffff:
			return col, fmt.Sprintf("the control character U+%04X: remove it, or write \"\\x%02x\" in double quotes", c, c)
		}
	}
	return 0, ""
}

// documents refuses what would make more than one document, or none that is seen.
func (s *source) documents(r *report) {
	begun, started, ended := false, false, false
	for i, line := range s.lines {
		at := place{line: i + 1, col: 1}
		text := strings.TrimSpace(line)
		marker := line == "---" || strings.HasPrefix(line, "--- ") || strings.HasPrefix(line, "---\t")
		switch {
		case marker && (begun || started):
			r.errorf(at, "a plan is one document: a second one starts here")
			return
		case marker && !ended:
			begun = true
		case line == "..." || strings.HasPrefix(line, "... "):
			ended = true
		case text == "" || text[0] == '#':
		case ended:
			r.errorf(at, "text after the end of the document (...)")
			return
		case !begun && !started && line[0] == '%':
			r.errorf(at, "YAML directives (%%) are not accepted in a plan")
			return
		default:
			started = true
		}
	}
}

var (
	itemPrefix = lazily(`^(?:[-?] +)+`)
	keyPrefix  = lazily(`^(?:[A-Za-z_<][A-Za-z0-9_<-]*|"[^"]*"|'[^']*')[ ]*:(?: +|$)`)
	propPrefix = lazily(`^(?:&\S+ +)+`)
	noSpace    = lazily(`^[A-Za-z_][A-Za-z0-9_-]*:\S`)
	badEscape  = lazily(`^"(?:[^"\\]|\\[0abtnvfre "/\\N_LPxuU\t])*(\\.)`)
)

// diagnose finds in a line that is no YAML what a person meant by it. The
// message is empty if it finds nothing.
func diagnose(line string) (col int, msg string) {
	indent := line[:len(line)-len(strings.TrimLeft(line, " \t"))]
	if i := strings.IndexByte(indent, '\t'); i >= 0 {
		return i + 1, "a tab: YAML indents with spaces only"
	}
	value := line[len(indent):]
	for _, prefix := range []*regexp.Regexp{itemPrefix(), keyPrefix(), propPrefix()} {
		value = value[len(prefix.FindString(value)):]
	}
	start := utf8.RuneCountInString(line[:len(line)-len(value)]) + 1
	offset, msg := diagnoseValue(value)
	return start + utf8.RuneCountInString(value[:offset]), msg
}

// diagnoseValue is diagnose for what follows the key; offset is in bytes.
func diagnoseValue(v string) (offset int, msg string) {
	if v == "" {
		return 0, ""
	}
	switch c := v[0]; c {
	case '\t':
		return 0, "a tab: YAML wants a space here"
	case '?', '-':
		if strings.HasPrefix(v[1:], " ") {
			return 0, "YAML takes a leading " + string(c) + " and a space for the start of a list or a key: " + quoteIt
		}
	case '*':
		return 0, "YAML takes a leading * for an alias: " + quoteIt
	case '&':
		return 0, "YAML takes a leading & for an anchor: " + quoteIt
	case '!':
		return 0, "YAML takes a leading ! for a tag: " + quoteIt
	case '%', '@', '`':
		return 0, "YAML lets no text begin with " + string(c) + ": " + quoteIt
	case '[':
		return 0, "YAML takes a leading [ for the start of a list: " + quoteIt
	case '{':
		return 0, "YAML takes a leading { for the start of a mapping: " + quoteIt
	case '|', '>':
		return 0, "YAML takes a leading " + string(c) + " for the start of a block, whose text begins on the next line: " + quoteIt
	case '"':
		if m := badEscape().FindStringSubmatchIndex(v); m != nil {
			return m[2], v[m[2]:m[3]] + " is no escape that YAML knows inside double quotes: " + quoteIt
		}
		return diagnoseQuotes(v, doubleQuoted())
	case '\'':
		return diagnoseQuotes(v, singleQuoted())
	}
	if noSpace().MatchString(v) && !strings.Contains(v, ": ") {
		return strings.IndexByte(v, ':'), "a space is missing after the colon"
	}
	if i := strings.Index(v+" ", ": "); i >= 0 {
		return i, "YAML takes a colon and a space for a mapping: " + quoteIt
	}
	if i := strings.IndexByte(v, '\t'); i >= 0 {
		return i, "a tab where YAML wants spaces: " + quoteIt
	}
	return 0, ""
}

var (
	doubleQuoted = lazily(`^"(?:[^"\\]|\\.)*"`)
	singleQuoted = lazily(`^'(?:[^']|'')*'`)
)

func diagnoseQuotes(v string, quoted *regexp.Regexp) (offset int, msg string) {
	m := quoted.FindString(v)
	rest := strings.TrimSpace(v[len(m):])
	switch {
	case m == "":
		return 0, "the quote that opens here is never closed"
	case rest != "" && rest[0] != '#':
		return len(m) + strings.Index(v[len(m):], rest), "text after the closing quote; YAML's quotes must hold the whole value: put all of it in single quotes, or on the next line under |"
	}
	return 0, ""
}

// value is the text from a value on, without the anchor and the tag before it.
func (s *source) value(n *node) string {
	text := s.text[n.offset:]
	for strings.HasPrefix(text, "&") || strings.HasPrefix(text, "!") {
		end := strings.IndexAny(text, " \n")
		if end < 0 {
			return ""
		}
		text = strings.TrimLeft(text[end:], " \n")
	}
	return text
}

// blockLines counts the lines that hold something in the block scalar whose
// header is at a place.
func (s *source) blockLines(at place) (n int) {
	indent := -1
	for _, line := range s.lines[at.line:] {
		body := strings.TrimLeft(line, " ")
		if strings.TrimSpace(body) == "" {
			continue
		}
		if indent < 0 {
			indent = len(line) - len(body)
		}
		if len(line)-len(body) < indent || indent == 0 {
			break
		}
		n++
	}
	return n
}
