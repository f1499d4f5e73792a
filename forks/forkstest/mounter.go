//go:build linux

package forkstest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

const (
	// mounterName is the process that mounts for an ordinary user's tests.
	mounterName = "forkstest-mounter"
	// mounterSocket holds the path where it listens.
	mounterSocket = "AGENTENV_TEST_MOUNTER"
	// noMounter says why there is none.
	noMounter = "AGENTENV_TEST_NO_MOUNTER"
)

func init() { reexec.Register(mounterName, mounterMain) }

// errNoMounter says that this process cannot have anything mounted.
var errNoMounter = errors.New("nothing can be mounted here")

// order is what the mounter is asked for: to mount a tree at At, or something
// else as mount(2) does, or without either to unmount what is there.
type order struct {
	At    string
	Mount *forks.Mount

	Source, Type, Data string
	Flags              uintptr
}

// reply is what the mounter answers: nothing, or why not.
type reply struct {
	Text  string
	Errno syscall.Errno
}

// mounterMain runs the test binary without the capabilities that this process
// has, and mounts what it asks for: an overlay mount wants them all, and a
// driver must be tested with none.
func mounterMain() {
	exitOn(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	path := filepath.Join(os.Getenv(userDir), "mounter")
	l, err := net.Listen("unix", path)
	exitOn(err)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	runtime.LockOSThread() // whose ambient capabilities the child inherits
	exitOn(unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
	cmd := exec.Command(reexec.Self(), os.Args[1:]...)
	cmd.Env = append(os.Environ(), mounterSocket+"="+path)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		os.Exit(max(exit.ExitCode(), 1))
	}
	exitOn(err)
}

func serve(c net.Conn) {
	defer c.Close()
	var o order
	err := json.NewDecoder(c).Decode(&o)
	if err == nil {
		err = o.do()
	}
	var r reply
	if err != nil {
		r.Text = err.Error()
		errors.As(err, &r.Errno)
	}
	_ = json.NewEncoder(c).Encode(r) // the asker may be dead by now
}

// do carries the order out with what this process may do.
func (o order) do() error {
	if o.Type != "" || o.Flags != 0 {
		return os.NewSyscallError("mount "+o.At, unix.Mount(o.Source, o.At, o.Type, o.Flags, o.Data))
	}
	if o.Mount == nil {
		return unmount(o.At)
	}
	fd, err := o.Mount.Open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, o.At, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "mount", Path: o.At, Err: err}
	}
	return nil
}

// unmount waits for processes that are just ending.
func unmount(path string) error {
	end := time.Now().Add(3 * time.Second)
	for {
		err := unix.Unmount(path, 0)
		if err != syscall.EBUSY || time.Now().After(end) {
			if err != nil {
				return &os.PathError{Op: "unmount", Path: path, Err: err}
			}
			return nil
		}
		time.Sleep(time.Millisecond)
	}
}

// give has the order carried out by whoever may.
func (o order) give() error {
	if os.Geteuid() == 0 {
		return o.do()
	}
	path := os.Getenv(mounterSocket)
	if path == "" {
		return fmt.Errorf("%w: %s", errNoMounter, os.Getenv(noMounter))
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := json.NewEncoder(c).Encode(o); err != nil {
		return err
	}
	var r reply
	if err := json.NewDecoder(c).Decode(&r); err != nil {
		return err
	}
	if r.Text == "" {
		return nil
	}
	if r.Errno != 0 {
		return fmt.Errorf("%s: %w", strings.TrimSuffix(r.Text, ": "+r.Errno.Error()), r.Errno)
	}
	return errors.New(r.Text)
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
