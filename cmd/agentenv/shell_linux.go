package main

import (
	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
)

func (a *App) shellCommand() *cobra.Command {
	var x execFlags
	c := &cobra.Command{
		Use:   "shell",
		Short: "An interactive shell in the work tree, or in a throw-away fork; if it changed files, a snapshot follows",
		Long: `A shell in the environment, in the present directory where that lies in the
tree: in a workspace yours ($SHELL), in a rootfs root's there. If files changed,
one automatic snapshot follows when it ends, and its exit code is passed on (125:
agentenv itself failed). With --fork it runs in a fork, as exec does.

Where input and output are no terminal, it reads its commands from its input.`,
		Example: "  agentenv shell\n  agentenv shell --fork --keep\n  echo 'make test' | agentenv shell",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := x.check(c.Flags(), nil); err != nil {
				return err
			}
			x.tty = isTerminal(a.Stdin) && isTerminal(a.Stdout)
			return a.exec(c.Flags(), x, nil)
		},
	}
	x.add(c.Flags())
	return c
}

// What chooses a shell runs inside, where alone it can be seen which there are.
// In a workspace SHELL is the caller's, in a rootfs that of root.
const (
	rootsShell = `SHELL=
if [ -r /etc/passwd ]; then
	while IFS=: read -r _ _ uid _ _ _ SHELL; do [ "$uid" = 0 ] && break; SHELL=; done </etc/passwd
fi
set -- /bin/bash /usr/bin/bash /bin/sh
`
	firstShell = `for SHELL in "$SHELL" "$@" /bin/sh; do
	case ${SHELL##*/} in nologin | false) continue ;; esac
	[ -f "$SHELL" ] && [ -x "$SHELL" ] && export SHELL && exec "$SHELL"
done
exec sh`
)

// shellArgs is the command that becomes a shell.
func shellArgs(kind env.Kind) []string {
	script := firstShell
	if kind == env.Rootfs {
		script = rootsShell + firstShell
	}
	return []string{"sh", "-c", script}
}
