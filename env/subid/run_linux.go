package subid

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

const (
	// waitName is the program between the clone and its maps: it has no ids yet
	// and no rights, and gets them by executing itself anew.
	waitName = "agentenv-subid"
	// goFD is where it waits for the word to go. The other end stays open for as
	// long as who started it lives.
	goFD = 3
	// ExtraFD is the descriptor of the file that Run passes on.
	ExtraFD = 4
)

func init() {
	reexec.Register(waitName, waitForMaps)
	Register(probeName, probed)
	reexec.Init() // before other packages initialise what neither needs
}

// waitForMaps executes the program under the name of its arguments once the
// maps are written.
func waitForMaps() {
	if n, err := os.NewFile(goFD, "go").Read(make([]byte, 1)); n != 1 {
		fmt.Fprintln(os.Stderr, "agentenv: the program that started this one has ended:", err)
		os.Exit(1)
	}
	err := unix.Exec(reexec.Self(), os.Args[1:], os.Environ())
	fmt.Fprintln(os.Stderr, "agentenv: execute itself:", err)
	os.Exit(1)
}

// Register lets Run call f under a name. It is called by an init function.
func Register(name string, f func()) {
	if os.Args[0] == name {
		stay()
	}
	reexec.Register(name, f)
}

// stay lets this process live no longer than the one that started it. To be
// killed with it was given up by the kernel when the process got its rights. This
// is the first thread, which never ends.
func stay() {
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0) // it takes every signal
	gone := []unix.PollFd{{Fd: goFD}}
	if _, err := unix.Poll(gone, 0); err != nil || gone[0].Revents != 0 {
		os.Exit(1) // it died meanwhile
	}
	_ = unix.Close(goFD) // only read
}

// Run executes the program anew in a user namespace with the map m, under the
// name args[0], which is one of [Register], and returns its exit status;
// 128+N if signal N ended it that was sent to this process. Another signal makes
// the error [*Killed]; every other error means that it never ran. extra, if not
// nil, is its descriptor [ExtraFD].
func Run(m Map, stdin, extra *os.File, args ...string) (int, error) {
	// The death of the thread that starts it is its own.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	signals := make(chan os.Signal, 16) // more than a person sends before the maps are written
	signal.Notify(signals, heeded()...)
	defer signal.Stop(signals)
	child, word, err := start(m, stdin, extra, args)
	if err != nil {
		return 0, err
	}
	defer word.Close()
	states := make(chan unix.WaitStatus)
	go wait(child.Pid, states)
	var mustStop <-chan time.Time
	for {
		// An error of a signal means that the process has ended.
		select {
		case sig := <-signals:
			if sig == unix.SIGTSTP {
				if Orphaned() {
					continue // nobody could continue us, as everywhere
				}
				if !catches(child.Pid, unix.SIGTSTP) {
					sig = unix.SIGSTOP // without a shell in its session TSTP does not stop it
				} else {
					mustStop = time.After(stopWithin)
				}
			}
			_ = child.Signal(sig)
		case <-mustStop:
			_ = child.Signal(unix.SIGSTOP)
		case ws := <-states:
			switch {
			case ws.Stopped():
				mustStop = nil
				// So that the shell that waits for us notices. CONT goes the same way.
				_ = unix.Kill(unix.Getpid(), unix.SIGSTOP)
			case ws.Signaled() && !slices.Contains(forwarded, os.Signal(ws.Signal())):
				return 0, &Killed{ws.Signal()}
			case ws.Signaled():
				return 128 + int(ws.Signal()), nil
			default:
				return ws.ExitStatus(), nil
			}
		}
	}
}

// forwarded are the signals by which others tell the program something.
var forwarded = []os.Signal{
	unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2,
	unix.SIGWINCH, unix.SIGTSTP, unix.SIGCONT,
}

// heeded are those of them that whoever started us did not have ignored, as nohup
// does.
func heeded() []os.Signal {
	return slices.DeleteFunc(slices.Clone(forwarded), signal.Ignored)
}

// stopWithin is how long the process inside has to stop by itself when it is
// asked to, as by ^Z, and catches that: it has to stop a command, of which it waits
// a second for the last, and restore the terminal first. One that hangs is stopped.
const stopWithin = 3 * time.Second

// catches says whether a process has a handler for a signal.
func catches(pid int, sig syscall.Signal) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // it catches none when it is gone
	_, after, _ := strings.Cut(string(status), "\nSigCgt:\t")
	mask, _, _ := strings.Cut(after, "\n")
	caught, _ := strconv.ParseUint(mask, 16, 64)
	return caught&(1<<(sig-1)) != 0
}

// Killed says that the process inside was killed: by somebody, or by the kernel.
type Killed struct{ Signal syscall.Signal }

func (k *Killed) Error() string {
	return fmt.Sprintf("agentenv was killed (%s) in the user namespace where it works", unix.SignalName(k.Signal))
}

// wait tells of every change of the child's state; the last is its end.
func wait(pid int, states chan<- unix.WaitStatus) {
	for {
		var ws unix.WaitStatus
		switch _, err := unix.Wait4(pid, &ws, unix.WUNTRACED, nil); {
		case err == unix.EINTR:
			continue
		case err != nil: // nobody else reaps it
			panic(err)
		}
		states <- ws
		if !ws.Stopped() {
			return
		}
	}
}

// start clones the process and writes its maps. It also returns the end of the
// pipe that stays open.
func start(m Map, stdin, extra *os.File, args []string) (child *os.Process, word *os.File, err error) {
	ready, word, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			word.Close()
		}
	}()
	cmd := reexec.Command(append([]string{waitName}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{ready} // goFD
	if extra != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, extra) // ExtraFD
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
		Setsid:     true,
	}
	err = cmd.Start()
	ready.Close()
	if err != nil {
		return nil, nil, &Error{Msg: fmt.Sprintf("a user namespace is refused here: %v", errnoOf(err)), Fix: "`agentenv doctor` says why"}
	}
	if err = write(m, cmd.Process.Pid); err == nil {
		_, err = io.WriteString(word, "!")
	}
	if err != nil {
		_ = cmd.Process.Kill() // an error means that it is dead
		_, _ = cmd.Process.Wait()
		return nil, nil, err
	}
	return cmd.Process, word, nil
}

func errnoOf(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// write has both maps of the process pid written, at once.
func write(m Map, pid int) error {
	done := make(chan error)
	go func() { done <- uids.write(m.UIDs, pid) }()
	return errors.Join(gids.write(m.GIDs, pid), <-done)
}

func (k kind) write(m []Range, pid int) error {
	args := []string{strconv.Itoa(pid)}
	for _, r := range m {
		for _, n := range []int64{r.Inside, r.Outside, r.Size} {
			args = append(args, strconv.FormatInt(n, 10))
		}
	}
	program, err := k.program()
	if err != nil {
		return err
	}
	out, err := exec.Command(program, args...).CombinedOutput()
	if err == nil {
		return nil
	}
	said := strings.TrimSpace(string(out))
	if said == "" {
		said = k.helper + ": " + err.Error()
	}
	return &Error{
		Msg: strings.ReplaceAll(said, "\n", "; "),
		Fix: fmt.Sprintf("%s must be setuid root or have its file capability (sudo apt-get install --reinstall uidmap), and nothing (such as a container's no-new-privileges) may take that away", k.helper),
	}
}
