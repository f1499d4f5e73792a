package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hide masks the hidden host paths that lie below the host's directory src,
// which is seen at dst.
func (w *world) hide(src, dst string) error {
	for _, p := range w.spec.View.Hide {
		rel, ok := below(src, p)
		if !ok || rel == "." || w.hiddenWithParent(p) {
			continue // what is brought in by its own name is not hidden
		}
		if err := w.mask(path.Join(dst, rel)); err != nil {
			return fmt.Errorf("hide %s: %w", p, err)
		}
	}
	return nil
}

// hiddenMounts lists what is mounted below hidden paths. In a user namespace of
// our own there is nothing to do about those: they are locked.
func (w *world) hiddenMounts() ([]string, error) {
	if w.spec.UserNS {
		return nil, nil
	}
	points, err := w.hostMounts()
	var at []string
	for _, p := range points {
		if slices.ContainsFunc(w.spec.View.Hide, func(dir string) bool {
			_, in := below(dir, p)
			return in && dir != p
		}) {
			at = append(at, p)
		}
	}
	return at, err
}

// drop unmounts, in the copy of the host's system, what is mounted at hidden
// paths. A mask alone would keep it alive as long as the command, though the
// host has let go of it.
func (w *world) drop(hidden []string) error {
	for _, p := range slices.Backward(hidden) {
		at := fmt.Sprintf("/proc/self/fd/%d%s", w.root.fd, p)
		err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && err != unix.EINVAL && err != unix.ENOENT { // locked, or gone with the one around it
			return &os.PathError{Op: "unmount the copy of", Path: p, Err: err}
		}
	}
	return nil
}

// hiddenWithParent says whether p lies below another hidden path, whose mask
// covers it.
func (w *world) hiddenWithParent(p string) bool {
	return slices.ContainsFunc(w.spec.View.Hide, func(other string) bool {
		_, in := below(other, p)
		return in && other != p
	})
}

// mask puts something empty over p, if p is there.
func (w *world) mask(p string) error {
	at, err := w.root.open(p)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return w.maskFile(at)
	}
	mnt, err := newFS("tmpfs", attrData, option{"mode", "755"}, option{"size", "64k"})
	if err != nil {
		return err
	}
	if err := attach(mnt, at); err != nil {
		return err
	}
	// Read-only at the end: the tree's own place may be below.
	w.root.own[p], w.root.sealed[p] = true, true
	return unix.Close(mnt)
}

func (w *world) maskFile(at int) error {
	w.made++
	name := strconv.Itoa(w.made)
	if err := makeEntry(w.scratch, name, false); err != nil {
		return err
	}
	mnt, err := cloneTree(w.scratch, name, attrSealed)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return attach(mnt, at)
}

// binds brings in the tree of a workspace and what else was asked for, outer
// places first.
func (w *world) binds() error {
	v := w.spec.View
	all := slices.Clone(v.Binds)
	if v.At != "" {
		all = append(all, Bind{From: v.Tree.Dir, To: v.At, Mode: theTree})
	}
	depth := func(b Bind) int { return strings.Count(path.Clean(b.To), "/") }
	slices.SortStableFunc(all, func(a, b Bind) int { return cmp.Compare(depth(a), depth(b)) })
	for _, b := range all {
		if err := w.bind(b); err != nil {
			what := "mount at " + b.To
			if v.At != "" && b.To == v.At {
				what = "place for the tree at " + b.To
			}
			fix := ""
			if errors.Is(err, errMountPoint) {
				fix = "make " + b.To + " there first, or choose another place"
			}
			return &Error{What: what, Err: err, Fix: fix}
		}
	}
	return nil
}

// theTree is the mode of the bind that is the command's tree.
const theTree Mode = "tree"

func (w *world) bind(b Bind) error {
	var mnt int
	var err error
	switch b.Mode {
	case ReadWrite:
		mnt, err = cloneTree(unix.AT_FDCWD, b.From, unix.MOUNT_ATTR_NODEV)
	case ReadOnly:
		mnt, err = cloneTree(unix.AT_FDCWD, b.From, attrSealed)
	case Overlay:
		mnt, err = w.overlay(b.From, nil)
	case theTree:
		mnt = w.tree
	default:
		err = fmt.Errorf("unknown mode %q", b.Mode)
	}
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := w.root.mount(mnt, path.Clean(b.To), b.Mode == Overlay); err != nil {
		return err
	}
	return w.hide(b.From, b.To)
}

// below gives p relative to dir, if it is dir or lies in it.
func below(dir, p string) (string, bool) {
	rel, err := filepath.Rel(dir, p)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return "", false
	}
	return rel, true
}
