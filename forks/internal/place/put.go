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

// put does all that was planned for the directory it, which is open as fd: what
// is to go, what is to come, what lies below, and then its own metadata.
func (r *replacer) put(ctx context.Context, fd int, it *item) (err error) {
	defer func() {
		if e := r.closeBin(it); e != nil {
			err = errors.Join(err, e)
		}
	}()
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
		if err := r.below(fd, kid, func(sub int) error { return r.put(ctx, sub, kid) }); err != nil {
			return err
		}
	}
	if it.private {
		if err := r.closeBin(it); err != nil {
			return err
		}
		if err := fsat.RemoveAll(ctx, fd, r.left); err != nil {
			return &os.PathError{Op: "clean up", Path: it.path, Err: err}
		}
	}
	return r.settle(fd, it, touched)
}

// below is like at, for a directory that may be gone by now.
func (r *replacer) below(fd int, it *item, fn func(fd int) error) error {
	sub, err := r.open(fd, it)
	if fsat.IsGone(err) {
		r.keep(it)
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: it.path, Err: err}
	}
	defer unix.Close(sub)
	return fn(sub)
}

func (r *replacer) putKid(ctx context.Context, fd int, it, kid *item) error {
	r.changed = true
	if kid.then != nil && kid.made == "" {
		return nil // it could not be made
	}
	b, err := r.binOf(fd, it, r.useStage(it) && (kid.then == nil || kid.inStage))
	if err != nil {
		return err
	}
	if kid.then == nil {
		return r.remove(b, fd, kid)
	}
	return r.switchKid(ctx, b, fd, it, kid)
}

// remove removes what is to go. A directory stays that holds what must stay.
func (r *replacer) remove(b *bin, fd int, it *item) error {
	if it.alone || it.now == nil {
		return nil
	}
	if !isDir(it.now) {
		return r.moveAside(b, fd, it)
	}
	if err := r.empty(b, fd, it); err != nil {
		return err
	}
	err := gone(unix.Unlinkat(fd, it.name, unix.AT_REMOVEDIR))
	if isFull(err) || err == unix.EBUSY {
		r.warn(fmt.Sprintf("%s: is not in the snapshot and stays, because of what it holds", it.path))
		return r.below(fd, it, func(sub int) error { return restoreDir(sub, &it.was) })
	}
	if err == unix.ENOTDIR {
		r.keep(it)
		return nil
	}
	return err
}

// isFull says that a directory was not removed because it holds something.
func isFull(err error) bool { return err == unix.ENOTEMPTY || err == unix.EEXIST }

// empty removes what a directory holds that is to go.
func (r *replacer) empty(b *bin, fd int, it *item) error {
	return r.below(fd, it, func(sub int) error {
		for _, kid := range it.kids {
			if err := r.remove(b, sub, kid); err != nil {
				var pe *os.PathError
				if errors.As(err, &pe) {
					return err
				}
				return &os.PathError{Op: "remove", Path: kid.path, Err: err}
			}
		}
		return nil
	})
}

// gone lets pass that what was to be removed is not there.
func gone(err error) error {
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// switchKid puts what was made in the place of what was there.
func (r *replacer) switchKid(ctx context.Context, b *bin, fd int, it, kid *item) error {
	if isDir(kid.now) {
		if err := r.empty(b, fd, kid); err != nil || kid.alone {
			return err
		}
		switch err := gone(unix.Unlinkat(fd, kid.name, unix.AT_REMOVEDIR)); {
		case isFull(err) || err == unix.ENOTDIR:
			r.keep(kid)
			return nil
		case err != nil:
			return err
		}
		kid.now = nil
	}
	step.At("place.replace.cleared")
	err := r.exchange(b, fd, kid)
	if err == unix.EXDEV && kid.inStage {
		// Such as another project quota, or another encryption policy.
		if err = r.writeBeside(ctx, fd, it, kid); err != nil {
			return err
		}
		if b, err = r.binOf(fd, it, false); err == nil {
			err = r.exchange(b, fd, kid)
		}
	}
	if err != nil || !isDir(kid.then) || kid.alone {
		return err
	}
	return r.below(fd, kid, func(sub int) error { return r.settle(sub, kid, true) })
}

// settle gives a directory its metadata: that of the snapshot if it differed and
// nobody changed it meanwhile, else what it had before names in it came and went.
func (r *replacer) settle(fd int, it *item, touched bool) error {
	switch {
	case it.listed && it.then != nil && !it.ownMeta:
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
