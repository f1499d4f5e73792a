//go:build !linux

package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
)

var linuxKinds []kind

func isTerminal(any) bool { return false }

func linuxHint(error) string { return "" }

// linuxCommands are the commands that need Linux: here they say so.
func (a *App) linuxCommands() []*cobra.Command {
	var out []*cobra.Command
	for _, name := range []string{"init", "exec", "commit", "checkout", "log", "head", "tag", "branches", "show", "status", "delete", "apply", "tournament", "runs"} {
		out = append(out, &cobra.Command{
			Use: name, Short: "(needs Linux)", DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return fmt.Errorf("agentenv %s needs Linux, and this is %s: run it in a virtual machine or container with Linux, such as WSL 2, Lima or `docker run -it debian`", name, runtime.GOOS)
			},
		})
	}
	return out
}
