package sandbox

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// explain makes an [Error] of why the kernel refused part of a sandbox,
// looking at what usually is the cause.
func explain(what string, err error) *Error {
	var e *Error
	if !errors.As(err, &e) {
		return newError(what, err)
	}
	if e.Fix == "" && !e.OfFileSystem() {
		e.Fix = fixFor(e.Err)
	}
	return e
}

// newError makes an [Error] with what mends it.
func newError(what string, err error) *Error {
	e := &Error{What: what, Err: err}
	if !e.OfFileSystem() {
		e.Fix = fixFor(err)
	}
	return e
}

// knob is a kernel setting that forbids sandboxes when it has a certain value.
type knob struct {
	file string
	bad  string
	fix  string
	root bool // it binds root too
}

var knobs = []knob{
	{"/proc/sys/user/max_user_namespaces", "0", "user namespaces are switched off; run: sudo sysctl user.max_user_namespaces=15000", true},
	{"/proc/sys/user/max_mnt_namespaces", "0", "mount namespaces are switched off; run: sudo sysctl user.max_mnt_namespaces=15000", true},
	{"/proc/sys/user/max_pid_namespaces", "0", "PID namespaces are switched off; run: sudo sysctl user.max_pid_namespaces=15000", true},
	{"/proc/sys/user/max_ipc_namespaces", "0", "IPC namespaces are switched off; run: sudo sysctl user.max_ipc_namespaces=15000", true},
	{"/proc/sys/user/max_uts_namespaces", "0", "UTS namespaces are switched off; run: sudo sysctl user.max_uts_namespaces=15000", true},
	{"/proc/sys/kernel/unprivileged_userns_clone", "0", "user namespaces are for root only here; run: sudo sysctl kernel.unprivileged_userns_clone=1", false},
	{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor forbids user namespaces; run: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or give agentenv an AppArmor profile with the rule userns", false},
}

const (
	weaker   = "or use --isolation process, which has no namespaces"
	inChroot = "this runs in a chroot, where the kernel allows no such thing; run it outside, " + weaker
)

// fixFor says what the user can do about err.
func fixFor(err error) string {
	switch {
	case errors.Is(err, unix.EINVAL) && chrooted():
		return inChroot
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return "too many files are open; raise the limit (ulimit -n) or run fewer at once (--parallel)"
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return "too many processes, or no memory; raise the limit (ulimit -u) or run fewer at once (--parallel)"
	case errors.Is(err, unix.ENOSYS):
		return "Linux 5.12 or later is needed, and nothing (such as a container's seccomp profile) that hides its system calls"
	case errors.Is(err, unix.ENOSPC):
		if k := badKnob(); k != "" {
			return k + "; " + weaker
		}
		return "too many namespaces are in use; raise the limits (see sysctl user)"
	case refusedNamespace(err), errors.Is(err, unix.EACCES):
		return fixForRefusal()
	}
	return ""
}

// fixForOverlay says what the user can do when the overlay of a tree cannot be
// mounted, though the environment was made where it could.
func fixForOverlay(err error) string {
	switch {
	case isOfFileSystem(err):
		return ""
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESTALE):
		return "a layer of the store is gone: whatever was moved or removed below the root has to come back"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODEV), errors.Is(err, unix.EACCES):
		return "this system, or the file system of the root, does not let this user mount overlays: " +
			"run as the user and on the machine that made the environment, or make another with --backend copy"
	}
	return fixFor(err)
}

func badKnob() string {
	for _, k := range knobs {
		if !k.root && mayMount() {
			continue
		}
		value, err := os.ReadFile(k.file)
		if err == nil && strings.TrimSpace(string(value)) == k.bad {
			return k.fix
		}
	}
	return ""
}

// fixForRefusal looks for who said EPERM.
func fixForRefusal() string {
	if k := badKnob(); k != "" {
		return k + "; " + weaker
	}
	status, _ := os.ReadFile("/proc/self/status")
	switch {
	case chrooted():
		return inChroot
	case unmapped():
		return "this user's id is not mapped in the user namespace it is in; map it, " + weaker
	case maskedProc():
		return "parts of /proc are hidden, as containers do, and agentenv for root; run the container with " +
			"--security-opt systempaths=unconfined (or --privileged), or the agentenv around this as an ordinary user, " + weaker
	case strings.Contains(string(status), "\nSeccomp:\t2"):
		return "a seccomp filter, such as a container's, forbids it; run the container with " +
			"--security-opt seccomp=unconfined --security-opt systempaths=unconfined (or --privileged), " + weaker
	}
	return "the system forbids it; run as root, " + weaker
}

// chrooted says whether our root directory is not that of our mount
// namespace: then it is no mount point.
func chrooted() bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, "/", 0, 0, &st)
	return err == nil && st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0
}

// maskedProc says whether something is mounted below /proc: then the kernel
// lets no user namespace mount a new one.
func maskedProc() bool {
	info, err := os.ReadFile("/proc/self/mountinfo")
	return err == nil && strings.Contains(string(info), " /proc/")
}

func unmapped() bool {
	overflow, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	return err == nil && strings.TrimSpace(string(overflow)) == strconv.Itoa(os.Geteuid()) && !mapped(os.Geteuid())
}

// mapped says whether id is one of our user namespace's.
func mapped(id int) bool {
	m, err := identityMap("/proc/self/uid_map")
	if err != nil {
		return true
	}
	for _, r := range m {
		if id >= r.ContainerID && id-r.ContainerID < r.Size {
			return true
		}
	}
	return false
}
