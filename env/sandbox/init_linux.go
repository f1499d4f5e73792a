package sandbox

import (
	"bufio"
	"errors"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

func init() {
	reexec.Register(initName, func() { runHelper(&nsInit{}) })
	reexec.Register(natName, runNAT)
	reexec.Register(reaperName, func() { runHelper(&reaper{}) })
	reexec.Register(partName, tryPart)
	// A helper goes to work here and not in main: what the packages that
	// import this one initialise takes longer than all that it does.
	reexec.Init()
}

// keeper is what PID 1 of a sandbox and the subreaper of the process level do
// differently.
type keeper interface {
	// prepare makes what the command is to see.
	prepare(s *spec, notice func(string)) error
	// start executes the command and returns its pid.
	start(s *spec) (int, error)
	// term sends TERM (and CONT, for the stopped) to all.
	term()
	// kill sends KILL to all that is left; end also waits until they are gone.
	kill()
	end()
}

// helper is a process of a sandbox that stays beside the command.
type helper struct {
	keeper keeper
	in     io.Reader
	null   int // the host's /dev/null; a tree may have none
	guard  *guard

	mu       sync.Mutex
	out      io.Writer
	pid      int  // the command's, while it is alive
	stopping bool // wait for all, not for the command alone
	killed   bool // start nothing any more
}

// runHelper is the whole life of a helper. It never returns.
func runHelper(k keeper) {
	shield()
	unix.CloseRange(controlFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC)
	control := os.NewFile(controlFD, "control")
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		null = controlFD // anything that is not the command's will do
	}
	h := &helper{keeper: k, in: bufio.NewReader(control), out: control, null: null}
	m, err := readMessage(h.in)
	if err != nil {
		syscall.Exit(1) // agentenv died before it could say go
	}
	s := parseSpec(m)
	h.guard = guardTerminal(s)
	go h.obey()
	h.live(s)
}

// live makes the sandbox, runs the command and reaps until it ends.
func (h *helper) live(s *spec) {
	if err := h.keeper.prepare(s, func(n string) { _ = h.report(message{sayNotice, n}) }); err != nil {
		h.quit(failed(err))
	}
	pid, began, err := h.start(s)
	var refused *notExecuted
	switch {
	case errors.As(err, &refused):
		h.quit(refused.message())
	case err != nil:
		h.quit(failed(err))
	}
	h.releaseStdio()
	_ = h.report(message{sayStarted})
	h.reap(pid, began)
}

// start executes the command. A request that comes meanwhile waits until there
// is something to signal or to kill.
func (h *helper) start(s *spec) (int, time.Time, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.killed {
		return 0, time.Time{}, &Error{What: "process", Err: errors.New("stopped before it was started")}
	}
	pid, err := h.keeper.start(s)
	h.pid = pid
	return pid, time.Now(), err
}

// reap waits for every child. The command's end is the end of all; after a
// Stop the others have until its grace is over.
func (h *helper) reap(pid int, began time.Time) {
	for {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil: // ECHILD: nobody is left
			h.quit(nil)
		case got != pid:
			continue
		}
		h.mu.Lock()
		h.pid = 0
		stopping := h.stopping
		h.mu.Unlock()
		exit := exited{ws, time.Since(began)}.message()
		if !stopping {
			h.quit(exit)
		}
		_ = h.report(exit)
	}
}

// obey does what agentenv asks, and ends everything when agentenv is gone.
func (h *helper) obey() {
	for {
		m, err := readMessage(h.in)
		if err != nil {
			h.kill(h.keeper.end)
			h.guard.wait()
			syscall.Exit(1)
		}
		switch m.next() {
		case askSignal:
			h.signal(syscall.Signal(m.nextInt()))
		case askTerm:
			h.mu.Lock()
			h.stopping = true
			h.mu.Unlock()
			h.keeper.term()
		case askKill:
			_ = h.report(message{sayEnding})
			h.kill(h.keeper.kill)
		}
	}
}

// kill ends everything, also what is just being started.
func (h *helper) kill(all func()) {
	h.mu.Lock()
	h.killed = true
	h.mu.Unlock()
	all()
}

// signal sends a signal to the command, if it was not reaped.
func (h *helper) signal(sig syscall.Signal) {
	h.mu.Lock()
	defer h.mu.Unlock()
	to := h.pid
	if slices.Contains(terminalSignals, sig) {
		to = -to // it leads a process group of its own
	}
	if h.pid > 0 {
		_ = syscall.Kill(to, sig)
	}
}

// terminalSignals are what a terminal sends to a whole process group: a shell
// that waits for its child acts upon an interrupt only when the child did.
var terminalSignals = []syscall.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP, syscall.SIGWINCH}

// report tells agentenv something; an error means that it is dead, which obey
// notices.
func (h *helper) report(m message) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return m.writeTo(h.out)
}

// quit says the last word and ends everything. It stays, with what it holds, as
// long as anything is alive, also if agentenv waits no more.
func (h *helper) quit(last message) {
	gone := h.report(last) != nil
	_ = h.report(message{sayEnding})
	h.keeper.end()
	if gone {
		h.guard.wait()
	}
	syscall.Exit(0)
}

// releaseStdio lets go of the command's streams, so that who is at their
// other end sees only what the command does with them.
func (h *helper) releaseStdio() {
	for fd := range 3 {
		unix.Dup3(h.null, fd, unix.O_CLOEXEC)
	}
}

// nsInit is PID 1 of a sandbox's PID namespace. When it exits the kernel kills
// all others.
type nsInit struct{}

func (*nsInit) prepare(s *spec, notice func(string)) error {
	host := hostTerminal(s)
	if s.ownNetwork() {
		if err := raiseNetwork(); err != nil {
			return err
		}
	}
	w := &world{spec: s, root: newRoot(), uppers: -1, notice: notice}
	if err := w.build(); err != nil {
		return err
	}
	if err := giveTerminal(s, host); err != nil {
		return err
	}
	confine(notice) // this thread, which is to start the command
	return nil
}

func (*nsInit) start(s *spec) (int, error) {
	uids, gids, err := innerMaps(s)
	if err != nil {
		return 0, &Error{What: "user namespace", Err: err}
	}
	attr := &syscall.SysProcAttr{
		Setsid: true,
		// A namespace of its own, in which the mounts are locked: with the
		// powers of the namespace that mounted them they could be undone.
		Cloneflags:                 syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings:                uids,
		GidMappings:                gids,
		GidMappingsEnableSetgroups: s.setgroups(),
	}
	pid, err := execute(s, attr)
	if !s.UserNS && refusedNamespace(err) {
		return startBounded(s)
	}
	return pid, err
}

func (*nsInit) term() {
	// -1: all but ourselves.
	syscall.Kill(-1, syscall.SIGTERM)
	syscall.Kill(-1, syscall.SIGCONT)
}

func (*nsInit) kill() { syscall.Kill(-1, syscall.SIGKILL) }

// end reaps what it killed: all in the namespace become our children. Who came
// in from outside does not, and dies when we do.
func (n *nsInit) end() {
	for err := error(nil); err != syscall.ECHILD; _, err = syscall.Wait4(-1, nil, 0, nil) {
		n.kill()
	}
}
