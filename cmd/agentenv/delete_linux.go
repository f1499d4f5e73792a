package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
)

func (a *App) deleteCommand() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:   "delete (REF | --all)",
		Short: "Remove a snapshot from the history, or with --all the whole environment",
		Long: `Remove a snapshot from the history; its children get its parent. HEAD, a tagged
snapshot, one in a fork of which a command runs, and the last one are held.

With --all, remove the whole environment: the work tree with what no snapshot
holds, all snapshots, forks and runs, and the root, unless something foreign is
in it. The directory that it was taken from stays as it is, also in place.
Nothing is removed while another agentenv, or a command in a fork, is at work.
The environment is the one that --root or AGENTENV_ROOT names, or the one taken
from the present directory; it may be damaged.`,
		Example: "  agentenv delete 3f2a\n  agentenv --root ~/old delete --all",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case all && len(args) > 0:
				return usage("delete takes a REF or --all, not both", "")
			case !all && len(args) != 1:
				return usage("say which snapshot to delete", "usage: agentenv delete REF, or agentenv delete --all for the whole environment")
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			if all {
				return a.deleteAll(c.Context())
			}
			return a.change(c.Context(), "delete", func(e *env.Env) error {
				d, err := e.Delete(c.Context(), args[0])
				if err != nil {
					return err
				}
				doc := map[string]any{"removed": []env.ID{d.ID}, "stays": d.Stays}
				return a.output(doc, func() {
					if d.Stays > 0 {
						a.say("removed %s; its %s stay on disk until the snapshots built upon it go", d.ID, humanBytes(d.Stays))
						return
					}
					a.say("removed %s", d.ID)
				})
			})
		},
	}
	c.Flags().BoolVar(&all, "all", false, "remove the whole environment")
	return c
}

// deleteAll removes the environment that the user named or stands in: never one
// that is only the default.
func (a *App) deleteAll(ctx context.Context) error {
	dir, err := workDir()
	if err != nil {
		return err
	}
	root, meant, err := env.FindRoot(a.root, a.Getenv, dir)
	if err != nil {
		return err
	}
	if !meant {
		return usage("no environment was taken from this directory", "name the root of the one to remove: agentenv --root DIR delete --all")
	}
	if err := a.enterDamaged(root); err != nil {
		return err
	}
	d, err := env.DeleteAll(ctx, root, a.envOptions())
	if err != nil {
		return explain(root, err)
	}
	return a.output(d, func() { a.printDeletedAll(d) })
}

func (a *App) printDeletedAll(d env.DeletedAll) {
	what := "the environment at " + d.Root
	if d.Snapshots > 0 {
		what = fmt.Sprintf("%s with %s", what, count(d.Snapshots, "snapshot"))
	}
	a.say("removed %s", what)
	if !d.RootRemoved {
		a.say("the directory stays: it holds what is not agentenv's (%s)", quote(strings.Join(d.Left, ", ")))
	}
	if d.Kept != "" {
		a.say("%s, its work tree, stays as it is", d.Kept)
	}
}
