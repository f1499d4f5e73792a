package report

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// clean makes visible in a name or a message what a terminal would act on.
func clean(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			b.WriteRune(utf8.RuneError)
		case r == '\t':
			b.WriteByte('\t')
		case r < 0x20 || r == 0x7f:
			b.WriteByte('^')
			b.WriteByte(byte(r) ^ 0x40) // as cat -v writes it
		case !unicode.IsGraphic(r):
			fmt.Fprintf(&b, "<U+%04X>", r)
		default:
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return defused(b.String())
}

var plain = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._/@+=,-]*$`)

// name is a candidate's name, quoted if it is not plainly one word.
func name(s string) string {
	if plain.MatchString(s) {
		return s
	}
	return clean(strconv.Quote(s))
}

// title names an attempt; of is how many its candidate has.
func title(candidate string, attempt, of int) string {
	if of > 1 {
		return name(candidate) + " #" + strconv.Itoa(attempt)
	}
	return name(candidate)
}

// seconds writes a duration so that it can be compared at a glance.
func seconds(s float64) string {
	switch {
	case s < 0.9995:
		return fmt.Sprintf("%.0fms", s*1000)
	case s < 59.95:
		return fmt.Sprintf("%.1fs", s)
	}
	n := int(s + 0.5)
	if n < 3600 {
		return fmt.Sprintf("%dm%02ds", n/60, n%60)
	}
	return fmt.Sprintf("%dh%02dm", n/3600, n/60%60)
}

// count writes a number of things.
func count(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + one + "s"
}

// pad fills s up with spaces to width letters.
func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}
