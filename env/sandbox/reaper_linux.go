package sandbox

import (
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// reaper is the subreaper of LevelProcess: every process that the command
// starts is its descendant for good, whatever it forks or detaches.
type reaper struct{}

func (*reaper) prepare(s *spec, _ func(string)) error {
	if info, err := os.Stat(s.View.Tree.Dir); err != nil || !info.IsDir() {
		if err == nil {
			err = &os.PathError{Op: "open", Path: s.View.Tree.Dir, Err: syscall.ENOTDIR}
		}
		return &Error{What: "tree", Err: err}
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return &Error{What: "subreaper", Err: os.NewSyscallError("prctl", err)}
	}
	return giveTerminal(s, hostTerminal(s))
}

func (*reaper) start(s *spec) (int, error) {
	// If we are killed ourselves, the command at least goes with us.
	return execute(s, &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL})
}

func (*reaper) term() {
	for _, pid := range Descendants(os.Getpid()) {
		syscall.Kill(pid, syscall.SIGTERM)
		syscall.Kill(pid, syscall.SIGCONT)
	}
}

// looks is how often nobody must be found. A look at /proc takes time, and a
// process whose parent dies meanwhile may be seen below neither the old parent
// nor the new one; the next look finds it.
const looks = 3

// kill leaves it to [helper.reap] to reap, which is to know how the command ended.
func (*reaper) kill() { killDescendants(unix.WNOWAIT) }

func (*reaper) end() { killDescendants(0) }

// killDescendants kills until none is left. New ones can appear while it looks
// for them, but each comes from one that the next look finds. One that hangs in
// the kernel is worth a look now and then.
func killDescendants(options int) {
	began := time.Now()
	for pause := time.Duration(0); hasChild(options); pause = min(pause+time.Millisecond, 10*time.Millisecond) {
		if time.Since(began) > stuckAfter {
			pause = lookAgain
		}
		for _, pid := range Descendants(os.Getpid()) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(pause)
	}
}

// hasChild says whether this process has a child, after it reaped the dead unless
// options say WNOWAIT. A subreaper without one has no descendant either, and to
// ask takes no look at all processes of the machine.
func hasChild(options int) bool {
	for {
		var dead unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &dead, unix.WEXITED|unix.WNOHANG|unix.WALL|options, nil)
		switch {
		case err == unix.ECHILD:
			return false
		case err == unix.EINTR, err == nil && dead.Signo != 0 && options == 0:
			continue
		}
		return true
	}
}

// Descendants lists the living processes below pid, zombies left out.
func Descendants(pid int) []int {
	children := map[int][]int{}
	dead := map[int]bool{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		parent, state := parentOf(child)
		children[parent] = append(children[parent], child)
		if state == 'Z' { // perhaps the first thread alone
			_, state = worstTask(child)
		}
		dead[child] = state == 'X'
	}
	var found []int
	for todo := []int{pid}; len(todo) > 0; todo = todo[1:] {
		for _, c := range children[todo[0]] {
			todo = append(todo, c)
			if !dead[c] {
				found = append(found, c)
			}
		}
	}
	return found
}
