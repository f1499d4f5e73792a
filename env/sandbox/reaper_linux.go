package sandbox

import (
	"bytes"
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
	return nil
}

func (*reaper) start(s *spec) (int, error) {
	// If we are killed ourselves, the command at least goes with us.
	return execute(s, &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL})
}

func (*reaper) term() {
	for _, pid := range descendants(os.Getpid()) {
		syscall.Kill(pid, syscall.SIGTERM)
		syscall.Kill(pid, syscall.SIGCONT)
	}
}

// looks is how often nobody must be found. A look at /proc takes time, and a
// process whose parent dies meanwhile may be seen below neither the old parent
// nor the new one; the next look finds it.
const looks = 3

// end kills descendants until none is left. New ones can appear while it
// looks, but each comes from one that the next look finds.
func (*reaper) end() {
	none := 0
	for pause := time.Duration(0); ; pause = min(pause+time.Millisecond, 10*time.Millisecond) {
		alive := descendants(os.Getpid())
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

// descendants lists the living processes below pid, zombies left out.
func descendants(pid int) []int {
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
		dead[child] = state == 'Z' || state == 'X'
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

// parentOf reads a process's parent and state; 0 if it is gone.
func parentOf(pid int) (parent int, state byte) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 'X'
	}
	// The name may hold anything, also spaces and parentheses.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return 0, 'X'
	}
	parent, _ = strconv.Atoi(string(fields[1]))
	return parent, fields[0][0]
}
