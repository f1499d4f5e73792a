//go:build linux

package forkstest

import (
	"flag"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// userDir names, in a child made by AsUser, the directory that is its own.
const userDir = "AGENTENV_TEST_USER_DIR"

// testUser is an uid and gid that nobody has.
const testUser = 61234

// IsUser says whether this process is a child made by [AsUser].
func IsUser() bool { return os.Getenv(userDir) != "" }

// AsUser runs the calling test once more, as an ordinary user who owns dir, and
// takes over its result. It returns true in that child, where the test goes on,
// and false in the parent, where it is over.
//
// The child lives in user and mount namespaces of its own, in which it has its
// own ids and no capabilities; what it wants mounted, its parent there mounts.
// Where such namespaces are refused it lives in none, and cannot mount.
func AsUser(t *testing.T, dir string) bool {
	t.Helper()
	if IsUser() {
		return true
	}
	id := os.Geteuid()
	if id == 0 {
		id = testUser
		assert.NilError(t, os.Chown(dir, id, id))
	}
	exe, err := os.Open("/proc/self/exe")
	assert.NilError(t, err)
	defer exe.Close()
	run := func(why string) ([]byte, error) {
		// The test binary lies where only root may look for it.
		cmd := exec.Command("/proc/self/fd/3", testArgs(t)...)
		cmd.ExtraFiles = []*os.File{exe}
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), userDir+"="+dir, "HOME="+dir, "TMPDIR="+dir, noMounter+"="+why)
		cmd.SysProcAttr = &syscall.SysProcAttr{}
		if os.Geteuid() == 0 {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(id), Gid: uint32(id)}
		}
		if why == "" {
			cmd.Args[0] = mounterName
			ownNamespaces(cmd.SysProcAttr)
		}
		return cmd.CombinedOutput()
	}
	out, err := run("")
	if _, ran := err.(*exec.ExitError); err != nil && !ran {
		out, err = run("no user namespace: " + err.Error())
	}
	if err != nil {
		t.Fatalf("as an ordinary user: %v\n%s", err, out)
	}
	if testing.Verbose() {
		t.Logf("as an ordinary user:\n%s", out)
	}
	return false
}

// withoutNamespaces says that this is an ordinary user to whom user namespaces
// are refused.
func withoutNamespaces() bool { return os.Getenv(noMounter) != "" }

// testArgs are the flags that run the calling test alone, and of what is below
// it that which this process was asked to run.
func testArgs(t *testing.T) []string {
	var pattern []string
	for name := range strings.SplitSeq(t.Name(), "/") {
		pattern = append(pattern, "^"+name+"$")
	}
	if asked := strings.Split(flag.Lookup("test.run").Value.String(), "/"); len(asked) > len(pattern) {
		pattern = append(pattern, asked[len(pattern):]...)
	}
	args := []string{"-test.run=" + strings.Join(pattern, "/"), "-test.v=true", "-test.timeout=300s"}
	flag.Visit(func(f *flag.Flag) {
		if strings.HasPrefix(f.Name, "rapid.") {
			args = append(args, "-"+f.Name+"="+f.Value.String())
		}
	})
	return args
}

// ownNamespaces gives the child user and mount namespaces where it has the ids
// it has outside, and every capability.
func ownNamespaces(a *syscall.SysProcAttr) {
	uid, gid := os.Getuid(), os.Getgid()
	if a.Credential != nil {
		uid, gid = int(a.Credential.Uid), int(a.Credential.Gid)
		a.GidMappingsEnableSetgroups = true
	}
	a.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNS
	a.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
	a.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		a.AmbientCaps = append(a.AmbientCaps, c)
	}
}
