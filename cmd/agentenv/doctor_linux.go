package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
)

// check is one thing that was tried on this machine, in the form of CONTRACT §5.
type check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Lost   string `json:"lost"`
	Fix    string `json:"fix"`
}

// String is the check in one line.
func (c check) String() string {
	switch {
	case c.OK:
		return c.Name + ": works, " + c.Detail
	case c.Fix == "": // it is no fault
		return c.Name + ": " + c.Detail
	}
	return c.Name + ": does not work, " + c.Detail + "; to mend it: " + c.Fix
}

func backendChecks(probes []forks.Probe) []check {
	out := make([]check, len(probes))
	for i, p := range probes {
		out[i] = check(p)
	}
	return out
}

// sayBackend tells which backend a new environment got, if its forks cost more
// than they would with a better one that could be had.
func (a *App) sayBackend(e *env.Env) {
	var why []string
	for _, p := range e.Refused() {
		switch {
		case p.Fix != "":
			why = append(why, p.Name+": "+p.Detail+", fix: "+p.Fix)
		case a.verbose:
			why = append(why, p.Name+": "+p.Detail)
		}
	}
	if (e.Features().ConstantFork || len(why) == 0) && !a.verbose {
		return
	}
	line := "backend: " + e.Backend()
	if len(why) > 0 {
		line += " (" + strings.Join(why, "; ") + ")"
	}
	a.say("%s", line)
}

func (a *App) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Try what this machine allows: backends where the environment is or would be, and isolation",
		Long: `Try every backend on the file system where the environment is or would be, and
every level of isolation. What does not work is told with the command that
mends it. Exit 0 if a tournament can run.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			root, err := a.findRoot()
			if err != nil {
				return err
			}
			checks, able := examine(c.Context(), root)
			err = a.output(map[string]any{"checks": checks}, func() {
				for _, c := range checks {
					a.print("%s", c)
				}
			})
			if err == nil && !able {
				err = exitStatus(exitHarness)
			}
			return err
		},
	}
}

// examine tries everything and says whether a tournament can run.
func examine(ctx context.Context, root string) (checks []check, able bool) {
	dir := root
	for dir != filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	checks = backendChecks(env.ProbeBackends(ctx, dir, all.Backends()))
	able = slices.ContainsFunc(checks, func(c check) bool { return c.OK })
	for i := range checks {
		checks[i].Name = "backend " + checks[i].Name
	}
	strongest := isolationCheck(root, sandbox.LevelNamespaces, "candidates would see and share the host's processes, /tmp and home")
	checks = append(checks, strongest, isolationCheck(root, sandbox.LevelProcess, "nothing can be run"))
	return checks, able && strongest.OK
}

func isolationCheck(root string, level sandbox.Level, lost string) check {
	c := check{Name: "isolation " + string(level), OK: true, Detail: "a command was run so"}
	if err := env.ProbeIsolation(root, level); err != nil {
		f := describe(explain(root, err))
		c.OK, c.Detail, c.Lost, c.Fix = false, f.message, lost, f.hint
	}
	return c
}
