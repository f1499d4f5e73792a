//go:build linux

package place

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/step"
)

// group is the names of one file of the snapshot, some of which must change.
type group struct {
	// dir is what the path of an existing name is relative to: the directory
	// or the stage. path is "" until the file is made.
	dir  int
	path string
}

// findGroups finds for every hard-link group that gets a new name one that
// stays, if there is one. A name that is not listed is of the same file as all
// others of its group that are not: the comparison knows a group by its first
// name.
func (r *replacer) findGroups() error {
	r.groups = make(map[uint64]*group)
	listed := make(map[string]bool)
	for _, c := range r.list {
		listed[c.Path] = true
		if isReg(c.New) && c.New.Link != 0 {
			r.groups[c.New.Link] = &group{}
		}
	}
	if len(r.groups) == 0 {
		return nil
	}
	return r.view.Walk(func(e forks.Entry) error {
		if g := r.groups[e.Link]; e.Link != 0 && g != nil && g.path == "" && !listed[e.Path] {
			g.dir, g.path = r.root, e.Path
		}
		return nil
	})
}

// place is a private directory in which something new is made.
type place struct {
	fd int
	// dir and path say where it is: the stage, or the directory and the path
	// of it.
	dir  int
	path string
}

func (p place) join(name string) string { return join(p.path, name) }

// write makes all that is new in the directory it, which is open as fd, and
// below it.
func (r *replacer) write(ctx context.Context, fd int, it *item) error {
	for _, kid := range it.kids {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		var err error
		switch {
		case kid.alone:
		case kid.stays():
			err = r.below(fd, kid, func(sub int) error { return r.write(ctx, sub, kid) })
		case kid.then != nil:
			err = r.writeNew(ctx, fd, it, kid)
		case !r.useStage(it):
			err = r.makePrivate(fd, it) // for what is moved aside
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// writeNew makes kid in a private directory.
func (r *replacer) writeNew(ctx context.Context, fd int, it, kid *item) error {
	if r.useStage(it) {
		kid.inStage = true
		return r.make(ctx, place{r.stage, r.stage, "."}, kid)
	}
	return r.writeBeside(ctx, fd, it, kid)
}

// useStage says whether what is in the directory it can be renamed to and from
// the stage.
func (r *replacer) useStage(it *item) bool { return r.stage >= 0 && it.was.Dev == r.stageDev }

// makePrivate makes sure that there is a private directory in the directory it.
func (r *replacer) makePrivate(fd int, it *item) error {
	private, err := r.private(fd, it)
	if err != nil {
		return &os.PathError{Op: "write in", Path: it.path, Err: err}
	}
	return unix.Close(private)
}

func (r *replacer) writeBeside(ctx context.Context, fd int, it, kid *item) error {
	kid.inStage = false
	private, err := r.private(fd, it)
	if err != nil {
		return &os.PathError{Op: "write in", Path: it.path, Err: err}
	}
	defer unix.Close(private)
	return r.make(ctx, place{private, r.root, join(it.path, r.left)}, kid)
}

// private opens the private directory in the directory it, and makes it if it
// is not there.
func (r *replacer) private(fd int, it *item) (int, error) {
	if it.private {
		return r.access.OpenDir(fd, r.left)
	}
	if err := fsat.RemoveAll(context.Background(), fd, r.left); err != nil { // of one that was cut short
		return -1, err
	}
	if err := unix.Mkdirat(fd, r.left, 0o700); err != nil {
		return -1, err
	}
	it.private = true
	private, err := r.access.OpenDir(fd, r.left)
	if err != nil {
		return -1, err
	}
	// Nothing is to be handed down to what is made in it.
	for _, acl := range []string{fsat.ACLDefault, fsat.ACLAccess} {
		_ = unix.Fremovexattr(private, acl) // mostly there is none
	}
	if err := unix.Fchmod(private, 0o700); err != nil {
		unix.Close(private)
		return -1, err
	}
	step.At("place.replace.private")
	return private, nil
}

// make makes kid, with all below it, under a new name in p.
func (r *replacer) make(ctx context.Context, p place, kid *item) error {
	r.made++
	name := strconv.Itoa(r.made)
	ok, err := r.makeAs(ctx, p, name, kid, true)
	if err != nil {
		return err
	}
	if ok {
		kid.made = name
	}
	step.At("place.replace.made")
	return nil
}

// makeAs makes kid as name in p. It says no, with a warning, if the caller may
// not make such a thing. A directory that is to be renamed (top) gets its own
// metadata later.
func (r *replacer) makeAs(ctx context.Context, p place, name string, kid *item, top bool) (bool, error) {
	if err := context.Cause(ctx); err != nil {
		return false, err
	}
	var ok = true
	var err error
	switch {
	case isDir(kid.then):
		err = r.makeDir(ctx, p, name, kid, top)
	case isReg(kid.then) && kid.then.Link != 0:
		err = r.makeLink(p, name, kid)
	case isReg(kid.then):
		err = r.makeFile(p.fd, name, kid.path, kid.then)
	default:
		ok, err = r.makeSpecial(p.fd, name, kid)
	}
	var pe *os.PathError
	if err != nil && !errors.As(err, &pe) {
		err = &os.PathError{Op: "write", Path: kid.path, Err: err}
	}
	return ok, err
}

func (r *replacer) makeDir(ctx context.Context, p place, name string, it *item, top bool) error {
	if err := unix.Mkdirat(p.fd, name, 0o700); err != nil {
		return err
	}
	fd, err := fsat.Access{}.OpenDir(p.fd, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	sub := place{fd, p.dir, p.join(name)}
	for _, kid := range it.kids {
		if kid.then == nil || kid.alone {
			continue
		}
		if _, err := r.makeAs(ctx, sub, kid.name, kid, false); err != nil {
			return err
		}
	}
	if top {
		return nil
	}
	var st unix.Stat_t
	return r.fresh.FD(fd, meta(it.then), &st)
}

func (r *replacer) makeFile(fd int, name, path string, e *forks.Entry) error {
	f, err := r.view.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	src, ok := f.(interface{ Fd() uintptr })
	if !ok {
		return fmt.Errorf("%w: a stored file without a descriptor", forks.ErrUnsupported)
	}
	var st unix.Stat_t
	_, err = r.copier.File(fsat.New{Dir: fd, Name: name, Meta: meta(e), Size: e.Size}, int(src.Fd()), r.buf, r.fresh, &st)
	return err
}

// makeLink makes a name of a file that has several: the first of them as a
// file, unless one is there already.
func (r *replacer) makeLink(p place, name string, kid *item) error {
	g := r.groups[kid.then.Link]
	if g.path != "" {
		err := r.link(g, p.fd, name)
		switch err {
		case nil:
			return nil
		case unix.EXDEV, unix.EPERM, unix.EACCES, unix.EMLINK, unix.ENOENT:
			r.warn(fmt.Sprintf("%s: cannot be a hard link to the other names of its file (%v), and becomes a file of its own", kid.path, err))
			return r.makeFile(p.fd, name, kid.path, kid.then)
		}
		return err
	}
	if err := r.makeFile(p.fd, name, kid.path, kid.then); err != nil {
		return err
	}
	g.dir, g.path = p.dir, p.join(name)
	return nil
}

// link makes a name of a file that is there.
func (r *replacer) link(g *group, fd int, name string) error {
	at, err := unix.FcntlInt(uintptr(g.dir), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return err
	}
	if dir := path.Dir(g.path); dir != "." {
		for elem := range strings.SplitSeq(dir, "/") {
			next, err := r.access.Open(at, elem, unix.O_PATH|unix.O_DIRECTORY)
			unix.Close(at)
			if err != nil {
				return err
			}
			at = next
		}
	}
	defer unix.Close(at)
	return unix.Linkat(at, path.Base(g.path), fd, name, 0)
}

// makeSpecial makes a symlink, FIFO, socket or device.
func (r *replacer) makeSpecial(fd int, name string, kid *item) (bool, error) {
	var err error
	switch e := kid.then; e.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		err = unix.Symlinkat(e.Target, fd, name)
	case unix.S_IFBLK, unix.S_IFCHR:
		err = unix.Mknodat(fd, name, e.Mode, int(e.Rdev))
		if err == unix.EPERM {
			r.warn(fmt.Sprintf("%s: a device, which only root can make: it is left out", kid.path))
			return false, nil
		}
	default:
		err = unix.Mknodat(fd, name, e.Mode, 0)
	}
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	return true, r.fresh.At(fd, name, meta(kid.then), &st)
}

// abandon takes back what was done in the directory it and below it, before
// anything was put in place.
func (r *replacer) abandon(ctx context.Context, fd int, it *item) error {
	var errs []error
	for _, kid := range it.kids {
		if kid.seen && !kid.alone {
			errs = append(errs, r.at(fd, kid, func(sub int) error { return r.abandon(ctx, sub, kid) }))
		}
	}
	if it.private {
		errs = append(errs, fsat.RemoveAll(context.WithoutCancel(ctx), fd, r.left))
	}
	if it.private || it.opened {
		errs = append(errs, restoreDir(fd, &it.was))
	}
	return errors.Join(errs...)
}

// restoreDir gives a directory the times and the mode that it had. Of another
// user's directory the times cannot be set.
func restoreDir(fd int, was *unix.Stat_t) error {
	ts := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, was.Mtim}
	if err := setTimes(fd, &ts); err != nil && err != unix.EPERM {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode == was.Mode {
		return err
	}
	return unix.Fchmod(fd, was.Mode&0o7777)
}

// setTimes is utimensat of an open directory.
func setTimes(fd int, ts *[2]unix.Timespec) error {
	return unix.UtimesNanoAt(fd, ".", ts[:], 0)
}
