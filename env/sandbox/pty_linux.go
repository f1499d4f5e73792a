package sandbox

import (
	"encoding/binary"
	"errors"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// userTerminalFD is where, after the socket spec.TTY, a helper has the user's
// terminal.
func (s *spec) userTerminalFD() int { return s.TTY + 1 }

// guard is a helper's care for the user's terminal: if agentenv dies while the
// terminal is raw, nobody else would put it back.
type guard struct {
	terminal int
	saved    unix.Termios
	on       atomic.Uint32 // modes that the command's output left on
	done     chan struct{} // closed when agentenv is dead and the terminal put back
}

// guardTerminal begins to watch over the user's terminal, which is not raw yet;
// nil if the command has none.
func guardTerminal(s *spec) *guard {
	if s.TTY == 0 {
		return nil
	}
	g := &guard{terminal: s.userTerminalFD(), done: make(chan struct{})}
	saved, err := unix.IoctlGetTermios(g.terminal, unix.TCGETS)
	if err != nil {
		return nil // it has hung up: there is nothing to put back
	}
	g.saved = *saved
	go g.watch(s.TTY)
	return g
}

// watch reads which modes are on, until agentenv is dead.
func (g *guard) watch(socket int) {
	defer close(g.done)
	buf := make([]byte, 4)
	for {
		n, err := unix.Read(socket, buf)
		switch {
		case err == unix.EINTR:
		case err != nil || n < len(buf):
			g.restore()
			return
		default:
			g.on.Store(binary.NativeEndian.Uint32(buf))
		}
	}
}

// restore puts the terminal back, unless somebody else did so first. We are in
// another session: job control does not stop us.
func (g *guard) restore() {
	raw := rawTermios(g.saved)
	if now, err := unix.IoctlGetTermios(g.terminal, unix.TCGETS); err != nil || *now != raw {
		return
	}
	if undo := modes(g.on.Load()).undo(); undo != "" {
		unix.Write(g.terminal, []byte(undo))
	}
	unix.IoctlSetTermios(g.terminal, unix.TCSETS, &g.saved)
}

// guardPatience bounds the wait for a terminal that takes no output.
const guardPatience = time.Second

// wait returns when the terminal was put back after agentenv's death.
func (g *guard) wait() {
	if g == nil {
		return
	}
	select {
	case <-g.done:
	case <-time.After(guardPatience):
	}
}

// rawTermios is what makes a terminal pass everything on as it is: cfmakeraw(3).
func rawTermios(t unix.Termios) unix.Termios {
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cflag &^= unix.CSIZE | unix.PARENB
	t.Cflag |= unix.CS8
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	return t
}

// pair is a new terminal: the end that the command has is the peer.
type pair struct{ master, peer int }

func (p *pair) close() {
	if p != nil {
		unix.Close(p.master)
		unix.Close(p.peer)
	}
}

// hostTerminal opens a new terminal of the host's, for a command whose tree may
// have no /dev; nil if none is wanted or to be had.
func hostTerminal(s *spec) *pair {
	if s.TTY == 0 {
		return nil
	}
	host, err := openPair("/dev/ptmx", 0)
	if err != nil {
		return nil
	}
	return host
}

// giveTerminal makes a new terminal the helper's streams, which the command
// inherits, and sends its master to agentenv. It is one of the command's own
// /dev, so that its name is good inside, or else host.
func giveTerminal(s *spec, host *pair) error {
	if s.TTY == 0 {
		return nil
	}
	own, err := openPair(s.chroot+"/dev/pts/ptmx", unix.RESOLVE_NO_SYMLINKS)
	switch {
	case err == nil:
		host.close()
	case host == nil:
		return newError("terminal", err)
	default:
		own = host
	}
	defer own.close()
	if err := own.connectStreams(s.userTerminalFD()); err != nil {
		return newError("terminal", err)
	}
	err = unix.Sendmsg(s.TTY, []byte{0}, unix.UnixRights(own.master), nil, 0)
	return os.NewSyscallError("sendmsg", err)
}

// openPair opens a new terminal. Only the kernel's own answers to being asked
// for the number of one: a tree can hold anything at that path.
func openPair(ptmx string, resolve uint64) (*pair, error) {
	master, err := unix.Openat2(unix.AT_FDCWD, ptmx, &unix.OpenHow{
		Flags: unix.O_RDWR | unix.O_NOCTTY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: resolve,
	})
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: ptmx, Err: err}
	}
	var peer uintptr
	if _, err = unix.IoctlGetInt(master, unix.TIOCGPTN); err == nil {
		err = unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		var errno unix.Errno
		peer, _, errno = unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		if errno != 0 {
			err = errno
		}
	}
	if err != nil {
		unix.Close(master)
		return nil, &os.PathError{Op: "make a terminal from", Path: ptmx, Err: err}
	}
	return &pair{master, int(peer)}, nil
}

// connectStreams makes the peer, with the settings and the size of the user's
// terminal, our descriptors 0 to 2.
func (p *pair) connectStreams(user int) error {
	settings, err := unix.IoctlGetTermios(user, unix.TCGETS)
	if err == nil {
		err = unix.IoctlSetTermios(p.peer, unix.TCSETS, settings)
	}
	if err == nil {
		err = copySize(user, p.master)
	}
	for fd := range 3 {
		err = errors.Join(err, unix.Dup3(p.peer, fd, 0))
	}
	return os.NewSyscallError("ioctl of a terminal", err)
}

// copySize gives one terminal the size of another.
func copySize(from, to int) error {
	size, err := unix.IoctlGetWinsize(from, unix.TIOCGWINSZ)
	if err != nil {
		return err
	}
	return unix.IoctlSetWinsize(to, unix.TIOCSWINSZ, size)
}
