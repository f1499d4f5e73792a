package sandbox

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

//go:generate go run ./internal/mkfilter filter_linux.go

// instruction is one of a filter's program.
type instruction unix.SockFilter

// confine denies the calling thread, and whatever it starts, the system calls
// that container runtimes deny. It takes the powers of an init: without them the
// kernel asks for no_new_privs, and sudo would not work inside.
//
// A machine that has no filters goes without one, and the user is told. The
// filter makes the kernel harder to attack; what keeps a command where it
// belongs are the namespaces.
func confine(notice func(string)) {
	filter := filterFor(runtime.GOARCH)
	if filter == nil {
		notice("there is no seccomp filter for " + runtime.GOARCH + ", so commands may use every system call")
		return
	}
	runtime.LockOSThread()
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: (*unix.SockFilter)(&filter[0])}
	// With SPEC_ALLOW, as runc has it: kernels before 5.16 would else slow down
	// every process with a filter for fear of Spectre.
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		notice("this system allows no seccomp filter, so commands may use every system call that it has: " +
			os.NewSyscallError("seccomp", errno).Error())
	}
}

// filterFor gives the filter of a machine that runs programs made for goarch.
func filterFor(goarch string) []instruction {
	switch goarch {
	case "amd64", "386":
		return filterX86
	case "arm64", "arm":
		return filterARM
	}
	return nil
}
