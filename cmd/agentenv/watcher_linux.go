package main

import (
	"context"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/env/subid"
)

// watcher passes signals on to a command and ends it when its time is up.
type watcher struct {
	timeout time.Duration
	say     func(format string, args ...any)
	// ownTerminal says that the command has a terminal of its own, whose keys do
	// what the user's would.
	ownTerminal bool
	// inside says that an agentenv of the user's session, whom the shell sees,
	// starts and stops this one: see package subid.
	inside bool
	// files are those that may be the user's terminal.
	files []any

	hungUp          int // how many HUP came
	started         chan sandbox.Process
	ended, timedOut chan struct{}
}

// begin catches signals from now on. The context that it returns ends when one
// comes that no command gets, as it does not run yet or has ended: what is done
// then is making its tree or waiting, and the user does not want that.
func (w *watcher) begin() context.Context {
	w.started = make(chan sandbox.Process, 1)
	w.ended, w.timedOut = make(chan struct{}), make(chan struct{})
	signals := make(chan os.Signal, 8)
	heed := []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH}
	signal.Notify(signals, slices.DeleteFunc(heed, signal.Ignored)...) // nohup has one ignored
	heeding.Add(1)
	if !w.ownTerminal && !signal.Ignored(unix.SIGTSTP) {
		signal.Notify(signals, unix.SIGTSTP, unix.SIGCONT)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	go w.follow(signals, cancel)
	return ctx
}

// end stops what begin began.
func (w *watcher) end() {
	heeding.Add(-1)
	close(w.ended)
}

// watch is given the command once it runs.
func (w *watcher) watch(p sandbox.Process) { w.started <- p }

func (w *watcher) follow(signals chan os.Signal, cancel context.CancelCauseFunc) {
	defer signal.Stop(signals)
	var p sandbox.Process
	var expired <-chan time.Time
	for {
		select {
		case p = <-w.started:
			if w.timeout > 0 {
				expired = time.After(w.timeout)
			}
		case sig := <-signals:
			switch sig {
			case unix.SIGTSTP:
				w.pause(p)
			case unix.SIGCONT:
				resume(p)
			default:
				w.pass(sig, p, cancel)
			}
		case <-expired:
			if p.Signal(0) == nil { // it has not ended meanwhile
				close(w.timedOut)
				p.Stop(execGrace)
			}
		case <-w.ended:
			return
		}
	}
}

// pass gives a signal to the command, if it runs.
func (w *watcher) pass(sig os.Signal, p sandbox.Process, cancel context.CancelCauseFunc) {
	if p == nil || p.Signal(sig.(syscall.Signal)) != nil {
		stopAt(sig, cancel)
		return
	}
	if sig == unix.SIGHUP {
		w.hungUp++
	}
	if sig == unix.SIGTERM || w.hungUp > 1 || sig == unix.SIGHUP && slices.ContainsFunc(w.files, hasHungUp) {
		w.finish(sig, p)
	}
}

// finish ends a command that does not end by itself after the signal that it was
// given: who sent it wants us to end. A first HUP alone may mean to read the
// configuration anew.
func (w *watcher) finish(sig os.Signal, p sandbox.Process) {
	if sig == unix.SIGTERM {
		time.AfterFunc(execGrace, func() { p.Stop(0) })
		return
	}
	time.AfterFunc(hangUpGrace, func() { p.Stop(execGrace - hangUpGrace) })
}

// hangUpGrace passes between HUP and TERM, and execGrace between HUP and KILL.
const hangUpGrace = 2 * time.Second

// hasHungUp says whether f was a terminal that is gone.
func hasHungUp(f any) bool {
	file, ok := f.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == unix.EIO
}

// pause is ^Z: the command stops, with all that it started, and then we do, so
// that the shell sees its job stop. Until it says CONT. Where no shell could say
// so, TSTP stops nothing, as everywhere.
func (w *watcher) pause(p sandbox.Process) {
	if !w.inside && subid.Orphaned() {
		return
	}
	if p != nil {
		_ = p.Freeze() // one that waits for a disk stops when that answers
	}
	_ = unix.Kill(unix.Getpid(), unix.SIGSTOP) // package signal cannot give TSTP back to the kernel
}

func resume(p sandbox.Process) {
	if p != nil {
		_ = p.Thaw() // an error means that it is gone
	}
}

// stopAt cancels at a signal that is to end a program.
func stopAt(sig os.Signal, cancel context.CancelCauseFunc) {
	switch sig {
	case unix.SIGINT:
		cancel(errInterrupted)
	case unix.SIGQUIT:
		cancel(errQuit)
	case unix.SIGTERM, unix.SIGHUP:
		cancel(errTerminated)
	}
}

// code is the exit code that the command's end gives agentenv.
func (w *watcher) code(res sandbox.Result) int {
	if res.NotStarted {
		w.say("%s", res.Reason)
	}
	select {
	case <-w.timedOut:
		w.say("the command did not end within %s", w.timeout)
		return exitTimeout
	default:
		return res.ExitCode
	}
}
