package sandbox

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A process that waits for a device which does not answer cannot be killed: it
// hangs in the kernel until that answers (state D). Nobody waits for it. It is
// named, its helper stays beside it and with it what the helper holds, and both
// end by themselves if ever the device answers.

// After KILL, stuckAfter is how long a process may take to end before it counts
// as one that hangs, if all that are left seem to; patience how long if not.
// lookAgain is the pause between looks.
const (
	stuckAfter = 2 * time.Second
	patience   = 10 * time.Second
	lookAgain  = 200 * time.Millisecond
)

// expectEnd is called when all have been sent KILL.
func (p *process) expectEnd() { p.expecting.Do(func() { go p.watchEnd() }) }

// watchEnd tells follow of processes that do not end.
func (p *process) watchEnd() {
	began := time.Now()
	for wait := stuckAfter; ; wait = lookAgain {
		select {
		case <-p.done:
			return
		case <-time.After(wait):
		}
		if s := p.hanging(time.Since(began) > patience); len(s) > 0 {
			p.stuck <- s
			return
		}
	}
}

// members lists the living processes of the command. Below a helper that brings in
// a network there are, besides, PID 1 and what forwards.
func (p *process) members() []int {
	pids := Descendants(p.cmd.Process.Pid)
	if p.level == LevelProcess {
		return pids
	}
	own := len(namespacePIDs(os.Getpid()))
	return slices.DeleteFunc(pids, func(pid int) bool {
		in := namespacePIDs(pid)
		return len(in) == own || len(in) == own+1 && in[own] == "1"
	})
}

// namespacePIDs are a process's pids from our PID namespace down to its own; none
// if it is gone.
func namespacePIDs(pid int) []string {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), "\nNSpid:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.Fields(line)
}

// hanging names the processes of the command that hang, and the helper if it does;
// none if, unless all is true, one of them may still be ending.
func (p *process) hanging(all bool) []string {
	var names []string
	pids, helper := p.members(), p.cmd.Process.Pid
	if _, state := parentOf(helper); state == 'D' {
		pids = append(pids, helper)
	}
	for _, pid := range pids {
		task, state := worstTask(pid)
		switch {
		case state == 'X':
			continue
		case state != 'D' && !all:
			return nil
		}
		names = append(names, describeStuck(pid, task, state))
	}
	return names
}

// worstTask finds the thread of a process by which it hangs: one in state D, else
// one that is alive. The state is X if there is none.
func worstTask(pid int) (dir string, state byte) {
	state = 'X'
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", pid))
	for _, t := range tasks {
		_, s := parentIn(t)
		if s == 'D' {
			return t, s
		}
		if s != 'Z' && s != 'X' {
			dir, state = t, s
		}
	}
	return dir, state
}

// describeStuck says what is known of a thread that hangs. Nothing is read that
// needs the memory of its process: that may be locked by what hangs.
func describeStuck(pid int, task string, state byte) string {
	comm, _ := os.ReadFile(filepath.Join(task, "comm")) // it may have ended by now
	where := ""
	if in, err := os.ReadFile(filepath.Join(task, "wchan")); err == nil && len(in) > 0 && string(in) != "0" {
		where = ", in " + string(in)
	}
	return fmt.Sprintf("pid %d (%s) hangs in the kernel (state %c%s)", pid, strings.TrimSpace(string(comm)), state, where)
}

// helpers are the helpers that this process started and did not reap yet; false
// for one that nobody waits for any more. cgroups are those that could not be
// removed.
var helpers = struct {
	sync.Mutex
	pids    map[int]bool
	cgroups []string
}{pids: map[int]bool{}}

func giveUpHelper(pid int) {
	helpers.Lock()
	defer helpers.Unlock()
	helpers.pids[pid] = false
}

// removeCgroup removes the command's cgroup, or notes that it is left.
func (p *process) removeCgroup() {
	p.freezing.Lock()
	defer p.freezing.Unlock()
	if p.cgroup == nil {
		return
	}
	dirs := slices.Clone(p.cgroup.dirs)
	p.cgroup.remove()
	for _, d := range dirs {
		if _, err := os.Lstat(d.Name()); err == nil {
			p.leftCgroups = append(p.leftCgroups, d.Name())
		}
	}
	helpers.Lock()
	defer helpers.Unlock()
	helpers.cgroups = append(helpers.cgroups, p.leftCgroups...)
}

// Left lists what commands of this process that have ended left: living processes
// that hang in the kernel or had killed their reaper, and cgroups.
func Left() (processes []int, cgroups []string) {
	processes = Strays()
	helpers.Lock()
	defer helpers.Unlock()
	for pid, waited := range helpers.pids {
		if !waited {
			processes = append(processes, Descendants(pid)...)
		}
	}
	helpers.cgroups = slices.DeleteFunc(helpers.cgroups, func(dir string) bool {
		_, err := os.Lstat(dir)
		return err != nil
	})
	return processes, slices.Clone(helpers.cgroups)
}

func forgetHelper(pid int) {
	helpers.Lock()
	defer helpers.Unlock()
	delete(helpers.pids, pid)
}

// adoptOrphans makes this process the parent of those whose reaper was killed.
// An error means that the kernel is older than 3.4.
var adoptOrphans = sync.OnceFunc(func() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })

// Strays lists the living processes that commands at [LevelProcess] left to this
// process by killing their reaper.
func Strays() []int {
	var found []int
	for _, pid := range orphans() {
		found = append(append(found, pid), Descendants(pid)...)
	}
	return slices.DeleteFunc(found, func(pid int) bool { _, state := worstTask(pid); return state == 'X' })
}

// orphans lists the children of ours, dead ones too, that are no helpers and not
// of our session, in which all others are that we start.
func orphans() []int {
	helpers.Lock()
	defer helpers.Unlock()
	own, _ := unix.Getsid(0) // it cannot fail
	return slices.DeleteFunc(childrenOf(os.Getpid()), func(pid int) bool {
		sid, err := unix.Getsid(pid)
		_, ours := helpers.pids[pid]
		return err != nil || sid == own || ours
	})
}

// killStrays ends what is left of a command whose reaper was killed.
func killStrays() {
	for none, end := 0, time.Now().Add(stuckAfter); none < looks && time.Now().Before(end); time.Sleep(time.Millisecond) {
		none++
		for _, pid := range Strays() {
			none = 0
			_ = syscall.Kill(pid, syscall.SIGKILL) // an error means that it is gone
		}
		for _, pid := range orphans() {
			_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil) // one that lives is waited for next time
		}
	}
}

// childrenOf lists the children of all threads of a process, zombies too.
func childrenOf(pid int) []int {
	var found []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if child, err := strconv.Atoi(e.Name()); err == nil {
			if parent, _ := parentOf(child); parent == pid {
				found = append(found, child)
			}
		}
	}
	return found
}

// parentOf reads a process's parent and state; X if it is gone.
func parentOf(pid int) (parent int, state byte) { return parentIn("/proc/" + strconv.Itoa(pid)) }

// parentIn is [parentOf] for a directory of /proc, a thread's too.
func parentIn(dir string) (parent int, state byte) {
	fields := statFields(dir)
	if len(fields) < 2 {
		return 0, 'X'
	}
	parent, _ = strconv.Atoi(string(fields[1]))
	return parent, fields[0][0]
}

// statFields are what stat of a directory of /proc says after the name, see
// proc_pid_stat(5); none if the process is gone.
func statFields(dir string) [][]byte {
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return nil
	}
	// The name may hold anything, also spaces and parentheses.
	return bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
}
