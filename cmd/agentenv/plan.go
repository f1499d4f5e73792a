package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/specs"
)

func (a *App) planCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "plan",
		Short: "Check a plan, print the plan's JSON Schema, or write an example",
		Args:  noSuchCommand,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(&cobra.Command{
		Use:     "check FILE",
		Short:   "Say whether a plan is valid, and print it with every default filled in, as JSON",
		Example: "  agentenv plan check plan.yaml",
		Args:    cobra.ExactArgs(1),
		RunE:    func(_ *cobra.Command, args []string) error { return a.planCheck(args[0]) },
	}, &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of plan files, for editors",
		Example: "  agentenv plan schema >plan.schema.json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			data, err := specs.Schema()
			if err != nil {
				return err
			}
			_, err = a.Stdout.Write(append(data, '\n'))
			return err
		},
	}, &cobra.Command{
		Use:     "new",
		Short:   "Print a commented example of a plan",
		Example: "  agentenv plan new >plan.yaml",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return a.content(map[string]any{}, bytes.NewReader(specs.Example()))
		},
	})
	return c
}

func (a *App) planCheck(file string) error {
	p, err := a.loadPlan(file)
	if err != nil {
		return err
	}
	data, err := p.JSON()
	if err != nil {
		return err
	}
	_, err = a.Stdout.Write(append(data, '\n'))
	return err
}

func (a *App) loadPlan(file string) (*specs.Plan, error) {
	p, err := specs.Load(file, a.specOptions())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, usage("no plan at "+file, "write one with `agentenv plan new`")
	}
	var path *fs.PathError
	if errors.As(err, &path) {
		return nil, usage(err.Error(), "")
	}
	return p, err
}

// specOptions are what a plan's defaults depend on.
func (a *App) specOptions() specs.Options {
	home := a.Getenv("HOME")
	if home == "" && runtime.GOOS == "windows" {
		home = a.Getenv("USERPROFILE")
	}
	dir, err := os.Getwd()
	if err != nil {
		dir = filepath.Clean("/")
	}
	return specs.Options{CPUs: runtime.NumCPU(), Home: home, Dir: dir}
}
