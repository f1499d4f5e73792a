package sandbox

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// What starts a command cannot set rlimits in the child alone, so the helper takes
// those of the command while it starts it.
//
// That of open files it takes soft and hard, so that the command never sees another;
// of an ordinary user it keeps the hard one, which is enough for what it opens
// until its end. A limit too small for the helper, and that of processes, which
// counts the helper, are set from outside at once after the start. What the command
// forks before that keeps what the helper needs; but the kernel holds all in a user
// namespace, with who made it, to the limit that its maker had then, so that all
// together can be spareThreads too many at most.

// helperFiles is how many more files a helper opens, at most, from the start of a
// command on (Go's fork needs four), and spareThreads how many threads its runtime
// may start meanwhile.
const (
	helperFiles  = 8
	spareThreads = 4
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

// lend sets our limit to the command's, or to what we need to start it.
func (r *rlimit) lend() error {
	if err := syscall.Getrlimit(r.resource, &r.was); err != nil {
		return os.NewSyscallError("getrlimit", err)
	}
	var lent syscall.Rlimit
	if r.resource == unix.RLIMIT_NPROC {
		r.value = min(r.value, r.was.Max)
		lent = syscall.Rlimit{Cur: min(r.value+threads()+spareThreads, r.was.Max), Max: r.was.Max} // we are counted too
	} else {
		files := max(r.value, min(filesNeeded(), r.was.Max))
		lent = syscall.Rlimit{Cur: files, Max: files}
	}
	// Not unix.Prlimit: with it the runtime would give the child the limit that
	// we were started with.
	return os.NewSyscallError("setrlimit", syscall.Setrlimit(r.resource, &lent))
}

// threads counts our own.
func threads() uint64 {
	own, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return 16 // more than a helper has
	}
	return uint64(len(own))
}

// filesNeeded is the least limit of open files with which helperFiles more can be
// opened.
func filesNeeded() uint64 {
	most := 0
	for range helperFiles {
		fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			break // we have no more ourselves
		}
		defer unix.Close(fd)
		most = max(most, fd)
	}
	return uint64(most) + 1
}

// takeBack gives us our own limit again, if we may raise it.
func (r *rlimit) takeBack() { _ = syscall.Setrlimit(r.resource, &r.was) }

// give sets the limit of the process, soft and hard.
func (r *rlimit) give(pid int) error {
	err := unix.Prlimit(pid, r.resource, &unix.Rlimit{Cur: r.value, Max: r.value}, nil)
	if err == unix.ESRCH {
		return nil // it has ended
	}
	return os.NewSyscallError("prlimit", err)
}
