package sandbox

import (
	"bytes"
	"testing"

	"gotest.tools/v3/assert"
)

func TestScreen(t *testing.T) {
	for in, undo := range map[string]string{
		"plain":                            "",
		"\x1b[31mred":                      "\x1b[m",
		"\x1b[31mred\x1b[0m \x1b[1m\x1b[m": "",
		"\x1b[01;00mx":                     "\x1b[m",
		"\x1b[?1049h\x1b[?25l":             "\x1b[?25h\x1b[?1049l",
		"\x1b[?1049h\x1b[?25l\x1b[?25h\x1b[?1049l":                     "",
		"\x1b[?1000;1006;2004h\x1b[?1000l":                             "\x1b[?1006l\x1b[?2004l",
		"\x1b[?2004h$ \x1b[?2004l":                                     "",
		"\x1b[>1u\x1b=\x1b[>4;2m":                                      "\x1b>\x1b[<u\x1b[>4m",
		"\x1b[>1u\x1b[<u\x1b=\x1b>\x1b[>4;0m":                          "",
		"\x1b[?1049h\x1bc":                                             "",
		"\x1b]0;a title?1049h\a\x1b[4h\x1b[?99999h\x1b[?h\x1b[?12;;h":  "",
		"\x1b[?10\x1b[?25l":                                            "\x1b[?25h",
		"\x1b[?10\n49h":                                                "\x1b[?1049l",
		"\x1b[" + string(bytes.Repeat([]byte("1"), 200)) + "\x1b[?47h": "\x1b[?47l",
	} {
		whole := &screen{}
		whole.see([]byte(in))
		assert.Equal(t, whole.on.undo(), undo, "%q", in)
		bytewise := &screen{}
		for i := range in {
			bytewise.see([]byte(in[i : i+1]))
		}
		assert.Equal(t, bytewise.on, whole.on, "%q", in)
		whole.see([]byte(undo))
		assert.Equal(t, whole.on, modes(0), "%q undoes %q", undo, in)
	}
}
