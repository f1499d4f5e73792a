package specs

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"
	"gotest.tools/v3/assert"
	"gotest.tools/v3/golden"
)

func resolved(t *testing.T) *jsonschema.Resolved {
	t.Helper()
	text, err := Schema()
	assert.NilError(t, err)
	var s jsonschema.Schema
	assert.NilError(t, json.Unmarshal(text, &s))
	r, err := s.Resolve(nil)
	assert.NilError(t, err)
	return r
}

// asJSON is a node as an editor's YAML 1.2 reader sees it.
func asJSON(n *node) any {
	switch n.kind {
	case mapping:
		m := map[string]any{}
		for i, key := range n.keys {
			m[key.text] = asJSON(n.items[i])
		}
		return m
	case sequence:
		list := []any{}
		for _, item := range n.items {
			list = append(list, asJSON(item))
		}
		return list
	}
	if n.null() {
		return nil
	}
	var v any
	if n.plain && json.Unmarshal([]byte(n.text), &v) == nil {
		return v
	}
	return n.text
}

func validate(t *testing.T, plan string) error {
	t.Helper()
	r := &report{}
	root, _ := decode(r, []byte(plan))
	assert.NilError(t, r.err())
	return resolved(t).Validate(asJSON(root))
}

func TestSchemaGolden(t *testing.T) {
	text, err := Schema()
	assert.NilError(t, err)
	golden.Assert(t, string(text), "schema.golden.json")
}

func TestSchemaAcceptsWhatParses(t *testing.T) {
	for _, plan := range []string{
		string(readFile(t, "testdata/full.yaml")), string(Example()), minimal(""), minimal("promote: best\nselect: all\n"),
		"candidates: [true, {run: a}]\ntest: {run: true}\nbase: {dir: .}\nenv: {A: 1.10, B: true, C: x}\nlimits: {cpus: 0.5}\n",
	} {
		_, err := Parse("p.yaml", []byte(plan), full())
		assert.NilError(t, err)
		assert.NilError(t, validate(t, plan), plan)
	}
}

// What the schema refuses, the parser refuses: an editor never cries wolf.
func TestSchemaRefusesMistakes(t *testing.T) {
	for _, plan := range []string{
		minimal("timout: 5s\n"), minimal("timeout: 5\n"), minimal("timeout: 5d\n"), minimal("name: A\n"), minimal("parallel: 0\n"),
		minimal("home: hots\n"), minimal("apply: yes\n"), minimal("env: {A: ~}\n"), minimal("env: {1: x}\n"), minimal("shell: []\n"),
		minimal("base: {}\n"), minimal("base: {dir: a, tarball: b}\n"), minimal("base: {ref: a}\n"), minimal("mounts: [{to: /x}]\n"),
		minimal("limits: {memory: 512}\n"), minimal("limits: {memory: 512M}\n"), minimal("limits: {cpus: 0}\n"), minimal("promote: 'true'\n"),
		"candidates: []\ntest: b\n", "candidates: a\ntest: b\n", "candidates: [{name: a}]\ntest: b\n", "candidates: [{run: a, script: b}]\ntest: b\n",
		"candidates: [{run: a, matrix: {}}]\ntest: b\n", "candidates: [{run: a, repeat: 0}]\ntest: b\n", "candidates: [a]\n", "test: a\n",
		"candidates: [a]\ntest: {timeout: 5s}\n", "candidates: [a]\ntest: ''\n", "candidates: [a]\ntest: {run: b, on_base: no}\n",
	} {
		assert.Assert(t, validate(t, plan) != nil, plan)
		_, err := Parse("p.yaml", []byte(plan), full())
		assert.Assert(t, err != nil, plan)
	}
}

// The schema and the reader know the same keys, on every level, both ways: a
// key of the schema is never "unknown" to the reader, and what the reader
// lists as known is in the schema. Every key says what it is for.
func TestSchemaAndParserKnowTheSameKeys(t *testing.T) {
	s, err := schema()
	assert.NilError(t, err)
	inner := func(s *jsonschema.Schema) *jsonschema.Schema {
		for s.Type != "object" {
			if s.Items != nil {
				s = s.Items
				continue
			}
			s = s.AnyOf[1]
		}
		return s
	}
	for level, wrap := range map[string]func(string) string{
		"":           func(key string) string { return key + ": ~\n" },
		"base":       func(key string) string { return "base: {" + key + ": ~}\n" },
		"setup":      func(key string) string { return "setup: {" + key + ": ~}\n" },
		"candidates": func(key string) string { return "candidates: [{" + key + ": ~}]\n" },
		"test":       func(key string) string { return "test: {" + key + ": ~}\n" },
		"score":      func(key string) string { return "score: {" + key + ": ~}\n" },
		"limits":     func(key string) string { return "limits: {" + key + ": ~}\n" },
		"mounts":     func(key string) string { return "mounts: [{" + key + ": ~}]\n" },
	} {
		object := s
		if level != "" {
			object = inner(s.Properties[level])
		}
		assert.Assert(t, len(object.Properties) > 1, level)
		for key, property := range object.Properties {
			_, err := Parse("p.yaml", []byte(wrap(key)), full())
			want := ": has no value"
			if key == "run" || key == "test" || key == "setup" {
				want = ": empty command"
			}
			assert.ErrorContains(t, err, key+want)
			assert.Assert(t, !strings.Contains(err.Error(), "unknown key"), err.Error())
			assert.Assert(t, property.Description != "", "%s.%s has no description", level, key)
		}
		_, err := Parse("p.yaml", []byte(strings.Replace(wrap("zzzzzzzz"), "~", "1", 1)), full())
		assert.ErrorContains(t, err, `unknown key "zzzzzzzz"`)
		if _, list, ok := strings.Cut(err.Error(), "known here: "); ok {
			list, _, _ = strings.Cut(list, ")")
			for _, key := range strings.Split(list, ", ") {
				assert.Assert(t, object.Properties[key] != nil, "%s.%s is not in the schema", level, key)
			}
			assert.Equal(t, len(strings.Split(list, ", ")), len(object.Properties), level)
		}
		assert.Assert(t, reflect.DeepEqual(object.AdditionalProperties, &jsonschema.Schema{Not: &jsonschema.Schema{}}), level)
	}
}

// Every key that the table of later keys names exists.
func TestLaterKeysExist(t *testing.T) {
	for path := range notYet {
		group, key, nested := strings.Cut(path, ".")
		if path == "${{" {
			continue
		}
		owner := reflect.TypeFor[Plan]()
		if nested {
			owner = map[string]reflect.Type{"candidates": reflect.TypeFor[Candidate](), "test": reflect.TypeFor[Test]()}[group]
			group = key
		}
		found := false
		for _, k := range keysOf(owner) {
			found = found || k.name == group
		}
		assert.Assert(t, found, path)
	}
}

func TestSchemaIsForEditors(t *testing.T) {
	text, err := Schema()
	assert.NilError(t, err)
	var s map[string]any
	assert.NilError(t, json.Unmarshal(text, &s))
	assert.Equal(t, s["$schema"], "https://json-schema.org/draft/2020-12/schema")
	assert.Equal(t, s["title"], "agentenv plan")
	assert.Assert(t, s["description"] != "")
	assert.Assert(t, strings.Index(string(text), `"name"`) < strings.Index(string(text), `"keep"`), "keys in the order of the documentation")
}

func TestJSONKeepsCharacters(t *testing.T) {
	p := parse(t, "candidates: ['a && b > c < d']\ntest: 'x'\n")
	out, err := p.JSON()
	assert.NilError(t, err)
	assert.Assert(t, strings.Contains(string(out), `"run": "a && b > c < d"`))
	assert.Assert(t, strings.Contains(string(out), "\"promote\": true,\n"))
	assert.Assert(t, strings.HasSuffix(string(out), "}\n"))
}
