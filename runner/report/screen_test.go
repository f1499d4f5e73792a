package report

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"gotest.tools/v3/assert"
)

func TestLine(t *testing.T) {
	for _, c := range []struct{ in, plain, coloured string }{
		{"plain\ttext", "plain\ttext", "plain\ttext"},
		{"", "", ""},
		// Colours, closed at the end of the line.
		{"\x1b[31mred\x1b[0m", "red", "\x1b[31mred\x1b[0m"},
		{"\x1b[1;38:2::1:2:3mopen", "open", "\x1b[1;38:2::1:2:3mopen\x1b[0m"},
		{"\x1b[m\x1b[0mno colour", "no colour", "no colour"},
		{"\x1b[>4;2mkeys\x1b[?25m", "keys", "keys"},
		// What moves, clears, asks, renames.
		{"\x1b[2J\x1b[1;1H\x1b[10Ahi\x1b[6n\x1b[?1049h\x1b[?25l", "hi", "hi"},
		{"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\b", "alinkb", "alinkb"},
		{"a\x1bP1$qm\x1b\\b\x1b_x\x1b\\c\x1b^y\x1b\\d\x1bXz\x1b\\e", "abcde", "abcde"},
		{"a\x1b]52;c;ZXZpbA==", "a", "a"},
		{"a\x1b]0;x\x18b", "ab", "ab"},
		{"a\x1b(Bb\x1b#8c\x1bcd\x1b7e\x1b", "abcde", "abcde"},
		{"a\x1b[31", "a", "a"}, {"a\x1b[3\x07b", "ab", "ab"}, {"a\x1b\x1b[1mb", "ab", "a\x1b[1mb\x1b[0m"},
		{"a\x1béb", "aéb", "aéb"},
		// C1, as one byte and as UTF-8.
		{"a\x9b31mb\x9d0;t\x9cc\x90q\x9cd", "abcd", "abcd"},
		{"a\u009b31mb\u009d0;t\u009cc\u0085d\u009ce", "abcde", "abcde"},
		{"\x93quoted\x94", "\uFFFDquoted\uFFFD", "\uFFFDquoted\uFFFD"},
		{"a\x9d not its end", "a\uFFFD not its end", "a\uFFFD not its end"},
		// Bell, backspace and the others.
		{"a\x07b\bc", "abc", "abc"}, {"a\x00\x0e\x7f", "a^@^N^?", "a^@^N^?"},
		{"a\x01\x0b\x0c\x0f\x1f\x7fb", "a^A^K^L^O^_^?b", "a^A^K^L^O^_^?b"},
		// What is rewritten in place.
		{"10%\r50%\rdone", "done", "done"}, {"text\r", "text", "text"}, {"text\r\r", "text", "text"},
		{"99%\r\x1b[K", "", ""}, {"99%\x1b[2K", "", ""}, {"99%\x1b[Kx", "99%x", "99%x"}, {"one\x1b[Gtwo\x1b[1Gthree", "three", "three"},
		{"\x1b[32mok\rstill green", "still green", "\x1b[32mstill green\x1b[0m"},
		{"\x1b[32mok\r\x1b[0mplain", "plain", "plain"},
		{"\x1b[32mok\r\x1b[0m", "ok", "\x1b[32mok\x1b[0m"},
		// Letters that are broken, or act on the order of others.
		{"caf\xe9 \xc3", "caf\uFFFD \uFFFD", "caf\uFFFD \uFFFD"},
		{"a\u202eb\u200bc", "a<U+202E>b<U+200B>c", "a<U+202E>b<U+200B>c"},
		{"##[error]x #\x1b[1m#[group]", "## [error]x ## [group]", "## [error]x #\x1b[1m#[group]\x1b[0m"},
	} {
		assert.Equal(t, Line(c.in, 1000, false), c.plain, "%q", c.in)
		assert.Equal(t, Line(c.in, 1000, true), c.coloured, "%q", c.in)
	}
}

func TestLineIsCutAtALetter(t *testing.T) {
	assert.Equal(t, Line(strings.Repeat("é", 10), 10, false), strings.Repeat("é", 10))
	assert.Equal(t, Line(strings.Repeat("é", 11), 10, false), strings.Repeat("é", 10)+"…")
	assert.Equal(t, Line("\x1b[31m"+strings.Repeat("é", 11), 10, true), "\x1b[31m"+strings.Repeat("é", 10)+"…\x1b[0m")
	assert.Equal(t, Line(strings.Repeat("x", 50)+"\rshort", 10, false), "short", "what is rewritten does not count")
}

var colourOnly = regexp.MustCompile(`\x1b\[[0-9;:]*m`)

// FuzzLine: whatever is printed, nothing but colours acts on the terminal, they
// end with the line, and no letter is broken.
func FuzzLine(f *testing.F) {
	for _, s := range []string{"\x1b[31mé\r\x1b[K", "\x1b]0;t\x07\u009b1m\x9d\xff", "##[\x1b[m##[", "\x1b[\x1b[31m", "a\u2028\u202e\xe2\x80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		in = strings.ReplaceAll(in, "\n", "")
		for _, most := range []int{3, 1000} {
			for _, colours := range []bool{false, true} {
				got := Line(in, most, colours)
				if !utf8.ValidString(got) || strings.Contains(got, "##[") {
					t.Fatalf("%q of %q", got, in)
				}
				text := got
				if colours {
					if all := colourOnly.FindAllString(got, -1); len(all) > 0 && all[len(all)-1] != reset {
						t.Fatalf("not closed: %q of %q", got, in)
					}
					text = colourOnly.ReplaceAllString(got, "")
				}
				for _, r := range text {
					if r < 0x20 && r != '\t' || r >= 0x7f && r < 0xa0 || r >= 0x200b && r <= 0x200f || r >= 0x2028 && r <= 0x202e {
						t.Fatalf("%q in %q of %q", r, got, in)
					}
				}
			}
		}
	})
}
