package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/runner"
	"github.com/agentenv/agentenv/runner/report"
)

// lastRun is the word for the newest run. No run is called so: their names end
// with the time.
const lastRun = "last"

func (a *App) runsCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "runs",
		Short: "List tournaments, newest first",
		Long: `List tournaments, newest first, with how each ended: promoted, passed (a winner
that was not promoted), no-winner, failed (agentenv itself), interrupted, or
running. RUN is a name from this list, a unique beginning of one, or "last".`,
		Args: noSuchRun,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), a.listRuns)
		},
	}
	var x logFlags
	logs := &cobra.Command{
		Use:   "logs RUN [CANDIDATE]",
		Short: "Print the log of a candidate (the winner), or of its test",
		Long: `Print the log of a candidate (the winner), or of its test: both streams, in the
order in which they were written. To a terminal it is shown without control
characters other than colours; elsewhere it is printed byte by byte as it is.
With several attempts CANDIDATE is NAME.N.`,
		Example: "  agentenv runs logs last right --test\n  agentenv runs logs last right.2 --timestamps",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(c *cobra.Command, args []string) error {
			return a.read(c.Context(), func(e *env.Env) error { return a.runLogs(e, args[0], append(args, "")[1], x) })
		},
	}
	logs.Flags().BoolVar(&x.test, "test", false, "the log of the test")
	logs.Flags().BoolVar(&x.timestamps, "timestamps", false, "begin each line with the time it was written, in UTC")
	c.AddCommand(&cobra.Command{
		Use:   "show RUN",
		Short: "Print what a tournament came to",
		Args:  cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return a.read(c.Context(), func(e *env.Env) error {
				res, err := loadRun(e, args[0])
				if err != nil {
					return err
				}
				return a.printResult(res, false)
			})
		},
	}, logs)
	return c
}

// noSuchRun is noSuchCommand for who left out `show`.
func noSuchRun(c *cobra.Command, args []string) error {
	if len(args) > 0 && (args[0] == lastRun || strings.ContainsAny(args[0], "-0123456789")) {
		return usage(fmt.Sprintf("no command %q", "runs "+args[0]), "did you mean `agentenv runs show "+args[0]+"`?")
	}
	return noSuchCommand(c, args)
}

func (a *App) listRuns(e *env.Env) error {
	list, err := runner.List(e.RunsDir())
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(map[string]any{"runs": list})
	}
	opts, err := a.reportOptions(a.Stdout)
	if err != nil {
		return err
	}
	return report.Runs(a.Stdout, list, opts)
}

func loadRun(e *env.Env, run string) (*runner.Result, error) {
	if run == lastRun {
		list, err := runner.List(e.RunsDir())
		if err != nil {
			return nil, err
		}
		if len(list) == 0 {
			return nil, &env.Error{Kind: env.ErrNotFound, Msg: "no tournament has run here yet"}
		}
		run = list[0].Run
	}
	return runner.Load(e.RunsDir(), run)
}

// printResult writes a tournament's result to stdout. With told, the user saw the
// run's warnings already.
func (a *App) printResult(res *runner.Result, told bool) error {
	if a.json {
		return report.JSON(a.Stdout, res)
	}
	opts, err := a.reportOptions(a.Stdout)
	if err != nil {
		return err
	}
	opts.Told, opts.Commands = told, !told
	return report.Result(a.Stdout, res, opts)
}

func (a *App) reportOptions(w io.Writer) (report.Options, error) {
	colours, err := a.colours(w)
	return report.Options{Colours: colours, Verbose: a.verbose}, err
}
