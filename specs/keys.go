package specs

import (
	"reflect"
	"slices"
	"strings"
	"unicode"
)

// key is one key of the plan file, as the struct tags of the plan's types give
// it: json names it, plan has its rule and options, jsonschema describes it.
type key struct {
	name     string
	index    int // of the struct's field
	rule     string
	required bool
	textOnly bool // set by the short form only, no key of the mapping
	doc      string
}

// keysOf lists the keys of a mapping that is bound to t, in the order of the
// plan's documentation.
func keysOf(t reflect.Type) []key {
	var keys []key
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		options := strings.Split(f.Tag.Get("plan"), ",")
		keys = append(keys, key{
			name: name, index: i, rule: options[0],
			required: slices.Contains(options, "required"),
			textOnly: slices.Contains(options, "text-only"),
			doc:      f.Tag.Get("jsonschema"),
		})
	}
	return keys
}

// shortForm names, for each mapping that may be written as a plain string, the
// key that the string is for.
var shortForm = map[reflect.Type]string{
	reflect.TypeFor[Base]():      "ref",
	reflect.TypeFor[Setup]():     "run",
	reflect.TypeFor[Candidate](): "run",
	reflect.TypeFor[Test]():      "run",
}

// choices are the words of each type that has few; the first is the default.
var choices = map[reflect.Type][]string{
	reflect.TypeFor[Select]():    {string(FirstPass), string(BestScore), string(All)},
	reflect.TypeFor[Home]():      {string(HomeOverlay), string(HomePrivate), string(HomeHost)},
	reflect.TypeFor[Network]():   {string(NetworkHost), string(NetworkPrivate), string(NetworkNAT)},
	reflect.TypeFor[Isolation](): {string(Namespaces), string(Process)},
	reflect.TypeFor[Promote]():   {string(PromoteTrue), string(PromoteFalse), string(PromoteBest)},
	reflect.TypeFor[Keep]():      {string(KeepWinner), string(KeepPassed), string(KeepAll), string(KeepNone)},
	reflect.TypeFor[OnTamper]():  {string(TamperReject), string(TamperReport)},
	reflect.TypeFor[OnBase]():    {string(BaseWarn), string(BaseFails), string(BasePasses), string(BaseSkip)},
	reflect.TypeFor[Goal]():      {string(Max), string(Min)},
	reflect.TypeFor[Enforce]():   {string(Strict), string(BestEffort)},
	reflect.TypeFor[MountMode](): {string(MountRO), string(MountOverlay), string(MountRW)},
}

// notYet holds the keys whose behaviour does not exist yet, with the values
// that ask for nothing new: none, if every value does. A key leaves this table
// when its behaviour lands; nothing else needs to change here.
var notYet = map[string][]string{
	"workdir":            {"."},
	"pass_env":           {"[]"},
	"setup":              nil,
	"candidates.script":  nil,
	"candidates.stdin":   nil,
	"candidates.matrix":  nil,
	"candidates.exclude": nil,
	"candidates.include": nil,
	"candidates.workdir": {"."},
	"test.confirm":       {"0"},
	"test.protect":       nil,
	"test.on_tamper":     nil,
	"test.on_base":       nil,
	"score":              nil,
	"select":             {"first-pass"},
	"promote":            {"true", "false"},
	"artifacts":          {"[]"},
	"keep":               {"winner"},
	"${{":                nil,
}

// supported says whether a key, named by its path without indices, may have
// this value. Lists and mappings are [] and {} when empty, else anything else.
func supported(path, value string) bool {
	values, pending := notYet[path]
	return !pending || slices.Contains(values, value)
}

// nearest is the word that a misspelt one most probably means, or "".
func nearest(word string, words []string) string {
	flat := func(s string) string {
		return strings.Map(func(c rune) rune {
			if unicode.IsLetter(c) || unicode.IsDigit(c) {
				return unicode.ToLower(c)
			}
			return -1
		}, s)
	}
	best, least := "", 3
	for _, w := range words {
		if d := distance(flat(word), flat(w)); d < least && d < max(2, len(w)/2) {
			best, least = w, d
		}
	}
	return best
}

// distance counts the letters to insert, delete, replace or swap with their
// neighbour to turn a into b.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		for j := range d[i] {
			switch {
			case i == 0 || j == 0:
				d[i][j] = i + j
			case a[i-1] == b[j-1]:
				d[i][j] = d[i-1][j-1]
			default:
				d[i][j] = 1 + min(d[i-1][j-1], d[i-1][j], d[i][j-1])
			}
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
