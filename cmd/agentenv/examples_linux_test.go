package main

import (
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/runner"
)

// examples says how each directory of examples/ that has a plan ends.
var examples = map[string]struct {
	// test is the directory's own test; it fails before and passes after.
	test   []string
	winner string
	want   map[string][]runner.Status
}{
	"fix-a-bug": {
		test:   []string{"go", "test", "./..."},
		winner: "right",
		want: map[string][]runner.Status{
			"right": {runner.Passed}, "wrong": {runner.Failed}, "does-not-compile": {runner.Failed},
			"never-ends": {runner.Cancelled, runner.Timeout},
		},
	},
	"best-of-prompts": {
		test:   []string{"./check.sh"},
		winner: "with-test",
		want: map[string][]runner.Status{
			"vague": {runner.Failed}, "short": {runner.Failed}, "with-test": {runner.Passed},
		},
	},
}

// TestExamples does with a copy of each example what its README says, up to
// and including the change of the directory.
func TestExamples(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	plans, err := filepath.Glob("../../examples/*/plan.yaml")
	assert.NilError(t, err)
	assert.Equal(t, len(plans), len(examples), "an example without a test, or a test without an example")
	asEach(t, func(t *testing.T, p *person) {
		p.withGo(t)
		for name := range examples {
			t.Run(name, func(t *testing.T) { runExample(t, p, name) })
		}
	})
}

func runExample(t *testing.T, p *person, name string) {
	x := examples[name]
	dir := p.copyIn(t, filepath.Join("../../examples", name), "src", name)
	_, _, code := p.run(t, dir, x.test[0], x.test[1:]...)
	assert.Equal(t, code, 1, "nothing to mend here")
	// Two at a time, so that each loser has its verdict before the winner ends
	// the run: the one that never ends holds one slot, the others follow each
	// other in the second.
	res := p.tournament(t, dir, 0, "-f", "plan.yaml", "--parallel", "2", "--apply")
	assert.Assert(t, res.Promoted && res.Winner != nil, "%+v", res)
	assert.Equal(t, res.Winner.Candidate, x.winner)
	got := statuses(res)
	assert.Equal(t, len(got), len(x.want))
	for candidate, may := range x.want {
		ok := false
		for _, s := range may {
			ok = ok || got[candidate] == s
		}
		assert.Assert(t, ok, "%s ended as %s, want %s", candidate, got[candidate], may)
	}
	p.must(t, dir, x.test[0], x.test[1:]...)
	_, err := os.Stat(filepath.Join(dir, "plan.yaml"))
	assert.NilError(t, err)
}
