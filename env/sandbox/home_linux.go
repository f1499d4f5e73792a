package sandbox

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// secrets are the parts of a home that an overlay of it does not show.
var secrets = []string{".ssh", ".gnupg", ".aws", ".kube", ".netrc", ".docker", ".config/gh"}

// noHome is where HOME points when the caller's is nothing to mount over.
const noHome = "/run/home"

// copyLimit is the size in bytes up to which a file that lies beside the
// scratch directory's ancestors is copied, so that it can be changed; a larger
// one is seen read-only.
const copyLimit = 1 << 20

// findHomeMounts notes what is mounted below the caller's home, before the
// sandbox mounts anything itself.
func (w *world) findHomeMounts() error {
	v := &w.spec.View
	if v.At == "" || v.Home != HomeOverlay || v.HomeDir == "" {
		return nil
	}
	points, err := w.hostMounts()
	home := w.homeSource()
	for _, p := range points {
		if _, in := below(home, p); in && p != home {
			w.homeMounts = append(w.homeMounts, p)
		}
	}
	return err
}

// hostMounts lists the mount points that there are before the sandbox mounts
// anything.
func (w *world) hostMounts() ([]string, error) {
	if w.mountPoints != nil {
		return w.mountPoints, nil
	}
	infos, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	for _, i := range infos {
		w.mountPoints = append(w.mountPoints, i.Mountpoint)
	}
	return w.mountPoints, nil
}

// homeSource is the caller's home with links resolved, so that it can be
// compared with other paths.
func (w *world) homeSource() string { return resolved(w.spec.View.HomeDir) }

// resolved is p without links, or p itself if it is not there.
func resolved(p string) string {
	if r, err := filepath.EvalSymlinks(p); err == nil {
		return r
	}
	return filepath.Clean(p)
}

// home makes the workspace's home directory.
func (w *world) home() error {
	v := &w.spec.View
	if w.homeUnusable() {
		return w.privateHome(noHome)
	}
	switch v.Home {
	case HomePrivate:
		return w.privateHome(v.HomeDir)
	case HomeHost:
		mnt, err := cloneTree(unix.AT_FDCWD, v.HomeDir, unix.MOUNT_ATTR_NODEV)
		if err != nil {
			return err
		}
		defer unix.Close(mnt)
		return w.root.mount(mnt, v.HomeDir, false)
	case HomeOverlay:
		return w.overlayHome()
	}
	return fmt.Errorf("unknown kind %q", v.Home)
}

// homeUnusable says whether the caller's home is none, the whole system, the
// tree or a part of it.
func (w *world) homeUnusable() bool {
	v := &w.spec.View
	home := w.homeSource()
	if v.HomeDir == "" || home == "/" {
		return true
	}
	if v.Home == HomeHost {
		return false
	}
	for _, tree := range []string{v.Tree.Dir, v.At} {
		if _, in := below(resolved(tree), home); in {
			return true
		}
	}
	return false
}

// privateHome makes an empty home at p and points HOME there.
func (w *world) privateHome(p string) error {
	mnt, err := w.scratchDir(0o700)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := w.root.mount(mnt, p, true); err != nil {
		return err
	}
	if p == noHome {
		w.spec.Env = slices.DeleteFunc(w.spec.Env, func(kv string) bool { return strings.HasPrefix(kv, "HOME=") })
		w.spec.Env = append(w.spec.Env, "HOME="+p)
	}
	return nil
}

// overlayHome lays one overlay over the caller's home. The kernel refuses that
// where an upper directory would lie below its own lower one (ELOOP), which is
// so when our store is in the home, and where something is mounted below it
// (EINVAL in a user namespace). Then the directories on the way to those places
// are made anew and each of their other subdirectories is an overlay.
func (w *world) overlayHome() error {
	src, dst := w.homeSource(), w.spec.View.HomeDir
	if _, err := os.Stat(src); errors.Is(err, os.ErrNotExist) {
		return w.privateHome(dst)
	}
	var mnt int
	var err error
	whole := !w.split(src)
	if whole {
		mnt, err = w.overlay(src, secretsIn(src, src))
	} else {
		mnt, err = w.scratchDir(0o700)
	}
	if err != nil {
		return fixHome(err)
	}
	defer unix.Close(mnt)
	if err := w.root.mount(mnt, dst, true); err != nil || whole {
		return err
	}
	top, err := unix.Openat(mnt, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open home", err)
	}
	defer unix.Close(top)
	return fixHome(w.skeleton(src, top))
}

// fixHome says what to do where the kernel refused an overlay of the home. Of
// what has nothing to do with the home the usual is said.
func fixHome(err error) error {
	switch {
	case err == nil:
		return nil
	case isOfFileSystem(err), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return newError("home overlay", err)
	}
	return &Error{What: "home overlay", Err: err,
		Fix: "use --home private, or a root on a file system that can be an overlay's upper (ext4, XFS, btrfs, tmpfs)"}
}

// split says whether p holds something that keeps it from being one overlay.
func (w *world) split(p string) bool {
	if _, in := below(p, resolved(w.spec.View.Scratch)); in {
		return true
	}
	return slices.ContainsFunc(w.homeMounts, func(m string) bool { _, in := below(p, m); return in })
}

// secretsIn lists the secrets of home that lie in dir, relative to dir.
func secretsIn(home, dir string) []string {
	var in []string
	for _, s := range secrets {
		rel, ok := below(dir, filepath.Join(home, s))
		if !ok || rel == "." {
			continue
		}
		if _, err := os.Lstat(filepath.Join(dir, rel)); err == nil {
			in = append(in, rel)
		}
	}
	return in
}

// skeleton fills the empty directory to with what the home's directory from
// has. Secrets and hidden paths are left out.
func (w *world) skeleton(from string, to int) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := w.fill(from, entries, to); err != nil {
		return err
	}
	return copyMeta(from, to)
}

func (w *world) fill(from string, entries []os.DirEntry, to int) error {
	for _, e := range entries {
		p := filepath.Join(from, e.Name())
		if w.leftOut(p) {
			continue
		}
		err := w.skeletonEntry(p, e, to)
		if _, gone := os.Lstat(p); errors.Is(err, unix.ENOENT) && errors.Is(gone, os.ErrNotExist) {
			continue // it was removed meanwhile
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *world) leftOut(p string) bool {
	for _, s := range secrets {
		if p == filepath.Join(w.homeSource(), s) {
			return true
		}
	}
	return p == resolved(w.spec.View.Scratch) ||
		slices.ContainsFunc(w.spec.View.Hide, func(h string) bool { return p == resolved(h) })
}

func (w *world) skeletonEntry(p string, e os.DirEntry, to int) error {
	switch {
	case slices.Contains(w.homeMounts, p):
		w.notice(p + " is a mount of its own and read-only in the overlay of the home")
		return w.place(p, e, to)
	case e.IsDir() && w.split(p):
		if err := makeEntry(to, e.Name(), true); err != nil {
			return err
		}
		fd, err := unix.Openat(to, e.Name(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return w.skeleton(p, fd)
	case e.IsDir():
		mnt, err := w.overlay(p, secretsIn(w.homeSource(), p))
		if err != nil {
			return err
		}
		defer unix.Close(mnt)
		if err := makeEntry(to, e.Name(), true); err != nil {
			return err
		}
		w.root.own[w.seenAt(p)] = true
		return attachAt(mnt, to, e.Name())
	case e.Type() == os.ModeSymlink:
		from, err := unix.Open(filepath.Dir(p), unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(from)
		return copyLink(from, to, e.Name())
	case e.Type().IsRegular():
		return w.skeletonFile(p, e, to)
	}
	return nil // a socket or a pipe of a program outside is of no use inside
}

func (w *world) skeletonFile(p string, e os.DirEntry, to int) error {
	info, err := e.Info()
	if err != nil {
		return err
	}
	if info.Size() > copyLimit {
		return w.place(p, e, to)
	}
	src, err := os.Open(p)
	if errors.Is(err, os.ErrPermission) {
		return w.place(p, e, to)
	}
	if err != nil {
		return err
	}
	defer src.Close()
	if err := makeEntry(to, e.Name(), false); err != nil {
		return err
	}
	fd, err := unix.Openat(to, e.Name(), unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	dst := os.NewFile(uintptr(fd), p)
	defer dst.Close()
	if _, err := io.Copy(dst, src); err != nil {
		return fmt.Errorf("copy %s: %w", p, err)
	}
	return copyMeta(p, fd)
}

// seenAt gives the name inside of p, which lies in the caller's home.
func (w *world) seenAt(p string) string {
	rel, _ := below(w.homeSource(), p)
	return filepath.Join(w.spec.View.HomeDir, rel)
}

// place binds p read-only beside the overlays.
func (w *world) place(p string, e os.DirEntry, to int) error {
	mnt, err := cloneTree(unix.AT_FDCWD, p, attrSealed)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := makeEntry(to, e.Name(), e.IsDir()); err != nil {
		return err
	}
	return attachAt(mnt, to, e.Name())
}
