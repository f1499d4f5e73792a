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

// world puts together what one command sees. It works in the init of the
// sandbox, whose mount namespace is its own.
type world struct {
	spec    *spec
	root    *root
	scratch int // the scratch directory, by descriptor: the new root lies over it
	made    int // how many directories were made in it
	// homeMounts are the mount points below the caller's home.
	homeMounts []string
	notice     func(string)
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
	return nil
}

// rootfs is the layout in which the tree is a system of its own. Where the
// tree lacks a directory to mount over, the mount is left out: nothing that
// the sandbox needs may turn up in the tree.
func (w *world) rootfs() []part {
	return []part{
		{"root", func() error { return w.system(w.spec.View.Tree) }},
		{"/proc", w.proc},
		{"/dev", w.dev},
		{"/sys", w.sys},
		{"/run", w.run},
		{"resolver's file", w.resolver},
		{"mounts", w.binds},
		{"hidden directories", w.root.seal},
		{"root", w.root.enter},
	}
}

// workspace is the layout in which the tree lies in the host's read-only
// system.
func (w *world) workspace() []part {
	return []part{
		{"read-only view of the host", func() error { return w.base("/", attrSealed) }},
		{"/proc", w.proc},
		{"/dev", w.dev},
		{"/tmp", func() error { return w.temp("/tmp") }},
		{"/var/tmp", func() error { return w.temp("/var/tmp") }},
		{"/run", w.run},
		{"resolver's file", w.resolver},
		{"home", w.home},
		{"hidden directories", func() error { return w.hide("/", "/") }},
		{"mounts", w.binds},
		{"hidden directories", w.root.seal},
		{"root", w.root.enter},
	}
}

// base makes the host's directory p the ground of the new root. It is
// attached over the scratch directory, which is the one place that is
// certainly ours.
func (w *world) base(p string, attrs uint64) error {
	if err := w.findHomeMounts(); err != nil {
		return err
	}
	mnt, err := cloneTree(unix.AT_FDCWD, p, attrs)
	if err != nil {
		return err
	}
	w.root.fd, w.root.top = mnt, mnt
	return attach(mnt, w.scratch)
}

// innerRoot is where a tree without /proc stands in the directory around it.
const innerRoot = "/tree"

// system makes the tree the ground of the new root. Executing a command takes
// a /proc for ourselves: where the tree has none it becomes a part of a root
// of ours, and the command is put into it by chroot.
func (w *world) system(tree string) error {
	if err := w.base(tree, unix.MOUNT_ATTR_NODEV); err != nil {
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
		w.notice("the tree has no directory " + p + ", so commands run without it; make an empty one in the tree to have it")
		return true
	}
	unix.Close(fd)
	return false
}

// Of /proc, what a process with the host's uid 0 could use on the whole
// machine although it has no capability: the kernel checks only the owner.
var (
	procReadOnly = []string{"bus", "fs", "irq", "sys", "sysrq-trigger"}
	procMasked   = []string{"kcore", "keys", "timer_list", "latency_stats", "sched_debug", "scsi"}
)

func (w *world) proc() error {
	if w.absent("/proc") {
		return nil
	}
	mnt, err := newFS("proc", attrProc)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := w.root.mount(mnt, "/proc", false); err != nil {
		return err
	}
	return w.protectProc(mnt)
}

// protectProc covers what the machine's own uid 0 must not reach.
func (w *world) protectProc(proc int) error {
	if !w.spec.RealRoot {
		return nil
	}
	for _, name := range procReadOnly {
		if err := w.cover(proc, name, attrSealed, proc, name); err != nil {
			return err
		}
	}
	for _, name := range procMasked {
		if err := w.cover(proc, name, attrSealed, unix.AT_FDCWD, "/dev/null"); err != nil {
			return err
		}
	}
	return nil
}

// cover binds src of srcdir over name of dir. A name that this kernel does not
// have needs no cover; a directory gets an empty one.
func (w *world) cover(dir int, name string, attrs uint64, srcdir int, src string) error {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil
	}
	var mnt int
	var err error
	if src != name && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		mnt, err = newFS("tmpfs", attrSealed, option{"mode", "555"})
	} else {
		mnt, err = cloneTree(srcdir, src, attrs)
	}
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return attachAt(mnt, dir, name)
}

// devices are the nodes of a sandbox's /dev; none of them reaches hardware.
var devices = []string{"null", "zero", "full", "random", "urandom", "tty"}

var devLinks = [][2]string{
	{"fd", "/proc/self/fd"},
	{"stdin", "/proc/self/fd/0"},
	{"stdout", "/proc/self/fd/1"},
	{"stderr", "/proc/self/fd/2"},
	{"ptmx", "pts/ptmx"},
}

func (w *world) dev() error {
	if w.absent("/dev") {
		return nil
	}
	mnt, err := newFS("tmpfs", attrData, option{"mode", "755"}, option{"size", "1m"})
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := w.root.mount(mnt, "/dev", true); err != nil {
		return err
	}
	for _, name := range devices {
		if err := w.device(mnt, name); err != nil {
			return err
		}
	}
	for _, l := range devLinks {
		if err := unix.Symlinkat(l[1], mnt, l[0]); err != nil {
			return &os.PathError{Op: "symlink", Path: "/dev/" + l[0], Err: err}
		}
	}
	for _, name := range []string{"pts", "shm"} {
		if err := makeEntry(mnt, name, true); err != nil {
			return err
		}
	}
	// No gid=: group tty is not mapped in a user's namespace.
	err = w.root.mountFS("/dev/pts", "devpts", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC,
		option{"newinstance", ""}, option{"mode", "620"}, option{"ptmxmode", "666"})
	if err != nil {
		return err
	}
	return w.root.mountFS("/dev/shm", "tmpfs", attrData, option{"mode", "1777"})
}

// device binds the host's node: making one needs the host's own root.
func (w *world) device(dev int, name string) error {
	mnt, err := cloneTree(unix.AT_FDCWD, "/dev/"+name, unix.MOUNT_ATTR_NOSUID)
	if errors.Is(err, unix.ENOENT) {
		return nil // some containers have no tty
	}
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := makeEntry(dev, name, false); err != nil {
		return err
	}
	return attachAt(mnt, dev, name)
}

func (w *world) sys() error {
	if w.absent("/sys") {
		return nil
	}
	mnt, err := cloneTree(unix.AT_FDCWD, "/sys", attrSealed|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return w.root.mount(mnt, "/sys", false)
}

// temp gives a private p that lies on the disk of the scratch directory:
// what builds leave in /tmp would else be memory.
func (w *world) temp(p string) error {
	mnt, err := w.scratchDir(0o1777)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return w.root.mount(mnt, p, true)
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

func (w *world) run() error {
	if w.absent("/run") {
		return nil
	}
	mnt, err := newFS("tmpfs", attrData, option{"mode", "755"})
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if err := w.root.mount(mnt, "/run", true); err != nil {
		return err
	}
	uid := w.spec.UID
	if w.spec.View.At == "" {
		uid = 0
	}
	for _, d := range []struct {
		name string
		mode uint32
	}{{"lock", 0o1777}, {"user", 0o755}, {"user/" + strconv.Itoa(uid), 0o700}} {
		if err := unix.Mkdirat(mnt, d.name, d.mode); err != nil {
			return &os.PathError{Op: "mkdir", Path: "/run/" + d.name, Err: err}
		}
	}
	return nil
}

const resolvConf = "/etc/resolv.conf"

// resolver gives the command the host's resolv.conf: in our own /run where
// the link leads there, else over the tree's file. A workspace sees the host's
// /etc anyway.
func (w *world) resolver() error {
	content, err := os.ReadFile(resolvConf)
	if err != nil {
		return nil // the host has none either
	}
	if fd, err := w.root.open(resolvConf); err == nil {
		defer unix.Close(fd)
		if w.spec.View.At != "" {
			return nil
		}
		mnt, err := cloneTree(unix.AT_FDCWD, resolvConf, attrSealed)
		if err != nil {
			return err
		}
		defer unix.Close(mnt)
		return w.root.mount(mnt, resolvConf, false)
	}
	if at, ok := w.linkTarget(resolvConf); ok && strings.HasPrefix(at, "/run/") {
		return w.root.write(at, content)
	}
	if w.spec.View.At == "" {
		w.notice("the tree has no file " + resolvConf + ", so names may not be resolved; make an empty one in the tree to have the host's")
	}
	return nil
}

// linkTarget reads the link p of the new root; /var/run is another name of
// /run everywhere.
func (w *world) linkTarget(p string) (string, bool) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(w.root.fd, strings.TrimPrefix(p, "/"), buf)
	if err != nil {
		return "", false
	}
	to := string(buf[:n])
	if !path.IsAbs(to) {
		to = path.Join(path.Dir(p), to)
	}
	to = path.Clean(to)
	if rest, ok := strings.CutPrefix(to, "/var/run/"); ok {
		to = "/run/" + rest
	}
	return to, true
}

// write makes the file p, which lies on a mount of ours.
func (r *root) write(p string, content []byte) error {
	at, err := r.ensure(p, false)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	return os.WriteFile("/proc/self/fd/"+strconv.Itoa(at), content, 0o644)
}

// hide masks the hidden host paths that lie below the host's directory src,
// which is seen at dst.
func (w *world) hide(src, dst string) error {
	for _, p := range w.spec.View.Hide {
		rel, ok := below(src, p)
		if !ok || rel == "." {
			continue // what is brought in by its own name is not hidden
		}
		if err := w.mask(path.Join(dst, rel)); err != nil {
			return fmt.Errorf("hide %s: %w", p, err)
		}
	}
	return nil
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
		all = append(all, Bind{From: v.Tree, To: v.At, Mode: ReadWrite})
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
