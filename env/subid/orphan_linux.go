package subid

import (
	"bytes"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Orphaned says whether nobody in our session can continue our process group:
// then the kernel does not stop it for a terminal either.
func Orphaned() bool {
	group, session := unix.Getpgrp(), sessionOf(0)
	for pid := unix.Getppid(); pid > 0; pid = parentOf(pid) {
		if sessionOf(pid) != session {
			return true
		}
		if g, err := unix.Getpgid(pid); err != nil || g != group {
			return err != nil
		}
	}
	return true
}

// sessionOf is the session of a process, 0 if it is gone.
func sessionOf(pid int) int {
	sid, err := unix.Getsid(pid)
	if err != nil {
		return 0
	}
	return sid
}

// parentOf is the parent of a process, 0 if it has none or is gone.
func parentOf(pid int) int {
	stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(fields[1])
	return parent
}
