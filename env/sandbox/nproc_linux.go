package sandbox

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// manyProcesses is a limit (RLIMIT_NPROC) that nobody comes near by accident: to
// count the processes of a busy user takes milliseconds.
const manyProcesses = 8192

// ProcessesLeft says how many more threads and processes this user may have, as
// far as can be seen: the kernel counts those too that /proc hides. limited is
// false where that is no concern, as it is none of the machine's root.
func ProcessesLeft() (left, limit int, limited bool) {
	var l unix.Rlimit
	if machineRoot() || unix.Getrlimit(unix.RLIMIT_NPROC, &l) != nil || l.Cur > manyProcesses {
		return 0, 0, false
	}
	used := 0
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is good
	for _, dir := range dirs {
		used += threadsOf(dir, strconv.Itoa(os.Getuid()))
	}
	return int(l.Cur) - used, int(l.Cur), true
}

// threadsOf is how many threads a process has, 0 if it is gone or another user's.
func threadsOf(dir, uid string) int {
	f, err := os.Open(dir + "/status")
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), ":")
		words := strings.Fields(value)
		switch {
		case len(words) == 0:
		case name == "Uid" && words[0] != uid: // the real one
			return 0
		case name == "Threads":
			n, _ := strconv.Atoi(words[0])
			return n
		}
	}
	return 0
}
