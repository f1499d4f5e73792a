package runner

import (
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
)

// What this process keeps open whatever it does, and for each attempt at most:
// pipes and logs of a command, and the directories that are open while a fork
// is made. Both are counted from runs with a low limit, with room to spare.
const (
	filesKept       = 48
	filesPerAttempt = 24
	// Threads that this process still starts, and those of the processes around a
	// command, with a few for what it starts itself.
	threadsKept       = 4
	threadsPerAttempt = 8
)

// slots is how many attempts run at once: as many as the plan says, unless a limit
// of open files or processes allows fewer.
func (t *tournament) slots() int {
	n := max(t.Plan.Parallel, 1)
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil && limit.Cur <= 1<<20 {
		n = t.fewer(n, (int(limit.Cur)-filesKept)/filesPerAttempt, int(limit.Cur), "open files", "-n")
	}
	if left, limit, limited := sandbox.ProcessesLeft(); limited {
		n = t.fewer(n, (left-threadsKept)/threadsPerAttempt, limit, "processes of this user", "-u")
	}
	return n
}

// fewer is n, or what fits if that is less, and at least 1. It tells the user.
func (t *tournament) fewer(n, fit, limit int, what, flag string) int {
	fit = max(fit, 1)
	if fit >= min(n, len(t.attempts)) {
		return n
	}
	attempts := "attempts run"
	if fit == 1 {
		attempts = "attempt runs"
	}
	t.warn("%d %s at once, not %d: there may be %d %s; raise the limit with `ulimit %s`", fit, attempts, n, limit, what, flag)
	return fit
}
