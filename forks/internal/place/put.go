//go:build linux

package place

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/step"
)

// errEdited: someone wrote to a path between the look at it and its change.
var errEdited = errors.New("it was changed by someone else meanwhile")

// put does all that was planned for the directory it, which is open as fd: what
// is to go, what is to come, what lies below, and then its own metadata.
func (r *replacer) put(ctx context.Context, fd int, it *item) error {
	touched := it.private || it.opened
	for _, gone := range []bool{true, false} {
		for _, kid := range it.kids {
			if kid.alone || kid.stays() || (kid.then == nil) != gone {
				continue
			}
			touched = true
			if err := r.putKid(ctx, fd, it, kid); err != nil {
				var pe *os.PathError
				if errors.As(err, &pe) {
					return err
				}
				return &os.PathError{Op: "replace", Path: kid.path, Err: err}
			}
			step.At("place.replace.put")
		}
	}
	for _, kid := range it.kids {
		if kid.alone || !kid.stays() {
			continue
		}
		if err := r.at(fd, kid, func(sub int) error { return r.put(ctx, sub, kid) }); err != nil {
			return err
		}
	}
	if it.private {
		if err := fsat.RemoveAll(ctx, fd, r.left); err != nil {
			return &os.PathError{Op: "clean up", Path: it.path, Err: err}
		}
	}
	return r.settle(fd, it, touched)
}

func (r *replacer) putKid(ctx context.Context, fd int, it, kid *item) error {
	r.changed = true
	if kid.then == nil {
		return r.remove(fd, kid)
	}
	if kid.made == "" {
		return nil // it could not be made
	}
	return r.switchKid(ctx, fd, it, kid)
}

// unedited refuses what is not what it was when the directory was compared: it
// may hold work that is nowhere else.
func unedited(fd int, it *item) error {
	var st unix.Stat_t
	err := unix.Fstatat(fd, it.name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	e := it.now
	same := st.Mode == e.Mode && (isDir(e) || st.Mtim.Sec == e.Mtime.Unix() && st.Mtim.Nsec == int64(e.Mtime.Nanosecond()))
	if !same || isReg(e) && st.Size != e.Size {
		return errEdited
	}
	return nil
}

// remove removes what is to go. A directory stays that holds what must stay.
func (r *replacer) remove(fd int, it *item) error {
	if it.alone || it.listed && it.now == nil {
		return nil
	}
	if !isDir(it.now) {
		if err := unedited(fd, it); err != nil {
			return err
		}
		return gone(unix.Unlinkat(fd, it.name, 0))
	}
	if err := r.empty(fd, it); err != nil {
		return err
	}
	err := gone(unix.Unlinkat(fd, it.name, unix.AT_REMOVEDIR))
	if err == unix.ENOTEMPTY || err == unix.EEXIST || err == unix.EBUSY {
		r.warn(fmt.Sprintf("%s: is not in the snapshot and stays, because of what it holds", it.path))
		return r.at(fd, it, func(sub int) error { return restoreDir(sub, &it.was) })
	}
	return err
}

// empty removes what a directory holds that is to go.
func (r *replacer) empty(fd int, it *item) error {
	err := r.at(fd, it, func(sub int) error {
		for _, kid := range it.kids {
			if err := r.remove(sub, kid); err != nil {
				var pe *os.PathError
				if errors.As(err, &pe) {
					return err
				}
				return &os.PathError{Op: "remove", Path: kid.path, Err: err}
			}
		}
		return nil
	})
	if fsat.IsGone(err) {
		return nil
	}
	return err
}

// gone lets pass that what was to be removed is not there.
func gone(err error) error {
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// switchKid puts what was made in the place of what was there.
func (r *replacer) switchKid(ctx context.Context, fd int, it, kid *item) error {
	switch {
	case isDir(kid.now):
		if err := r.empty(fd, kid); err != nil {
			return err
		}
		if err := gone(unix.Unlinkat(fd, kid.name, unix.AT_REMOVEDIR)); err == unix.ENOTEMPTY {
			return errEdited
		} else if err != nil {
			return err
		}
		kid.now = nil
	case kid.now != nil:
		if err := unedited(fd, kid); err != nil {
			return err
		}
		if isDir(kid.then) {
			if err := gone(unix.Unlinkat(fd, kid.name, 0)); err != nil {
				return err
			}
			kid.now = nil
		}
	}
	step.At("place.replace.cleared")
	err := r.rename(fd, it, kid)
	if err == unix.EXDEV && kid.inStage {
		// Such as another project quota, or another encryption policy.
		if err = r.writeBeside(ctx, fd, it, kid); err == nil {
			err = r.rename(fd, it, kid)
		}
	}
	if err != nil || !isDir(kid.then) {
		return err
	}
	return r.at(fd, kid, func(sub int) error { return r.settle(sub, kid, true) })
}

// rename moves what was made to where it belongs; where nothing was, nothing
// may have come.
func (r *replacer) rename(fd int, it, kid *item) error {
	from := r.stage
	if !kid.inStage {
		private, err := r.access.OpenDir(fd, r.left)
		if err != nil {
			return err
		}
		defer unix.Close(private)
		from = private
	}
	var err error = unix.EINVAL
	if kid.now == nil {
		err = unix.Renameat2(from, kid.made, fd, kid.name, unix.RENAME_NOREPLACE)
	}
	switch err {
	case unix.EEXIST:
		return errEdited
	case unix.EINVAL: // something is to be replaced, or the flag is not known here
		err = unix.Renameat(from, kid.made, fd, kid.name)
	}
	if err == nil && kid.then.Link != 0 {
		// Two names of one file are not renamed onto each other.
		err = gone(unix.Unlinkat(from, kid.made, 0))
	}
	return err
}

// settle gives a directory its metadata: that of the snapshot if it differed,
// else what it had before names in it came and went.
func (r *replacer) settle(fd int, it *item, touched bool) error {
	switch {
	case it.listed && it.then != nil:
		r.changed = true
		return r.settleAs(fd, it)
	case touched:
		return restoreDir(fd, &it.was)
	}
	return nil
}

func (r *replacer) settleAs(fd int, it *item) error {
	var st unix.Stat_t
	err := r.old.FD(fd, meta(it.then), &st)
	if errors.Is(err, unix.EPERM) && !r.old.Root() && st.Uid != uint32(os.Geteuid()) {
		r.warn(fmt.Sprintf("%s: belongs to another user, so its mode and times stay as they are", it.path))
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "replace", Path: it.path, Err: err}
	}
	step.At("place.replace.settled")
	return nil
}
