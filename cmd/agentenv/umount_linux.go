package main

import (
	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
)

func (a *App) umountCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "umount",
		Short: "Let go of a mounted work tree; the next command that needs it mounts it again",
		Long: `Take the mount of the work tree off the host. Nothing is lost: what the tree
holds stays in the store, and the next command that needs it mounts it again.
While something uses the tree it is named, and the tree stays mounted.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.change(c.Context(), "umount", func(e *env.Env) error {
				was, err := e.Umount(c.Context())
				if err != nil {
					return err
				}
				if !was {
					a.say("the work tree is not mounted: there is nothing to let go of")
				}
				return a.output(map[string]any{"work_tree": e.WorkTree(), "unmounted": was}, func() {})
			})
		},
	}
}
