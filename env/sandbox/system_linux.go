package sandbox

import (
	"errors"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// What a process with the machine's uid 0 could use on the whole machine although
// it has no capability there: the kernel checks only the owner. The lists are
// Docker's (daemon/pkg/oci/defaults.go of moby v2.0); of its list only the
// thermal_throttle of each processor is left out, which is one mount a processor
// for what any user can read. Added are the file systems that Docker never has in
// a container, and that lie in the host's /sys.
var (
	procReadOnly = []string{"bus", "fs", "irq", "sys", "sysrq-trigger"}
	procMasked   = []string{"acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats"}
	sysMasked    = []string{"devices/virtual/powercap", "firmware",
		"fs/bpf", "fs/fuse/connections", "fs/pstore", "fs/selinux",
		"kernel/config", "kernel/debug", "kernel/security", "kernel/tracing"}
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
	return w.blank(proc, procMasked)
}

// blank covers names of dir with nothing.
func (w *world) blank(dir int, names []string) error {
	for _, name := range names {
		if err := w.cover(dir, name, attrSealed, unix.AT_FDCWD, "/dev/null"); err != nil {
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
		mnt, err = w.emptyDir()
	} else {
		mnt, err = cloneTree(srcdir, src, attrs)
	}
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return attachAt(mnt, dir, name)
}

// emptyDir gives a detached mount of an empty directory. The first is made, the
// others are binds of it, which takes a third of the time.
func (w *world) emptyDir() (int, error) {
	if w.empty != 0 {
		return cloneTree(w.empty, "", attrSealed)
	}
	mnt, err := newFS("tmpfs", attrSealed, option{"mode", "555"})
	if err == nil {
		w.empty, err = unix.FcntlInt(uintptr(mnt), unix.F_DUPFD_CLOEXEC, 0)
	}
	return mnt, err
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
	return w.root.mountFS("/dev/shm", "tmpfs", attrData, w.spec.temp("1777")...)
}

// device binds the host's node: making one needs the host's own root. The node
// is read-only, which stops nobody from writing to the device, but root from
// changing the mode of the host's /dev/null.
func (w *world) device(dev int, name string) error {
	mnt, err := cloneTree(unix.AT_FDCWD, "/dev/"+name, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_RDONLY)
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
	if err := w.root.mount(mnt, "/sys", false); err != nil {
		return err
	}
	return w.protectSys()
}

// protectSys covers what the machine's own uid 0 must not see of /sys, which is
// read-only.
func (w *world) protectSys() error {
	if !w.spec.RealRoot {
		return nil
	}
	fd := w.root.openDir("/sys")
	if fd < 0 {
		return nil // neither does the host have it
	}
	defer unix.Close(fd)
	return w.blank(fd, sysMasked)
}

// temps gives private directories for temporary files: the usual ones, and
// the one that TMPDIR names, which the command would else find read-only.
func (w *world) temps() error {
	for _, p := range []string{"/tmp", "/var/tmp"} {
		if err := w.temp(p); err != nil {
			return err
		}
	}
	p, _ := getenv(w.spec.Env, "TMPDIR")
	if !absolute(p) || p == "/" {
		return nil
	}
	p = path.Clean(p)
	if info, err := os.Stat(p); err != nil || !info.IsDir() {
		return nil
	}
	v := w.spec.View
	for _, other := range []string{"/tmp", "/var/tmp", v.At, v.HomeDir} {
		_, inside := below(other, p)
		_, around := below(p, other)
		if other != "" && other != "/" && (inside || around) {
			return w.tempIn(other, p)
		}
	}
	return w.temp(p)
}

// tempIn makes p in a private directory for temporary files. In the tree or
// the home, or around them, it stays what it is.
func (w *world) tempIn(dir, p string) error {
	if dir != "/tmp" && dir != "/var/tmp" {
		return nil
	}
	fd, err := w.root.ensure(p, true)
	if err != nil {
		return err
	}
	return unix.Close(fd)
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

func (w *world) run() error {
	if w.absent("/run") {
		return nil
	}
	mnt, err := newFS("tmpfs", attrData, w.spec.temp("755")...)
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

// temp are the options of a file system in memory that the command writes to. What
// is there is no file on a disk, whose size is watched.
func (s *spec) temp(mode string) []option {
	options := []option{{"mode", mode}}
	if s.Temp > 0 {
		options = append(options, option{"size", strconv.FormatInt(s.Temp, 10)})
	}
	return options
}
