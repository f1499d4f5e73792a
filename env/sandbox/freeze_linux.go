package sandbox

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// freezeTime bounds the wait for all to stand still: what waits for a disk stops
// when that answers.
const freezeTime = time.Second

// identity tells a process from a later one with the same pid.
type identity struct {
	pid     int
	started string // in ticks since boot, as /proc/PID/stat has it
}

// Freeze implements [Process].
func (p *process) Freeze() error {
	p.freezing.Lock()
	defer p.freezing.Unlock()
	select {
	case <-p.done:
		return os.ErrProcessDone
	default:
	}
	if p.cgroup.freeze(freezeTime) {
		return nil
	}
	p.cgroup.thaw()
	return stopAll(p.stopOnce, freezeTime)
}

// stopAll stops those that stop finds running, until it found none several times in
// a row. When the time is over, only who still runs is a reason to give up.
func stopAll(stop func() (moving []string), limit time.Duration) error {
	end := time.Now().Add(limit)
	for still := 0; still < looks; time.Sleep(time.Millisecond) {
		moving := stop()
		switch {
		case len(moving) == 0:
			still++
			continue
		case time.Now().After(end):
			return fmt.Errorf("not all processes could be stopped: %s", strings.Join(moving, ", "))
		}
		still = 0
	}
	return nil
}

// stopOnce stops those that run, parents first: a shell then does not see its
// child stop. It names those that it found running.
func (p *process) stopOnce() (moving []string) {
	for _, pid := range p.members() {
		id, state := identify(pid)
		if strings.ContainsRune("TtXZ", rune(state)) {
			continue
		}
		moving = append(moving, fmt.Sprintf("pid %d (state %c)", pid, state))
		switch {
		case !slices.Contains(p.frozen, id):
			if id.signal(unix.SIGSTOP) == nil {
				p.frozen = append(p.frozen, id)
			}
		case state == 'D':
			p.wakeChildren(pid)
		}
	}
	return moving
}

// wakeChildren lets go on, until the next look, what a process may wait for: one
// that has called vfork cannot stop before its child has executed.
func (p *process) wakeChildren(parent int) {
	p.frozen = slices.DeleteFunc(p.frozen, func(id identity) bool {
		of, _ := parentOf(id.pid)
		return of == parent && id.signal(unix.SIGCONT) == nil
	})
}

// Thaw implements [Process]. Children go on before their parents.
func (p *process) Thaw() error {
	p.freezing.Lock()
	defer p.freezing.Unlock()
	var errs []error
	for _, id := range slices.Backward(p.frozen) {
		if err := id.signal(unix.SIGCONT); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("pid %d: %w", id.pid, err))
		}
	}
	p.frozen = nil
	p.cgroup.thaw()
	return errors.Join(errs...)
}

// signal sends a signal to the very process; ESRCH if it is gone.
func (id identity) signal(sig unix.Signal) error {
	fd, err := unix.PidfdOpen(id.pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if now, _ := identify(id.pid); now != id {
		return unix.ESRCH
	}
	return unix.PidfdSendSignal(fd, sig, nil, 0)
}

// identify reads a process's identity and its state, X if it is gone.
func identify(pid int) (identity, byte) {
	const state, started = 0, 19
	fields := statFields("/proc/" + strconv.Itoa(pid))
	if len(fields) <= started {
		return identity{pid: pid}, 'X'
	}
	return identity{pid, string(fields[started])}, fields[state][0]
}
