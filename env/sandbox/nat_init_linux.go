package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

// natInit is the process around the init of a command with [NetworkNAT]: PID 1 of
// a namespace in which are the program that forwards packets and, in a namespace
// below, the command. So the forwarder dies with them, whoever is killed, and the
// command can neither see nor signal it, which is in the host's network.
//
// It makes the command's network namespace on a thread of its own and stays in the
// host's itself.
type natInit struct {
	tool    natTool
	control *os.File
	// extra are the descriptors that the init is to have beside its socket; they
	// follow on it.
	extra []*os.File
	// inside runs functions on the thread in the command's network.
	inside chan<- func()
	init   atomic.Int32 // its pid, once it was started
	// rulesEnd is the input of the program that holds the rules of natVeth; it
	// ends when that is closed.
	rulesEnd *os.File
	// undo is what the end of the namespaces would undo only later.
	undo func()
}

// natReady bounds the wait for a forwarder to be ready. It takes milliseconds.
const natReady = 10 * time.Second

// natPatience is how long an init may take to end when agentenv is dead: longer
// than guardPatience.
const natPatience = 2 * time.Second

// runNAT is the whole life of the process. It never returns.
func runNAT() {
	signal.Notify(make(chan os.Signal, 1)) // see runHelper
	unix.CloseRange(controlFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC)
	// Both ends are one program: the arguments are those of natTools.around.
	n := &natInit{control: os.NewFile(controlFD, "control"), undo: func() {}}
	extra, _ := strconv.Atoi(os.Args[1])
	for fd := range extra {
		n.extra = append(n.extra, os.NewFile(uintptr(controlFD+1+fd), "inherited"))
	}
	var tools natTools
	for t := range slices.Chunk(os.Args[2:], 3) {
		tools = append(tools, natTool{name: t[0], path: t[1], nft: t[2]})
	}
	go n.watch()
	err := n.connect(tools)
	if err == nil && os.Args[1] == natTrial {
		_ = message{sayStarted, n.tool.name}.writeTo(n.control)
		n.undo()
		syscall.Exit(0)
	}
	var cmd *exec.Cmd
	if err == nil {
		cmd, err = n.start()
	}
	if err != nil {
		n.undo()
		_ = failed(err).writeTo(n.control) // if agentenv is gone, nobody wants to know
		syscall.Exit(1)
	}
	n.release()
	n.reap(cmd.Process.Pid)
	n.undo()
	syscall.Exit(0)
}

// watch ends all if agentenv dies before there is an init to notice it. An init
// that somebody stopped, as [Process].Freeze does, is woken, and has its time.
func (n *natInit) watch() {
	for {
		fds := []unix.PollFd{{Fd: controlFD, Events: unix.POLLRDHUP}}
		if _, err := unix.Poll(fds, -1); err == unix.EINTR {
			continue
		}
		pid := n.init.Load()
		if pid == 0 {
			syscall.Exit(1)
		}
		_ = syscall.Kill(int(pid), syscall.SIGCONT) // an error means that it is dead
		time.Sleep(natPatience)
		syscall.Exit(1)
	}
}

// connect makes the network, with the first of the tools that works. Each has a
// namespace that is new: who fails may leave something in it.
func (n *natInit) connect(tools natTools) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return &Error{What: "mount namespace", Err: err}
	}
	var said []string
	for _, n.tool = range tools {
		namespace, forget, err := n.makeNamespace()
		if err != nil {
			return err
		}
		err = n.forward(namespace)
		if ferr := forget(); ferr != nil {
			return &Error{What: "network namespace", Err: ferr}
		}
		if err == nil {
			if len(said) > 0 {
				_ = message{sayNotice, "network nat goes by " + n.tool.name + ", for others do not work here: " + strings.Join(said, "; ")}.writeTo(n.control)
			}
			return nil
		}
		said = append(said, n.tool.name+": "+err.Error())
	}
	return &Error{What: "network", Err: errors.New(strings.Join(said, "; ")),
		Fix: "look whether the machine itself has a network; --network private works without"}
}

// start starts the init in the network. Its argument is the way out.
func (n *natInit) start() (*exec.Cmd, error) {
	cmd := reexec.Command(initName, n.tool.name)
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = append([]*os.File{n.control}, n.extra...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: helperNamespaces}
	if err := n.within(cmd.Start); err != nil {
		return nil, explain("namespaces", fmt.Errorf("start of its init: %w", errnoOf(err)))
	}
	n.init.Store(int32(cmd.Process.Pid))
	return cmd, nil
}

// netnsHomes are where the namespace gets a name, in a file system that only this
// process sees. Under the AppArmor profile that comes with it pasta may open
// @{run}/user/@{uid}/netns/*; a path in /proc it would have to trace us for. Where
// there is no /run/user there is hardly a profile.
var netnsHomes = []string{"/run/user", "/mnt", "/tmp"}

// makeNamespace makes the command's network namespace, on a thread that stays in
// it, and gives it a name, for forget to take away again: a program that drops its
// privileges may not look it up in /proc.
func (n *natInit) makeNamespace() (name string, forget func() error, err error) {
	var home string
	for _, home = range netnsHomes {
		if err = unix.Mount("tmpfs", home, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755"); err == nil {
			break
		}
	}
	dir := filepath.Join(home, "0/netns")
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	name = filepath.Join(dir, "network")
	if err == nil {
		err = os.WriteFile(name, nil, 0o600)
	}
	if err != nil {
		return "", nil, &Error{What: "network namespace", Err: err}
	}
	if n.inside == nil {
		n.inside = lockedThread()
	}
	forget = func() error { return os.NewSyscallError("umount", unix.Unmount(home, unix.MNT_DETACH)) }
	return name, forget, n.within(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return networkRefused(os.NewSyscallError("unshare", err))
		}
		if err := unix.Mount("/proc/thread-self/ns/net", name, "", unix.MS_BIND, ""); err != nil {
			return &Error{What: "network namespace", Err: os.NewSyscallError("mount", err)}
		}
		return nil
	})
}

// lockedThread runs functions on a thread of its own.
func lockedThread() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
}

// within calls f on the thread in the command's network.
func (n *natInit) within(f func() error) error {
	done := make(chan error, 1)
	n.inside <- func() { done <- f() }
	return <-done
}

// forward gives the namespace its way out.
func (n *natInit) forward(namespace string) error {
	switch n.tool.name {
	case natPasta:
		return n.pasta(namespace)
	case natSlirp:
		return n.slirp(namespace)
	default:
		return n.veth(namespace)
	}
}

// pasta goes into the background when it is ready.
func (n *natInit) pasta(namespace string) error {
	ctx, cancel := context.WithTimeout(context.Background(), natReady)
	defer cancel()
	cmd := exec.CommandContext(ctx, n.tool.path, pastaArgs(namespace)...)
	return n.withWords(cmd, cmd.Run)
}

// slirp writes to a descriptor when it is ready.
func (n *natInit) slirp(namespace string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(n.tool.path, slirpArgs(namespace, controlFD)...)
	cmd.ExtraFiles = []*os.File{w}
	return n.withWords(cmd, func() error {
		err := cmd.Start()
		w.Close()
		if err != nil {
			return err
		}
		if err = r.SetReadDeadline(time.Now().Add(natReady)); err == nil {
			_, err = io.ReadFull(r, make([]byte, 1))
		}
		if err == nil {
			return nil
		}
		_ = cmd.Process.Kill() // an error means that it is dead
		_ = cmd.Wait()
		if errors.Is(err, io.EOF) {
			return errors.New("it ended before it was ready")
		}
		return err
	})
}

// withWords adds to the error of run what cmd wrote.
func (n *natInit) withWords(cmd *exec.Cmd, run func() error) error {
	// No pipe: who stays in the background would keep it open.
	fd, err := unix.MemfdCreate("words", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	words := os.NewFile(uintptr(fd), "words")
	defer words.Close()
	cmd.Stdout, cmd.Stderr = words, words
	if err = run(); err == nil {
		return nil
	}
	text := make([]byte, 4096)
	count, _ := words.ReadAt(text, 0) // what can be read is enough
	return fmt.Errorf("%w: %s", err, strings.Join(strings.Fields(string(text[:count])), " "))
}

// release lets go of what is the init's.
func (n *natInit) release() {
	if null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		for fd := range 3 {
			unix.Dup3(null, fd, unix.O_CLOEXEC)
		}
	}
	for _, f := range n.extra {
		f.Close()
	}
}

// reap waits until the init ends. Whoever else ends is the forwarder.
func (n *natInit) reap(pid int) {
	for {
		got, err := syscall.Wait4(-1, nil, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil || got == pid:
			return
		default:
			_ = message{sayNotice, "the network of a command has no way out any more: " + n.tool.name + " ended"}.writeTo(n.control)
		}
	}
}
