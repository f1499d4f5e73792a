package runner

import "golang.org/x/sys/unix"

// What this process keeps open whatever it does, and for each attempt at most:
// pipes and logs of a command, and the directories that are open while a fork
// is made. Both are counted from runs with a low limit, with room to spare.
const (
	filesKept       = 48
	filesPerAttempt = 24
)

// slots is how many attempts run at once: as many as the plan says, unless the
// limit of open files allows fewer.
func (t *tournament) slots() int {
	n := max(t.Plan.Parallel, 1)
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil || limit.Cur > 1<<20 {
		return n
	}
	fit := max((int(limit.Cur)-filesKept)/filesPerAttempt, 1)
	if fit < min(n, len(t.attempts)) {
		what := "attempts run"
		if fit == 1 {
			what = "attempt runs"
		}
		t.warn("%d %s at once, not %d: there may be %d open files; raise the limit with `ulimit -n`", fit, what, n, limit.Cur)
		return fit
	}
	return n
}
