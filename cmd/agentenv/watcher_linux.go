package main

import (
	"bytes"
	"context"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
)

// watcher passes signals on to a command and ends it when its time is up.
type watcher struct {
	timeout time.Duration
	say     func(format string, args ...any)
	// ownTerminal says that the command has a terminal of its own, whose keys do
	// what the user's would.
	ownTerminal bool

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
	if !w.ownTerminal && !signal.Ignored(unix.SIGTSTP) {
		signal.Notify(signals, unix.SIGTSTP, unix.SIGCONT)
	}
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
			switch sig {
			case unix.SIGTSTP:
				pause(p)
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
	}
}

// pause is ^Z: the command stops, with all that it started, and then we do, so
// that the shell sees its job stop. Until it says CONT. Where no shell could say
// so, TSTP stops nothing, as everywhere.
func pause(p sandbox.Process) {
	if isOrphaned() {
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

// isOrphaned says whether nobody in our session can continue our process group:
// then the kernel does not stop it either.
func isOrphaned() bool {
	group, session := unix.Getpgrp(), sessionOf(0)
	for pid := unix.Getppid(); pid > 0; pid = parentOf(pid) {
		if sessionOf(pid) != session {
			return true
		}
		if g, err := unix.Getpgid(pid); err != nil || g != group {
			return err != nil
		}
	}
	return true
}

// sessionOf is the session of a process, 0 if it is gone.
func sessionOf(pid int) int {
	sid, err := unix.Getsid(pid)
	if err != nil {
		return 0
	}
	return sid
}

// parentOf is the parent of a process, 0 if it has none or is gone.
func parentOf(pid int) int {
	stat, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(fields[1])
	return parent
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
