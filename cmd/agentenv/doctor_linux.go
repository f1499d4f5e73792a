package main

import (
	"context"
	"fmt"
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
		Short: "Try what this machine allows: backends where the environment is or would be, isolation, limits",
		Long: `Try every backend on the file system where the environment is or would be, every
level of isolation and the parts that it is made of, limits and networks. For
each thing that does not work it says what is lost without it, and the command
that mends it. Exit 0 if a tournament can run, else 3.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			root, rootErr := a.findRoot()
			colours, err := a.colours(a.Stdout)
			if err != nil {
				return err
			}
			checks, able := a.examine(c.Context(), root, rootErr)
			err = a.output(map[string]any{"checks": checks}, func() {
				for _, line := range a.marks(colours).table(checks) {
					a.print("%s", line)
				}
				a.print("")
				a.print("%s", verdict(checks, able))
			})
			if err == nil && !able {
				err = exitStatus(exitHarness)
			}
			return err
		},
	}
}

// marks begin the lines of a table: what works, what does not, and what is no
// fault.
type marks struct{ ok, bad, none string }

// marks are signs where they can be shown, else words.
func (a *App) marks(colours bool) marks {
	m := marks{"ok", "no", "--"}
	if isTerminal(a.Stdout) && a.unicode() {
		m = marks{"✓", "✗", "–"}
	}
	if colours {
		m.ok, m.bad = "\x1b[32m"+m.ok+"\x1b[0m", "\x1b[31m"+m.bad+"\x1b[0m"
	}
	return m
}

// unicode says whether the user's locale is of UTF-8.
func (a *App) unicode() bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToLower(a.Getenv(name)); v != "" {
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

// table shows what was tried, and then what does not work: what is lost by that
// and what mends it.
func (m marks) table(checks []check) []string {
	width := 0
	for _, c := range checks {
		width = max(width, len(c.Name))
	}
	var lines, todo []string
	for _, c := range checks {
		mark := m.ok
		switch {
		case !c.OK && c.Fix == "": // it is no fault
			mark = m.none
		case !c.OK:
			mark = m.bad
			todo = append(todo, "", mark+" "+c.Name+": "+c.Lost, "  to mend it: "+c.Fix)
		}
		lines = append(lines, fmt.Sprintf("%s %-*s  %s", mark, width, c.Name, c.Detail))
	}
	return append(lines, todo...)
}

// examine tries everything and says whether a tournament can run. Without a root,
// rootErr says why there is none.
func (a *App) examine(ctx context.Context, root string, rootErr error) (checks []check, able bool) {
	dir, able := env.Nearest(root), false
	if rootErr != nil {
		checks = append(checks, check{Name: "root"}.failed(rootErr, "no environment can be made or found"))
	} else {
		checks = backendChecks(env.ProbeBackends(ctx, dir, all.Backends()))
		able = slices.ContainsFunc(checks, func(c check) bool { return c.OK })
		for i := range checks {
			checks[i].Name = "backend " + checks[i].Name
		}
	}
	strongest := isolationCheck(root, sandbox.LevelNamespaces, "candidates would see and share the host's processes, /tmp and home")
	checks = append(checks, strongest, isolationCheck(root, sandbox.LevelProcess, "nothing can be run"))
	checks = append(checks, partChecks(root)...)
	cgroups := sandbox.ProbeCgroups()
	ids, usable := idsCheck(root)
	checks = append(checks, natCheck(), limitsCheck(cgroups), freezeCheck(cgroups), ids, kernelCheck())
	if rootErr == nil {
		checks = append(checks, reflinkCheck(dir), spaceCheck(dir))
	}
	checks = append(checks, watchesCheck(), filesCheck())
	return checks, able && usable && strongest.OK
}

// verdict is what the checks come to.
func verdict(checks []check, able bool) string {
	works := func(name string) bool {
		return slices.ContainsFunc(checks, func(c check) bool { return c.OK && strings.HasPrefix(c.Name, name) })
	}
	switch {
	case able:
		return "A tournament can run here."
	case !works("isolation namespaces") && works("isolation process") && works("backend "):
		return "A tournament can run here only with --isolation process, and only in a workspace."
	}
	return "No tournament can run here."
}

func isolationCheck(root string, level sandbox.Level, lost string) check {
	c := check{Name: "isolation " + string(level), OK: true, Detail: "a command was run so"}
	if err := env.ProbeIsolation(root, level); err != nil {
		return c.failed(explain(root, err), lost)
	}
	return c
}

// failed is the check of something that does not work.
func (c check) failed(err error, lost string) check {
	f := describe(err)
	c.OK, c.Detail, c.Lost, c.Fix = false, f.message, lost, f.hint
	return c
}
