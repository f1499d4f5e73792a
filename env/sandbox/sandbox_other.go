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

// RemoveScratch removes the scratch directory of a command that has ended.
func RemoveScratch(string) error { return Probe("") }
