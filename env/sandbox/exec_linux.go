package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Exit codes of what could not be executed, as every shell has them.
const (
	codeNotExecutable = 126
	codeNotFound      = 127
)

// defaultPath is searched when the command's environment has no PATH.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// execute starts the command with the helper's own descriptors 0 to 2. An
// error that is a *notExecuted is the command's fault, every other ours.
func execute(s *spec, attr *syscall.SysProcAttr) (int, error) {
	if f, err := s.open(s.Dir, unix.O_PATH|unix.O_DIRECTORY); err != nil {
		gone := errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR)
		return 0, &notExecuted{Code: codeNotExecutable, Reason: fmt.Sprintf("working directory %s: %v", s.Dir, err), NoDir: gone}
	} else {
		f.Close()
	}
	file, err := lookUp(s)
	if err != nil {
		return 0, err
	}
	attr.Chroot, attr.Setctty = s.chroot, s.TTY != 0
	pid, err := s.inCgroup(attr, func() (int, error) {
		return withRlimits(s.Limits, func() (int, error) { return forkExec(file, s, attr) })
	})
	var limits *Error
	switch {
	case err == nil:
		return pid, nil
	case errors.As(err, &limits):
		return 0, limits
	case refusedNamespace(err), err == syscall.EAGAIN, err == syscall.ENOMEM:
		return 0, &Error{What: "process", Err: os.NewSyscallError("clone", err)}
	case err == syscall.ENOENT:
		return 0, &notExecuted{Code: codeNotFound, Reason: file + ": " + missingPart(s, file)}
	case err == syscall.E2BIG:
		return 0, &notExecuted{Code: codeNotExecutable, Reason: file + ": arguments and environment are too long (one string may have 128 KiB)"}
	}
	return 0, &notExecuted{Code: codeNotExecutable, Reason: fmt.Sprintf("%s: %v", file, err)}
}

// busyTries and busyPause bound the wait for a program that some other
// process, forked while it was being written, still has open for writing.
const (
	busyTries = 100
	busyPause = 5 * time.Millisecond
)

func forkExec(file string, s *spec, attr *syscall.SysProcAttr) (pid int, err error) {
	for range busyTries {
		pid, err = syscall.ForkExec(file, s.Args, &syscall.ProcAttr{
			Dir: s.Dir, Env: s.Env, Files: []uintptr{0, 1, 2}, Sys: attr,
		})
		if err != syscall.ETXTBSY {
			break
		}
		time.Sleep(busyPause)
	}
	return pid, err
}

// refusedNamespace says whether err is how the kernel refuses namespaces.
func refusedNamespace(err error) bool {
	return errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, unix.EUSERS)
}

// lookUp finds the program of a command as a shell would.
func lookUp(s *spec) (string, error) {
	name := s.Args[0]
	if strings.Contains(name, "/") {
		return name, usable(s, name)
	}
	list, ok := getenv(s.Env, "PATH")
	if !ok {
		list = defaultPath
	}
	var found error
	for _, dir := range strings.Split(list, ":") {
		if dir == "" {
			dir = "."
		}
		// Not path.Join: "./x" must stay a path with a slash.
		file := dir + "/" + name
		f, err := s.open(file, unix.O_PATH)
		if err != nil {
			continue // also a directory that this user may not search
		}
		f.Close()
		if err := usable(s, file); err == nil {
			return file, nil
		} else if found == nil {
			found = err
		}
	}
	if found != nil {
		return "", found
	}
	return "", &notExecuted{Code: codeNotFound, Reason: name + ": command not found"}
}

// usable says why file cannot be executed, nil if it seems that it can.
func usable(s *spec, file string) error {
	f, err := s.open(file, unix.O_PATH)
	switch {
	case err == syscall.ENOENT, err == syscall.ENOTDIR:
		return &notExecuted{Code: codeNotFound, Reason: file + ": no such file"}
	case err != nil:
		return &notExecuted{Code: codeNotExecutable, Reason: fmt.Sprintf("%s: %v", file, err)}
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return &notExecuted{Code: codeNotExecutable, Reason: fmt.Sprintf("%s: %v", file, err)}
	case info.IsDir():
		return &notExecuted{Code: codeNotExecutable, Reason: file + ": is a directory"}
	case info.Mode()&0o111 == 0:
		return &notExecuted{Code: codeNotExecutable, Reason: file + ": not executable"}
	}
	return nil
}

// missingPart explains why a file that is there cannot be found by exec.
func missingPart(s *spec, file string) string {
	f, err := s.open(file, unix.O_RDONLY)
	if err != nil {
		return "no such file"
	}
	defer f.Close()
	head := make([]byte, 256)
	n, _ := f.Read(head)
	line, _, _ := strings.Cut(string(head[:n]), "\n")
	if rest, ok := strings.CutPrefix(line, "#!"); ok {
		if strings.HasSuffix(rest, "\r") {
			return fmt.Sprintf("its first line names the interpreter %q, with a carriage return", strings.TrimSpace(rest))
		}
		return "its interpreter " + strings.TrimSpace(rest) + " is not there"
	}
	return "the loader it needs is not there"
}

// open opens a file as the command will see it, relative to its directory.
func (s *spec) open(file string, flags uint64) (*os.File, error) {
	if !path.IsAbs(file) {
		file = path.Join(s.Dir, file)
	}
	top, err := unix.Open(s.chroot+"/", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(top)
	fd, err := unix.Openat2(top, file, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), file), nil
}

func getenv(env []string, key string) (string, bool) {
	for i := len(env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(env[i], key+"="); ok {
			return v, true
		}
	}
	return "", false
}

func errnoOf(err error) error {
	var e syscall.Errno
	if errors.As(err, &e) {
		return e
	}
	return err
}

// startBounded runs the command without a user namespace of its own, where the
// machine refuses one but gave us the powers to mount. What would undo the
// mounts is then taken from the command by dropping the capabilities.
func startBounded(s *spec) (int, error) {
	// The bounding set is the thread's; the child takes it from this one.
	runtime.LockOSThread()
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if keptCapabilities[c] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != unix.EINVAL {
			return 0, &Error{What: "capabilities", Err: os.NewSyscallError("prctl", err)}
		}
	}
	return execute(s, &syscall.SysProcAttr{Setsid: true})
}

// keptCapabilities are those that a package manager needs and that reach
// nothing outside the sandbox: the set that Docker gives, less mknod.
var keptCapabilities = map[int]bool{
	unix.CAP_CHOWN: true, unix.CAP_DAC_OVERRIDE: true, unix.CAP_FOWNER: true, unix.CAP_FSETID: true,
	unix.CAP_KILL: true, unix.CAP_SETGID: true, unix.CAP_SETUID: true, unix.CAP_SETPCAP: true,
	unix.CAP_NET_BIND_SERVICE: true, unix.CAP_NET_RAW: true, unix.CAP_SYS_CHROOT: true,
	unix.CAP_AUDIT_WRITE: true, unix.CAP_SETFCAP: true,
}
