package specs

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/google/jsonschema-go/jsonschema"
)

// Schema is the JSON Schema (draft 2020-12) of the plan file, indented, for
// editors. It is made of the types and the tables that plans are read by. What
// only a reader of the text can see, such as lost comments and quoted numbers,
// it does not have; a plan that it refuses, [Parse] refuses too.
func Schema() ([]byte, error) {
	s, err := schema()
	if err != nil {
		return nil, fmt.Errorf("make the plan's schema: %w", err)
	}
	return indent(s)
}

func schema() (*jsonschema.Schema, error) {
	s, err := jsonschema.For[Plan](nil)
	if err != nil {
		return nil, err
	}
	s = refine(s, reflect.TypeFor[Plan]())
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = "agentenv plan"
	s.Description = "A tournament: candidates that each run in a fork of one base, and the test that finds the winner."
	return s, nil
}

// refine turns the schema of a type, which is that of its Go form, into the
// schema of what a plan file has in its place.
func refine(s *jsonschema.Schema, t reflect.Type) *jsonschema.Schema {
	s.Required, s.Description = nil, ""
	var short *jsonschema.Schema
	var order []string
	for _, k := range keysOf(t) {
		value := refineValue(s.Properties[k.name], t.Field(k.index).Type, k.rule)
		if k.name == shortForm[t] {
			short = value.CloneSchemas()
		}
		value.Description = k.doc
		if k.textOnly {
			delete(s.Properties, k.name)
			continue
		}
		s.Properties[k.name] = value
		order = append(order, k.name)
		if k.required {
			s.Required = append(s.Required, k.name)
		}
	}
	s.PropertyOrder = order
	s.Type, s.Types = "object", nil
	s.OneOf = exactlyOne[t]
	if short == nil {
		return s
	}
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{short, s}}
}

// exactlyOne are the mappings of which one key or another must be there.
var exactlyOne = map[reflect.Type][]*jsonschema.Schema{
	reflect.TypeFor[Base]():      {{Required: []string{"dir"}}, {Required: []string{"tarball"}}},
	reflect.TypeFor[Candidate](): {{Required: []string{"run"}}, {Required: []string{"script"}}},
}

func refineValue(s *jsonschema.Schema, t reflect.Type, name string) *jsonschema.Schema {
	if words, ok := choices[t]; ok {
		return &jsonschema.Schema{Enum: enum(words)}
	}
	if t == reflect.TypeFor[Duration]() {
		return &jsonschema.Schema{Type: "string", Pattern: durationPattern}
	}
	if r, ok := rules[name]; ok {
		return r.schema()
	}
	switch t.Kind() {
	case reflect.Pointer:
		return refine(s, t.Elem())
	case reflect.Struct:
		return refine(s, t)
	case reflect.Slice:
		list := &jsonschema.Schema{Type: "array", Items: refine(s.Items, t.Elem())}
		if t == reflect.TypeFor[[]Candidate]() {
			list.MinItems = new(1)
		}
		return list
	}
	return s
}

// enum has true and false as what an editor takes the unquoted words for.
func enum(words []string) []any {
	var list []any
	for _, w := range words {
		switch w {
		case "true":
			list = append(list, true)
		case "false":
			list = append(list, false)
		default:
			list = append(list, w)
		}
	}
	return list
}

func stringSchema() *jsonschema.Schema { return &jsonschema.Schema{Type: "string"} }

// commandSchema lets `test: true` be: an editor sees a boolean, we see text.
func commandSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Types: []string{"string", "boolean"}, MinLength: new(1)}
}

func cpusSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Types: []string{"string", "number"}, Pattern: cpusPattern, ExclusiveMinimum: new(0.0)}
}

func pattern(p string) func() *jsonschema.Schema {
	return func() *jsonschema.Schema { return &jsonschema.Schema{Type: "string", Pattern: p} }
}

func integerSchema(least float64) func() *jsonschema.Schema {
	return func() *jsonschema.Schema { return &jsonschema.Schema{Type: "integer", Minimum: &least} }
}

func listSchema(item func() *jsonschema.Schema, least int) func() *jsonschema.Schema {
	return func() *jsonschema.Schema {
		s := &jsonschema.Schema{Type: "array", Items: item()}
		if least > 0 {
			s.MinItems = &least
		}
		return s
	}
}

// textMapSchema takes scalars of every kind, since all reach commands as text.
func textMapSchema(names string) func() *jsonschema.Schema {
	return func() *jsonschema.Schema {
		return &jsonschema.Schema{
			Type: "object", PropertyNames: &jsonschema.Schema{Pattern: names},
			AdditionalProperties: &jsonschema.Schema{Types: []string{"string", "number", "boolean"}},
		}
	}
}

func matrixSchema() *jsonschema.Schema {
	values := listSchema(func() *jsonschema.Schema {
		return &jsonschema.Schema{Types: []string{"string", "number", "boolean"}}
	}, 1)()
	values.UniqueItems = true
	return &jsonschema.Schema{
		Type: "object", PropertyNames: &jsonschema.Schema{Pattern: axisPattern},
		AdditionalProperties: values, MinProperties: new(1),
	}
}

// indent is JSON for people: two spaces, and <, > and & as they are.
func indent(v any) ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	err := enc.Encode(v)
	return out.Bytes(), err
}

// JSON is the plan with all its defaults, indented, durations as seconds.
func (p *Plan) JSON() ([]byte, error) {
	return indent(p)
}

// MarshalJSON is true, false or "best".
func (p Promote) MarshalJSON() ([]byte, error) {
	if p == PromoteTrue || p == PromoteFalse {
		return []byte(p), nil
	}
	return json.Marshal(string(p))
}
