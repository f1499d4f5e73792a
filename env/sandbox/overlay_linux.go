package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// overlay makes a detached overlay over the directory lower whose changes go
// to the scratch directory. What of it is named in without is not seen.
//
// Where the scratch directory's file system cannot hold an upper (in a
// container it is often an overlay itself), changes are kept in memory.
func (w *world) overlay(lower string, without []string) (int, error) {
	if w.uppers < 0 {
		w.uppers = w.scratch
	}
	mnt, err := w.overlayIn(w.uppers, lower, without)
	if err == nil || w.uppers != w.scratch || !unfitUpper(err) {
		return mnt, err
	}
	memory, merr := w.memory()
	if merr != nil {
		return -1, err
	}
	mnt, merr = w.overlayIn(memory, lower, without)
	if merr != nil {
		unix.Close(memory)
		return -1, err
	}
	w.uppers = memory
	w.notice("the file system of " + w.spec.View.Scratch + " cannot hold the changes of an overlay, so those to the home and to overlaid mounts are kept in memory")
	return mnt, nil
}

// unfitUpper says whether err is how the kernel refuses a file system that can
// hold no upper.
func unfitUpper(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP)
}

// memory mounts a directory in memory where the new root hides it.
func (w *world) memory() (int, error) {
	w.made++
	name := strconv.Itoa(w.made)
	if err := makeEntry(w.scratch, name, true); err != nil {
		return -1, err
	}
	mnt, err := newFS("tmpfs", attrData, option{"mode", "700"})
	if err != nil {
		return -1, err
	}
	return mnt, attachAt(mnt, w.scratch, name)
}

// overlayIn makes an overlay with its upper in the directory dir.
func (w *world) overlayIn(dir int, lower string, without []string) (int, error) {
	low, err := unix.Open(lower, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "overlay", Path: lower, Err: err}
	}
	defer unix.Close(low)
	w.made++
	upper := strconv.Itoa(w.made)
	work := upper + ".work"
	for _, d := range []string{upper, work} {
		if err := makeEntry(dir, d, true); err != nil {
			return -1, err
		}
	}
	if err := fillUpper(dir, upper, lower, without); err != nil {
		return -1, err
	}
	at := fmt.Sprintf("/proc/self/fd/%d/", dir)
	mnt, err := newFS("overlay", attrData, w.overlayOptions(
		option{"lowerdir", fmt.Sprintf("/proc/self/fd/%d", low)},
		option{"upperdir", at + upper},
		option{"workdir", at + work})...)
	if err != nil {
		return -1, fmt.Errorf("overlay over %s: %w", lower, err)
	}
	return mnt, nil
}

// fillUpper makes the upper what the lower is to the eye, less what is not to
// be seen: an overlay's top takes its mode, owner and times from the upper.
func fillUpper(dir int, name, lower string, without []string) error {
	upper, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open upper directory", err)
	}
	defer unix.Close(upper)
	for _, rel := range without {
		if err := whiteout(lower, upper, rel); err != nil {
			return err
		}
	}
	return copyMeta(lower, upper)
}

// overlayOptions adds what every overlay here has. The upper is thrown away,
// so nothing is ever synced for it (volatile).
func (w *world) overlayOptions(opts ...option) []option {
	opts = append(opts, option{"index", "off"}, option{"metacopy", "off"},
		option{"redirect_dir", "nofollow"}, option{"nfs_export", "off"}, option{"volatile", ""})
	if w.spec.InUserNS {
		opts = append(opts, option{"userxattr", ""})
	}
	return opts
}

// whiteout makes rel of the directory lower invisible in an overlay with the
// given upper.
func whiteout(lower string, upper int, rel string) error {
	dir, name := filepath.Split(rel)
	at := upper
	if dir != "" {
		if err := unix.Mkdirat(upper, dir, 0o700); err != nil && err != unix.EEXIST {
			return &os.PathError{Op: "mkdir", Path: dir, Err: err}
		}
		fd, err := unix.Openat(upper, dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: dir, Err: err}
		}
		defer unix.Close(fd)
		if err := copyMeta(filepath.Join(lower, dir), fd); err != nil {
			return err
		}
		at = fd
	}
	if err := unix.Mknodat(at, name, unix.S_IFCHR, 0); err != nil {
		return &os.PathError{Op: "hide", Path: rel, Err: err}
	}
	return nil
}

// copyMeta gives fd the mode, owner and times of p. An owner that this user
// cannot give is left.
func copyMeta(p string, fd int) error {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return &os.PathError{Op: "stat", Path: p, Err: err}
	}
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil && err != unix.EPERM && err != unix.EINVAL {
		return &os.PathError{Op: "chown copy of", Path: p, Err: err}
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777); err != nil {
		return &os.PathError{Op: "chmod copy of", Path: p, Err: err}
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	if err := unix.UtimesNanoAt(fd, "", times, unix.AT_EMPTY_PATH); err != nil {
		return &os.PathError{Op: "set times of copy of", Path: p, Err: err}
	}
	return nil
}
