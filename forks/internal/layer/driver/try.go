//go:build linux

package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

const tryName = "agentenv-try-overlay"

func init() { reexec.Register(tryName, tryMain) }

// TryError says at what a trial of overlays failed.
type TryError struct {
	// Step is what was done: "namespace", "mount", "attribute", "write",
	// "delete", "stack".
	Step string
	// Own says that the trial was made in a user namespace of its own.
	Own bool
	Err error
}

func (e *TryError) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *TryError) Unwrap() error { return e.Err }

// Try mounts a small overlay in the directory dir as forks are mounted, works
// in it, makes its upper a layer, and mounts that. Who may not mount does so in
// a user namespace. Nothing is left in dir. The error is a [*TryError] if an
// overlay cannot be used.
func Try(ctx context.Context, dir string) (err error) {
	tmp, err := os.MkdirTemp(dir, ".try-")
	if err != nil {
		return err
	}
	defer func() {
		parent, e := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if e == nil {
			e = fsat.RemoveAll(context.WithoutCancel(ctx), parent, filepath.Base(tmp))
			unix.Close(parent)
		}
		err = errors.Join(err, e)
	}()
	if os.Geteuid() == 0 {
		err = tryHere(tmp)
		if !errors.Is(err, unix.EPERM) {
			return err
		}
		// Root of a container, who may be more in a namespace of his own.
		if err := os.RemoveAll(tmp); err != nil {
			return err
		}
		if err := os.Mkdir(tmp, 0o700); err != nil {
			return err
		}
	}
	return tryInNamespace(ctx, tmp)
}

func tryInNamespace(ctx context.Context, tmp string) error {
	cmd := exec.CommandContext(ctx, reexec.Self())
	cmd.Args = []string{tryName, tmp}
	var out bytes.Buffer
	cmd.Stdout = &out
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil && out.Len() == 0 {
		return &TryError{Step: "namespace", Own: true, Err: err}
	}
	what, text, _ := strings.Cut(strings.TrimSpace(out.String()), " ")
	number, detail, _ := strings.Cut(text, " ")
	errno, err := strconv.Atoi(number)
	switch {
	case what == "ok":
		return nil
	case err != nil:
		return &TryError{Step: "namespace", Own: true, Err: fmt.Errorf("the helper process said %q", out.String())}
	}
	return &TryError{Step: what, Own: true, Err: said(syscall.Errno(errno), detail)}
}

// said is the error with a text, which has it at its beginning, at its end or not at
// all.
func said(errno syscall.Errno, text string) error {
	if before, ok := strings.CutSuffix(text, errno.Error()); ok {
		return fmt.Errorf("%s%w", before, errno)
	}
	if after, ok := strings.CutPrefix(text, errno.Error()); ok {
		return fmt.Errorf("%w%s", errno, after)
	}
	return fmt.Errorf("%w: %s", errno, text)
}

// tryMain answers "ok", or the step, the error's number and its text.
func tryMain() {
	var te *TryError
	err := tryHere(os.Args[1])
	errno := syscall.EIO
	errors.As(err, &errno)
	switch {
	case err == nil:
		fmt.Println("ok")
	case errors.As(err, &te):
		fmt.Printf("%s %d %s\n", te.Step, int(errno), te.Err)
	default:
		fmt.Printf("mount %d %s\n", int(errno), err)
	}
	os.Exit(0)
}

// tryHere makes the trial with the rights that the process has.
func tryHere(tmp string) error {
	for _, d := range []string{"low/d", "up", "work", "work2", "up2"} {
		if err := os.MkdirAll(filepath.Join(tmp, d), 0o700); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, "low/gone"), []byte("x"), 0o600); err != nil {
		return err
	}
	if err := unix.Setxattr(filepath.Join(tmp, "up"), "user.agentenv", []byte("y"), 0); err != nil {
		return &TryError{Step: "attribute", Err: err}
	}
	first := &forks.Overlay{Dir: tmp, Lower: []string{"low"}, Upper: "up", Work: "work", Volatile: true}
	err := within(first, func(tree string) error {
		if err := os.WriteFile(tree+"/d/new", []byte("new"), 0o600); err != nil {
			return &TryError{Step: "write", Err: err}
		}
		if err := os.Remove(tree + "/gone"); err != nil {
			return &TryError{Step: "delete", Err: err}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(tmp, "up"), filepath.Join(tmp, "layer")); err != nil {
		return &TryError{Step: "stack", Err: err}
	}
	second := &forks.Overlay{Dir: tmp, Lower: []string{"layer", "low"}, Upper: "up2", Work: "work2"}
	return within(second, func(tree string) error {
		b, err := os.ReadFile(tree + "/d/new")
		if err == nil && string(b) != "new" {
			err = unix.EIO
		}
		if _, e := os.Lstat(tree + "/gone"); err == nil && e == nil {
			err = unix.EEXIST
		}
		if err != nil {
			return &TryError{Step: "stack", Err: err}
		}
		return nil
	})
}

// within calls fn with a path to the mounted overlay.
func within(o *forks.Overlay, fn func(tree string) error) error {
	fd, err := forks.Mount{Overlay: o}.Open()
	if err != nil {
		return &TryError{Step: "mount", Err: err}
	}
	defer unix.Close(fd)
	return fn(fmt.Sprintf("/proc/self/fd/%d", fd))
}
