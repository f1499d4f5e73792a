package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/specs"
)

// Exit codes of CONTRACT §3.
const (
	exitNo         = 1
	exitUsage      = 2
	exitHarness    = 3
	exitOwnFailure = 125 // agentenv's own failure, of commands that pass on another's code
	exitInterrupt  = 130
	exitQuit       = 131
	exitTerminated = 143
)

// exitStatus ends the program with a code; all has been said already.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// errUsage marks what is wrong with the command line itself.
var errUsage = errors.New("usage")

type usageError struct{ msg, hint string }

func (e *usageError) Error() string {
	if e.hint == "" {
		return e.msg
	}
	return e.msg + ": " + e.hint
}

func (e *usageError) Is(target error) bool { return target == errUsage }

func usage(msg, hint string) error { return &usageError{msg, hint} }

// failure is an error as the user is told it.
type failure struct {
	code, message, hint string
	exit                int
}

// String is the failure in one line.
func (f failure) String() string {
	if f.hint == "" {
		return f.message
	}
	return f.message + ": " + f.hint
}

// kind is one row of the table that maps errors to codes.
type kind struct {
	is   error
	code string
	exit int
}

// kinds are tried in order; the first that an error is decides.
var kinds = append([]kind{
	{errUsage, "usage", exitUsage},
	{errInterrupted, "interrupted", exitInterrupt},
	{errQuit, "interrupted", exitQuit},
	{errTerminated, "interrupted", exitTerminated},
	{context.Canceled, "interrupted", exitInterrupt},
}, append(linuxKinds, []kind{
	{syscall.ENOSPC, "no_space", exitHarness},
	{syscall.EDQUOT, "no_space", exitHarness},
	{syscall.EIO, "damaged", exitHarness},
	{syscall.EACCES, "permission", exitHarness},
	{syscall.EPERM, "permission", exitHarness},
	{syscall.EROFS, "permission", exitHarness},
	{fs.ErrNotExist, "not_found", exitUsage},
}...)...)

// The causes for which a running command is cancelled.
var (
	errInterrupted = errors.New("interrupted")
	errQuit        = errors.New("interrupted by QUIT")
	errTerminated  = errors.New("terminated")
)

// describe finds out how an error is told.
func describe(err error) failure {
	f := failure{code: "internal", message: err.Error(), exit: exitHarness}
	var invalid *specs.Errors
	if errors.As(err, &invalid) {
		f.code, f.exit = "usage", exitUsage
		return f
	}
	for _, k := range kinds {
		if errors.Is(err, k.is) {
			f.code, f.exit = k.code, k.exit
			break
		}
	}
	f.hint = hintOf(err)
	f.message = saidOnce(strings.TrimRight(strings.TrimSuffix(f.message, f.hint), ":; "))
	return f
}

// saidOnce leaves out what a message says twice in a row, as errors of the
// system that were wrapped do: "write X: write X: …".
func saidOnce(message string) string {
	const sep = ": "
	return strings.Join(slices.Compact(strings.Split(message, sep)), sep)
}

// hintedError is an error with what the user can do about it.
type hintedError struct {
	error
	hint string
}

func (e *hintedError) Unwrap() error { return e.error }

// hintOf returns what the user can do, if the error knows.
func hintOf(err error) string {
	var u *usageError
	if errors.As(err, &u) {
		return u.hint
	}
	var h *hintedError
	if errors.As(err, &h) {
		return h.hint
	}
	return linuxHint(err)
}

// passesExitCode says whether a command's exit code is that of what it runs.
func passesExitCode(c *cobra.Command) bool {
	return c != nil && (c.Name() == "exec" || c.Name() == "shell")
}
