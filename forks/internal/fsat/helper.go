//go:build linux

package fsat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

// The helper is this program, started again in a user namespace of its own in
// which the caller is root: there it may read whatever the caller owns, whatever
// the modes say. It opens what it is asked to, and passes the descriptor back.
// Programs that use this package call reexec.Init first in main.
const helperName = "agentenv-open"

// errNoHelper: user namespaces are refused here.
var errNoHelper = errors.New("permission denied, and user namespaces, which would help, are refused here")

// helperIdle is how long a helper that nobody asks stays.
const helperIdle = 10 * time.Second

func init() { reexec.Register(helperName, helperMain) }

// requestSize is what precedes the path in a request: the flags of open, and
// whether to enter mount points. The directory comes as a descriptor.
const requestSize = 8

var helper struct {
	sync.Mutex
	conn    int // our end of the socket; 0 if there is no helper
	process *os.Process
	refused bool
	idle    *time.Timer
}

// helperOpen has the helper open path, which may have several elements, below
// dir. Symlinks are not followed.
func helperOpen(dir int, path string, flags int, cross bool) (int, error) {
	helper.Lock()
	defer helper.Unlock()
	if helper.refused {
		return -1, errNoHelper
	}
	if helper.conn == 0 {
		if err := startHelper(); err != nil {
			helper.refused = true
			return -1, errNoHelper
		}
	}
	helper.idle.Reset(helperIdle)
	fd, err := ask(helper.conn, dir, path, flags, cross)
	if errors.Is(err, io.ErrUnexpectedEOF) || err == unix.EPIPE || err == unix.ECONNRESET {
		stopHelper() // it was killed; the next question starts another
	}
	return fd, err
}

func startHelper() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	theirs := os.NewFile(uintptr(pair[1]), "helper")
	defer theirs.Close()
	cmd := exec.Command(reexec.Self())
	cmd.Args = []string{helperName}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Setpgid:     true,
	}
	if err := cmd.Start(); err != nil {
		unix.Close(pair[0])
		return err
	}
	helper.conn, helper.process = pair[0], cmd.Process
	helper.idle = time.AfterFunc(helperIdle, func() {
		helper.Lock()
		defer helper.Unlock()
		stopHelper()
	})
	// A first question tells whether a helper answers at all: it does not where
	// the program forgot reexec.Init, or exec in the namespace is refused.
	timeout := unix.Timeval{Sec: 5}
	_ = unix.SetsockoptTimeval(helper.conn, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout)
	fd, err := ask(helper.conn, unix.AT_FDCWD, "/", unix.O_PATH|unix.O_DIRECTORY, true)
	if err != nil {
		stopHelper()
		return err
	}
	unix.Close(fd)
	return nil
}

// stopHelper closes the socket, at which the helper exits.
func stopHelper() {
	if helper.conn == 0 {
		return
	}
	unix.Close(helper.conn)
	_ = helper.process.Kill()
	_, _ = helper.process.Wait()
	helper.conn, helper.process = 0, nil
	helper.idle.Stop()
}

// ask sends one request and returns the descriptor of the answer.
func ask(conn, dir int, path string, flags int, cross bool) (int, error) {
	b := make([]byte, requestSize, requestSize+len(path))
	binary.NativeEndian.PutUint32(b, uint32(flags))
	if cross {
		b[4] = 1
	}
	b = append(b, path...)
	var rights []byte
	if dir != unix.AT_FDCWD {
		rights = unix.UnixRights(dir)
	}
	if err := unix.Sendmsg(conn, b, rights, nil, unix.MSG_NOSIGNAL); err != nil {
		return -1, err
	}
	answer := make([]byte, 4)
	n, fds, err := receive(conn, answer)
	if err != nil {
		return -1, err
	}
	if n != 4 {
		closeAll(fds)
		return -1, io.ErrUnexpectedEOF
	}
	if e := binary.NativeEndian.Uint32(answer); e != 0 {
		closeAll(fds)
		return -1, unix.Errno(e)
	}
	if len(fds) != 1 {
		closeAll(fds)
		return -1, io.ErrUnexpectedEOF
	}
	return fds[0], nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// receive reads one packet and the descriptors that come with it.
func receive(conn int, b []byte) (int, []int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := unix.Recvmsg(conn, b, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil || oobn == 0 {
			return n, nil, err
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil || len(messages) != 1 {
			return n, nil, err
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		return n, fds, err
	}
}

// helperMain answers requests until the socket is closed.
func helperMain() {
	const conn = 3
	b := make([]byte, requestSize+unix.PathMax)
	for {
		n, fds, err := receive(conn, b)
		if err != nil || n < requestSize {
			os.Exit(0)
		}
		dir := unix.AT_FDCWD
		if len(fds) == 1 {
			dir = fds[0]
		}
		a := Access{CrossMounts: b[4] == 1}
		fd, err := a.open(dir, string(b[requestSize:n]), int(binary.NativeEndian.Uint32(b)))
		closeAll(fds)
		if err := reply(conn, fd, err); err != nil {
			fmt.Fprintln(os.Stderr, "agentenv helper:", err)
			os.Exit(1)
		}
	}
}

func reply(conn, fd int, err error) error {
	answer := make([]byte, 4)
	if err == nil {
		defer unix.Close(fd)
		return unix.Sendmsg(conn, answer, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
	}
	var e unix.Errno
	if !errors.As(err, &e) {
		e = unix.EIO
	}
	binary.NativeEndian.PutUint32(answer, uint32(e))
	return unix.Sendmsg(conn, answer, nil, nil, unix.MSG_NOSIGNAL)
}
