package runner

import (
	"slices"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

// Check says what this machine cannot give of what a plan asks for: networks and
// limits. Its error is a [*sandbox.Error]. It makes nothing and costs next to
// nothing; whether the isolation works, [env.ProbeIsolation] tries.
func Check(p *specs.Plan) error {
	for _, n := range networks(p) {
		if err := sandbox.CheckNetwork(level(p), sandbox.Network(n)); err != nil {
			return err
		}
	}
	return sandbox.CheckLimits(level(p), limits(p))
}

// networks are those of the plan's commands, the plan's first, each once.
func networks(p *specs.Plan) []string {
	list := []string{string(p.Network)}
	for i := range p.Candidates {
		list = append(list, string(p.Candidates[i].Network))
	}
	list = append(list, string(p.Test.Network))
	var out []string
	for _, n := range list {
		if n != "" && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// level is the sandbox's word for the plan's isolation.
func level(p *specs.Plan) sandbox.Level {
	if p.Isolation == specs.Process {
		return sandbox.LevelProcess
	}
	return sandbox.LevelNamespaces
}

// limits are the plan's in the sandbox's words.
func limits(p *specs.Plan) sandbox.Limits {
	if p.Limits == nil {
		return sandbox.Limits{}
	}
	l := p.Limits
	return sandbox.Limits{
		CPUs: l.CPUs, Memory: l.Memory, PIDs: l.PIDs, Disk: l.Disk, NoFile: l.NoFile,
		BestEffort: l.Enforce == specs.BestEffort,
	}
}

// inForce is what of the plan's limits this machine enforces: all of them,
// unless the plan can do with less. Nil is nothing.
func inForce(p *specs.Plan) *specs.Limits {
	if p.Limits == nil {
		return nil
	}
	l := sandbox.Enforced(level(p), limits(p))
	out := specs.Limits{
		CPUs: l.CPUs, Memory: l.Memory, PIDs: l.PIDs, Disk: l.Disk, NoFile: l.NoFile, Enforce: p.Limits.Enforce,
	}
	if out == (specs.Limits{Enforce: out.Enforce}) {
		return nil
	}
	return &out
}
