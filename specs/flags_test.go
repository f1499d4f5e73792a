package specs

import (
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
)

func TestFromFlags(t *testing.T) {
	p, err := FromFlags(Flags{
		Test: "go test ./...", Commands: []string{"echo a: b #c", "{ x; }"},
		Given: map[string][]string{"base": {"dir:."}, "timeout": {"5m"}, "env": {"A=1", "B=x=y", "C="}, "mount": {"~/m:/m"}, "promote": {"false"}},
	}, testOptions)
	assert.NilError(t, err)
	// The same plan from a file differs in nothing but the file.
	want, err := Parse("tournament.yaml", []byte(`
base: {dir: .}
env: {A: 1, B: x=y, C: ""}
mounts: [{from: ~/m, to: /m}]
candidates:
  - {run: 'echo a: b #c', timeout: 5m}
  - {run: '{ x; }', timeout: 5m}
test: go test ./...
promote: false
`), testOptions)
	assert.NilError(t, err)
	want.File = ""
	assert.DeepEqual(t, p, want)
}

func TestFromFlagsErrors(t *testing.T) {
	for _, tc := range []struct {
		flags Flags
		want  []string
	}{
		{Flags{}, []string{"--test: empty command", "candidates: at least one command is due after --"}},
		{Flags{Test: "a", Commands: []string{"", "echo ${{ matrix.x }}"}}, []string{
			"candidate c1: empty command", "candidate c2: not supported yet: ${{ matrix.x }}"}},
		{Flags{Test: "${{ x", Commands: []string{"a"}}, []string{"--test: run: ${{ is never closed by }}"}},
		{Flags{Test: "a", Commands: []string{"b"}, Given: map[string][]string{"timeout": {"30"}, "nice": {"5"}}}, []string{
			"--nice: unknown flag of a plan", `--timeout: durations need a unit, such as 30s or 5m: "30"`}},
	} {
		_, err := FromFlags(tc.flags, testOptions)
		checkErrors(t, err, "", tc.want)
	}
}

func TestOverride(t *testing.T) {
	plan := `
env: {A: plan, B: plan}
mounts: [{from: /x, to: /m}, {from: /y}]
candidates: [{run: a, env: {A: own}}, {run: b, timeout: 1m}]
test: {run: c, timeout: 1m}
timeout: 1m
grace: 1s
`
	p := parse(t, plan)
	err := p.Override(Flags{Given: map[string][]string{
		"base": {"HEAD~1"}, "parallel": {"3"}, "timeout": {"2m"}, "total-timeout": {"3m"}, "test-timeout": {"4m"},
		"grace": {"5m"}, "promote": {"false"}, "apply": {"true"}, "isolation": {"namespaces"}, "network": {"host"},
		"home": {"host"}, "mount": {"/z:/m:rw"}, "env": {"A=flag"},
	}}, testOptions)
	assert.NilError(t, err)
	want := parse(t, `
base: HEAD~1
env: {A: flag, B: plan}
mounts: [{from: /y}, {from: /z, to: /m, mode: rw}]
candidates: [{run: a, env: {A: flag}, timeout: 2m}, {run: b, timeout: 2m}]
test: {run: c, timeout: 4m}
parallel: 3
timeout: 3m
grace: 5m
promote: false
apply: true
home: host
`)
	assert.DeepEqual(t, p, want)
}

// Each wrong flag is named, and the plan stays as it was.
func TestOverrideErrors(t *testing.T) {
	p, before := parse(t, minimal("")), parse(t, minimal(""))
	for flag, values := range map[string]map[string]string{
		"base":          {"": "a snapshot's id", "./x": "looks like a path; a directory is dir:PATH", "dir:": "a path is due", "-x": "cannot be a snapshot"},
		"parallel":      {"0": "at least 1", "x": "at least 1", "-1": "at least 1", "": "at least 1", "99999999999999999999": "at most 999999999"},
		"timeout":       {"0": "need a unit", "-1s": "more than zero", "30": "need a unit", "99999h": "at most 8760h", "": "need a unit"},
		"total-timeout": {"0s": "more than zero"},
		"test-timeout":  {"1d": "the longest unit is the hour"},
		"grace":         {"5": "need a unit"},
		"promote":       {"yes": "none of true, false, best", "best": "is not supported yet, only true, false so far"},
		"apply":         {"maybe": "none of true, false"},
		"isolation":     {"none": "none of namespaces, process"},
		"network":       {"hots": `did you mean "host"`, "": "none of host, private, nat"},
		"home":          {"/x": "none of overlay, private, host"},
		"mount":         {"/a:/proc": "over /proc", "": "a path is due"},
		"env":           {"A": "NAME=VALUE is due", "1=x": "cannot be a variable's name", "A=" + strings.Repeat("x", MaxEnv): "MAX_ARG_STRLEN", "A=\x00": "NUL"},
	} {
		for value, want := range values {
			err := p.Override(Flags{Given: map[string][]string{flag: {value}}}, testOptions)
			assert.ErrorContains(t, err, want, "%s %q", flag, value)
			assert.Assert(t, strings.HasPrefix(err.Error(), "--"+flag+": "), err.Error())
			assert.DeepEqual(t, p, before)
		}
	}
	err := p.Override(Flags{Given: map[string][]string{"mount": {"/a:/m", "/b:/m"}}}, testOptions)
	assert.Error(t, err, "--mount: /m is mounted at twice")
	err = p.Override(Flags{Given: map[string][]string{"isolation": {"process"}, "home": {"private"}}}, testOptions)
	checkErrors(t, err, "", []string{"--isolation: isolation: process cannot give what home asks for"})
	assert.DeepEqual(t, p, before)
	err = p.Override(Flags{Given: map[string][]string{"isolation": {"process"}, "network": {"nat"}}}, testOptions)
	checkErrors(t, err, "", []string{"--isolation: isolation: process cannot give what network asks for"})
	assert.DeepEqual(t, p, before)
	own := parse(t, "candidates: [{run: a, network: private}]\ntest: b\n")
	err = own.Override(Flags{Given: map[string][]string{"isolation": {"process"}}}, testOptions)
	checkErrors(t, err, "", []string{"--isolation: isolation: process cannot give what candidates[0].network asks for"})
	err = p.Override(Flags{Test: "a", Commands: []string{"b"}}, testOptions)
	checkErrors(t, err, "", []string{"--test: the plan file has the test", "candidates: the plan file has the candidates"})
}

func TestOverrideNetworkFollowsThePlans(t *testing.T) {
	p, err := Parse("p.yaml", []byte("setup: s\ncandidates: [a, {run: b, network: nat}]\ntest: c\n"), full())
	assert.NilError(t, err)
	assert.NilError(t, p.Override(Flags{Given: map[string][]string{"network": {"private"}}}, testOptions))
	assert.Equal(t, p.Network, NetworkPrivate)
	assert.Equal(t, p.Setup.Network, NetworkPrivate)
	assert.Equal(t, p.Test.Network, NetworkPrivate)
	assert.Equal(t, p.Candidates[0].Network, NetworkPrivate)
	assert.Equal(t, p.Candidates[1].Network, NetworkNAT)
}

// The contract's --promote rules hold for flags too.
func TestOverridePromoteWithSelectAll(t *testing.T) {
	p, err := Parse("p.yaml", []byte(minimal("select: all\n")), full())
	assert.NilError(t, err)
	assert.ErrorContains(t, p.Override(Flags{Given: map[string][]string{"promote": {"true"}}}, full()), "false or best is due")
	assert.NilError(t, p.Override(Flags{Given: map[string][]string{"promote": {"best"}}}, full()))
	assert.Equal(t, p.Promote, PromoteBest)
}

// A command that has no plan uses the same flags on an empty one.
func TestOverrideOfAnEmptyPlan(t *testing.T) {
	p := &Plan{}
	assert.NilError(t, p.Override(Flags{Given: map[string][]string{"env": {"A=1"}, "mount": {"/a"}, "home": {"private"}}}, testOptions))
	assert.DeepEqual(t, p.Env, map[string]string{"A": "1"})
	assert.DeepEqual(t, p.Mounts, []Mount{{From: "/a", To: "/a", Mode: MountRO}})
	assert.Equal(t, p.Home, HomePrivate)
}

func TestLastFlagCounts(t *testing.T) {
	p := parse(t, minimal(""))
	assert.NilError(t, p.Override(Flags{Given: map[string][]string{"grace": {"1s", "2s"}, "isolation": {"process"}}}, testOptions))
	assert.Equal(t, p.Isolation, Process)
	assert.Equal(t, p.Grace, Duration(2*time.Second))
}
