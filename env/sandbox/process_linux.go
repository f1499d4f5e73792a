package sandbox

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a command in its sandbox, seen from outside.
type process struct {
	level    Level
	cmd      *exec.Cmd // the helper
	control  *os.File
	streams  *streams
	terminal *terminal // nil if the command has none
	notice   func(string)
	uncancel func() bool
	cgroup   *cgroup    // nil if it has none
	disk     *diskWatch // nil if there is no limit

	ready  chan struct{} // closed when failed is known
	failed error
	done   chan struct{} // closed when result and err are known
	result Result
	err    error

	freezing sync.Mutex // guards frozen, and cgroup's end
	frozen   []identity // those that Freeze stopped, parents first

	leftCgroups []string // set before done is closed

	expecting sync.Once
	stuck     chan []string // the processes that hang, if there are any

	mu       sync.Mutex // guards what is below, and writing to control
	over     bool
	deadline time.Time
	killer   *time.Timer
	killed   bool
	ending   bool // the helper said that it kills
}

func newProcess(level Level, cmd *exec.Cmd, control *os.File, s *streams, notice func(string)) *process {
	return &process{
		level: level, cmd: cmd, control: control, streams: s, notice: notice,
		ready: make(chan struct{}), done: make(chan struct{}), stuck: make(chan []string, 1),
	}
}

// send writes one message to the helper. An error means that the helper is
// dead, which follow finds out.
func (p *process) send(m ...string) {
	_ = message(m).writeTo(p.control)
}

// listen passes on the helper's reports until it is dead, and reaps it.
func (p *process) listen(reports chan<- message, dead chan<- error) {
	for in := bufio.NewReader(p.control); ; {
		m, err := readMessage(in)
		if err != nil {
			break
		}
		select {
		case reports <- m:
		case <-p.done:
		}
	}
	p.abandoned()
	err := p.cmd.Wait()
	forgetHelper(p.cmd.Process.Pid)
	dead <- err
	<-p.done
	for _, dir := range p.leftCgroups { // of what hung until now
		removeCgroup(dir)
	}
}

// abandoned is called at the end of the helper's stream. That may be the helper's
// end, or that of a descriptor nobody should have closed: either way nothing
// may go on, except what hangs and its helper.
func (p *process) abandoned() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	p.killLocked()
	if p.level != LevelProcess {
		_ = p.cmd.Process.Kill() // an error means that it is dead
	}
}

// follow takes the helper's reports until it is dead, or hangs, and then ends.
func (p *process) follow() {
	var exit *exited
	signalled := false
	first := func(err error) {
		if !signalled {
			signalled = true
			p.failed = err
			close(p.ready)
		}
	}
	began := time.Now()
	reports, dead := make(chan message), make(chan error, 1)
	go p.listen(reports, dead)
	for waiting := true; waiting; {
		var m message
		select {
		case m = <-reports:
		case p.result.Stuck = <-p.stuck:
			first(&Error{What: "init", Err: errors.New(strings.Join(p.result.Stuck, "; "))})
			giveUpHelper(p.cmd.Process.Pid)
			waiting = false
		case err := <-dead:
			if !signalled && p.cgroup.reached() != "" {
				p.result.Started = began
				first(nil) // a command that does not fit its limit takes the helper along, with whom it shares its memory until it is executed
			}
			first(&Error{What: "init", Err: errors.Join(errors.New("it ended before the command was started"), err)})
			if p.level == LevelProcess && !p.isEnding() {
				p.cgroup.kill()
				killStrays()
			}
			waiting = false
		}
		switch m.next() {
		case sayNotice:
			p.notice(m.next())
		case sayFailed:
			e := parseFailed(m)
			first(explain(e.What, e))
		case sayStarted:
			began = time.Now()
			p.result.Started = began
			p.disk.watch(p.Stop)
			err := p.terminal.connect()
			if err != nil {
				p.kill()
			}
			first(err)
		case sayRefused:
			p.result = Result{ExitCode: int(m.nextInt()), NotStarted: true, Reason: m.next(), Started: began}
			p.result.NoDir = m.next() == "dir"
			first(nil)
		case sayExit:
			exit = parseExited(m)
		case sayEnding:
			p.mu.Lock()
			p.ending = true
			p.mu.Unlock()
			p.expectEnd()
		}
	}
	if !p.result.NotStarted {
		p.setResult(exit, time.Since(began))
		p.setLimit()
	}
	p.finish()
}

// setResult turns the command's status into a result; without one it was
// killed with its helper.
func (p *process) setResult(exit *exited, ran time.Duration) {
	p.result.Duration = ran
	p.result.Signal = syscall.SIGKILL
	if exit != nil {
		p.result.Duration = exit.ran
		p.result.Signal = 0
		p.result.ExitCode = exit.status.ExitStatus()
		if exit.status.Signaled() {
			p.result.Signal = exit.status.Signal()
		}
	}
	if p.result.Signal != 0 {
		p.result.ExitCode = 128 + int(p.result.Signal)
	}
}

func (p *process) finish() {
	p.err = errors.Join(p.streams.finish(), p.terminal.finish())
	p.disk.finish()
	p.removeCgroup()
	p.mu.Lock()
	p.over = true
	if p.killer != nil {
		p.killer.Stop()
	}
	p.control.Close()
	p.mu.Unlock()
	close(p.done)
}

// Signal implements [Process].
func (p *process) Signal(sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return os.ErrProcessDone
	}
	if sig == syscall.SIGWINCH && p.terminal != nil {
		p.terminal.resize()
		return nil
	}
	p.send(askSignal, strconv.Itoa(int(sig)))
	return nil
}

// Stop implements [Process].
func (p *process) Stop(grace time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over || p.killed {
		return
	}
	if grace <= 0 {
		p.killLocked()
		return
	}
	deadline := time.Now().Add(grace)
	if p.killer == nil {
		p.send(askTerm)
		go p.Thaw() // so that they can act upon it
	} else if !deadline.Before(p.deadline) || !p.killer.Stop() {
		return
	}
	p.deadline = deadline
	p.killer = time.AfterFunc(grace, p.kill)
}

func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killLocked()
}

// killLocked ends everything at once. The helper does it, and lives until all
// are gone, so that what it holds is held as long.
func (p *process) killLocked() {
	p.killed = true
	_ = p.cmd.Process.Signal(syscall.SIGCONT) // an error means that it is dead
	p.send(askKill)
	p.expectEnd()
	if p.level == LevelNamespaces {
		time.AfterFunc(answerTime, p.killHelper)
	}
}

// answerTime is how long a helper may take to say that it kills.
const answerTime = 250 * time.Millisecond

// killHelper kills one that does not answer: with PID 1 its namespace dies. A
// reaper is needed alive to find the others.
func (p *process) killHelper() {
	if !p.isEnding() {
		_ = p.cmd.Process.Kill() // an error means that it is dead
	}
}

func (p *process) isEnding() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ending || p.over
}

// wake keeps the helper going: at the process level the command can stop it,
// even before it could say that the command was started; otherwise only who is
// outside can.
func (p *process) wake() {
	pause := wakeInit
	if p.level == LevelProcess {
		pause = wakeReaper
	}
	for {
		select {
		case <-p.done:
			return
		case <-time.After(pause):
			_ = p.cmd.Process.Signal(syscall.SIGCONT) // an error means that it is dead
		}
	}
}

// wakeReaper and wakeInit are how long a stopped helper can hold up what it is to
// do.
const (
	wakeReaper = 50 * time.Millisecond
	wakeInit   = time.Second
)

// Wait implements [Process].
func (p *process) Wait() (Result, error) {
	<-p.done
	if p.uncancel != nil {
		p.uncancel()
	}
	return p.result, p.err
}
