package sandbox

import (
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// deadly are the signals whose handlers end a Go program that did not ask for
// them.
var deadly = []syscall.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGBUS,
	syscall.SIGFPE, syscall.SIGSEGV, syscall.SIGTERM, syscall.SIGSTKFLT, syscall.SIGSYS,
}

// shield keeps signals from inside from ending or stopping a helper. Nothing may
// be ignored or blocked for that, as the command would inherit it.
//
// To catch them all takes milliseconds: each has its turn on a thread of its own.
// But to PID 1 of a namespace the kernel gives no signal whose handler is the
// default one (signal(7): KILL and STOP come from outside alone), so that there
// the runtime's handlers need only go.
func shield() {
	if os.Getpid() != 1 {
		signal.Notify(make(chan os.Signal, 1))
		return
	}
	var byDefault [4]uint64 // struct sigaction with SIG_DFL, as the kernel has it
	for _, sig := range deadly {
		unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0)
	}
}
