package sandbox

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// A command's rlimits are set in two steps, for what starts a command cannot
// set them in the child alone, and a helper must not lower its own hard limits,
// which an ordinary user could not raise again. The command is started with the
// helper's soft limits set to the command's, so that it never sees others; at once
// afterwards the hard ones are set from outside. In between, which takes
// microseconds, it could raise them by itself.

// helperFiles and helperThreads are what a helper itself needs, at most, of a limit
// that holds for it while it starts a command.
const (
	helperFiles   = 128
	helperThreads = 64
)

// withRlimits runs start, which starts the command, with the limits in force.
func withRlimits(l Limits, start func() (int, error)) (int, error) {
	var set []*rlimit
	if l.NoFile > 0 {
		set = append(set, &rlimit{resource: unix.RLIMIT_NOFILE, value: uint64(l.NoFile)})
	}
	if l.PIDs > 0 {
		set = append(set, &rlimit{resource: unix.RLIMIT_NPROC, value: uint64(l.PIDs)})
	}
	for _, r := range set {
		if err := r.lend(); err != nil {
			return 0, &Error{What: "limits", Err: err}
		}
		defer r.takeBack()
	}
	pid, err := start()
	if err != nil {
		return 0, err
	}
	for _, r := range set {
		if err := r.give(pid); err != nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			return 0, &Error{What: "limits", Err: err}
		}
	}
	return pid, nil
}

// rlimit is a limit that a command is to have.
type rlimit struct {
	resource int
	value    uint64
	was      syscall.Rlimit
}

// lend sets our soft limit to the command's, or to what we need to start it.
func (r *rlimit) lend() error {
	if err := syscall.Getrlimit(r.resource, &r.was); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	soft := max(r.value, helperFiles)
	if r.resource == unix.RLIMIT_NPROC {
		r.value = min(r.value, r.was.Max)
		soft = min(r.value+helperThreads, r.was.Max) // we are counted too
	}
	if r.value <= r.was.Max {
		soft = min(soft, r.was.Max)
	}
	// Not unix.Prlimit: with it the runtime would give the child the limit that
	// we were started with.
	return os.NewSyscallError("setrlimit", syscall.Setrlimit(r.resource, &syscall.Rlimit{Cur: soft, Max: max(soft, r.was.Max)}))
}

func (r *rlimit) takeBack() { _ = syscall.Setrlimit(r.resource, &r.was) }

// give sets the limit of the process, soft and hard.
func (r *rlimit) give(pid int) error {
	err := unix.Prlimit(pid, r.resource, &unix.Rlimit{Cur: r.value, Max: r.value}, nil)
	if err == unix.ESRCH {
		return nil // it has ended
	}
	return os.NewSyscallError("prlimit", err)
}
