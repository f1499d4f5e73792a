package specs

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

func typeOf(v any) reflect.Type { return reflect.TypeOf(v) }

// binder fills a plan from nodes. What it finds wrong it reports, and goes on.
type binder struct {
	*report
	src  *source
	opts Options
	dir  string // the plan's folder, absolute
	// given has the place of every value, by its path, such as test.run or
	// candidates[0].name.
	given map[string]place
	// meant are the paths of keys that unknown ones probably stand for, so that
	// a misspelt key is not reported as missing too.
	meant map[string]bool
}

// spot is a value that is being bound: where it stands and what it is for.
type spot struct {
	*node
	path string
	key  string
}

func (s spot) item(i int) spot {
	return spot{s.items[i], s.path + "[" + strconv.Itoa(i) + "]", s.key}
}

var indices = lazily(`\[\d+\]`)

// general is the path without indices, by which the tables know a key.
func (s spot) general() string { return indices().ReplaceAllString(s.path, "") }

// brief is the value as the table of unsupported keys writes it.
func (s spot) brief() string {
	switch {
	case s.kind == scalar:
		return s.text
	case len(s.items) > 0:
		return "..."
	case s.kind == mapping:
		return "{}"
	}
	return "[]"
}

// wrong reports that a value is not what its key wants.
func (b *binder) wrong(s spot, format string, args ...any) {
	b.errorf(s.at, "%s: %s", s.key, fmt.Sprintf(format, args...))
}

// ok reports err, if there is one, at a value.
func (b *binder) ok(s spot, err error) bool {
	if err != nil {
		b.wrong(s, "%s", err)
	}
	return err == nil
}

// value binds a node to a field of any type; rule is what the field's tag says.
func (b *binder) value(s spot, v reflect.Value, rule string) {
	b.given[s.path] = s.at
	if b.full() {
		return
	}
	if s.null() {
		what := "has no value"
		t := v.Type()
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if rule == "command" || shortForm[t] == "run" {
			what = "empty command"
		}
		b.wrong(s, "%s: give one, or leave the key out", what)
		return
	}
	if words, ok := choices[v.Type()]; ok {
		b.choice(s, v, words)
		return
	}
	if r, ok := rules[rule]; ok {
		if x, ok := r.bind(b, s); ok {
			v.Set(reflect.ValueOf(x).Convert(v.Type()))
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		b.object(s, v.Elem())
	case reflect.Struct:
		b.object(s, v)
	case reflect.Slice:
		b.list(s, "a list", func(item spot) {
			v.Set(reflect.Append(v, reflect.Zero(v.Type().Elem())))
			b.object(item, v.Index(v.Len()-1))
		})
	case reflect.Bool:
		if b.choice(s, reflect.New(typeOf("")).Elem(), []string{"true", "false"}) {
			v.SetBool(s.text == "true")
		}
	default: // Duration is the only type that needs no rule in its tag
		if text, ok := b.word(s); ok {
			d, err := ParseDuration(text)
			if b.ok(s, err) {
				v.SetInt(int64(d))
			}
		}
	}
}

// object binds a mapping, or the short form of one.
func (b *binder) object(s spot, v reflect.Value) {
	keys := keysOf(v.Type())
	short, hasShort := shortForm[v.Type()]
	if s.null() {
		what := "empty item"
		if short == "run" {
			what = "empty command"
		}
		b.wrong(s, "%s: give one, or take the hyphen out", what)
		return
	}
	if s.kind == scalar && hasShort {
		i := slices.IndexFunc(keys, func(k key) bool { return k.name == short })
		if short == "run" && b.missingSpace(s, keys) {
			return
		}
		b.value(spot{s.node, s.path + "." + short, s.key}, v.Field(keys[i].index), keys[i].rule)
		return
	}
	keys = slices.DeleteFunc(keys, func(k key) bool { return k.textOnly })
	if s.kind != mapping {
		b.notObject(s, keys, hasShort)
		return
	}
	if short == "run" && isCommand(s.node, keys) {
		b.wrong(s, "unknown key %q: YAML makes of this %s", s.keys[0].text, mistaken(s.node))
		return
	}
	for i, node := range s.keys {
		at := slices.IndexFunc(keys, func(k key) bool { return k.name == node.text })
		if at < 0 {
			b.unknown(s, node, keys)
			continue
		}
		k := keys[at]
		child := spot{s.items[i], strings.TrimPrefix(s.path+"."+k.name, "."), k.name}
		b.value(child, v.Field(k.index), k.rule)
		b.support(node.at, child)
	}
	for _, k := range keys {
		if k.required && s.get(k.name) == nil && !b.meant[s.path+"."+k.name] {
			b.errorf(s.at, "the key %q is missing", k.name)
		}
	}
}

// support refuses a key whose behaviour does not exist yet.
func (b *binder) support(at place, s spot) {
	if !b.opts.allowUnsupported && !b.wrongAt(s.at) && !supported(s.general(), s.brief()) {
		b.errorf(at, "not supported yet: %s", s.key)
	}
}

// unknown reports a key that no mapping of this type has.
func (b *binder) unknown(s spot, n *node, keys []key) {
	if b.full() {
		return
	}
	var names []string
	for _, k := range keys {
		names = append(names, k.name)
	}
	hint := ""
	if near := nearest(n.text, names); near != "" {
		hint = fmt.Sprintf(" (did you mean %q?)", near)
		b.meant[s.path+"."+near] = true
	} else if owner := ownerOf(n.text); owner != "" {
		hint = fmt.Sprintf(" (it belongs in %s)", owner)
	} else if len(names) < 12 {
		hint = " (known here: " + strings.Join(names, ", ") + ")"
	}
	b.errorf(n.at, "unknown key %q%s", n.text, hint)
}

// ownerOf says where a key that is known elsewhere belongs.
func ownerOf(name string) string {
	plan := reflect.TypeFor[Plan]()
	for _, k := range keysOf(plan) {
		if k.name == name {
			return "the plan's top level"
		}
	}
	for _, k := range keysOf(plan) {
		t := plan.Field(k.index).Type
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			continue
		}
		for _, inner := range keysOf(t) {
			if inner.name == name && !inner.textOnly {
				return k.name
			}
		}
	}
	return ""
}

var plainKey = lazily(`^[A-Za-z_][A-Za-z0-9_-]*$`)

// isCommand says that a mapping where a command may stand is a command that
// YAML takes for one, such as `echo a: b`, `make:` or `{a,b}`.
func isCommand(n *node, keys []key) bool {
	if len(n.keys) == 0 {
		return false
	}
	empty := true
	for i, k := range n.keys {
		empty = empty && n.items[i].null()
		if slices.ContainsFunc(keys, func(known key) bool { return known.name == k.text }) {
			return false
		}
	}
	return !plainKey().MatchString(strings.TrimSpace(n.keys[0].text)) || empty
}

// notObject reports a value of the wrong kind where a mapping is due.
func (b *binder) notObject(s spot, keys []key, hasShort bool) {
	var names []string
	for _, k := range keys {
		names = append(names, k.name)
	}
	what := "a mapping with keys of " + strings.Join(names, ", ") + " is due, not "
	if hasShort {
		what = "YAML makes of this "
	}
	b.wrong(s, "%s%s", what, mistaken(s.node))
}

// mistaken names what YAML made of a value, and how to write it as text.
func mistaken(n *node) string {
	switch {
	case n.kind == scalar:
		return "text"
	case n.kind == mapping && n.flow:
		return "a mapping, for which YAML takes a leading {; if this is text, " + quoteIt
	case n.kind == mapping:
		return "a mapping, for which YAML takes a colon and a space; if this is text, " + quoteIt
	case n.flow:
		return "a list, for which YAML takes a leading [; if this is text, " + quoteIt
	}
	return "a list, for which YAML takes a leading hyphen and a space; if this is text, " + quoteIt
}

// missingSpace finds `run:make`, which is text to YAML.
func (b *binder) missingSpace(s spot, keys []key) bool {
	name, rest, ok := strings.Cut(s.text, ":")
	if !ok || !s.plain || rest == "" {
		return false
	}
	for _, k := range keys {
		if k.name == name && !k.textOnly {
			b.wrong(s, "a space is missing after %q; if this is a command, %s", name+":", quoteIt)
			return true
		}
	}
	return false
}

// list calls f with each item of a list.
func (b *binder) list(s spot, what string, f func(spot)) bool {
	if s.kind != sequence {
		b.wrong(s, "%s is due, each item on a line of its own after a hyphen, or in [ ]", what)
		return false
	}
	for i := range s.items {
		item := s.item(i)
		b.given[item.path] = item.at
		f(item)
	}
	return true
}

// choice binds one of a few words, true and false among them.
func (b *binder) choice(s spot, v reflect.Value, words []string) bool {
	text, ok := b.word(s)
	if !ok {
		return false
	}
	isBool := slices.Contains(words, "true")
	if isBool && slices.Contains([]string{"yes", "no", "on", "off", "y", "n"}, strings.ToLower(text)) {
		b.wrong(s, "write true or false, not %s", text)
		return false
	}
	if isBool && !s.plain && (text == "true" || text == "false") {
		b.wrong(s, "write %s without quotes", text)
		return false
	}
	if !b.ok(s, parseChoice(text, words)) {
		return false
	}
	v.SetString(text)
	return true
}

// word is the text of a scalar that has no ${{ }} and no NUL.
func (b *binder) word(s spot) (string, bool) {
	switch {
	case s.kind != scalar:
		b.wrong(s, "text is due, not %s", mistaken(s.node))
	case s.null():
		b.wrong(s, "has no value: give one, or write \"\" for empty text")
	case strings.ContainsRune(s.text, 0):
		b.wrong(s, "a NUL byte is not accepted")
	case strings.Contains(s.text, "${{"):
		b.wrong(s, "${{ }} is for run, env and a candidate's name only")
	default:
		return s.text, true
	}
	return "", false
}

// expression is ${{ matrix.X }} or ${{ env.X }}, or an attempt at one.
var (
	expression = lazily(`(?s)\$\{\{(.*?)(\}\}|$)`)
	reference  = lazily(`^\s*(matrix|env)\.([A-Za-z_][A-Za-z0-9_-]*)\s*$`)
)

// expressions checks the ${{ }} in a text. axes are the matrix keys that are
// known there; the names of env are known only when the tournament starts.
func (b *binder) expressions(at place, key, text string, axes map[string]bool) {
	for _, m := range expression().FindAllStringSubmatch(text, -1) {
		ref := reference().FindStringSubmatch(m[1])
		switch {
		case m[2] == "":
			b.errorf(at, "%s: ${{ is never closed by }}", key)
		case ref == nil:
			b.errorf(at, "%s: %s: only ${{ matrix.KEY }} and ${{ env.NAME }} are known", key, m[0])
		case !b.opts.allowUnsupported && !supported("${{", m[0]):
			b.errorf(at, "not supported yet: %s", m[0])
		case ref[1] == "matrix" && !axes[ref[2]]:
			b.errorf(at, "%s: %s: the matrix here has no key %q", key, m[0], ref[2])
		}
	}
}
