package sandbox_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// deniedCalls are made with arguments that do no harm where they are not denied.
var deniedCalls = []struct {
	name string
	call uintptr
	args [5]uintptr
	// open says that the kernel lets everybody make the call: without a filter it
	// fails with something else.
	open bool
}{
	{"acct", unix.SYS_ACCT, [5]uintptr{1}, false},
	{"add_key", unix.SYS_ADD_KEY, [5]uintptr{}, true},
	{"bpf", unix.SYS_BPF, [5]uintptr{9999}, false},
	{"clock_settime", unix.SYS_CLOCK_SETTIME, [5]uintptr{99}, false},
	{"delete_module", unix.SYS_DELETE_MODULE, [5]uintptr{}, false},
	{"fanotify_init", unix.SYS_FANOTIFY_INIT, [5]uintptr{0xffff0000}, false},
	{"finit_module", unix.SYS_FINIT_MODULE, [5]uintptr{99999}, false},
	{"get_mempolicy", unix.SYS_GET_MEMPOLICY, [5]uintptr{0, 0, 0, 0, 0xffff}, true},
	{"init_module", unix.SYS_INIT_MODULE, [5]uintptr{}, false},
	{"io_uring_setup", unix.SYS_IO_URING_SETUP, [5]uintptr{}, true},
	{"io_uring_enter", unix.SYS_IO_URING_ENTER, [5]uintptr{99999}, true},
	{"io_uring_register", unix.SYS_IO_URING_REGISTER, [5]uintptr{99999, 99}, true},
	{"kcmp", unix.SYS_KCMP, [5]uintptr{0, 0, 99}, true},
	{"kexec_load", unix.SYS_KEXEC_LOAD, [5]uintptr{0, 99999}, false},
	{"keyctl", unix.SYS_KEYCTL, [5]uintptr{9999}, true},
	{"lookup_dcookie", unix.SYS_LOOKUP_DCOOKIE, [5]uintptr{}, false},
	{"open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, [5]uintptr{99999}, false},
	{"perf_event_open", unix.SYS_PERF_EVENT_OPEN, [5]uintptr{}, true},
	{"pidfd_getfd", unix.SYS_PIDFD_GETFD, [5]uintptr{99999}, true},
	{"process_madvise", unix.SYS_PROCESS_MADVISE, [5]uintptr{99999}, true},
	{"quotactl", unix.SYS_QUOTACTL, [5]uintptr{99999}, false},
	{"reboot", unix.SYS_REBOOT, [5]uintptr{}, false},
	{"request_key", unix.SYS_REQUEST_KEY, [5]uintptr{}, true},
	{"set_mempolicy", unix.SYS_SET_MEMPOLICY, [5]uintptr{99}, true},
	{"settimeofday", unix.SYS_SETTIMEOFDAY, [5]uintptr{1}, false},
	{"socket of AF_ALG", unix.SYS_SOCKET, [5]uintptr{unix.AF_ALG, 99}, true},
	{"socket of AF_VSOCK", unix.SYS_SOCKET, [5]uintptr{unix.AF_VSOCK, 99}, true},
	{"swapon", unix.SYS_SWAPON, [5]uintptr{}, false},
	{"swapoff", unix.SYS_SWAPOFF, [5]uintptr{}, false},
	{"syslog", unix.SYS_SYSLOG, [5]uintptr{99}, false},
	// 1: only for faults of the program itself, which everybody may ask for
	{"userfaultfd", unix.SYS_USERFAULTFD, [5]uintptr{0xf1}, true},
	{"vhangup", unix.SYS_VHANGUP, [5]uintptr{}, false},
}

// TestCalls makes the denied calls and prints how each ended; TestSeccomp runs
// it inside.
func TestCalls(t *testing.T) {
	if os.Getenv("SANDBOX_CALLS") == "" {
		t.Skip("only run by TestSeccomp")
	}
	for _, c := range deniedCalls {
		if c.name == "vhangup" && os.Getenv("SANDBOX_CALLS") == "outside" {
			continue
		}
		_, _, errno := unix.Syscall6(c.call, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], 0)
		fmt.Printf("CALL %s: %d\n", c.name, errno)
	}
	offset := unix.Timex{Modes: unix.ADJ_OFFSET}
	_, err := unix.Adjtimex(&offset)
	fmt.Println("adjtimex:", err)
	_, _, errno := unix.Syscall(5000, 0, 0, 0)
	fmt.Printf("unknown call: %d\n", errno)
}

func TestSeccomp(t *testing.T) {
	envtest.Census(t)
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	t.Run("status", func(t *testing.T) {
		dir := scratchHome(t)
		c := scene(t, dir, sandbox.LevelNamespaces)
		// No no_new_privs: sudo works inside.
		assert.Equal(t, runInside(t, c, "sh", "-c", `grep -E '^(Seccomp|NoNewPrivs):' /proc/self/status`), "NoNewPrivs:\t0\nSeccomp:\t2\n")
	})
	t.Run("process level", func(t *testing.T) {
		c := scene(t, scratchHome(t), sandbox.LevelProcess)
		out, err := exec.Command("grep", "^Seccomp:", "/proc/self/status").Output()
		assert.NilError(t, err)
		assert.Equal(t, runInside(t, c, "grep", "^Seccomp:", "/proc/self/status"), string(out))
	})
	t.Run("denied", testDenied)
	t.Run("denied to 32 bits", testDenied32)
	t.Run("sandboxes inside", testSandboxesInside)
	t.Run("agentenv inside", testNested)
}

func testDenied(t *testing.T) {
	dir := scratchHome(t)
	c := scene(t, dir, sandbox.LevelNamespaces)
	c.Env = append(c.Env, "SANDBOX_CALLS=inside")
	c.View.Binds = []sandbox.Bind{{From: probeBinary(t, dir), To: "/run/probe", Mode: sandbox.ReadOnly}}
	out := runInside(t, c, "/run/probe", "-test.run", "^TestCalls$")
	for _, call := range deniedCalls {
		assert.Assert(t, strings.Contains(out, fmt.Sprintf("CALL %s: %d\n", call.name, unix.EPERM)), "%s\n%s", call.name, out)
	}
	assert.Assert(t, strings.Contains(out, "adjtimex: operation not permitted"), out)
	assert.Assert(t, strings.Contains(out, fmt.Sprintf("unknown call: %d\n", unix.ENOSYS)), out)

	// Without a filter most of them fail otherwise: it is the filter that we see.
	cmd := exec.Command(dir+"/probe", "-test.run", "^TestCalls$")
	cmd.Env = append(os.Environ(), "SANDBOX_CALLS=outside")
	if os.Geteuid() == 0 {
		return // not calls such as reboot with all powers
	}
	text, err := cmd.Output()
	assert.NilError(t, err)
	for _, call := range deniedCalls {
		assert.Assert(t, !call.open || !strings.Contains(string(text), fmt.Sprintf("CALL %s: %d\n", call.name, unix.EPERM)), "%s\n%s", call.name, text)
	}
}

// calls32 makes calls by the ABI of 386 and prints how each ended.
const calls32 = `#include <stdio.h>
static int call(int n, int a) {
	int r;
	__asm__ volatile("int $0x80" : "=a"(r) : "a"(n), "b"(a), "c"(0), "d"(0), "S"(0), "D"(0) : "memory", "r8", "r9", "r10", "r11");
	return r;
}
int main(void) {
	int numbers[] = {20 /* getpid */, 286 /* add_key */, 288 /* keyctl */, 101 /* ioperm */, 110 /* iopl */,
		128 /* init_module */, 336 /* perf_event_open */, 357 /* bpf */, 374 /* userfaultfd */, 425 /* io_uring_setup */,
		342 /* open_by_handle_at */, 404 /* clock_settime64 */, 5000};
	for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
		int r = call(numbers[i], 9999);
		printf("%d ", r > 0 ? 1 : r);
	}
	printf("%d ", call(359 /* socket */, 40 /* AF_VSOCK */)); // of type 0, which nobody has
	return 0;
}
`

func testDenied32(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil || runtime.GOARCH != "amd64" {
		t.Skip("needs gcc on amd64")
	}
	dir := scratchHome(t)
	c := scene(t, dir, sandbox.LevelNamespaces)
	assert.NilError(t, os.WriteFile(dir+"/calls.c", []byte(calls32), 0o644))
	out, err := exec.Command("gcc", "-o", c.View.Tree.Dir+"/calls", dir+"/calls.c").CombinedOutput()
	assert.NilError(t, err, string(out))
	plain, err := exec.Command(c.View.Tree.Dir + "/calls").Output()
	if err != nil || !strings.HasPrefix(string(plain), "1 ") {
		t.Skipf("this kernel runs no 32-bit calls: %v %s", err, plain)
	}
	assert.Equal(t, runInside(t, c, "./calls"), "1 "+strings.Repeat("-1 ", 11)+"-38 -1 ")
}

// testSandboxesInside: programs that sandbox themselves, and debuggers, run inside
// if they run outside.
func testSandboxesInside(t *testing.T) {
	realRoot := os.Geteuid() == 0 && !inUserNamespace(t)
	for _, script := range []string{
		"bwrap --ro-bind / / --unshare-all true",
		"bwrap --ro-bind / / --dev /dev --tmpfs /tmp --unshare-user --unshare-pid --unshare-net --die-with-parent true",
		"bwrap --ro-bind / / --proc /proc --unshare-all true",
		"unshare -Ur true",
		"unshare -Urm mount -t tmpfs none /mnt",
		"unshare -Urmpf --mount-proc true",
		"unshare -Urn true",
		"strace -f -o /dev/null sh -c true",
		"setarch -R true",
		"gdb -batch -ex run /bin/true",
	} {
		t.Run(script, func(t *testing.T) {
			if strings.HasPrefix(script, "gdb") && !envtest.Long() {
				t.Skip("it takes seconds: set AGENTENV_TEST_LONG=1")
			}
			if out, err := exec.Command("sh", "-c", script).CombinedOutput(); err != nil {
				t.Skipf("it does not run outside: %v: %s", err, out)
			}
			c := scene(t, scratchHome(t), sandbox.LevelNamespaces)
			out := runInside(t, c, "sh", "-c", script+" && echo it runs")
			if realRoot && strings.Contains(script, "proc") {
				// The machine's root could change its settings through a /proc of his own.
				assert.Assert(t, strings.Contains(out, "exit "), out)
				return
			}
			assert.Assert(t, strings.Contains(out, "it runs"), out)
		})
	}
}

// TestNestedProbe is run inside by TestSeccomp.
func TestNestedProbe(t *testing.T) {
	if os.Getenv("SANDBOX_NESTED") == "" {
		t.Skip("only run by TestSeccomp")
	}
	fmt.Println("nested:", sandbox.Probe(sandbox.LevelNamespaces))
}

// testNested: agentenv runs inside agentenv; as the machine's root it says why
// not.
func testNested(t *testing.T) {
	dir := scratchHome(t)
	c := scene(t, dir, sandbox.LevelNamespaces)
	c.Env = append(c.Env, "SANDBOX_NESTED=1")
	c.View.Binds = []sandbox.Bind{{From: probeBinary(t, dir), To: "/run/probe", Mode: sandbox.ReadOnly}}
	out := runInside(t, c, "/run/probe", "-test.run", "^TestNestedProbe$")
	if os.Geteuid() == 0 && !inUserNamespace(t) {
		assert.Assert(t, strings.Contains(out, "nested: cannot make the sandbox's /proc"), out)
		assert.Assert(t, strings.Contains(out, "--isolation process"), out)
		return
	}
	assert.Assert(t, strings.Contains(out, "nested: <nil>\n"), out)
}

// TestSeccompRefused: where something around us denies filters themselves, the
// user is told, and the command runs.
func TestSeccompRefused(t *testing.T) {
	envtest.Census(t)
	if os.Getenv("SANDBOX_NOFILTER") == "" {
		if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
			t.Skip(err)
		}
		cmd := exec.Command("/proc/self/exe", "-test.run", "^TestSeccompRefused$", "-test.v")
		cmd.Env = append(os.Environ(), "SANDBOX_NOFILTER=1")
		out, err := cmd.CombinedOutput()
		assert.NilError(t, err, string(out))
		return
	}
	denySeccomp(t)
	var n notices
	c := scene(t, scratchHome(t), sandbox.LevelNamespaces)
	c.Args = []string{"true"}
	p, err := sandbox.New(sandbox.Options{Notice: n.add}).Start(context.Background(), c)
	assert.NilError(t, err)
	r, err := p.Wait()
	assert.NilError(t, err)
	assert.Equal(t, r.ExitCode, 0)
	assert.Assert(t, strings.Contains(strings.Join(n.all(), "\n"), "allows no seccomp filter"), "%v", n.all())
}

// denySeccomp makes seccomp(2) fail for all threads of this process.
func denySeccomp(t *testing.T) {
	t.Helper()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: unix.SYS_SECCOMP},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread() // or no_new_privs and the call might be of two threads
	defer runtime.UnlockOSThread()
	assert.NilError(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	assert.Equal(t, int(errno), 0)
}

// TestSeccompAs runs TestSeccomp as others.
func TestSeccompAs(t *testing.T) {
	t.Run("user", func(t *testing.T) { as(t, ordinaryUser(), "^(TestSeccomp|TestSeccompRefused)$") })
	t.Run("namespace", func(t *testing.T) { as(t, inNamespace(), "^TestSeccomp$") })
}
