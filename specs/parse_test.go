package specs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"gotest.tools/v3/assert/cmp"
	"gotest.tools/v3/golden"
)

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	assert.NilError(t, err)
	return data
}

var testOptions = Options{Dir: "/plans", Home: "/home/u", CPUs: 2}

// full are the options under which the grammar of later keys can be tested.
func full() Options {
	o := testOptions
	o.allowUnsupported = true
	return o
}

func parse(t *testing.T, plan string) *Plan {
	t.Helper()
	p, err := Parse("p.yaml", []byte(plan), testOptions)
	assert.NilError(t, err)
	return p
}

// minimal is a plan with more keys, at its top level.
func minimal(more string) string { return "candidates: [a]\ntest: b\n" + more }

func TestDefaults(t *testing.T) {
	p := parse(t, minimal(""))
	assert.DeepEqual(t, p, &Plan{
		File: "p.yaml", Dir: "/plans", Name: "p", Base: Base{Ref: "HEAD"}, Workdir: ".",
		Shell: []string{"sh", "-e", "-c"}, Env: map[string]string{}, PassEnv: []string{},
		Candidates: []Candidate{{
			Name: "c1", Run: "a", Repeat: 1, Env: map[string]string{}, Workdir: ".", Network: NetworkHost,
		}},
		Test: Test{
			Run: "b", Network: NetworkHost, Protect: []string{}, OnTamper: TamperReject, OnBase: BaseWarn,
		},
		Select: FirstPass, Parallel: 2, Grace: Duration(5 * time.Second), Home: HomeOverlay,
		Mounts: []Mount{}, Network: NetworkHost, Isolation: Namespaces, Promote: PromoteTrue,
		Artifacts: []string{}, Keep: KeepWinner,
	})
	assert.Equal(t, parse(t, "base: HEAD\n"+minimal("")).BaseGiven, true)
}

// The example of the contract has every key.
func TestEveryKey(t *testing.T) {
	p, err := Parse("plans/full.yaml", readFile(t, "testdata/full.yaml"), Options{Dir: "/w", Home: "/home/u", allowUnsupported: true})
	assert.NilError(t, err)
	out, err := p.JSON()
	assert.NilError(t, err)
	golden.Assert(t, string(out), "full.golden.json")
}

func TestExampleIsValidAndPlain(t *testing.T) {
	p, err := Parse("example.yaml", Example(), testOptions)
	assert.NilError(t, err)
	assert.Equal(t, len(p.Candidates), 2)
	assert.Equal(t, p.Base.Dir, "/plans")
	for key, values := range notYet {
		last := key[strings.LastIndex(key, ".")+1:]
		assert.Assert(t, values != nil || !strings.Contains(string(Example()), last+":"), "the example speaks of %s", key)
	}
}

func TestShapes(t *testing.T) {
	p := parse(t, `
candidates:
  - echo one
  - {run: echo two, timeout: 1h30m, env: {K: v}}
  - name: three
    run: |
      echo a: b # c
      echo *.go
test: {run: make test, timeout: 90s}
parallel: 7
timeout: 2h
grace: 250ms
home: private
isolation: namespaces
network: host
promote: false
apply: true
shell: [bash, -c]
mounts:
  - from: ~/models
  - {from: data, to: /data, mode: overlay}
  - {from: /srv/x/, to: ~/x, mode: rw}
`)
	var names, runs []string
	for _, c := range p.Candidates {
		names, runs = append(names, c.Name), append(runs, c.Run)
	}
	assert.DeepEqual(t, names, []string{"c1", "c2", "three"})
	assert.DeepEqual(t, runs, []string{"echo one", "echo two", "echo a: b # c\necho *.go\n"})
	assert.Equal(t, p.Candidates[1].Timeout, Duration(90*time.Minute))
	assert.DeepEqual(t, p.Candidates[1].Env, map[string]string{"K": "v"})
	assert.Equal(t, p.Test.Run, "make test")
	assert.Equal(t, p.Test.Timeout, Duration(90*time.Second))
	assert.Equal(t, p.Parallel, 7)
	assert.Equal(t, p.Timeout, Duration(2*time.Hour))
	assert.Equal(t, p.Grace, Duration(250*time.Millisecond))
	assert.Equal(t, p.Home, HomePrivate)
	assert.Equal(t, p.Isolation, Namespaces)
	assert.Equal(t, p.Promote, PromoteFalse)
	assert.Equal(t, p.Apply, true)
	assert.DeepEqual(t, p.Shell, []string{"bash", "-c"})
	assert.DeepEqual(t, p.Mounts, []Mount{
		{From: "/home/u/models", To: "/home/u/models", Mode: MountRO},
		{From: "/plans/data", To: "/data", Mode: MountOverlay},
		{From: "/srv/x", To: "/home/u/x", Mode: MountRW},
	})
}

func TestBase(t *testing.T) {
	for text, want := range map[string]Base{
		"base: HEAD~2":               {Ref: "HEAD~2"},
		"base: 1234":                 {Ref: "1234"},
		"base: 0e10":                 {Ref: "0e10"},
		"base: {dir: .}":             {Dir: "/plans"},
		"base: {dir: ../x}":          {Dir: "/x"},
		"base: {dir: ~/src}":         {Dir: "/home/u/src"},
		"base:\n  tarball: a.tar.gz": {Tarball: "/plans/a.tar.gz"},
		"base: {tarball: /a/b.tar/}": {Tarball: "/a/b.tar"},
	} {
		assert.DeepEqual(t, parse(t, text+"\n"+minimal("")).Base, want)
	}
}

// Paths are relative to the plan's folder, wherever the caller stands.
func TestPathsOfThePlansFolder(t *testing.T) {
	dir := t.TempDir()
	assert.NilError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	file := filepath.Join(dir, "sub", "My Plan.v2.yaml")
	assert.NilError(t, os.WriteFile(file, []byte(minimal("base: {dir: tree}\n")), 0o644))
	t.Chdir(dir)
	for _, path := range []string{file, filepath.Join("sub", "My Plan.v2.yaml")} {
		p, err := Load(path, Options{})
		assert.NilError(t, err)
		assert.Equal(t, p.Base.Dir, filepath.Join(dir, "sub", "tree"))
		assert.Equal(t, p.Dir, filepath.Join(dir, "sub"))
		assert.Equal(t, p.File, path)
		assert.Equal(t, p.Name, "my-plan-v2")
		assert.Equal(t, p.Parallel, runtime.NumCPU())
	}
}

// A relative plan is looked for in Options.Dir.
func TestLoadFromDir(t *testing.T) {
	dir := t.TempDir()
	assert.NilError(t, os.WriteFile(filepath.Join(dir, "p.yaml"), []byte(minimal("")), 0o644))
	p, err := Load("p.yaml", Options{Dir: dir})
	assert.NilError(t, err)
	assert.Equal(t, p.Dir, dir)
}

func TestLoadErrors(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(filepath.Join(dir, "none.yaml"), Options{})
	assert.Assert(t, errors.Is(err, fs.ErrNotExist), "%v", err)
	_, err = Load(dir, Options{})
	assert.ErrorContains(t, err, "read plan")
	big := filepath.Join(dir, "big.yaml")
	assert.NilError(t, os.WriteFile(big, nil, 0o644))
	assert.NilError(t, os.Truncate(big, 1<<40)) // must not be read to its end
	_, err = Load(big, Options{})
	assert.Error(t, err, big+":1:1: the plan is larger than 1 MiB")
}

// What YAML 1.1 would turn into booleans, numbers and dates stays text.
func TestScalarsAsWritten(t *testing.T) {
	p := parse(t, `
env: {COUNTRY: NO, A: on, V: 1.10, D: 2024-01-02, O: 0755, B: 1_000, T: 12:30:45, Y: y, F: 1e3, H: 0x1F, I: .inf, E: "", Q: "~", S: ' x ', BIG: 123456789012345678901234567890}
candidates: [true, 1.10, 0755, {run: NO}, "~"]
test: yes
`)
	assert.DeepEqual(t, p.Env, map[string]string{
		"COUNTRY": "NO", "A": "on", "V": "1.10", "D": "2024-01-02", "O": "0755", "B": "1_000", "T": "12:30:45",
		"Y": "y", "F": "1e3", "H": "0x1F", "I": ".inf", "E": "", "Q": "~", "S": " x ",
		"BIG": "123456789012345678901234567890",
	})
	var runs []string
	for _, c := range p.Candidates {
		runs = append(runs, c.Run)
	}
	assert.DeepEqual(t, runs, []string{"true", "1.10", "0755", "NO", "~"})
	assert.Equal(t, p.Test.Run, "yes")
}

// mistakes are plans with everything that is wrong with them, in order.
var mistakes = []struct {
	name, plan string
	want       []string
}{
	{"empty", "", []string{"1:1: the plan is empty: `agentenv plan new` writes one to start from"}},
	{"only comments", "# a\n---\n# b\n", []string{"1:1: the plan is empty"}},
	{"text", "make\n", []string{"1:1: a plan is a mapping with keys such as candidates and test, not text"}},
	{"list", "- make\n", []string{"1:1: a plan is a mapping with keys such as candidates and test, not a list"}},
	{"nothing in it", "name: x\n", []string{
		`1:1: the key "candidates" is missing`, `1:1: the key "test" is missing`}},
	{"misspelt key", minimal("timout: 5s\n"), []string{`3:1: unknown key "timout" (did you mean "timeout"?)`}},
	{"wrong case", minimal("Parallel: 5\n"), []string{`3:1: unknown key "Parallel" (did you mean "parallel"?)`}},
	{"camel case", minimal("passEnv: []\n"), []string{`3:1: unknown key "passEnv" (did you mean "pass_env"?)`}},
	{"hyphen", minimal("pass-env: []\n"), []string{`3:1: unknown key "pass-env" (did you mean "pass_env"?)`}},
	{"inner key", "candidates:\n  - run: a\n    tiemout: 5s\ntest: b\n", []string{
		`3:5: unknown key "tiemout" (did you mean "timeout"?)`}},
	{"wrong level", minimal("confirm: 2\n"), []string{`3:1: unknown key "confirm" (it belongs in test)`}},
	{"wrong level, inner", "candidates: [a]\ntest:\n  run: b\n  parallel: 2\n", []string{
		`4:3: unknown key "parallel" (it belongs in the plan's top level)`}},
	{"nothing like it", "candidates: [a]\ntest: {run: b, frobnicate: 1}\n", []string{
		`2:16: unknown key "frobnicate" (known here: run, timeout, network, confirm, protect, on_tamper, on_base)`}},
	{"misspelt and so missing", "candidates: [a]\ntset: b\n", []string{`2:1: unknown key "tset" (did you mean "test"?)`}},
	{"ref is no key", "base: {ref: HEAD}\n" + minimal(""), []string{
		"1:7: base: exactly one of dir and tarball is due", `1:8: unknown key "ref" (known here: dir, tarball)`}},
	{"no key at all of these", "candidates: [a]\ntest:\n  command: make\n", []string{
		`3:3: unknown key "command" (known here: run,`, `3:3: the key "run" is missing`}},
	{"duplicate key", minimal("test: c\n"), []string{`3:1: duplicate key "test" (first at line 2)`}},
	{"duplicate key, quoted", minimal("env:\n  A: 1\n  'A': 2\n"), []string{`5:3: duplicate key "A" (first at line 4)`}},
	{"duplicate name", "candidates:\n  - {name: a, run: x}\n  - {name: b, run: x}\n  - name: a\n    run: y\ntest: b\n", []string{
		`4:11: the name "a" is taken by the candidate at line 2`}},
	{"taken default name", "candidates:\n  - {name: c2, run: x}\n  - y\ntest: b\n", []string{
		`3:5: the name "c2" is taken by the candidate at line 2`}},
	{"all at once", "name: A b\nparallel: 0\ncandidates: []\ntest: {run: ''}\nhome: hots\n", []string{
		`1:7: name: a name has lower-case letters, digits and hyphens only: "A b"`,
		`2:11: parallel: a whole number of at least 1 is due: "0"`,
		"3:13: candidates: at least one is due",
		"4:13: run: empty command",
		`5:7: home: "hots" is none of overlay, private, host (did you mean "host"?)`}},
	{"null", "candidates: ~\ntest:\nname: null\n", []string{
		"1:13: candidates: has no value", "2:6: test: empty command", "3:7: name: has no value"}},
	{"null in env", minimal("env: {A: ~, B: null, C: , D: NULL}\n"), []string{
		`3:10: env.A: has no value: write "" for empty text, and quotes around a word such as null`,
		"3:16: env.B: has no value", "3:25: env.C: has no value", "3:30: env.D: has no value"}},
	{"env list", minimal("env: [A=b]\n"), []string{"3:6: env: a mapping such as {NAME: text} is due"}},
	{"env nested", minimal("env: {A: [b], B: {c: d}}\n"), []string{
		"3:10: env.A: text is due, not a list", "3:18: env.B: text is due, not a mapping"}},
	{"env names", minimal("env: {1A: x, A-B: x, '': x, É: x, A=B: x}\n"), []string{
		`3:7: env: "1A" cannot be a variable's name`, `3:14: env: "A-B" cannot`, `3:22: env: "" cannot`,
		`3:29: env: "É" cannot`, `3:35: env: "A=B" cannot`}},
	{"env NUL", minimal("env: {A: \"x\\0y\"}\n"), []string{"3:10: env.A: the value of A holds a NUL byte"}},
	{"env lost tail", "candidates: [a]\ntest: b\nenv: {A: x #y\n }\napply: true\n", []string{
		"3:10: env.A: #y is a comment in YAML"}},
	{"env value too long", minimal("env:\n  A: " + strings.Repeat("x", 140_000) + "\n"), []string{
		"4:6: env.A: A is 140002 bytes long; the kernel takes at most 131071 for a variable with its name (MAX_ARG_STRLEN): put it into a file"}},
	{"booleans", minimal("promote: yes\napply: on\n"), []string{
		"3:10: promote: write true or false, not yes", "4:8: apply: write true or false, not on"}},
	{"quoted boolean", minimal("apply: 'true'\n"), []string{"3:8: apply: write true without quotes"}},
	{"other booleans", minimal("promote: 1\napply: [true]\n"), []string{
		`3:10: promote: "1" is none of true, false, best`, "4:8: apply: text is due, not a list"}},
	{"numbers", minimal("parallel: '4'\n"), []string{`3:11: parallel: a number without quotes is due: "4"`}},
	{"durations", "candidates: [{run: a, timeout: 5}]\ntest: {run: b, timeout: 1:30}\ntimeout: 1e3\ngrace: 0s\n", []string{
		`1:32: timeout: durations need a unit, such as 30s or 5m: "5"`,
		`2:25: timeout: durations need a unit, such as 30s or 5m: "1:30"`,
		`3:10: timeout: durations need a unit, such as 30s or 5m: "1e3"`,
		`4:8: grace: a duration must be more than zero: "0s"`}},
	{"shell", minimal("shell: bash -c\n"), []string{"3:8: shell: a list such as [bash, -e, -c] is due"}},
	{"shell empty", minimal("shell: []\n"), []string{"3:8: shell: the program is missing"}},
	{"base both", "base: {dir: a, tarball: b}\n" + minimal(""), []string{"1:7: base: exactly one of dir and tarball is due"}},
	{"base none", "base: {}\n" + minimal(""), []string{"1:7: base: exactly one of dir and tarball is due"}},
	{"base path", "base: ./x\n" + minimal(""), []string{`1:7: base: "./x" looks like a path; a directory is {dir: PATH}`}},
	{"base colon", "base: dir:x\n" + minimal(""), []string{"1:7: base: write {dir: x}, with a space after the colon"}},
	{"base flag", "base: -x\n" + minimal(""), []string{`1:7: base: "-x" cannot be a snapshot`}},
	{"base empty dir", "base: {dir: ''}\n" + minimal(""), []string{"1:13: dir: a path is due"}},
	{"other homes", "base: {dir: ~bob/x}\n" + minimal(""), []string{`1:13: dir: "~bob/x": only ~ and ~/ stand for a home directory`}},
	{"candidates text", "candidates: make\ntest: b\n", []string{"1:13: candidates: a list is due, each item on a line of its own after a hyphen"}},
	{"candidates mapping", "candidates: {a: b}\ntest: b\n", []string{"1:13: candidates: a list is due"}},
	{"candidate without run", "candidates: [{name: a}]\ntest: b\n", []string{"1:14: a candidate has either run or script"}},
	{"candidate with both", "candidates: [{run: a, script: b}]\ntest: b\n", []string{
		"1:14: a candidate has either run or script", "1:23: not supported yet: script"}},
	{"candidate null", "candidates:\n  -\n  - ~\ntest: b\n", []string{
		"2:4: candidates: empty command: give one, or take the hyphen out", "3:5: candidates: empty command"}},
	{"test list", "candidates: [a]\ntest: [a, b]\n", []string{"2:7: test: YAML makes of this a list"}},
	{"test without run", "candidates: [a]\ntest: {timeout: 5s}\n", []string{`2:7: the key "run" is missing`}},
	{"missing space", "candidates: [a]\ntest: run:make\n", []string{`2:7: test: a space is missing after "run:"`}},
	{"mounts", minimal("mounts: [{to: /x}, {from: /a, to: x}, {from: /a, to: /proc}, {from: /}, {from: /b, to: /sys/x}, {from: /c, mode: wr}, x]\n"), []string{
		`3:10: the key "from" is missing`, `3:35: to: an absolute path is due: "x"`,
		"3:54: to: nothing can be mounted over /proc", "3:62: nothing can be mounted over /",
		`3:88: to: nothing can be mounted below /sys: "/sys/x"`, `3:114: mode: "wr" is none of ro, overlay, rw`,
		"3:119: mounts: a mapping with keys of from, to, mode is due, not text"}},
	{"mounts over each other", minimal("mounts:\n  - from: /a\n  - {from: /b, to: /a/}\n"), []string{
		"5:5: mounts: /a is mounted at already (line 4)"}},
	{"mount device tree", minimal("mounts: [{from: /d, to: /dev/../dev/}]\n"), []string{"3:25: to: nothing can be mounted over /dev"}},
	{"custom tag", minimal("name: !x y\n"), []string{"3:7: YAML takes !x for a tag, and a plan has none"}},
	{"tag on a mapping", "candidates: [a]\ntest: !<tag:x> {run: b}\n", []string{"2:7: YAML takes !<tag:x> for a tag"}},
	{"binary tag", minimal("env: {A: !!binary aGk=}\n"), []string{"3:10: YAML takes !!binary for a tag"}},
	{"more than a process gives", minimal("isolation: process\nmounts: [{from: /a}]\n"), []string{
		"4:9: mounts: isolation: process cannot give this"}},
	{"home of a process", minimal("isolation: process\nhome: private\n"), []string{
		"4:7: home: isolation: process cannot give this"}},
	{"network of a process", minimal("isolation: process\nnetwork: private\n"), []string{
		"4:10: network: isolation: process cannot give this"}},
	{"network of a process's candidate", "candidates:\n  - a\n  - {run: b, network: nat}\ntest: {run: b, network: private}\nisolation: process\n", []string{
		"3:23: candidates[1].network: isolation: process cannot give this"}},
	{"network of a process's test", "candidates: [a]\ntest: {run: b, network: nat}\nisolation: process\n", []string{
		"2:25: test.network: isolation: process cannot give this"}},
	{"networks", minimal("network: none\n"), []string{`3:10: network: "none" is none of host, private, nat`}},
	{"limits", minimal("limits: {memory: 512, cpus: 0, pids: 0, disk: 0B, nofile: 19, enforce: maybe}\n"), []string{
		`3:18: memory: sizes need a unit, such as 512MiB or 2GB: "512"`,
		`3:29: cpus: a number of cores is due, such as 2 or 0.5: "0"`,
		`3:38: pids: a whole number of at least 1 is due: "0"`,
		`3:47: disk: a size must be more than zero: "0B"`,
		`3:59: nofile: a whole number of at least 20 is due: "19"`,
		`3:72: enforce: "maybe" is none of strict, best-effort`}},
	{"little memory", minimal("limits: {memory: 1023KiB}\n"), []string{
		`3:18: memory: no program starts in so little memory, at least 1MiB is due: "1023KiB"`}},
	{"limits of a list", minimal("limits: [512MiB]\n"), []string{"3:9: limits: "}},
	{"tab", "candidates:\n\t- a\ntest: b\n", []string{"2:1: a tab: YAML indents with spaces only"}},
	{"tab, inner", "candidates: [a]\ntest:\n  run: b\n \ttimeout: 5s\n", []string{"4:2: a tab: YAML indents with spaces only"}},
	{"second document", minimal("---\n" + minimal("")), []string{"3:1: a plan is one document: a second one starts here"}},
	{"second document, empty", "---\n---\n" + minimal(""), []string{"2:1: a plan is one document: a second one starts here"}},
	{"text after the end", minimal("...\n# fine\nrm -rf x\n"), []string{"5:1: text after the end of the document (...)"}},
	{"directive", "%YAML 1.1\n---\n" + minimal(""), []string{"1:1: YAML directives (%) are not accepted in a plan"}},
	{"not UTF-8", minimal("name: \xff\n"), []string{"3:7: not UTF-8: save the plan as UTF-8"}},
	{"UTF-16", "\xff\xfen\x00a\x00", []string{"1:1: not UTF-8 (this looks like UTF-16)"}},
	{"inner BOM", minimal("\ufeffname: x\n"), []string{"3:1: a byte order mark inside the text"}},
	{"control character", minimal("name: \x1b[0m\n"), []string{"3:7: the control character U+001B"}},
	{"wrong indentation", "candidates:\n  - run: a\n   timeout: 5s\ntest: b\n", []string{"3:4: not valid YAML: a list item is expected here; is the indentation right?"}},
	{"merge of text", minimal("env: {<<: x}\n"), []string{"3:7: << merges a mapping, or a list of mappings"}},
	{"merge twice", "candidates: [a]\ntest: {<<: {run: b}, <<: {run: c}}\n", []string{`2:22: duplicate key "<<" (first at line 2)`}},
	{"alias in itself", minimal("env: &e\n  A: *e\n"), []string{"4:6: the alias *e stands inside what it names"}},
	{"unknown alias", minimal("env: *e\n"), []string{"3:6: YAML takes a leading * for an alias"}},
	{"unused anchor", "candidates: [a]\ntest: &1 make\n", []string{"2:7: YAML takes &1 for an anchor, which nothing uses"}},
	{"error in an anchor is told once", "candidates:\n  - &c {run: a, env: &e {A: ~}}\n  - {run: b, env: *e}\ntest: b\n", []string{"2:29: env.A: has no value"}},
	{"expression in a path", "base: {dir: '${{ env.X }}'}\n" + minimal(""), []string{"1:13: dir: ${{ }} is for run, env and a candidate's name only"}},
	{"expressions", "candidates: [{run: 'echo ${{ matrix.m }}', name: 'x-${{env.Y}}', env: {A: '${{ matrix.m }}'}}]\ntest: echo ${{ env.Z }}\n", []string{
		"1:20: not supported yet: ${{ matrix.m }}", "1:50: not supported yet: ${{env.Y}}",
		"1:75: not supported yet: ${{ matrix.m }}", "2:7: not supported yet: ${{ env.Z }}"}},
	{"expressions in a block", "candidates:\n  - |\n    echo ${{ foo\n    echo\n  - |\n    echo ${{\n      env.X }}\ntest: b\n", []string{
		"2:5: run: ${{ is never closed by }}", `5:5: not supported yet: ${{\u000a  env.X }}`}},
	{"a terminal is left alone", minimal("env: {A: \"${{ \\e[31m\\u202e }}\"}\n"), []string{
		`3:10: env.A: ${{ \u001b[31m\u202e }}: only`}},
	{"broken expressions", "candidates: ['echo ${{ x', 'a ${{ github.sha }} b']\ntest: b\n", []string{
		"1:14: run: ${{ is never closed by }}", "1:28: run: ${{ github.sha }}: only ${{ matrix.KEY }} and ${{ env.NAME }} are known"}},
}

func TestMistakes(t *testing.T) {
	for _, tc := range mistakes {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Parse("p.yaml", []byte(tc.plan), testOptions)
			checkErrors(t, err, "p.yaml:", tc.want)
		})
	}
}

// checkErrors compares each error with the beginning that is wanted.
func checkErrors(t *testing.T, err error, prefix string, want []string) {
	t.Helper()
	var list *Errors
	assert.Assert(t, errors.As(err, &list), "%v", err)
	assert.Assert(t, cmp.Len(list.List, len(want)), "%v", err)
	for i, e := range list.List {
		assert.Assert(t, strings.HasPrefix(e.Error(), prefix+want[i]), "got  %s\nwant %s%s", e, prefix, want[i])
	}
	var one *Error
	assert.Assert(t, errors.As(err, &one) && one == list.List[0])
}

// Every key of the table is refused by itself, at its place, unless it asks
// for what is there; and none of them is refused when it is left out.
func TestNotSupportedYet(t *testing.T) {
	asks := map[string][2]string{ // a value that asks for more, and one that does not
		"workdir": {"sub", "."}, "pass_env": {"[X]", "[]"}, "setup": {"make"},
		"select": {"all", "first-pass"}, "score": {"{run: x}"},
		"promote": {"best", "true"}, "artifacts": {"[a]", "[]"}, "keep": {"all", "winner"},
		"candidates.stdin": {"f"}, "candidates.workdir": {"x", "."},
		"candidates.matrix": {"{a: [b]}"}, "test.confirm": {"1", "0"}, "test.protect": {"[x]"},
		"test.on_tamper": {"report"}, "test.on_base": {"skip"},
		// These need others, and are in TestMistakes and TestMatrixGrammar.
		"candidates.script": {}, "candidates.exclude": {}, "candidates.include": {}, "${{": {},
	}
	for path := range notYet {
		pair, ok := asks[path]
		assert.Assert(t, ok, "no value to try for %s", path)
		for i, value := range pair {
			if value == "" {
				continue
			}
			group, key, _ := strings.Cut(path, ".")
			plan, line, col := minimal(path+": "+value+"\n"), 3, 1
			switch group {
			case "candidates":
				plan, line, col = "candidates:\n  - run: a\n    "+key+": "+value+"\ntest: b\n", 3, 5
			case "test":
				plan, line, col = "candidates: [a]\ntest:\n  run: b\n  "+key+": "+value+"\n", 4, 3
			default:
				key = path
			}
			_, err := Parse("p.yaml", []byte(plan), testOptions)
			if i == 1 {
				assert.NilError(t, err, plan)
				continue
			}
			assert.ErrorContains(t, err, fmt.Sprintf("p.yaml:%d:%d: not supported yet: %s", line, col, key), plan)
		}
	}
}

// A value of a later key is checked as well as the key is refused.
func TestLaterKeysAreStillChecked(t *testing.T) {
	_, err := Parse("p.yaml", []byte(minimal("score: {run: x, goal: most}\n")), testOptions)
	checkErrors(t, err, "p.yaml:", []string{
		"3:1: not supported yet: score", `3:23: goal: "most" is none of max, min`})
}

// Networks follow the plan's; limits are as they are written.
func TestNetworksAndLimits(t *testing.T) {
	p := parse(t, `
network: private
candidates: [a, {run: b, network: host, repeat: 3}]
test: {run: c, network: nat}
limits: {cpus: "2", memory: 1.5GiB, pids: 512, disk: 4GB, nofile: 20, enforce: best-effort}
`)
	assert.Equal(t, p.Network, NetworkPrivate)
	assert.Equal(t, p.Candidates[0].Network, NetworkPrivate)
	assert.Equal(t, p.Candidates[1].Network, NetworkHost)
	assert.Equal(t, p.Candidates[1].Repeat, 3)
	assert.Equal(t, p.Test.Network, NetworkNAT)
	assert.DeepEqual(t, p.Limits, &Limits{
		CPUs: 2, Memory: 1610612736, PIDs: 512, Disk: 4e9, NoFile: 20, Enforce: BestEffort})
	assert.Equal(t, parse(t, minimal("network: private\n")).Test.Network, NetworkPrivate)
	assert.DeepEqual(t, parse(t, minimal("limits: {}\n")).Limits, &Limits{Enforce: Strict})
	assert.Assert(t, parse(t, minimal("")).Limits == nil)
}

func TestLaterGrammar(t *testing.T) {
	for plan, want := range map[string]string{
		minimal("select: all\npromote: true\n"):                "p.yaml:4:1",
		minimal("promote: best\n"):                             "promote: best goes with select: all only",
		minimal("select: best-score\n"):                        "3:9: select: best-score needs the key score",
		minimal("score: {goal: max}\n"):                        `3:8: the key "run" is missing`,
		minimal("score: ./bench\n"):                            "score: a mapping with keys of run, goal is due, not text",
		minimal("limits: {cpus: many}\n"):                      `3:16: cpus: a number of cores is due, such as 2 or 0.5: "many"`,
		minimal("limits: {cpus: 0}\n"):                         "cpus: a number of cores",
		minimal("limits: {pids: 0}\n"):                         "pids: a whole number of at least 1",
		minimal("limits: {disk: 0B}\n"):                        "disk: a size must be more than zero",
		minimal("limits: {enforce: maybe}\n"):                  `enforce: "maybe" is none of strict, best-effort`,
		minimal("workdir: /x\n"):                               "workdir: a path relative to the tree is due",
		minimal("workdir: a/../../x\n"):                        "leads out of the tree",
		minimal("artifacts: [/x, '../x', 'a[']\n"):             "3:25: artifacts: \"a[\" is not a valid pattern",
		minimal("pass_env: [A-B]\n"):                           `pass_env: "A-B" cannot be a variable's name`,
		minimal("setup: {timeout: 5s}\n"):                      `the key "run" is missing`,
		minimal("keep: winners\n"):                             `(did you mean "winner"?)`,
		"candidates: [{run: a, repeat: 0}]\ntest: b\n":         "repeat: a whole number of at least 1",
		"candidates: [{run: a, stdin: ''}]\ntest: b\n":         "stdin: a path is due",
		"candidates: [a]\ntest: {run: b, confirm: -1}\n":       "confirm: a whole number of at least 0",
		"candidates: [a]\ntest: {run: b, on_base: warns}\n":    `(did you mean "warn"?)`,
		"candidates: [a]\ntest: {run: 'x ${{ matrix.m }}'}\n":  `the matrix here has no key "m"`,
		"candidates: [a]\ntest: {run: b, protect: Makefile}\n": "protect: a list is due",
		"candidates: [{run: 'a ${{ matrix.x }}'}]\ntest: b\n":  `run: ${{ matrix.x }}: the matrix here has no key "x"`,
	} {
		_, err := Parse("p.yaml", []byte(plan), full())
		assert.ErrorContains(t, err, want, plan)
	}
	p, err := Parse("p.yaml", []byte(minimal("select: all\nsetup: make deps\nscore: {run: x}\nlimits: {cpus: 0.5, memory: 1.5GiB}\n")), full())
	assert.NilError(t, err)
	assert.Equal(t, p.Promote, PromoteFalse)
	assert.Equal(t, p.Setup.Run, "make deps")
	assert.Equal(t, p.Score.Goal, Max)
	assert.DeepEqual(t, p.Limits, &Limits{CPUs: 0.5, Memory: 1610612736, Enforce: Strict})
}

func TestMatrixGrammar(t *testing.T) {
	for matrix, want := range map[string]string{
		"matrix: {}":                              "matrix: a mapping of keys to lists of values is due",
		"matrix: {a: []}":                         "matrix.a: a list of values cannot be empty",
		"matrix: {a: b}":                          "matrix.a: a list of values is due",
		"matrix: {a: [1, '1']}":                   `matrix.a: the value "1" stands here twice (first at line 3)`,
		"matrix: {a: [~]}":                        "matrix.a: has no value",
		"matrix: {1: [b]}":                        `matrix: "1" cannot be a matrix key`,
		"exclude: [{a: b}]":                       "exclude: there is no matrix",
		"include: []":                             "include: a list cannot be empty here",
		"exclude: {a: b}":                         "exclude: a list of combinations",
		"matrix: {a: [b]}\n    exclude: [{c: b}]": `exclude: the matrix has no key "c"`,
		"matrix: {a: [b], d: [e]}\n    include: [{a: x}]": `include: the key "d" of the matrix is missing`,
		"matrix: {a: [b]}\n    exclude: [{}]":             "exclude: a combination cannot be empty",
	} {
		_, err := Parse("p.yaml", []byte("candidates:\n  - run: x\n    "+matrix+"\ntest: b\n"), full())
		assert.ErrorContains(t, err, want, matrix)
	}
	p, err := Parse("p.yaml", []byte("candidates:\n  - name: x-${{ matrix.v }}\n    run: echo ${{matrix.v}} ${{ env.HOME }}\n    matrix: {v: [1.10, NO]}\ntest: b\n"), full())
	assert.NilError(t, err)
	assert.DeepEqual(t, p.Candidates[0].Matrix, map[string][]string{"v": {"1.10", "NO"}})
}
