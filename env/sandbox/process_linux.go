package sandbox

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strconv"
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
	notice   func(string)
	uncancel func() bool

	ready  chan struct{} // closed when failed is known
	failed error
	done   chan struct{} // closed when result and err are known
	result Result
	err    error

	mu       sync.Mutex // guards what is below, and writing to control
	over     bool
	deadline time.Time
	killer   *time.Timer
	killed   bool
}

func newProcess(level Level, cmd *exec.Cmd, control *os.File, s *streams, notice func(string)) *process {
	return &process{
		level: level, cmd: cmd, control: control, streams: s, notice: notice,
		ready: make(chan struct{}), done: make(chan struct{}),
	}
}

// send writes one message to the helper. An error means that the helper is
// dead, which follow finds out.
func (p *process) send(m ...string) {
	_ = message(m).writeTo(p.control)
}

// follow reads the helper's reports until it is dead, and then ends.
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
	for in := bufio.NewReader(p.control); ; {
		m, err := readMessage(in)
		if err != nil {
			break
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
			first(nil)
		case sayRefused:
			p.result = Result{ExitCode: int(m.nextInt()), NotStarted: true, Reason: m.next(), Started: began}
			p.result.NoDir = m.next() == "dir"
			first(nil)
		case sayExit:
			exit = parseExited(m)
		}
	}
	// The end of the stream may be the helper's, or that of a descriptor
	// nobody should have closed: either way nothing may go on.
	p.kill()
	waitErr := p.cmd.Wait()
	first(&Error{What: "init", Err: errors.Join(errors.New("it ended before the command was started"), waitErr)})
	if !p.result.NotStarted {
		p.setResult(exit, time.Since(began))
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
	p.err = p.streams.finish()
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

// killLocked ends everything at once: with PID 1 its namespace dies; a
// reaper is needed alive to find the others.
func (p *process) killLocked() {
	p.killed = true
	if p.level == LevelProcess {
		p.send(askKill)
		return
	}
	_ = p.cmd.Process.Kill() // an error means that it is dead
}

// wake keeps the reaper going: at the process level the command can stop it,
// even before it could say that the command was started.
func (p *process) wake() {
	for {
		select {
		case <-p.done:
			return
		case <-time.After(wakeEvery):
			_ = p.cmd.Process.Signal(syscall.SIGCONT) // an error means that it is dead
		}
	}
}

// wakeEvery is how long a stopped reaper can hold up what it is asked.
const wakeEvery = 50 * time.Millisecond

// Wait implements [Process].
func (p *process) Wait() (Result, error) {
	<-p.done
	if p.uncancel != nil {
		p.uncancel()
	}
	return p.result, p.err
}
