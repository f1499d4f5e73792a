package sandbox

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// terminal connects the user's terminal with the command's own. The kernel's
// line discipline inside does what keys mean there: ^C comes as a byte and is
// never sent as a signal too.
type terminal struct {
	user   *os.File
	socket *os.File // to the helper's guard
	theirs *os.File // the helper's end, until it is started
	master *os.File // of the command's terminal, once it runs
	output *pump
	screen *trackedScreen // nil where the output goes elsewhere
	wake   *os.File       // closed to end the reading of the user's keys
	// hangUp is called when the user's terminal is gone.
	hangUp func()

	mu      sync.Mutex // guards what is below, and the user's settings
	saved   unix.Termios
	over    bool
	signals chan os.Signal
}

// newTerminal prepares the connection; nothing is changed yet.
func newTerminal(c Command) (*terminal, error) {
	if c.Terminal == nil {
		return nil, nil
	}
	saved, err := settingsOf(int(c.Terminal.Fd()))
	if err != nil {
		e := &Error{What: "terminal", Err: &os.PathError{Op: "use", Path: c.Terminal.Name(), Err: err}}
		if errors.Is(err, unix.EIO) {
			e.Fix = "it has hung up, or belongs to others now: start this in the foreground of its session"
		}
		return nil, e
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, newError("terminal", os.NewSyscallError("socketpair", err))
	}
	t := &terminal{
		user: c.Terminal, saved: *saved,
		socket: os.NewFile(uintptr(fds[0]), "terminal's socket"), theirs: os.NewFile(uintptr(fds[1]), "terminal's socket"),
		signals: make(chan os.Signal, 8),
	}
	out := c.Stdout
	if out == nil {
		out = c.Terminal
	}
	if f, ok := out.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			t.screen = &trackedScreen{to: f, socket: fds[0]}
			out = t.screen
		}
	}
	t.output = &pump{to: out}
	return t, nil
}

// settingsOf reads a terminal's settings. In the background the kernel stops us
// first, by what is else a wait for nothing, as it stops every program that
// changes a terminal, until `fg`: till then they are those of the foreground.
func settingsOf(fd int) (*unix.Termios, error) {
	if err := unix.IoctlSetInt(fd, unix.TCSBRK, 1); err != nil { // tcdrain(3)
		return nil, err
	}
	return unix.IoctlGetTermios(fd, unix.TCGETS)
}

// attachTo adds to the helper what it needs, and tells it where that is.
func (t *terminal) attachTo(files []*os.File, sp *spec) []*os.File {
	if t == nil {
		return files
	}
	sp.TTY = controlFD + len(files)
	return append(files, t.theirs, t.user)
}

// release closes what is the helper's.
func (t *terminal) release() {
	if t != nil {
		t.theirs.Close()
	}
}

// abandon lets go of a terminal that was never connected.
func (t *terminal) abandon() {
	if t != nil {
		t.socket.Close()
	}
}

// connect begins to pass on: the command was started.
func (t *terminal) connect() error {
	if t == nil {
		return nil
	}
	master, err := t.receive()
	if err != nil {
		return newError("terminal", err)
	}
	stop, wake, err := os.Pipe()
	if err != nil {
		master.Close()
		return newError("terminal", err)
	}
	t.mu.Lock()
	t.master, t.output.from, t.wake = master, master, wake
	err = t.rawLocked()
	t.mu.Unlock()
	if err != nil {
		stop.Close()
		return &Error{What: "terminal", Err: err}
	}
	signal.Notify(t.signals, unix.SIGWINCH, unix.SIGTSTP, unix.SIGCONT)
	go t.obeySignals()
	go t.passKeys(int32(t.user.Fd()), stop)
	t.output.wait.Go(t.output.run)
	return nil
}

// receive takes the master from the helper, which sent it before it said that
// the command was started.
func (t *terminal) receive() (*os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(t.socket.Fd()), make([]byte, 1), oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("recvmsg", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, errors.Join(errors.New("no descriptor came"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, errors.Join(errors.New("no descriptor came"), err)
	}
	return os.NewFile(uintptr(fds[0]), "terminal"), nil // the helper made it pollable
}

// rawLocked makes the user's terminal raw and follows its size.
func (t *terminal) rawLocked() error {
	raw := rawTermios(t.saved)
	if err := unix.IoctlSetTermios(int(t.user.Fd()), unix.TCSETS, &raw); err != nil {
		return &os.PathError{Op: "set", Path: t.user.Name(), Err: err}
	}
	t.resizeLocked()
	return nil
}

func (t *terminal) restoreLocked() {
	// An error means that it has hung up.
	_ = unix.IoctlSetTermios(int(t.user.Fd()), unix.TCSETS, &t.saved)
}

// resize gives the command's terminal the size of the user's, whereupon the
// kernel tells the command.
func (t *terminal) resize() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.over && t.master != nil {
		t.resizeLocked()
	}
}

func (t *terminal) resizeLocked() {
	raw, err := t.master.SyscallConn()
	if err == nil {
		// An error means that one of the two is gone, which others find out.
		_ = raw.Control(func(fd uintptr) { _ = copySize(int(t.user.Fd()), int(fd)) })
	}
}

// lastOutput is how long the end of a terminal's output may take to come.
const lastOutput = 500 * time.Millisecond

// obeySignals follows the size, and job control from outside: the terminal is
// the user's own while we are stopped.
func (t *terminal) obeySignals() {
	for sig := range t.signals {
		t.mu.Lock()
		switch {
		case t.over:
		case sig == unix.SIGTSTP:
			t.restoreLocked()
			_ = unix.Kill(unix.Getpid(), unix.SIGSTOP)
		case sig == unix.SIGCONT:
			_ = t.rawLocked() // an error means that it has hung up
		default:
			t.resizeLocked()
		}
		t.mu.Unlock()
	}
}

// passKeys passes on what the user types until stop ends. The terminal is
// polled, not made non-blocking: that would hold for everybody who has it open.
// Nobody waits for this to end, but once stop has ended user is not read.
func (t *terminal) passKeys(user int32, stop *os.File) {
	defer stop.Close()
	fds := []unix.PollFd{{Fd: int32(stop.Fd())}, {Fd: user, Events: unix.POLLIN}}
	buf := make([]byte, 4096) // what a line discipline holds
	for {
		_, err := unix.Poll(fds, -1)
		if err == unix.EINTR {
			continue
		}
		if err != nil || fds[0].Revents != 0 {
			return
		}
		n, err := unix.Read(int(fds[1].Fd), buf)
		switch {
		case err == unix.EINTR, err == unix.EAGAIN:
			continue
		case err != nil, n == 0:
			t.hangUp()
			return
		}
		if _, err := t.master.Write(buf[:n]); err != nil {
			return // the command has ended
		}
	}
}

// finish passes on the last of the output and puts the user's terminal back.
func (t *terminal) finish() error {
	if t == nil {
		return nil
	}
	defer t.socket.Close()
	if t.wake == nil {
		return nil // it was never connected
	}
	signal.Stop(t.signals)
	t.wake.Close()
	// The end comes once all that was written has, unless somebody outside holds
	// the command's terminal: what is on its way does not count as there.
	t.output.from.SetReadDeadline(time.Now().Add(lastOutput))
	t.output.wait.Wait()
	t.mu.Lock()
	t.over = true
	if t.screen != nil {
		t.screen.undo()
	}
	t.restoreLocked()
	t.mu.Unlock()
	close(t.signals)
	t.master.Close()
	if errors.Is(t.output.err, unix.EIO) {
		return nil // the terminal has hung up: there is nobody to tell
	}
	return t.output.err
}

// trackedScreen writes to a terminal and notes its modes, for us and for the
// helper's guard.
type trackedScreen struct {
	to     io.Writer
	socket int
	screen screen
	told   modes
}

func (s *trackedScreen) Write(b []byte) (int, error) {
	s.screen.see(b)
	n, err := s.to.Write(b)
	// Colours come and go with every line: the guard can do without.
	if now := s.screen.on &^ modeColour; now != s.told {
		s.told = now
		// If the helper is dead there is no need.
		_ = unix.Sendmsg(s.socket, binary.NativeEndian.AppendUint32(nil, uint32(now)), nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
	}
	return n, err
}

func (s *trackedScreen) undo() {
	if seq := s.screen.on.undo(); seq != "" {
		_, _ = io.WriteString(s.to, seq) // an error means that it has hung up
	}
}

// How a command ends whose terminal has hung up: it is told by HUP, by TERM if
// that did not end it, and by KILL.
const hangUpGrace = 2 * time.Second

func (p *process) hungUp() {
	_ = p.Signal(syscall.SIGHUP) // an error means that it has ended
	_ = p.Signal(syscall.SIGCONT)
	timer := time.AfterFunc(hangUpGrace, func() { p.Stop(hangUpGrace) })
	go func() {
		<-p.done
		timer.Stop()
	}()
}
