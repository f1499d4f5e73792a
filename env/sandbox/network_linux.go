package sandbox

import (
	"errors"
	"os"
	"strings"

	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
)

// CheckNetwork says whether commands of a level can have a network here. Its
// error is an [*Error]. It costs next to nothing; a way out that only trying can
// tell of is tried.
func CheckNetwork(level Level, n Network) error {
	switch {
	case n == "" || n == NetworkHost:
		return nil
	case n != NetworkPrivate && n != NetworkNAT:
		return &Error{What: "network", Err: errors.New("unknown network " + string(n)), Fix: "use host, private or nat"}
	case level == LevelProcess:
		return &Error{What: "network", Err: errors.New("the level process has no network of its own, and " + string(n) + " was asked for"),
			Fix: "use --isolation namespaces, or --network host"}
	case networkKnob.isBad():
		return networkRefused(unix.ENOSPC)
	case n == NetworkNAT:
		return checkNAT()
	}
	return nil
}

// networkKnob binds only commands with a network of their own, so it is none of
// the knobs that decide about the level.
var networkKnob = knob{"/proc/sys/user/max_net_namespaces", "0",
	"network namespaces are switched off; run: sudo sysctl user.max_net_namespaces=15000, or use --network host", true}

// isBad says whether the setting forbids sandboxes.
func (k knob) isBad() bool {
	value, err := os.ReadFile(k.file)
	return err == nil && strings.TrimSpace(string(value)) == k.bad
}

// ownNetwork says whether the command has a network namespace of its own.
func (s *spec) ownNetwork() bool { return s.Network == NetworkPrivate || s.Network == NetworkNAT }

// explainNetwork explains why a helper could not be started in a network
// namespace of its own, nil if that is not the reason: without it, it starts.
func explainNetwork(s *spec, err error) *Error {
	if !s.ownNetwork() {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) && networkKnob.isBad() {
		return networkRefused(err)
	}
	host := *s
	host.Network = NetworkHost
	attr, aerr := helperAttr(LevelNamespaces, &host)
	if aerr != nil {
		return nil
	}
	// Without its socket a helper ends at once.
	cmd := reexec.Command(initName)
	cmd.SysProcAttr = attr
	if start(cmd) != nil {
		return nil
	}
	_ = cmd.Wait() // that it could be started is all
	return networkRefused(err)
}

// networkRefused says what can be done where only a network namespace is refused.
func networkRefused(err error) *Error {
	fix := "the system, such as a container's seccomp profile, allows every namespace but this one; allow it " +
		"(--security-opt seccomp=unconfined, or --privileged), or use --network host, where ports are shared"
	switch {
	case !errors.Is(err, unix.ENOSPC):
	case networkKnob.isBad():
		fix = networkKnob.fix
	default:
		fix = "too many network namespaces are in use; raise user.max_net_namespaces (sysctl), run fewer at once (--parallel), or use --network host"
	}
	return &Error{What: "network namespace", Err: err, Fix: fix}
}

// networkSettings are made in a network namespace that is new. What cannot be set
// stays at the kernel's default: /proc/sys is read-only in some containers.
var networkSettings = []struct{ file, value string }{
	// A kernel can be told to begin without (net.core.devconf_inherit_init_net).
	{"ipv6/conf/lo/disable_ipv6", "0"},
	// The command has no power over the namespace, which is its own all the
	// same: a server may take port 80, and any group may ping. The kernel takes
	// only groups that are mapped.
	{"ipv4/ip_unprivileged_port_start", "0"},
	{"ipv4/ping_group_range", "0 0"},
	{"ipv4/ping_group_range", "0 2147483647"},
}

// raiseNetwork makes the new network namespace of this process usable: with lo
// up it has 127.0.0.1 and ::1.
func raiseNetwork() error {
	for _, s := range networkSettings {
		_ = os.WriteFile("/proc/sys/net/"+s.file, []byte(s.value), 0)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return &Error{What: "network", Err: os.NewSyscallError("socket", err)}
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		return &Error{What: "network", Err: os.NewSyscallError("set lo up", err),
			Fix: "the capability CAP_NET_ADMIN is missing; run the container with --cap-add NET_ADMIN, or use --network host"}
	}
	return nil
}

// networkDevices shows in /sys the command's devices instead of the host's,
// where the kernel lets a fresh sysfs be mounted; what is seen of the host's
// cannot be used anyway. The rest of /sys stays: a fresh one would lack the
// cgroups, by which programs learn their limits.
func (w *world) networkDevices() error {
	const at = "/sys/class/net"
	over := w.root.openDir(at)
	if !w.spec.ownNetwork() || over < 0 {
		return nil
	}
	defer unix.Close(over)
	const attrs = attrSealed | unix.MOUNT_ATTR_NOEXEC
	fresh, err := newFS("sysfs", attrs)
	if err != nil {
		return nil
	}
	defer unix.Close(fresh)
	// Only of what is attached parts can be bound; the first part hides it.
	if err := attach(fresh, over); err != nil {
		return err
	}
	for _, dir := range []string{"class/net", "devices/virtual/net"} {
		mnt, err := cloneTree(fresh, dir, attrs)
		if err != nil {
			return err
		}
		err = w.root.mount(mnt, "/sys/"+dir, false)
		unix.Close(mnt)
		if err != nil {
			return err
		}
	}
	return nil
}
