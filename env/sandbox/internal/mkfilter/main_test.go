//go:build linux

package main

import (
	"encoding/binary"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// TestGenerated: the filter that commands run under is what the profile says
// today.
func TestGenerated(t *testing.T) {
	need(t)
	want, err := generate()
	assert.NilError(t, err)
	have, err := os.ReadFile("../../filter_linux.go")
	assert.NilError(t, err)
	assert.Assert(t, string(have) == string(want), "filter_linux.go is not what the profile gives: run go generate ./env/sandbox, and look at what changed")
}

func need(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command, to find the tables of golang.org/x/sys")
	}
}

// machine is a filter that can be asked.
type machine struct {
	t       *testing.T
	vm      *bpf.VM
	numbers map[string]map[string]uint32 // of each ABI
	audit   map[string]uint32
}

func load(t *testing.T, name string) machine {
	t.Helper()
	m := machine{t: t, numbers: map[string]map[string]uint32{}, audit: map[string]uint32{}}
	for _, known := range machines {
		if known.name != name {
			continue
		}
		named, err := rules(known.arch)
		assert.NilError(t, err)
		raw, err := assemble(known.abis, func(a abi) ([]span, error) {
			m.audit[a.name] = a.audit
			m.numbers[a.name], err = calls(a)
			return byNumber(a, named, m.numbers[a.name]), err
		})
		assert.NilError(t, err)
		prog, ok := bpf.Disassemble(raw)
		assert.Assert(t, ok)
		m.vm, err = bpf.NewVM(prog)
		assert.NilError(t, err)
	}
	return m
}

// ask gives what the filter returns. The machine of that library loads words in
// the order of the network, the kernel in its own.
func (m machine) ask(audit, number uint32, args ...uint64) uint32 {
	m.t.Helper()
	data := make([]byte, offArgs+6*argSize)
	binary.BigEndian.PutUint32(data[offNumber:], number)
	binary.BigEndian.PutUint32(data[offABI:], audit)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[offArgs+i*argSize:], uint32(a))
		binary.BigEndian.PutUint32(data[offArgs+i*argSize+wordSize:], uint32(a>>32))
	}
	got, err := m.vm.Run(data)
	assert.NilError(m.t, err)
	return uint32(got)
}

func (m machine) call(abi, name string, args ...uint64) uint32 {
	m.t.Helper()
	number, ok := m.numbers[abi][name]
	assert.Assert(m.t, ok, "%s has no call %s", abi, name)
	return m.ask(m.audit[abi], number, args...)
}

const (
	allow uint32 = unix.SECCOMP_RET_ALLOW
	eperm uint32 = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	nosys uint32 = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
)

// mustBeDenied is what no command may do, on any machine.
var mustBeDenied = []string{
	"acct", "add_key", "bpf", "clock_settime", "delete_module", "fanotify_init", "finit_module", "init_module",
	"io_uring_enter", "io_uring_register", "io_uring_setup", "kcmp", "kexec_load", "keyctl", "lookup_dcookie", "nfsservctl",
	"open_by_handle_at", "perf_event_open", "pidfd_getfd", "quotactl", "quotactl_fd", "reboot", "request_key",
	"settimeofday", "swapoff", "swapon", "syslog", "userfaultfd", "vhangup",
}

func TestVerdicts(t *testing.T) {
	need(t)
	for name, abis := range map[string][]string{"X86": {"amd64", "386"}, "ARM": {"arm64", "arm"}} {
		m := load(t, name)
		for _, abi := range abis {
			for _, call := range mustBeDenied {
				assert.Equal(t, m.call(abi, call), eperm, "%s of %s", call, abi)
			}
			for _, call := range append([]string{"read", "execve", "ptrace", "seccomp", "prctl", "memfd_create", "process_vm_readv", "name_to_handle_at"}, allowedToo...) {
				if _, ok := m.numbers[abi][call]; !ok && call == "umount" {
					continue // where there is only umount2
				}
				assert.Equal(t, m.call(abi, call), allow, "%s of %s", call, abi)
			}
			// The upper half of an argument changes nothing: the kernel does not look
			// at it either.
			for _, high := range []uint64{0, 1 << 32} {
				assert.Equal(t, m.call(abi, "ioctl", 0, unix.TIOCSTI|high), eperm)
				assert.Equal(t, m.call(abi, "ioctl", 0, tioclinux|high), eperm)
				assert.Equal(t, m.call(abi, "ioctl", 0, unix.TIOCGWINSZ|high), allow)
			}
			assert.Equal(t, m.call(abi, "personality", 0), allow)
			assert.Equal(t, m.call(abi, "personality", 0xffffffff), allow)
			assert.Equal(t, m.call(abi, "personality", perLinux32), allow)
			assert.Equal(t, m.call(abi, "personality", addrNoRandomize), allow)
			assert.Equal(t, m.call(abi, "personality", 0x0400000), eperm) // READ_IMPLIES_EXEC
			for family, want := range map[uint64]uint32{unix.AF_UNIX: allow, unix.AF_INET6: allow, unix.AF_NETLINK: allow,
				unix.AF_ALG: eperm, unix.AF_VSOCK: eperm, unix.AF_IPX: eperm, 1000: eperm} {
				assert.Equal(t, m.call(abi, "socket", family), want, "family %d", family)
			}
			for _, none := range []uint32{5000, 1 << 30, 1<<30 + 175, 1 << 31, 0xffffffff} {
				assert.Equal(t, m.ask(m.audit[abi], none), nosys)
			}
		}
		assert.Equal(t, m.ask(0x5441, 1), uint32(unix.SECCOMP_RET_KILL_PROCESS))
	}
	x86 := load(t, "X86")
	// The families behind it cannot be seen, see main.go.
	for call := range uint64(21) {
		assert.Equal(t, x86.call("386", "socketcall", call), allow)
	}
	for _, call := range []string{"iopl", "ioperm"} {
		assert.Equal(t, x86.call("amd64", call), eperm)
		assert.Equal(t, x86.call("386", call), eperm)
	}
	for _, call := range []string{"vm86", "vm86old", "stime", "clock_settime64"} {
		assert.Equal(t, x86.call("386", call), eperm)
	}
	assert.Equal(t, x86.call("amd64", "arch_prctl"), allow)
	assert.Equal(t, load(t, "ARM").ask(unix.AUDIT_ARCH_ARM, armPrivate["set_tls"]), allow)
}
