package specs

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"gotest.tools/v3/assert"
)

// commandTraps are commands as people write them into YAML without a thought:
// each either runs as it stands, or is refused with what to do about it.
var commandTraps = []struct {
	yaml string
	run  string // what runs, if it is accepted
	err  string // else a part of the error
}{
	{"go test ./...", "go test ./...", ""},
	{"key:value", "key:value", ""},
	{"true", "true", ""},
	{"'it''s'", "it's", ""},
	{`"a\tb\n"`, "a\tb\n", ""},
	{"make # a comment", "make", ""},
	{"make #", "make", ""},
	{"cat << EOF", "cat << EOF", ""},
	{"a\\", "a\\", ""},
	{"'#fast'", "#fast", "only a comment"},
	{"'a #b'", "a #b", ""},
	{"a#b", "a#b", ""},
	{"!!str make", "make", ""},
	{"|\n      a: b #c\n      *x\n\n      %d `e` {f,g} [ h ] && ! i", "a: b #c\n*x\n\n%d `e` {f,g} [ h ] && ! i\n", ""},
	{"|-\n      a", "a", ""},
	{"|2\n      a", "  a\n", ""},
	{">\n      one", "one\n", ""},
	{">-\n      a\n\n      b", "a\nb", ""},
	{"make #fast", "", "#fast is a comment in YAML"},
	{"echo \"a #b\"", "", `before the #, inside the quote "`},
	{"echo 'a # b'", "", "before the #, inside the quote '"},
	{"echo a: b", "", "colon and a space"},
	{"echo a:", "", "colon and a space"},
	{"%d", "", "no text begin with %"},
	{"@foo", "", "no text begin with @"},
	{"`date`", "", "no text begin with `"},
	{"*.go", "", "leading * for an alias"},
	{"*x", "", "leading * for an alias"},
	{"&x foo", "", "&x for an anchor"},
	{"& foo", "", "leading & for an anchor"},
	{`"a\d"`, "", `\d is no escape`},
	{"{a,b}", "", "leading {"},
	{"{ a; b; }", "", "leading {"},
	{"{a,b} && c", "", "leading {"},
	{"{a", "", "leading {"},
	{"[ -f x ]", "", "leading ["},
	{"[ -f x ] && y", "", "leading ["},
	{"[[ -f x ]]", "", "leading ["},
	{"[a", "", "leading ["},
	{"! grep x f", "", "! for a tag"},
	{"!x", "", "!x for a tag"},
	{"? foo", "", quoteIt},
	{"- foo", "", quoteIt},
	{`"make" test`, "", "text after the closing quote"},
	{"'a' b", "", "text after the closing quote"},
	{"'unclosed", "", "the quote that opens here is never closed"},
	{`"unclosed`, "", "the quote that opens here is never closed"},
	{"| grep x", "", "leading | for the start of a block"},
	{"> out", "", "leading > for the start of a block"},
	{"|", "", "empty command"},
	{"''", "", "empty command"},
	{"' '", "", "empty command"},
	{`"\n"`, "", "empty command"},
	{"", "", "empty command"},
	{"~", "", "empty command"},
	{"null", "", "empty command"},
	{"# only a comment", "", "empty command"},
	{"|\n      # todo", "", "only a comment"},
	{`"a\0b"`, "", "NUL"},
	{"a &&\n      b", "", "folds these lines"},
	{"make \\\n      all", "", "folds these lines"},
	{"'a\n      b'", "", "folds these lines"},
	{"\"a\n      b\"", "", "folds these lines"},
	{"\"a\\\n      b\"", "", "folds these lines"},
	{">\n      make\n      make test", "", "folds these lines"},
	{">-\n      a\n      b\n\n      c", "", "folds these lines"},
	{">2-\n      a\n      b", "  a\n  b", ""},
	{"&a >\n      a\n      b", "", "folds these lines"},
	{"a\u2028b", "", "U+2028"},
	{"a\u2029b", "", "U+2029"},
	{"a\u0085b", "", "U+0085"},
	{"a\rb", "", "carriage return"},
	{"a\x07b", "", "control character U+0007"},
	{"|\n\ta", "", "a tab"},
}

func TestCommandTraps(t *testing.T) {
	for _, tc := range commandTraps {
		for _, form := range []struct {
			before, after string
			line, col     int
			get           func(*Plan) string
		}{
			{"candidates:\n  - ", "\ntest: a\n", 2, 5, func(p *Plan) string { return p.Candidates[0].Run }},
			{"candidates: [a]\ntest:\n  run: ", "\n", 3, 8, func(p *Plan) string { return p.Test.Run }},
			{"candidates: [a]\ntest:\n  run: ", "\n  timeout: 5s\nname: x\n", 3, 8, func(p *Plan) string { return p.Test.Run }},
		} {
			text := form.before + tc.yaml + form.after
			p, err := Parse("p.yaml", []byte(text), testOptions)
			if tc.err == "" {
				assert.NilError(t, err, text)
				assert.Equal(t, form.get(p), tc.run, text)
				continue
			}
			assert.ErrorContains(t, err, tc.err, text)
			checkPlaces(t, err, strings.Count(text, "\n")+1)
			first := err.(*Errors).List[0]
			last := form.line + strings.Count(tc.yaml, "\n")
			assert.Assert(t, first.Line >= form.line && first.Line <= last, "%s: %v", text, err)
			if first.Line == form.line {
				assert.Assert(t, first.Col >= form.col-1, "%s: %v", text, err)
			}
		}
	}
}

// In { } and [ ] a comma and a bracket end a text; inside a shell's quote that
// is never meant. An apostrophe in a variable is no quote.
func TestCommandsInFlow(t *testing.T) {
	for _, plan := range []string{
		"candidates: [echo \"a, b\"]\ntest: c\n", "candidates: [a]\ntest: {run: echo 'a, timeout: 5s}\n",
	} {
		_, err := Parse("p.yaml", []byte(plan), testOptions)
		assert.ErrorContains(t, err, "YAML ends this text before the ,", plan)
	}
	p := parse(t, "candidates: [echo \"a\" b, 'x, y']\ntest: {run: echo ok}\nenv: {A: it's, B: don't} # done\n")
	assert.Equal(t, p.Candidates[0].Run, `echo "a" b`)
	assert.Equal(t, p.Candidates[1].Run, "x, y")
	assert.DeepEqual(t, p.Env, map[string]string{"A": "it's", "B": "don't"})
}

// A text under | that is not indented gets a hint at that.
func TestBlockWithoutIndentation(t *testing.T) {
	_, err := Parse("p.yaml", []byte("candidates: [a]\ntest:\n  run: |\n  make\n"), testOptions)
	assert.ErrorContains(t, err, "p.yaml:4:3: not valid YAML: a key has no colon, or text that belongs under a | is not indented")
}

func TestErrorsAreBounded(t *testing.T) {
	_, err := Parse("p.yaml", []byte(minimal(manyKeys(5000))), testOptions)
	list := err.(*Errors).List
	assert.Equal(t, len(list), maxErrors+1)
	assert.Equal(t, list[maxErrors].Msg, "there are more errors than the 1000 that are listed")
	_, err = Parse("p.yaml", []byte(minimal(strings.Repeat("é", 5000)+": x\n")), testOptions)
	assert.Assert(t, len(err.Error()) < 700 && utf8.ValidString(err.Error()))
}

// The column is that of the character that is wrong, counted in characters.
func TestColumns(t *testing.T) {
	for plan, want := range map[string]string{
		"candidates: [a]\ntest: \"é\\d\"\n":                     "2:9",
		"candidates: [a]\ntest: grep é: x\n":                    "2:13",
		"candidates: [a]\ntest: b\nname: é\n":                   "3:7",
		"candidates: [\"é\", {run: a, tiemout: 5s}]\ntest: b\n": "1:28",
	} {
		_, err := Parse("p.yaml", []byte(plan), testOptions)
		assert.ErrorContains(t, err, "p.yaml:"+want+": ", plan)
	}
}

// The line of a syntax error is where it begins, however far away YAML notices.
func TestSyntaxErrorLines(t *testing.T) {
	far := strings.Repeat("# far\n", 300)
	for plan, line := range map[string]int{
		"candidates:\n  - a\n  - 'b\n" + far + "test: b\n":       3,
		"candidates:\n  - a\n  - [b\n" + far + "test: b\n":       3,
		far + "candidates:\n  - a\n  - %b\n" + far + "test: b\n": 303,
		"candidates:\n  - a\n" + far + "test: b\n  run: c\n":     304,
		"candidates: [\n a,\n b,\n]\n" + far + "test: @x\n":      305,
		"test: |\n  a\n b\ncandidates: [a]\n":                    3,
		"candidates:\n  - a\n" + far + " - b\ntest: c\n":         303,
	} {
		_, err := Parse("p.yaml", []byte(plan), testOptions)
		assert.ErrorContains(t, err, fmt.Sprintf("p.yaml:%d:", line))
	}
}

func TestBOMAndCRLF(t *testing.T) {
	unix := "name: x\ncandidates:\n  - run: |\n      a\n      b\n  - {name: c, run: \"c\\r\\n\"}\ntest: 'd'\n"
	want, err := Parse("p.yaml", []byte(unix), testOptions)
	assert.NilError(t, err)
	got, err := Parse("p.yaml", []byte("\ufeff"+strings.ReplaceAll(unix, "\n", "\r\n")), testOptions)
	assert.NilError(t, err)
	assert.DeepEqual(t, got, want)
	assert.Equal(t, got.Candidates[0].Run, "a\nb\n")
	assert.Equal(t, got.Candidates[1].Run, "c\r\n") // asked for by escapes
	_, err = Parse("p.yaml", []byte("\ufeffname: x\r\ncandidates: [a]\r\ntset: b\r\n"), testOptions)
	assert.ErrorContains(t, err, `p.yaml:3:1: unknown key "tset"`)
}

func TestAnchorsAndMerge(t *testing.T) {
	p := parse(t, `
env: &env
  A: plan
  B: plan
candidates:
  - &first
    name: first
    run: &cmd make
    env: {<<: *env, B: own}
  - <<: *first
    name: second
    timeout: 5s
  - {name: third, run: *cmd, env: {B: own, <<: [{A: near}, *env, {C: far}]}}
test:
  run: *cmd
  <<: {run: never, timeout: 1m}
`)
	assert.Equal(t, len(p.Candidates), 3)
	assert.DeepEqual(t, p.Candidates[0].Env, map[string]string{"A": "plan", "B": "own"})
	assert.DeepEqual(t, p.Candidates[1].Env, map[string]string{"A": "plan", "B": "own"})
	assert.Equal(t, p.Candidates[1].Name, "second")
	assert.Equal(t, p.Candidates[1].Run, "make")
	assert.Equal(t, p.Candidates[1].Timeout, Duration(5*time.Second))
	assert.DeepEqual(t, p.Candidates[2].Env, map[string]string{"A": "near", "B": "own", "C": "far"})
	assert.Equal(t, p.Test.Run, "make")
	assert.Equal(t, p.Test.Timeout, Duration(time.Minute))
	// A quoted << is a key as any other.
	_, err := Parse("p.yaml", []byte(minimal("env: {'<<': x}\n")), testOptions)
	assert.ErrorContains(t, err, `"<<" cannot be a variable's name`)
}

// A modest use of anchors is no bomb.
func TestLargeEnvThroughOneAnchor(t *testing.T) {
	var b strings.Builder
	b.WriteString("env: &e\n")
	for i := range 300 {
		fmt.Fprintf(&b, "  V%d: x\n", i)
	}
	b.WriteString("candidates:\n")
	for range 100 {
		b.WriteString("  - {run: a, env: *e}\n")
	}
	b.WriteString("test: {run: b}\n")
	p := parse(t, b.String())
	assert.Equal(t, len(p.Candidates[99].Env), 300)
}

// bomb is a plan whose aliases expand to width^levels values.
func bomb(levels, width int) string {
	var b strings.Builder
	b.WriteString("env:\n  a0: &a0 [x]\n")
	for i := 1; i <= levels; i++ {
		fmt.Fprintf(&b, "  a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i-1), width), ", "))
	}
	return b.String() + "candidates: [a]\ntest: b\n"
}

func TestBounds(t *testing.T) {
	long := strings.Repeat("x", 150)
	for name, tc := range map[string]struct{ plan, want string }{
		"alias bomb":        {bomb(9, 9), "aliases expand to more than 200000 values"},
		"deep aliases":      {bomb(70, 1), "nested deeper than 64 levels"},
		"deep flow":         {minimal("env: " + strings.Repeat("[", 500_000)), "p.yaml:"},
		"deep flow, closed": {minimal("env: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000)), "nested deeper than 64 levels"},
		"deep mappings":     {minimal("env: " + strings.Repeat("{a: ", 3000) + strings.Repeat("}", 3000)), "nested deeper than 64 levels"},
		"deep block":        {minimal("env:\n  " + strings.Repeat("- ", 5000) + "a\n"), "nested deeper than 64 levels"},
		"deep keys":         {minimal("env:\n  " + strings.Repeat("? ", 5000) + "a\n"), "p.yaml:"},
		"too large":         {"#" + strings.Repeat(" ", maxFile), "the plan is larger than 1 MiB"},
		"one long line":     {minimal("env: {" + strings.Repeat("aa: b, ", 149_000) + "}"), "p.yaml:3"},
		"aliases in a line": {minimal("x: [&a b, " + strings.Repeat("*a, c, ", 140_000) + "]"), "p.yaml:3"},
		"merges in a line":  {minimal("x: [" + strings.Repeat("{<<: {a: b}}, ", 70_000) + "]"), "p.yaml:3"},
		"unknown keys":      {minimal(strings.Repeat("retrys: 1\n", 100_000)), "p.yaml:3"},
		"different keys":    {minimal(manyKeys(60_000)), "p.yaml:3"},
		"syntax error, far": {strings.Repeat("# x\n", 200_000) + minimal("name: @\n"), "p.yaml:200003:7"},
		"open quote, near":  {minimal("name: '\n" + strings.Repeat("x\n", 400_000)), "p.yaml:3"},
		"comments":          {minimal("env:\n" + strings.Repeat("  # x\n\n", 100_000) + "  1: x\n"), "p.yaml:"},
		"candidates":        {"candidates:\n" + strings.Repeat("  - ''\n", 100_000) + "test: b\n", "empty command"},
		"long names":        {minimal(strings.Repeat(long+": x\n", 6_000)), "p.yaml:3"},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start := time.Now()
			_, err := Parse("p.yaml", []byte(tc.plan), testOptions)
			took := time.Since(start)
			runtime.ReadMemStats(&after)
			assert.ErrorContains(t, err, tc.want)
			checkPlaces(t, err, strings.Count(tc.plan, "\n")+1)
			t.Logf("%s, %d MB allocated in all", took, (after.TotalAlloc-before.TotalAlloc)>>20)
			assert.Assert(t, took < 20*time.Second, "took %s", took)
			if name == "alias bomb" {
				assert.Assert(t, took < time.Second && after.TotalAlloc-before.TotalAlloc < 100<<20)
			}
		})
	}
}

func manyKeys(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "k%d: x\n", i)
	}
	return b.String()
}

// A script may be larger than one argument of a program, up to the file's bound.
func TestLargeScript(t *testing.T) {
	script := strings.Repeat("echo x\n", 30_000)
	p := parse(t, "candidates:\n  - run: |\n      "+strings.ReplaceAll(strings.TrimSuffix(script, "\n"), "\n", "\n      ")+"\ntest: a\n")
	assert.Equal(t, p.Candidates[0].Run, script)
}

// The longest variable that the kernel takes is accepted.
func TestLongestVariable(t *testing.T) {
	for n, ok := range map[int]bool{MaxEnv - len("A=") - 1: true, MaxEnv - len("A="): false} {
		_, err := Parse("p.yaml", []byte(minimal("env: {A: "+strings.Repeat("x", n)+"}\n")), testOptions)
		assert.Equal(t, err == nil, ok, "%d", n)
	}
}
