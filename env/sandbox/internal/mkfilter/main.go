//go:build linux

// Command mkfilter writes the seccomp filter that every command of the level
// namespaces runs under, as tables of instructions: to derive them at each
// start would take longer than all else that a helper does.
//
// It takes the profile that Docker and containerd use by default
// (github.com/moby/profiles/seccomp) for a process with the capabilities that
// Docker gives, and changes in it what is named below, each with its reason.
//
// What the profile cannot do, this filter cannot either: 32-bit programs may make
// sockets by socketcall(2), whose arguments are in memory, where no filter sees
// them. So the families that socket(2) is denied, AF_ALG and AF_VSOCK among them,
// are open to those programs. To deny socketcall its socket would leave the
// programs of most 32-bit C libraries without any: glibc built for kernels before
// 4.3, as Debian 12 has it, knows no other way and does not fall back.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// heldCapability is the one capability of Docker's default set on which a rule
// of the profile depends.
const heldCapability = "CAP_SYS_CHROOT"

// allowedToo is what programs need that make a sandbox of their own (bubblewrap,
// Chromium, unshare, rootless builders, agentenv itself). The profile denies it,
// since a container's root may have the powers of the machine's. Here the command
// has powers over what its own namespace made and nothing else: our mounts are
// locked in it.
var allowedToo = []string{
	"clone", "clone3", "unshare", "setns", // namespaces
	"mount", "umount", "umount2", "pivot_root", // what is mounted in them,
	"fsopen", "fsconfig", "fsmount", "fspick", // and the same by descriptors
	"open_tree", "open_tree_attr", "move_mount", "mount_setattr",
	"sethostname", "setdomainname", // the name of the command's own machine
}

// personalities are what debuggers and the race detectors of C compilers switch
// to besides what the profile allows: no random addresses. It is a matter of that
// process alone, and the profile denies it only since it denies all it does not
// name.
var personalities = []uint32{addrNoRandomize, addrNoRandomize | perLinux32}

// ADDR_NO_RANDOMIZE and PER_LINUX32 of <linux/personality.h>.
const (
	addrNoRandomize = 0x0040000
	perLinux32      = 0x0008
)

// deniedIoctls push bytes into the input of a terminal. The command may share the
// user's, whose shell would execute them when the command has ended. The profile
// does not deny them, for a container has a terminal of its own.
var deniedIoctls = []uint32{unix.TIOCSTI, tioclinux}

// tioclinux is TIOCLINUX of <asm-generic/ioctls.h>: it pastes on a console.
const tioclinux = 0x541C

// abi is one way to make system calls.
type abi struct {
	name  string // as x/sys/unix has it in the names of its files
	audit uint32 // as the kernel gives it to a filter
	more  map[string]uint32
}

// armPrivate are the calls of <asm/unistd.h> of 32-bit ARM that are not in the
// common table.
var armPrivate = map[string]uint32{"breakpoint": 0x0f0001, "cacheflush": 0x0f0002, "usr26": 0x0f0003, "usr32": 0x0f0004, "set_tls": 0x0f0005}

// machines are the processors a filter is made for, with the ABIs that their
// programs can use. x32 is not among them: its calls have numbers above all
// others, and get what a kernel without it answers.
var machines = []struct {
	name string
	arch string // in the words of the profile
	abis []abi
}{
	{name: "X86", arch: "amd64",
		abis: []abi{{name: "amd64", audit: unix.AUDIT_ARCH_X86_64}, {name: "386", audit: unix.AUDIT_ARCH_I386}}},
	{name: "ARM", arch: "arm64",
		abis: []abi{{name: "arm64", audit: unix.AUDIT_ARCH_AARCH64}, {name: "arm", audit: unix.AUDIT_ARCH_ARM, more: armPrivate}}},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: mkfilter FILE")
		os.Exit(2)
	}
	text, err := generate()
	if err == nil {
		err = os.WriteFile(os.Args[1], text, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mkfilter:", err)
		os.Exit(1)
	}
}
