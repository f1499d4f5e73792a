package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks"
)

// world puts together what one command sees. It works in the init of the
// sandbox, whose mount namespace is its own.
type world struct {
	spec    *spec
	root    *root
	tree    int // the command's tree, a detached mount
	scratch int // the scratch directory, by descriptor: the new root lies over it
	made    int // how many things were made in it
	uppers  int // where the uppers of overlays are made; -1: nothing was tried
	empty   int // an empty directory to cover others with; 0: not made yet
	// mountPoints are the host's, once they were read; homeMounts those below the
	// caller's home.
	mountPoints, homeMounts []string
	lacking                 []string // what could not be mounted for want of a place in the tree
	notice                  func(string)
}

// part is one step of a layout, named for the error.
type part struct {
	what string
	make func() error
}

// build makes the layout and makes it the root of this process.
func (w *world) build() error {
	defer unix.Umask(unix.Umask(0))
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return &Error{What: "mount namespace", Err: err}
	}
	fd, err := unix.Open(w.spec.View.Scratch, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &Error{What: "scratch directory", Err: &os.PathError{Op: "open", Path: w.spec.View.Scratch, Err: err}}
	}
	w.scratch = fd
	if err := w.openTree(); err != nil {
		return err
	}
	parts := w.rootfs()
	if w.spec.View.At != "" {
		parts = w.workspace()
	}
	for _, p := range parts {
		if err := p.make(); err != nil {
			var e *Error
			if errors.As(err, &e) {
				return err
			}
			return &Error{What: p.what, Err: err}
		}
	}
	w.tellLacking()
	return nil
}

// tellLacking names in one line what the tree lacks.
func (w *world) tellLacking() {
	it, one := "it", "an empty one"
	switch len(w.lacking) {
	case 0:
		return
	case 1:
	default:
		it, one = "them", "empty ones"
	}
	w.notice("the tree has no " + strings.Join(w.lacking, ", ") + ", so commands run without; make " + one + " in the tree to have " + it)
}

// rootfs is the layout in which the tree is a system of its own. Where the
// tree lacks a directory to mount over, the mount is left out: nothing that
// the sandbox needs may turn up in the tree.
func (w *world) rootfs() []part {
	return []part{
		{"root", w.system},
		{"/proc", w.proc},
		{"/dev", w.dev},
		{"/sys", w.sys},
		{"/run", w.run},
		{"resolver's file", w.resolver},
		{"hosts file", w.hosts},
		{"network's devices", w.networkDevices},
		{"mounts", w.binds},
		{"hidden directories", w.root.seal},
		{"root", w.root.enter},
	}
}

// workspace is the layout in which the tree lies in the host's read-only
// system.
func (w *world) workspace() []part {
	return []part{
		{"read-only view of the host", w.host},
		{"/proc", w.proc},
		{"/dev", w.dev},
		{"/sys", w.protectSys},
		{"directories for temporary files", w.temps},
		{"/run", w.run},
		{"resolver's file", w.resolver},
		{"hosts file", w.hosts},
		{"network's devices", w.networkDevices},
		{"home", w.home},
		{"hidden directories", func() error { return w.hide("/", "/") }},
		{"mounts", w.binds},
		{"hidden directories", w.root.seal},
		{"root", w.root.enter},
	}
}

// openTree binds the command's tree, or mounts its overlay, where nobody sees
// it yet: first of all, for what is mounted later may hide the store.
func (w *world) openTree() error {
	t := w.spec.View.Tree
	mnt, err := t.Open()
	if err == nil {
		err = os.NewSyscallError("mount_setattr", setAttrs(mnt, unix.MOUNT_ATTR_NODEV))
	}
	if err != nil {
		e := &Error{What: "tree", Err: fmt.Errorf("%s: %w", t.Dir, err)}
		if t.Overlay != nil {
			e.Fix = fixForOverlay(err)
			if errors.Is(err, forks.ErrInUse) {
				e.Fix = "another command has it mounted: wait until that ends"
			}
		}
		return e
	}
	w.tree = mnt
	return nil
}

// host makes the host's system the ground of the new root.
func (w *world) host() error {
	if err := w.findHomeMounts(); err != nil {
		return err
	}
	hidden, err := w.hiddenMounts()
	if err != nil {
		return err
	}
	mnt, err := cloneTree(unix.AT_FDCWD, "/", attrSealed)
	if err != nil {
		return err
	}
	if err := w.base(mnt); err != nil {
		return err
	}
	return w.drop(hidden)
}

// base makes mnt the ground of the new root. It is attached over the scratch
// directory, which is the one place that is certainly ours.
func (w *world) base(mnt int) error {
	w.root.fd, w.root.top = mnt, mnt
	return attach(mnt, w.scratch)
}

// innerRoot is where a tree without /proc stands in the directory around it.
const innerRoot = "/tree"

// system makes the tree the ground of the new root. Executing a command takes
// a /proc for ourselves: where the tree has none it becomes a part of a root
// of ours, and the command is put into it by chroot.
func (w *world) system() error {
	if err := w.base(w.tree); err != nil {
		return err
	}
	if fd := w.root.openDir("/proc"); fd >= 0 {
		return unix.Close(fd)
	}
	around, err := newFS("tmpfs", attrData, option{"mode", "755"}, option{"size", "64k"})
	if err != nil {
		return err
	}
	mnt, err := cloneTree(w.root.fd, "", 0)
	if err != nil {
		return err
	}
	if err := attach(around, w.root.fd); err != nil {
		return err
	}
	proc, err := newFS("proc", attrProc)
	if err != nil {
		return err
	}
	defer unix.Close(proc)
	for name, m := range map[string]int{innerRoot[1:]: mnt, "proc": proc} {
		if err := makeEntry(around, name, true); err != nil {
			return err
		}
		if err := attachAt(m, around, name); err != nil {
			return err
		}
	}
	w.root.fd, w.root.top, w.spec.chroot = mnt, around, innerRoot
	return w.protectProc(proc)
}

// absent says whether the new root lacks the directory p itself. A tree where
// it is a link is treated the same: the link may lead anywhere.
func (w *world) absent(p string) bool {
	if w.spec.View.At != "" {
		return false
	}
	fd := w.root.openDir(p)
	if fd < 0 {
		w.lacking = append(w.lacking, p)
		return true
	}
	unix.Close(fd)
	return false
}

// scratchDir makes a directory in the scratch directory and a detached bind
// of it.
func (w *world) scratchDir(mode uint32) (int, error) {
	w.made++
	name := strconv.Itoa(w.made)
	if err := unix.Mkdirat(w.scratch, name, mode); err != nil {
		return -1, &os.PathError{Op: "mkdir", Path: filepath.Join(w.spec.View.Scratch, name), Err: err}
	}
	return cloneTree(w.scratch, name, attrData)
}
