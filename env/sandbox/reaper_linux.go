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

func (r *reaper) kill() { r.end() }

// end kills descendants until none is left. New ones can appear while it
// looks, but each comes from one that the next look finds. One that hangs in
// the kernel is worth a look now and then.
func (*reaper) end() {
	none := 0
	began := time.Now()
	for pause := time.Duration(0); ; pause = min(pause+time.Millisecond, 10*time.Millisecond) {
		if time.Since(began) > stuckAfter {
			pause = lookAgain
		}
		alive := Descendants(os.Getpid())
		if len(alive) > 0 {
			none = 0
		} else if none++; none == looks {
			return
		}
		for _, pid := range alive {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(pause)
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
