package subid

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const probeName = "agentenv-subid-probe"

// Probe tries to run a process with the ids of m, or if that is nil, with all that
// the caller has. The error, if that fails, is an [*Error]. Root needs no ranges:
// all ids are his.
func Probe(of *Map) (detail string, err error) {
	if os.Geteuid() == 0 {
		return "root needs no ranges", nil
	}
	var m Map
	if of != nil {
		m = *of
	} else if m, err = Mine(); err != nil {
		return "", err
	}
	code, err := Run(m, os.Stdin, nil, probeName)
	if err != nil {
		return "", err
	}
	if code != 0 {
		return "", &Error{Msg: fmt.Sprintf("a process with the ids of %s cannot change its user (status %d)", uids.file, code), Fix: "run outside the container or sandbox that forbids it"}
	}
	return fmt.Sprintf("%d user ids and %d group ids, written by %s", total(m.UIDs), total(m.GIDs), uids.helper), nil
}

// probed does what apt does before it fetches anything.
func probed() {
	for i, step := range []func() error{
		func() error { return unix.Setgroups([]int{nobody}) },
		func() error { return unix.Setresgid(nobody, nobody, nobody) },
		func() error { return unix.Setresuid(nobody, nobody, nobody) },
	} {
		if step() != nil {
			os.Exit(i + 1)
		}
	}
	os.Exit(0)
}

// nobody has the last of the ids that every system has.
const nobody = 65534
