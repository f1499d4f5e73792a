package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
)

// watcher passes signals on to a command and ends it when its time is up.
type watcher struct {
	timeout time.Duration
	say     func(format string, args ...any)

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
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	ctx, cancel := context.WithCancelCause(context.Background())
	go w.follow(signals, cancel)
	return ctx
}

// end stops what begin began.
func (w *watcher) end() { close(w.ended) }

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
			if p == nil || p.Signal(sig.(syscall.Signal)) != nil {
				stopAt(sig, cancel)
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

// stopAt cancels at a signal that is to end a program.
func stopAt(sig os.Signal, cancel context.CancelCauseFunc) {
	switch sig {
	case unix.SIGINT:
		cancel(errInterrupted)
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
