package sandbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// secret is what lies in the hidden store of the tests: it must not be seen.
const secret = "what no command may see"

// TestProbe is what the tests of this file run inside: it tries to get out, and
// prints what it could do. It does so once more in a user and mount namespace of
// its own, where it has every capability.
func TestProbe(t *testing.T) {
	store, real := os.Getenv("SANDBOX_STORE"), os.Getenv("SANDBOX_REALROOT") != ""
	if store == "" {
		t.Skip("only run inside, by TestSealed")
	}
	p := &prober{store: store, realRoot: real}
	if err := os.MkdirAll("/tmp/probe", 0o755); err != nil {
		p.did("cannot work: %v", err)
	}
	p.mounts()
	p.ownInit()
	p.files()
	p.devices()
	p.newMounts()
	if os.Getenv("SANDBOX_NESTED") == "" {
		p.again()
	}
	fmt.Print(strings.Join(p.found, "\n"))
}

type prober struct {
	store    string
	realRoot bool
	found    []string
}

func (p *prober) did(format string, args ...any) {
	p.found = append(p.found, "PROBE "+fmt.Sprintf(format, args...))
}

// refused notes what was done if err is nil.
func (p *prober) refused(err error, format string, args ...any) {
	if err == nil {
		p.did(format, args...)
	}
}

// again tries everything in a namespace of its own.
func (p *prober) again() {
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestProbe$")
	cmd.Env = append(os.Environ(), "SANDBOX_NESTED=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EPERM): // TestSealedBounded has none
		fmt.Println("NONEST")
	case err != nil:
		p.did("nested: %v: %s", err, out)
	default:
		p.found = append(p.found, probed(string(out), "nested: ")...)
	}
}

// probed are the lines of a probe in out.
func probed(out, prefix string) []string {
	var found []string
	for line := range strings.Lines(out) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "PROBE "); ok {
			found = append(found, "PROBE "+prefix+rest)
		}
	}
	return found
}

// mounts tries to undo what was mounted for it.
func (p *prober) mounts() {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		p.did("cannot work: %v", err)
	}
	to, other := "/tmp/probe/to", "/tmp/probe/bind"
	_, _ = os.MkdirAll(to, 0o755), os.MkdirAll(other, 0o755)
	var places []string
	for line := range strings.Lines(string(info)) {
		f := strings.Fields(line)
		at := strings.ReplaceAll(f[4], `\040`, " ")
		if mountOf(at) != f[0] {
			continue // it lies under another
		}
		places = append(places, at)
		p.refused(unix.Mount(at, to, "", unix.MS_MOVE, ""), "moved %s", at)
		p.loosened(at, strings.Split(f[5], ","))
		// What lies below a cover must not come to light in a bind that leaves the
		// cover out.
		if err := unix.Mount(at, other, "", unix.MS_BIND, ""); err == nil {
			if covered(string(info), f[0]) {
				p.did("bound %s without what covers it", at)
			}
			_ = unix.Unmount(other, unix.MNT_DETACH)
		}
	}
	p.unmounts("", places)
	// With a root of one's own the old one stays as it is.
	if unix.Mount("tmpfs", to, "tmpfs", 0, "") == nil {
		_ = os.Mkdir(to+"/old", 0o755)
		if unix.PivotRoot(to, to+"/old") == nil {
			p.unmounts("/old", places)
			if err := unix.PivotRoot("/old", "/old"+to); err != nil {
				p.did("cannot work: the way back: %v", err)
			}
		}
		_ = unix.Unmount(to, unix.MNT_DETACH)
	}
}

func (p *prober) unmounts(root string, places []string) {
	for _, at := range places {
		if root+at == root+"/" && root != "" {
			continue // one may leave the old root as a whole
		}
		p.refused(unix.Unmount(root+at, 0), "umount %s", root+at)
		p.refused(unix.Unmount(root+at, unix.MNT_DETACH), "umount -l %s", root+at)
	}
}

// mountOf gives the id of the mount that a path leads to.
func mountOf(at string) string {
	var st unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, at, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st) != nil {
		return ""
	}
	return strconv.FormatUint(st.Mnt_id, 10)
}

// loosened tries to take restrictions off the mount at.
func (p *prober) loosened(at string, has []string) {
	for _, l := range []struct {
		name string
		bit  uintptr
		attr uint64
	}{{"ro", unix.MS_RDONLY, unix.MOUNT_ATTR_RDONLY}, {"nosuid", unix.MS_NOSUID, unix.MOUNT_ATTR_NOSUID}, {"nodev", unix.MS_NODEV, unix.MOUNT_ATTR_NODEV}} {
		if !slices.Contains(has, l.name) {
			continue
		}
		all := uintptr(unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_RELATIME)
		p.refused(unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND|all&^l.bit, ""), "remounted %s without %s", at, l.name)
		p.refused(unix.MountSetattr(unix.AT_FDCWD, at, 0, &unix.MountAttr{Attr_clr: l.attr}), "took %s from %s", l.name, at)
	}
	p.refused(unix.Mount("", at, "", unix.MS_REMOUNT, ""), "remounted the file system at %s", at)
}

// covered says whether something is mounted on or below the mount id.
func covered(info, id string) bool {
	for line := range strings.Lines(info) {
		if strings.Fields(line)[1] == id {
			return true
		}
	}
	return false
}

// ownInit tries to get at the init, which has the host's mounts and descriptors.
func (p *prober) ownInit() {
	if os.Getenv("SANDBOX_NESTED") != "" {
		return // /proc is still the one outside, where this is another's pid
	}
	for _, f := range []string{"environ", "mem", "maps", "auxv", "ns/mnt", "ns/user", "ns/pid"} {
		fd, err := unix.Open("/proc/1/"+f, unix.O_RDONLY, 0)
		p.refused(err, "opened /proc/1/%s", f)
		unix.Close(fd)
	}
	for _, f := range []string{"root/etc/passwd", "root", "cwd", "exe", "fd/0", "fd/3", "fd/4"} {
		_, err := os.Stat("/proc/1/" + f)
		p.refused(err, "reached /proc/1/%s", f)
	}
	p.refused(unix.PtraceSeize(1), "ptrace of PID 1")
	local := []unix.Iovec{{Base: new(byte), Len: 1}}
	_, err := unix.ProcessVMReadv(1, local, []unix.RemoteIovec{{Base: 4096, Len: 1}}, 0)
	if !errors.Is(err, unix.EPERM) {
		p.did("read memory of PID 1: %v", err)
	}
	if fd, err := unix.PidfdOpen(1, 0); err == nil {
		for _, ns := range []int{unix.CLONE_NEWNS, unix.CLONE_NEWUSER, unix.CLONE_NEWPID, unix.CLONE_NEWIPC} {
			p.refused(unix.Setns(fd, ns), "setns %#x of PID 1", ns)
		}
		_, err := unix.PidfdGetfd(fd, 3, 0)
		p.refused(err, "took a descriptor of PID 1")
	}
}

// files tries to see and to change what is not the command's.
func (p *prober) files() {
	ways, _ := filepath.Glob("/proc/*/root")
	more, _ := filepath.Glob("/proc/*/cwd")
	for _, way := range append(append(ways, more...), "") {
		if text, err := os.ReadFile(way + p.store + "/secret"); err == nil {
			p.did("read %s%s/secret: %q", way, p.store, text)
		}
	}
	mustNotOpen := []string{"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/sysrq", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/proc/sys/kernel/modprobe",
		"/sys/power/state", "/sys/kernel/uevent_helper", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/module/kernel/parameters/panic", "/etc/passwd", "/proc/irq/default_smp_affinity"}
	for _, f := range mustNotOpen {
		if os.Getenv("SANDBOX_SYSTEM") != "" && f == "/etc/passwd" {
			continue // the tree's own
		}
		fd, err := unix.Open(f, unix.O_WRONLY, 0)
		p.refused(err, "opened %s for writing", f)
		unix.Close(fd)
	}
	for _, f := range []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/interrupts"} {
		if fd, err := unix.Open(f, unix.O_RDONLY, 0); err == nil && p.realRoot {
			p.did("opened %s", f)
			unix.Close(fd)
		}
	}
	for _, d := range []string{"/sys/firmware", "/sys/kernel/debug", "/sys/kernel/tracing", "/sys/kernel/security", "/sys/devices/virtual/powercap", "/proc/acpi", "/proc/scsi"} {
		if names, err := os.ReadDir(d); err == nil && len(names) > 0 && p.realRoot {
			p.did("%s holds %v", d, names[0].Name())
		}
	}
}

// devices tries to get at hardware.
func (p *prober) devices() {
	for _, dir := range []string{"/tmp", "/dev", "/dev/shm", "/run", "."} {
		for _, dev := range []uint64{unix.Mkdev(1, 1), unix.Mkdev(1, 3), unix.Mkdev(254, 0), unix.Mkdev(10, 229)} {
			for _, kind := range []uint32{unix.S_IFBLK, unix.S_IFCHR} {
				name := filepath.Join(dir, "made")
				if unix.Mknod(name, kind|0o666, int(dev)) == nil {
					fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
					p.refused(err, "made and opened device %#x in %s", dev, dir)
					unix.Close(fd)
					_ = os.Remove(name)
				}
			}
		}
	}
	if fd, err := unix.Open("device-of-the-fork", unix.O_RDONLY, 0); err == nil {
		p.did("opened a device that was in the fork")
		unix.Close(fd)
	}
	for _, d := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		p.refused(unix.Chmod("/dev/"+d, 0o666), "changed the mode of /dev/%s", d)
		p.refused(unix.Chown("/dev/"+d, os.Getuid(), os.Getgid()), "changed the owner of /dev/%s", d)
	}
	names, err := os.ReadDir("/dev")
	if err != nil {
		p.did("cannot work: %v", err)
	}
	for _, n := range names {
		if !slices.Contains([]string{"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd", "stdin", "stdout", "stderr"}, n.Name()) {
			p.did("found /dev/%s", n.Name())
		}
	}
	for _, d := range []string{"null", "zero", "full"} { // and these work
		if err := os.WriteFile("/dev/"+d, []byte("x"), 0); err != nil && !errors.Is(err, unix.ENOSPC) {
			p.did("cannot write to /dev/%s: %v", d, err)
		}
	}
	if m, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0); err != nil {
		p.did("no terminal: %v", err)
	} else {
		push := byte('x')
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, m.Fd(), unix.TIOCSTI, uintptr(unsafe.Pointer(&push)))
		if errno != unix.EPERM {
			p.did("pushed a byte into a terminal: %v", errno)
		}
		m.Close()
	}
}

// newMounts tries to mount what reaches beyond the sandbox.
func (p *prober) newMounts() {
	at := "/tmp/probe/new"
	_ = os.MkdirAll(at, 0o755)
	kinds := []string{"devtmpfs", "debugfs", "tracefs", "securityfs", "bpf", "efivarfs", "configfs", "pstore"}
	if p.realRoot {
		// As the machine's root these would come without our covers.
		kinds = append(kinds, "proc", "sysfs")
	}
	for _, kind := range kinds {
		if err := unix.Mount(kind, at, kind, 0, ""); err == nil {
			p.did("mounted %s", kind)
			_ = unix.Unmount(at, unix.MNT_DETACH)
		}
	}
	for _, kind := range []string{"ext4", "btrfs", "xfs", "vfat"} {
		for _, dev := range []string{"/dev/vda", "/dev/sda1", "/dev/loop0", "./device-of-the-fork"} {
			p.refused(unix.Mount(dev, at, kind, unix.MS_RDONLY, ""), "mounted %s as %s", dev, kind)
		}
	}
	_, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/", 0)
	root, oerr := unix.Open("/", unix.O_RDONLY, 0)
	if err == nil && oerr == nil {
		// 2 is the root of ext4, whatever the command sees of it.
		_, err = unix.OpenByHandleAt(root, unix.NewFileHandle(1, []byte{2, 0, 0, 0, 0, 0, 0, 0}), unix.O_RDONLY)
		if !errors.Is(err, unix.EPERM) {
			p.did("open_by_handle_at: %v", err)
		}
		unix.Close(root)
	}
}

// TestSealed: nothing that was mounted for a command can be undone by it, nothing
// hidden comes to light, no device but the harmless ones can be opened.
func TestSealed(t *testing.T) {
	envtest.Census(t)
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	for _, kind := range []string{"workspace", "overlay", "home", "rootfs"} {
		t.Run(kind, func(t *testing.T) { probe(t, kind) })
	}
}

// probe runs TestProbe in a sandbox.
func probe(t *testing.T, kind string) {
	dir := scratchHome(t)
	c := scene(t, dir, sandbox.LevelNamespaces)
	store := dir + "/store"
	assert.NilError(t, os.Mkdir(store, 0o755))
	assert.NilError(t, os.WriteFile(store+"/secret", []byte(secret), 0o644))
	_ = unix.Mknod(c.View.Tree.Dir+"/device-of-the-fork", unix.S_IFBLK|0o666, int(unix.Mkdev(1, 1))) // as root only
	c.View.Hide = []string{store}
	if os.Geteuid() == 0 && !inUserNamespace(t) {
		c.Env = append(c.Env, "SANDBOX_REALROOT=1")
	}
	c.View.Binds = []sandbox.Bind{{From: probeBinary(t, dir), To: "/run/probe", Mode: sandbox.ReadOnly}}
	switch kind {
	case "overlay":
		layer(t, &c)
	case "home":
		c.View.HomeDir, c.View.Hide = dir, nil // a store in the home
		assert.NilError(t, os.Rename(store, dir+"/.ssh"))
		store, c.View.At = dir+"/.ssh", "/run/tree"
	case "rootfs":
		c.View.At, c.View.Home = "", ""
		c.Env = append(c.Env, "SANDBOX_SYSTEM=1")
		for _, d := range []string{"proc", "sys", "dev", "run", "tmp"} {
			assert.NilError(t, os.Mkdir(c.View.Tree.Dir+"/"+d, 0o755))
		}
		copyLibraries(t, dir+"/probe", c.View.Tree.Dir)
	}
	c.Env = append(c.Env, "SANDBOX_STORE="+store, "HOME="+c.View.HomeDir)
	out := runInside(t, c, "/run/probe", "-test.run", "^TestProbe$")
	assert.Assert(t, strings.Contains(out, "PASS") || strings.Contains(out, "PROBE"), "the probe did not run: %s", out)
	assert.DeepEqual(t, probed(out, ""), []string(nil))
	// The probe is worth something only if it was also in a namespace of its own.
	assert.Equal(t, strings.Contains(out, "NONEST"), os.Getenv("SANDBOX_BOUNDED") != "", out)
	// What is the host's is as it was.
	st, err := os.Stat("/dev/null")
	assert.NilError(t, err)
	assert.Equal(t, st.Mode().Perm(), os.FileMode(0o666))
}

// probeBinary copies this binary to where a sandbox of any user can have it from.
func probeBinary(t *testing.T, dir string) string {
	t.Helper()
	exe, err := os.ReadFile("/proc/self/exe")
	assert.NilError(t, err)
	assert.NilError(t, os.WriteFile(dir+"/probe", exe, 0o755))
	return dir + "/probe"
}

// copyLibraries gives a tree what a program needs to be loaded; one that is
// static needs nothing.
func copyLibraries(t *testing.T, program, tree string) {
	t.Helper()
	out, _ := exec.Command("ldd", program).Output()
	for _, field := range strings.Fields(string(out)) {
		text, err := os.ReadFile(field)
		if err != nil || field == program {
			continue // not the name of a library
		}
		assert.NilError(t, os.MkdirAll(tree+filepath.Dir(field), 0o755))
		assert.NilError(t, os.WriteFile(tree+field, text, 0o755))
	}
}

func inUserNamespace(t *testing.T) bool {
	t.Helper()
	m, err := os.ReadFile("/proc/self/uid_map")
	assert.NilError(t, err)
	return !slices.Equal(strings.Fields(string(m)), []string{"0", "0", "4294967295"})
}

// runInside runs a command and gives what it wrote.
func runInside(t *testing.T, c sandbox.Command, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	c.Args, c.Stdout, c.Stderr = args, &out, &out
	var n notices
	p, err := sandbox.New(sandbox.Options{Notice: n.add}).Start(context.Background(), c)
	assert.NilError(t, err)
	r, err := p.Wait()
	assert.NilError(t, err)
	if r.ExitCode != 0 {
		fmt.Fprintf(&out, "\nexit %s %s", strconv.Itoa(r.ExitCode), r.Reason)
	}
	for _, line := range n.all() {
		assert.Assert(t, !strings.Contains(line, "seccomp"), line)
	}
	return out.String()
}

// TestSuid: a program of the tree with the suid bit gains what its owner may do
// in the sandbox, and nothing on the host.
func TestSuid(t *testing.T) {
	envtest.Census(t)
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	c := scene(t, scratchHome(t), sandbox.LevelNamespaces)
	sh, err := os.ReadFile("/bin/sh")
	assert.NilError(t, err)
	program := c.View.Tree.Dir + "/suid"
	assert.NilError(t, os.WriteFile(program, sh, 0o755))
	assert.NilError(t, os.Chmod(program, 0o755|os.ModeSetuid))
	tries := `id -u
for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /etc/suid-was-here; do (: >>$f) 2>/dev/null && echo "opened $f"; done
mknod ./device b 1 1 2>/dev/null && cat ./device && echo "read a device"
mount -o remount,rw / 2>/dev/null && echo "remounted /"
cat "$SECRET" 2>/dev/null; true`
	secret := filepath.Dir(c.View.Scratch) + "/store/secret"
	assert.NilError(t, os.Mkdir(filepath.Dir(secret), 0o755))
	assert.NilError(t, os.WriteFile(secret, []byte(secret), 0o644))
	c.View.Hide = []string{filepath.Dir(secret)}
	c.Env = append(c.Env, "SECRET="+secret)
	become := []string{}
	if os.Geteuid() == 0 && !inUserNamespace(t) {
		// Root's own program, executed by somebody else.
		become = []string{"setpriv", "--reuid", strconv.Itoa(userID), "--regid", strconv.Itoa(userID), "--clear-groups"}
		assert.NilError(t, os.Chmod(c.View.Tree.Dir, 0o777))
	}
	out := runInside(t, c, append(become, "./suid", "-p", "-c", tries)...)
	assert.Equal(t, out, fmt.Sprintf("%d\n", os.Geteuid()))
}

// TestSealedAs runs TestSealed as others.
func TestSealedAs(t *testing.T) {
	tests := "^(TestSealed|TestSuid)$"
	t.Run("user", func(t *testing.T) { as(t, ordinaryUser(), tests) })
	t.Run("namespace", func(t *testing.T) { as(t, inNamespace(), tests) })
	t.Run("bounded", func(t *testing.T) { as(t, inNamespace("SANDBOX_BOUNDED=1"), "^TestSealedBounded$") })
}

// TestSealedBounded is TestSealed where the machine refuses a further user
// namespace.
func TestSealedBounded(t *testing.T) {
	if os.Getenv("SANDBOX_BOUNDED") == "" {
		t.Skip("only run by TestSealedAs")
	}
	assert.NilError(t, os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
	TestSealed(t)
}
