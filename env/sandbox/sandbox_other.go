//go:build !linux

package sandbox

import (
	"context"
	"errors"
)

// Sandbox is the [Executor] of this package. Here it can only say that it
// needs Linux.
type Sandbox struct{}

// New makes a Sandbox.
func New(Options) *Sandbox { return &Sandbox{} }

// Start fails: sandboxes are made of parts of the Linux kernel.
func (*Sandbox) Start(context.Context, Command) (Process, error) { return nil, Probe("") }

// Probe says that no level works here.
func Probe(Level) error {
	return &Error{What: "namespaces", Err: errors.New("this needs Linux"),
		Fix: "run agentenv on Linux: in a virtual machine, in WSL 2 or in a container"}
}

// CheckNetwork says that no network works here.
func CheckNetwork(Level, Network) error { return Probe("") }

// CheckLimits says that no limit can be enforced here.
func CheckLimits(Level, Limits) error { return Probe("") }

// ProbeCgroups says that there are none here.
func ProbeCgroups() Cgroups { return Cgroups{Why: "agentenv's sandboxes need Linux"} }

// RemoveScratch removes the scratch directory of a command that has ended.
func RemoveScratch(string) error { return Probe("") }
