package specs

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// The bounds of a plan. A plan is written by people, so each is far above any
// real one and far below what would be felt.
const (
	maxFile  = 1 << 20 // bytes
	maxDepth = 64      // levels of lists and mappings
	// maxValues bounds what aliases expand to: a value used twice counts twice.
	maxValues = 200_000
)

type kind int

const (
	scalar kind = iota
	mapping
	sequence
)

// node is a value of a plan: YAML without its styles, tags, aliases and merges.
type node struct {
	kind   kind
	at     place
	offset int // in the source, of the value with its anchor and tag
	// text is the scalar as it is written, quotes and escapes resolved; plain
	// says that it had no quotes and is no block; block that it is a | or >.
	text  string
	plain bool
	block bool
	flow  bool // a mapping or list in { } or [ ]
	// items are a list's values or a mapping's; keys the mapping's keys.
	keys  []*node
	items []*node

	values int // how many values this is, itself included
	depth  int
}

// null says that the node is YAML's nothing: empty, ~ or null, without quotes.
func (n *node) null() bool {
	if n.kind != scalar || !n.plain {
		return false
	}
	switch n.text {
	case "", "~", "null", "Null", "NULL":
		return true
	}
	return false
}

// get is the value of a mapping's key, or nil.
func (n *node) get(key string) *node {
	for i, k := range n.keys {
		if k.text == key {
			return n.items[i]
		}
	}
	return nil
}

// decode reads a plan's one document; the errors go to r, and the node is nil
// when there is nothing that could be read further.
func decode(r *report, data []byte) (*node, *source) {
	src := readSource(r, data)
	if src == nil {
		return nil, nil
	}
	doc, err := parseYAML(src.text)
	if err != nil {
		src.explain(r, err)
		return nil, nil
	}
	if doc == nil || len(doc.Content) == 0 || len(src.content()) == 0 {
		r.errorf(place{line: 1, col: 1}, "the plan is empty: `agentenv plan new` writes one to start from")
		return nil, nil
	}
	c := converter{report: r, src: src, done: map[*yaml.Node]*node{}, used: map[*yaml.Node]bool{}}
	root := c.convert(doc.Content[0], 0)
	c.unused()
	if c.failed {
		return nil, nil
	}
	return root, src
}

// parseYAML gives the document node, nil for an empty stream.
func parseYAML(text string) (doc *yaml.Node, err error) {
	// A bug of the YAML library must not take the program down.
	defer func() {
		if p := recover(); p != nil {
			doc, err = nil, fmt.Errorf("yaml: %v", p)
		}
	}()
	var n yaml.Node
	if err := yaml.Unmarshal([]byte(text), &n); err != nil {
		return nil, err
	}
	if n.Kind == 0 {
		return nil, nil
	}
	return &n, nil
}

// converter makes nodes of YAML's. Each YAML node is converted once, however
// many aliases lead to it, so that an alias bomb costs nothing but its counting.
type converter struct {
	*report
	src  *source
	done map[*yaml.Node]*node
	// anchored are the scalars with an anchor; used is what aliases lead to.
	anchored []*yaml.Node
	used     map[*yaml.Node]bool
	failed   bool // the tree is not fit for binding
}

func (c *converter) fail(at place, format string, args ...any) *node {
	c.failed = true
	c.errorf(at, format, args...)
	return &node{at: at, text: "?"}
}

func (c *converter) convert(y *yaml.Node, depth int) *node {
	at := place{line: y.Line, col: y.Column}
	if depth > maxDepth {
		return c.fail(at, "nested deeper than %d levels", maxDepth)
	}
	if y.Kind == yaml.AliasNode {
		c.used[y.Alias] = true
		if n, ok := c.done[y.Alias]; ok && n == nil {
			return c.fail(at, "the alias *%s stands inside what it names", y.Value)
		}
		return c.convert(y.Alias, depth)
	}
	if n := c.done[y]; n != nil {
		if depth+n.depth > maxDepth {
			return c.fail(at, "nested deeper than %d levels", maxDepth)
		}
		return n
	}
	c.done[y] = nil
	n := &node{at: at, offset: c.src.offsetOf(at), values: 1, flow: y.Style&yaml.FlowStyle != 0}
	c.tag(n)
	switch y.Kind {
	case yaml.ScalarNode:
		if y.Anchor != "" {
			c.anchored = append(c.anchored, y)
		}
		n.text = y.Value
		n.block = y.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0
		n.plain = y.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 && !n.block
	case yaml.SequenceNode:
		n.kind = sequence
		for _, item := range y.Content {
			n.add(nil, c.convert(item, depth+1))
		}
	case yaml.MappingNode:
		n.kind = mapping
		c.mapping(n, y, depth)
	}
	if n.values > maxValues {
		return c.fail(at, "aliases expand to more than %d values", maxValues)
	}
	c.done[y] = n
	return n
}

func (n *node) add(key, item *node) {
	if key != nil {
		n.keys = append(n.keys, key)
	}
	n.items = append(n.items, item)
	n.values = min(n.values+item.values, maxValues+1)
	n.depth = max(n.depth, item.depth+1)
}

// tag refuses tags. They are read from the source, since the library drops the
// one that people write by accident: `test: ! grep x`.
func (c *converter) tag(n *node) {
	rest := c.src.text[n.offset:]
	if strings.HasPrefix(rest, "&") {
		rest = strings.TrimLeft(rest[len(word(rest)):], " \n")
	}
	if !strings.HasPrefix(rest, "!") {
		return
	}
	if tag := word(rest); tag != "!!str" {
		c.errorf(n.at, "YAML takes %s for a tag, and a plan has none: %s", tag, quoteIt)
	}
}

// word is what stands before the first blank.
func word(s string) string {
	if i := strings.IndexAny(s, " \t\n"); i >= 0 {
		return s[:i]
	}
	return s
}

// unused refuses anchors of text that no alias uses: most are commands that
// begin with an ampersand, and YAML would drop their first word.
func (c *converter) unused() {
	for _, y := range c.anchored {
		if !c.used[y] {
			c.errorf(place{line: y.Line, col: y.Column}, "YAML takes &%s for an anchor, which nothing uses: remove it; if it is text, %s", y.Anchor, quoteIt)
		}
	}
}

// mapping fills n with the keys of y, then with what y merges.
func (c *converter) mapping(n *node, y *yaml.Node, depth int) {
	type merge struct {
		at    place
		value *node
	}
	var merges []merge
	seen := map[string]*node{}
	for i := 0; i+1 < len(y.Content); i += 2 {
		k, v := y.Content[i], y.Content[i+1]
		if k.Kind == yaml.ScalarNode && k.Tag == "!!merge" {
			merges = append(merges, merge{place{line: k.Line, col: k.Column}, c.convert(v, depth+1)})
			continue
		}
		key := c.convert(k, depth+1)
		value := c.convert(v, depth+1)
		if key.kind != scalar {
			c.fail(key.at, "a key must be plain text; if this is a command, %s", quoteIt)
			continue
		}
		if first := seen[key.text]; first != nil {
			c.errorf(key.at, "duplicate key %q (first at line %d)", key.text, first.at.line)
			continue
		}
		seen[key.text] = key
		n.add(key, value)
	}
	for i, m := range merges {
		if i > 0 {
			c.errorf(m.at, "duplicate key \"<<\" (first at line %d); several are merged by <<: [*a, *b]", merges[0].at.line)
			continue
		}
		c.merge(n, m.at, m.value, seen)
	}
}

// merge adds the keys that n has not: explicit keys win, then the earlier of a list.
func (c *converter) merge(n *node, at place, from *node, seen map[string]*node) {
	list := []*node{from}
	if from.kind == sequence {
		list = from.items
	}
	for _, m := range list {
		if m.kind != mapping {
			c.errorf(at, "<< merges a mapping, or a list of mappings")
			return
		}
		for i, key := range m.keys {
			if seen[key.text] == nil {
				seen[key.text] = key
				n.add(key, m.items[i])
			}
		}
	}
}

var yamlLine = lazily(`line (\d+)`)

// guilty finds the line from which on the text cannot be YAML any more. The
// library's own line is often that of the enclosing mapping, or missing.
func (s *source) guilty(err error) int {
	budget := 4 * maxFile // bytes that may be read again in the search
	fails := func(n int) bool {
		text := strings.Join(s.lines[:n], "\n") + "\n"
		budget -= len(text)
		_, err := parseYAML(text)
		return err != nil
	}
	total := len(s.lines)
	n := total
	if m := yamlLine().FindStringSubmatch(err.Error()); m != nil {
		n, _ = strconv.Atoi(m[1])
		n = min(max(n, 1), total)
		for n < total && budget > 0 && !fails(n) {
			n = min(n*2, total)
		}
	}
	for n > 1 && budget > 0 && fails(n-1) {
		n--
	}
	return n
}

// explain reports a syntax error in words that need no knowledge of YAML.
func (s *source) explain(r *report, err error) {
	line := s.guilty(err)
	col, msg := diagnose(s.lines[line-1])
	if msg == "" {
		msg = "not valid YAML: " + plainWords(err)
		col = 1 + len([]rune(s.lines[line-1])) - len([]rune(strings.TrimLeft(s.lines[line-1], " ")))
	}
	r.errorf(place{line: line, col: col}, "%s", msg)
}

// plainWords is the library's message without its place and program's words.
func plainWords(err error) string {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	var te *yaml.TypeError
	if errors.As(err, &te) {
		msg = strings.Join(te.Errors, "; ")
	}
	msg = regexp.MustCompile(`^line \d+: `).ReplaceAllString(msg, "")
	words := []struct{ from, to string }{
		{"did not find expected key", "a key is expected here; is the indentation right?"},
		{"did not find expected '-' indicator", "a list item is expected here; is the indentation right?"},
		{"could not find expected ':'", "a key has no colon, or text that belongs under a | is not indented further than its key"},
		{"mapping values are not allowed in this context", "a mapping cannot stand here; is the indentation right?"},
		{"found unexpected end of stream", "a quote is never closed"},
	}
	i := slices.IndexFunc(words, func(w struct{ from, to string }) bool { return msg == w.from })
	if i >= 0 {
		return words[i].to
	}
	return msg
}
