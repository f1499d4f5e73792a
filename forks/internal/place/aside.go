//go:build linux

package place

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/step"
)

// bin is a private directory with the files that were moved out of the way.
// They stay in it until all is done: who had one open may write to it yet.
type bin struct {
	fd   int
	held []aside
}

type aside struct {
	name string
	it   *item
}

// binOf returns where what is in the directory it is moved to: the stage, or
// the private directory that it has.
func (r *replacer) binOf(fd int, it *item, stage bool) (*bin, error) {
	if stage {
		return &r.aside, nil
	}
	if it.bin != nil {
		return it.bin, nil
	}
	private, err := r.private(fd, it)
	if err != nil {
		return nil, err
	}
	it.bin = &bin{fd: private}
	return it.bin, nil
}

// closeBin looks again at what is in a directory's own bin, which is to go.
func (r *replacer) closeBin(it *item) error {
	if it.bin == nil {
		return nil
	}
	err := r.lookAgain(it.bin)
	unix.Close(it.bin.fd)
	it.bin = nil
	return err
}

// unedited says whether a file is what it was when the directory was compared,
// and at first also whether it has the same ctime. A rename changes that, and
// each name of a file that goes that of the others. The inode does not tell: on
// an overlay it may be another after the rename.
func unedited(fd int, name string, it *item, strictly bool) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, err
	}
	l := it.looked
	if strictly && l != nil && st.Nlink == 1 && l.Nlink == 1 && (st.Ctim.Sec != l.Ctime.Sec || st.Ctim.Nsec != int64(l.Ctime.Nsec)) {
		return false, nil
	}
	return same(it.now, st.Mode, st.Size, st.Mtim.Sec, st.Mtim.Nsec), nil
}

// moveAside takes a file that is to go out of the directory fd.
func (r *replacer) moveAside(b *bin, fd int, it *item) error {
	ok, err := unedited(fd, it.name, it, true)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	if !ok {
		r.keep(it)
		return nil
	}
	r.made++
	name := strconv.Itoa(r.made)
	step.At("place.replace.looked")
	switch err := move(fd, it.name, b.fd, name); err {
	case nil:
	case unix.ENOENT:
		return nil
	case unix.EXDEV: // another project quota: nothing can be moved aside
		return gone(unix.Unlinkat(fd, it.name, 0))
	default:
		return err
	}
	step.At("place.replace.aside")
	return r.lookAside(b, name, fd, it)
}

// lookAside looks at what was moved aside, and gives it back if it was edited.
func (r *replacer) lookAside(b *bin, name string, fd int, it *item) error {
	ok, err := unedited(b.fd, name, it, false)
	if err != nil {
		return err
	}
	if !ok {
		return r.giveBack(b, name, fd, it)
	}
	b.held = append(b.held, aside{name, it})
	return nil
}

// exchange puts what was made for kid where it belongs. Where nothing was,
// nothing may have come; a file that was there is exchanged with it, so that
// its name is there all the time.
func (r *replacer) exchange(b *bin, fd int, kid *item) error {
	if err := unix.Fstatat(b.fd, kid.made, &kid.ours, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if kid.ours.Uid != kid.then.UID || kid.ours.Gid != kid.then.GID {
		r.notOwned = append(r.notOwned, kid.path)
	}
	if kid.now == nil {
		return r.arrive(b, fd, kid)
	}
	ok, err := unedited(fd, kid.name, kid, true)
	if err == unix.ENOENT || err == nil && !ok {
		r.keep(kid)
		return nil
	}
	if err != nil {
		return err
	}
	step.At("place.replace.looked")
	switch err := unix.Renameat2(b.fd, kid.made, fd, kid.name, unix.RENAME_EXCHANGE); {
	case err == nil:
		step.At("place.replace.exchanged")
		if kid.ours.Nlink > 1 { // a name of the same file stays what it is
			var st unix.Stat_t
			if err := unix.Fstatat(b.fd, kid.made, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || st.Ino == kid.ours.Ino {
				return err
			}
		}
		return r.lookAside(b, kid.made, fd, kid)
	case err == unix.ENOENT:
		r.keep(kid)
		return nil
	case !unknownFlag(err):
		return err
	}
	if err := r.moveAside(b, fd, kid); err != nil || kid.alone {
		return err
	}
	return r.arrive(b, fd, kid)
}

// arrive moves what was made to a name that is free.
func (r *replacer) arrive(b *bin, fd int, kid *item) error {
	err := move(b.fd, kid.made, fd, kid.name)
	if err == unix.EEXIST {
		r.keep(kid)
		return nil
	}
	return err
}

// move renames to a name that must be free.
func move(from int, name string, to int, as string) error {
	err := unix.Renameat2(from, name, to, as, unix.RENAME_NOREPLACE)
	if !unknownFlag(err) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(to, as, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
		return unix.EEXIST
	} else if err != unix.ENOENT {
		return err
	}
	return unix.Renameat(from, name, to, as)
}

// unknownFlag says that a file system, such as NFS, does not know a flag of
// renameat2.
func unknownFlag(err error) bool {
	return err == unix.EINVAL || err == unix.ENOSYS || err == unix.EOPNOTSUPP
}

// keptSuffix is added to the name of an edited file whose place was taken.
const keptSuffix = ".kept"

// giveBack puts an edited file back under its name. If something that is not
// ours has come there by now, it gets a name beside.
func (r *replacer) giveBack(b *bin, name string, fd int, it *item) error {
	r.keep(it)
	err := move(b.fd, name, fd, it.name)
	if err == unix.EEXIST && r.isOurs(fd, it.name, it) {
		err = unix.Renameat2(b.fd, name, fd, it.name, unix.RENAME_EXCHANGE)
		if err == nil && r.isOurs(b.fd, name, it) {
			return nil
		}
		if err == nil || unknownFlag(err) {
			err = unix.EEXIST
		}
	}
	for n := 1; err == unix.EEXIST; n++ {
		as := it.name + keptSuffix
		if n > 1 {
			as += strconv.Itoa(n)
		}
		if err = move(b.fd, name, fd, as); err == nil {
			r.warn(fmt.Sprintf("%s: was changed twice meanwhile, and the one version is now %s", it.path, as))
		}
	}
	return err
}

// isOurs says whether a name is of the file that was made, and nobody wrote to.
func (r *replacer) isOurs(fd int, name string, it *item) bool {
	var st unix.Stat_t
	err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return err == nil && it.then != nil && !isDir(it.then) &&
		st.Ino == it.ours.Ino && st.Size == it.ours.Size && st.Mtim == it.ours.Mtim && st.Mode == it.ours.Mode
}

// lookAgain gives back what was written to after it was moved aside.
func (r *replacer) lookAgain(b *bin) error {
	for _, a := range b.held {
		ok, err := unedited(b.fd, a.name, a.it, false)
		if err == nil && !ok {
			err = r.giveBackTo(b, a)
		}
		if err != nil {
			return &os.PathError{Op: "give back", Path: a.it.path, Err: err}
		}
	}
	b.held = nil
	return nil
}

// giveBackTo makes the directories again that a file was in.
func (r *replacer) giveBackTo(b *bin, a aside) error {
	at, err := unix.FcntlInt(uintptr(r.root), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return err
	}
	if dir := path.Dir(a.it.path); dir != "." {
		for elem := range strings.SplitSeq(dir, "/") {
			next, err := r.access.Open(at, elem, unix.O_PATH|unix.O_DIRECTORY)
			if errors.Is(err, unix.ENOENT) {
				if err = unix.Mkdirat(at, elem, 0o777); err == nil {
					next, err = r.access.Open(at, elem, unix.O_PATH|unix.O_DIRECTORY)
				}
			}
			unix.Close(at)
			if err != nil {
				return err
			}
			at = next
		}
	}
	defer unix.Close(at)
	fd, err := fsat.Access{}.OpenDir(at, ".")
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return r.giveBack(b, a.name, fd, a.it)
}
