package forks

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Open returns the tree as a detached mount, of which the caller disposes. An
// overlay needs CAP_SYS_ADMIN in the user namespace that owns the caller's
// mount namespace.
func (m Mount) Open() (int, error) {
	if m.Overlay != nil {
		return m.Overlay.mount()
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.Dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return -1, &os.PathError{Op: "bind", Path: m.Dir, Err: err}
	}
	return fd, nil
}

// mount makes the overlay. What changes where files are found by more than
// their names is off, also where the kernel's default is another: a layer is
// moved and stacked anew. Marks are in user.overlay.*, for root too, so that
// whoever mounts a layer reads what anybody wrote.
func (o *Overlay) mount() (int, error) {
	if len(o.Lower) == 0 {
		return -1, fmt.Errorf("mount overlay: %w: a snapshot that %s is built upon is missing or unreadable", ErrDamaged, filepath.Join(o.Dir, o.Upper))
	}
	dir, err := unix.Open(o.Dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: o.Dir, Err: err}
	}
	defer unix.Close(dir)
	if err := o.waitFree(); err != nil {
		return -1, err
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen overlay", err)
	}
	defer unix.Close(fs)
	switch err := o.addLowers(fs, dir); {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // before Linux 6.13
		return o.mountNames()
	case err != nil:
		return -1, err
	}
	at := fmt.Sprintf("/proc/self/fd/%d/", dir)
	opts := append(o.options(), "upperdir="+at+o.Upper, "workdir="+at+o.Work)
	for _, opt := range opts {
		key, value, ok := strings.Cut(opt, "=")
		if ok {
			err = unix.FsconfigSetString(fs, key, value)
		} else {
			err = unix.FsconfigSetFlag(fs, key)
		}
		if err != nil {
			return -1, fmt.Errorf("overlay option %s: %w", opt, err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("mount overlay: %w%s", err, kernelLog(fs))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("fsmount overlay", err)
	}
	return mnt, nil
}

// patience is how long a mount waits for the end of another: that of a process
// which was killed goes when its namespace does, a moment after it.
const patience = time.Second

// firstPause and longestPause are those between two looks of a patient mount. Each
// refusal is a line in the kernel's log, so a long wait has few: 17.
const (
	firstPause   = 2 * time.Millisecond
	longestPause = 100 * time.Millisecond
)

// waitFree is Free, with patience.
func (o *Overlay) waitFree() error { return patiently(o.Free) }

func patiently(free func() error) error {
	end := time.Now().Add(patience)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := free()
		if err == nil || time.Now().After(end) {
			return err
		}
		time.Sleep(pause)
	}
}

// Free returns [ErrInUse] if the upper is mounted anywhere, in whatever mount
// namespace. The kernel marks such a directory and refuses it with EBUSY to a
// mount that wants an index (without one it only warns); to be its own work
// directory, as it is asked to here, it refuses to any other with EINVAL. Who
// may not mount gets nil. A refusal of either kind is a line in the kernel's log,
// so nobody asks whose work directory says enough: the first thing that a mount
// does is to make something in it.
func (o *Overlay) Free() error {
	if isEmpty(filepath.Join(o.Dir, o.Work)) {
		return nil
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil // the mount, if it comes to one, says why
	}
	defer unix.Close(fs)
	upper := filepath.Join(o.Dir, o.Upper)
	opts := [][2]string{{"lowerdir", upper}, {"upperdir", upper}, {"workdir", upper}, {"index", "on"}}
	for _, opt := range opts {
		if unix.FsconfigSetString(fs, opt[0], opt[1]) != nil {
			return nil
		}
	}
	_ = unix.FsconfigSetFlag(fs, "userxattr") // as the mount itself
	if unix.FsconfigCreate(fs) == unix.EBUSY {
		return &os.PathError{Op: "mount", Path: upper, Err: ErrInUse}
	}
	return nil
}

// isEmpty says whether dir is a directory with nothing in it.
func isEmpty(dir string) bool {
	f, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer f.Close()
	_, err = f.Readdirnames(1)
	return err == io.EOF
}

// options are those of every overlay of this program.
func (o *Overlay) options() []string {
	opts := []string{"userxattr", "index=off", "metacopy=off", "redirect_dir=nofollow", "nfs_export=off"}
	if o.Volatile {
		opts = append(opts, "volatile")
	}
	return opts
}

// addLowers passes the layers by descriptor. Kernels before 6.13 answer EINVAL.
func (o *Overlay) addLowers(fs, dir int) error {
	for _, l := range o.Lower {
		fd, err := unix.Openat(dir, l, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			err = fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		if err != nil {
			return &os.PathError{Op: "open", Path: filepath.Join(o.Dir, l), Err: err}
		}
		err = unix.FsconfigSetFd(fs, "lowerdir+", fd)
		unix.Close(fd)
		if err != nil {
			return os.NewSyscallError("fsconfig lowerdir+", err)
		}
	}
	return nil
}

// kernelLog is what the kernel wrote about a failure into the context fs.
func kernelLog(fs int) string {
	buf := make([]byte, 512)
	n, err := unix.Read(fs, buf)
	if err != nil || n <= 2 {
		return ""
	}
	return " (" + strings.TrimSpace(string(buf[2:n])) + ")"
}

// maxOptions is what mount(2) takes: a page with the final NUL.
const maxOptions = 4095

// mountNames makes the overlay with mount(2) for kernels that take no
// descriptors: the layers are short names relative to the working directory of
// a thread that ends here.
func (o *Overlay) mountNames() (int, error) {
	type result struct {
		fd  int
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The first thread never ends, and its mounts would stay: another.
			fd, err := o.mountNames()
			runtime.UnlockOSThread()
			done <- result{fd, err}
			return
		}
		// Never unlocked: the thread's directory and mounts are its own.
		fd, err := o.mountHere()
		done <- result{fd, err}
	}()
	r := <-done
	return r.fd, r.err
}

func (o *Overlay) mountHere() (int, error) {
	data := strings.Join(append(o.options(),
		"lowerdir="+strings.Join(o.Lower, ":"), "upperdir="+o.Upper, "workdir="+o.Work), ",")
	if len(data) > maxOptions {
		return -1, fmt.Errorf("mount overlay: %w: %d layers have names too long for this kernel", ErrUnsupported, len(o.Lower))
	}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return -1, os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return -1, os.NewSyscallError("make mounts private", err)
	}
	if err := unix.Chdir(o.Dir); err != nil {
		return -1, &os.PathError{Op: "chdir", Path: o.Dir, Err: err}
	}
	if err := unix.Mount("overlay", o.Work, "overlay", 0, data); err != nil {
		return -1, fmt.Errorf("mount overlay: %w", err)
	}
	defer func() { _ = unix.Unmount(o.Work, unix.MNT_DETACH) }() // the thread's namespace ends with it
	fd, err := unix.OpenTree(unix.AT_FDCWD, o.Work, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("open_tree", err)
	}
	return fd, nil
}
