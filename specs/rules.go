package specs

import (
	"fmt"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
)

// rule is what a tag plan:"rule" stands for: how a value is read, and what the
// schema says of it.
type rule struct {
	// bind gives the field's value; what is wrong it has reported, then false.
	bind   func(b *binder, s spot) (any, bool)
	schema func() *jsonschema.Schema
}

// rules are all that tags name.
var rules = map[string]rule{
	"name":          {text(func(t string) (string, error) { return t, CheckName(t) }), pattern(namePattern)},
	"template-name": {bindTemplateName, stringSchema},
	"command":       {bindCommand, commandSchema},
	"ref":           {text(func(t string) (string, error) { return t, checkRef(t) }), stringSchema},
	"path":          {bindPath, stringSchema},
	"target":        {bindTarget, stringSchema},
	"workdir":       {text(parseWorkdir), stringSchema},
	"size":          {text(parseSize), pattern(sizePattern)},
	"memory":        {text(parseMemory), pattern(sizePattern)},
	"cpus":          {text(parseCPUs), cpusSchema},
	"positive":      {integer(1), integerSchema(1)},
	"count":         {integer(0), integerSchema(0)},
	"files":         {integer(leastFiles), integerSchema(leastFiles)},
	"argv":          {bindArgv, listSchema(stringSchema, 1)},
	"names":         {items(checkVariableName), listSchema(pattern(variablePattern), 0)},
	"globs":         {items(checkGlob), listSchema(stringSchema, 0)},
	"env":           {bindEnv, textMapSchema(variablePattern)},
	"matrix":        {bindMatrix, matrixSchema},
	"combinations":  {bindCombinations, listSchema(textMapSchema(axisPattern), 1)},
}

// text makes a rule of a function that reads one piece of text.
func text[T any](parse func(string) (T, error)) func(*binder, spot) (any, bool) {
	return func(b *binder, s spot) (any, bool) {
		t, ok := b.word(s)
		if !ok {
			return nil, false
		}
		x, err := parse(t)
		return x, b.ok(s, err)
	}
}

func integer(least int) func(*binder, spot) (any, bool) {
	return func(b *binder, s spot) (any, bool) {
		t, ok := b.word(s)
		if !ok {
			return nil, false
		}
		if !s.plain {
			b.wrong(s, "a number without quotes is due: %q", t)
			return nil, false
		}
		n, err := parseInt(t, least)
		return n, b.ok(s, err)
	}
}

// items makes a rule for a list of texts, each of which must pass check.
func items(check func(string) error) func(*binder, spot) (any, bool) {
	return func(b *binder, s spot) (any, bool) {
		list := []string{}
		ok := b.list(s, "a list", func(item spot) {
			if t, ok := b.word(item); ok && b.ok(item, check(t)) {
				list = append(list, t)
			}
		})
		return list, ok
	}
}

func checkVariableName(name string) error { return checkVariable(name, "") }

func bindPath(b *binder, s spot) (any, bool) {
	t, ok := b.word(s)
	if !ok {
		return nil, false
	}
	path, err := b.opts.resolve(t, b.dir)
	return path, b.ok(s, err)
}

func bindTarget(b *binder, s spot) (any, bool) {
	t, ok := b.word(s)
	if !ok {
		return nil, false
	}
	path, err := b.opts.target(t)
	if err == nil {
		err = checkTarget(path)
	}
	return path, b.ok(s, err)
}

// scalarText is the text of a scalar as it is written; ${{ }} is checked later,
// when the matrix is known.
func (b *binder) scalarText(s spot) (string, bool) {
	switch {
	case s.kind != scalar:
		b.wrong(s, "text is due, not %s", mistaken(s.node))
	case s.null():
		b.wrong(s, "has no value: write \"\" for empty text, and quotes around a word such as null")
	case !b.noLostTail(s):
	default:
		return s.text, true
	}
	return "", false
}

func bindTemplateName(b *binder, s spot) (any, bool) {
	t, ok := b.scalarText(s)
	if !ok {
		return nil, false
	}
	return t, b.ok(s, CheckName(expression().ReplaceAllString(t, "x")))
}

func bindCommand(b *binder, s spot) (any, bool) {
	if s.kind != scalar {
		b.wrong(s, "a command is due, not %s", mistaken(s.node))
		return nil, false
	}
	if !b.noCutQuote(s) || !b.noLostTail(s) || !b.noJoinedLines(s) {
		return nil, false
	}
	return s.text, b.ok(s, checkCommand(s.text))
}

// bindArgv reads a command line in its words.
func bindArgv(b *binder, s spot) (any, bool) {
	list := []string{}
	ok := b.list(s, "a list such as [bash, -e, -c]", func(item spot) {
		if t, ok := b.word(item); ok {
			list = append(list, t)
		}
	})
	if ok && (len(s.items) == 0 || len(list) > 0 && list[0] == "") {
		b.wrong(s, "the program is missing, such as sh in [sh, -e, -c]")
		return nil, false
	}
	return list, ok
}

// texts reads a mapping of text to text.
func (b *binder) texts(s spot, check func(name, value string) error) (map[string]string, bool) {
	if s.kind != mapping {
		b.wrong(s, "a mapping such as {NAME: text} is due")
		return nil, false
	}
	m := map[string]string{}
	for i, key := range s.keys {
		child := spot{s.items[i], s.path + "." + key.text, s.key + "." + key.text}
		b.given[child.path] = child.at
		if err := check(key.text, ""); err != nil {
			b.errorf(key.at, "%s: %s", s.key, err)
			continue
		}
		if t, ok := b.scalarText(child); ok && b.ok(child, check(key.text, t)) {
			m[key.text] = t
		}
	}
	return m, true
}

func bindEnv(b *binder, s spot) (any, bool) { return b.texts(s, checkVariable) }

// checkAxis checks a key and a value of a matrix.
func checkAxis(name, value string) error {
	if !axisRule().MatchString(name) {
		return fmt.Errorf("%q cannot be a matrix key: letters, digits, _ and - only, a letter or _ first", name)
	}
	if strings.ContainsAny(value, "\x00\n") {
		return fmt.Errorf("a matrix value is one line of text")
	}
	return nil
}

func bindMatrix(b *binder, s spot) (any, bool) {
	if s.kind != mapping || len(s.keys) == 0 {
		b.wrong(s, "a mapping of keys to lists of values is due, such as {model: [opus, sonnet]}")
		return nil, false
	}
	m := map[string][]string{}
	for i, key := range s.keys {
		if err := checkAxis(key.text, ""); err != nil {
			b.errorf(key.at, "%s: %s", s.key, err)
			continue
		}
		axis := spot{s.items[i], s.path + "." + key.text, s.key + "." + key.text}
		first := map[string]place{}
		b.list(axis, "a list of values", func(item spot) {
			t, ok := b.scalarText(item)
			if !ok || !b.ok(item, checkAxis(key.text, t)) {
				return
			}
			if at, again := first[t]; again {
				b.wrong(item, "the value %q stands here twice (first at line %d)", t, at.line)
			}
			first[t] = item.at
			m[key.text] = append(m[key.text], t)
		})
		if axis.kind == sequence && len(axis.items) == 0 {
			b.wrong(axis, "a list of values cannot be empty")
		}
	}
	return m, true
}

func bindCombinations(b *binder, s spot) (any, bool) {
	list := []map[string]string{}
	ok := b.list(s, "a list of combinations, such as [{model: opus}]", func(item spot) {
		m, ok := b.texts(item, checkAxis)
		if ok && len(item.keys) == 0 {
			b.wrong(item, "a combination cannot be empty")
		}
		list = append(list, m)
	})
	if ok && len(s.items) == 0 {
		b.wrong(s, "a list cannot be empty here: leave the key out")
	}
	return list, ok
}

// noLostTail refuses an unquoted text that a comment follows, where a person
// may have meant the comment as part of the text: `make #fast`. A comment that
// a shell would take for one as well, with a space after the #, is left alone.
func (b *binder) noLostTail(s spot) bool {
	tail := b.tail(s)
	if len(tail) < 2 || tail[0] != '#' || strings.ContainsRune(" \t\n#", rune(tail[1])) {
		return true
	}
	b.wrong(s, "%s is a comment in YAML, and no part of the text: %s; if it is a comment, write a space after the #", word(tail), quoteIt)
	return false
}

// noCutQuote refuses an unquoted command that YAML ends inside a quote of the
// shell's, at a comment or, in { } and [ ], at a comma: `grep "a # b" f`.
func (b *binder) noCutQuote(s spot) bool {
	tail, quote := b.tail(s), openQuote(s.text)
	if tail == "" || quote == 0 || !strings.ContainsRune("#,]}", rune(tail[0])) {
		return true
	}
	b.wrong(s, "YAML ends this text before the %c, inside the quote %c: %s", tail[0], quote, quoteIt)
	return false
}

// tail is what follows an unquoted text of one line in the source.
func (b *binder) tail(s spot) string {
	rest, ok := strings.CutPrefix(b.src.value(s.node), s.text)
	if !s.plain || !ok {
		return ""
	}
	return strings.TrimLeft(rest, " \t")
}

// openQuote is the shell quote that a text leaves open, or 0.
func openQuote(text string) byte {
	var open byte
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\' && open != '\'':
			i++
		case open == 0 && (c == '"' || c == '\''):
			open = c
		case c == open:
			open = 0
		}
	}
	return open
}

// noJoinedLines refuses a command whose lines YAML folds into one: two commands
// become one with odd arguments, and a backslash at a line's end stays inside.
func (b *binder) noJoinedLines(s spot) bool {
	source := b.src.value(s.node)
	var joined bool
	switch {
	case strings.HasPrefix(source, ">") && s.block:
		joined = countLines(s.text) < b.src.blockLines(s.at)
	case s.block:
	case s.plain:
		joined = !strings.HasPrefix(source, s.text) && strings.HasPrefix(s.text, strings.TrimRight(firstLine(source), " \t"))
	case source != "":
		joined = !closes(source)
	}
	if joined {
		b.wrong(s, "YAML folds these lines into one line: write | to keep them apart; a long command may be cut with \\ at the ends of its lines there")
	}
	return !joined
}

// closes says whether the quoted text at the start of source ends on its line.
func closes(source string) bool {
	quote := source[0]
	for i := 1; i < len(source) && source[i] != '\n'; i++ {
		switch {
		case source[i] == '\\' && quote == '"' && source[i+1:] != "" && source[i+1] != '\n':
			i++
		case source[i] == quote && quote == '\'' && strings.HasPrefix(source[i+1:], "'"):
			i++
		case source[i] == quote:
			return true
		}
	}
	return false
}

// countLines counts the lines that hold something.
func countLines(text string) (n int) {
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) != "" {
			n++
		}
	}
	return n
}
