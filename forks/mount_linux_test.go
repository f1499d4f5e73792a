package forks

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// inNamespace says that this is a child made by asOther.
const inNamespace = "AGENTENV_TEST_NAMESPACE"

// asOther runs the calling test once more in a user and mount namespace of its
// own, which has no rights on the host.
func asOther(t *testing.T) {
	t.Helper()
	if os.Getenv(inNamespace) != "" {
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v=true")
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if err != nil && len(out) == 0 {
		t.Skipf("no user namespace: %v", err)
	}
	assert.NilError(t, err, string(out))
}

// layers makes an overlay of n layers, each with a file of its own and one that
// all have.
func layers(t *testing.T, n int) *Overlay {
	t.Helper()
	dir := t.TempDir()
	o := &Overlay{Dir: dir, Upper: "forks/k/stack/tree", Work: "forks/k/stack/work"}
	for i := range n {
		l := fmt.Sprintf("nodes/%016x/tree", i)
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, l), 0o755))
		for _, name := range []string{"all", fmt.Sprint("f", i)} {
			assert.NilError(t, os.WriteFile(filepath.Join(dir, l, name), []byte(fmt.Sprint(i)), 0o644))
		}
		o.Lower = append(o.Lower, l)
	}
	for _, d := range []string{o.Upper, o.Work} {
		assert.NilError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	return o
}

// Both ways of mounting show the same, with as many layers as there ever are:
// by descriptor, and by names for kernels that take none.
func TestMountWays(t *testing.T) {
	asOther(t)
	if os.Getenv(inNamespace) == "" && os.Geteuid() != 0 {
		t.Skip("mounting on the host needs root; the child did it")
	}
	for name, mount := range map[string]func(*Overlay) (int, error){
		"descriptors": func(o *Overlay) (int, error) { return Mount{Overlay: o}.Open() },
		"names":       (*Overlay).mountNames,
	} {
		o := layers(t, 64)
		before := mounts(t)
		fd, err := mount(o)
		assert.NilError(t, err, name)
		tree := fmt.Sprintf("/proc/self/fd/%d/", fd)
		for file, want := range map[string]string{"all": "0", "f0": "0", "f63": "63"} {
			b, err := os.ReadFile(tree + file)
			assert.NilError(t, err, name)
			assert.Equal(t, string(b), want)
		}
		assert.NilError(t, os.Remove(tree+"f63"))
		assert.NilError(t, os.WriteFile(tree+"new", []byte("n"), 0o644))
		assert.ErrorIs(t, o.Free(), ErrInUse, name)
		assert.NilError(t, unix.Close(fd))
		entries, err := os.ReadDir(filepath.Join(o.Dir, o.Upper))
		assert.NilError(t, err)
		assert.Equal(t, len(entries), 2, name) // the file and the whiteout
		if os.Getenv(inNamespace) != "" {      // where nobody else mounts
			assert.Equal(t, mounts(t), before, name)
		}
		assert.NilError(t, o.Free(), name)
	}
}

// mounts counts the mounts of our namespace.
func mounts(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	assert.NilError(t, err)
	return strings.Count(string(b), "\n")
}

// Names that do not fit into a page are an error that says so.
func TestMountLongNames(t *testing.T) {
	asOther(t)
	if os.Getenv(inNamespace) == "" && os.Geteuid() != 0 {
		t.Skip("mounting on the host needs root; the child did it")
	}
	o := layers(t, 1)
	for range 200 {
		o.Lower = append(o.Lower, o.Lower[0])
	}
	_, err := o.mountNames()
	assert.ErrorIs(t, err, ErrUnsupported)
	assert.ErrorContains(t, err, "201 layers")
}

// Whether an upper is mounted is asked without a word in the kernel's log where
// its work directory tells: nothing was ever mounted on it.
func TestFreeUnused(t *testing.T) {
	o := layers(t, 1)
	assert.NilError(t, o.Free())
	assert.Assert(t, isEmpty(filepath.Join(o.Dir, o.Work)))
	assert.Assert(t, !isEmpty(o.Dir))
	assert.Assert(t, !isEmpty(filepath.Join(o.Dir, "missing")))
	o.Work = "missing"
	assert.NilError(t, o.Free())
}

// A directory that is spread says so where the file system knows how, is left
// alone elsewhere, and hands the request down to nobody.
func TestSpread(t *testing.T) {
	dir := t.TempDir()
	Spread(filepath.Join(dir, "missing"))
	Spread(dir)
	Spread(dir)
	sub := filepath.Join(dir, "sub")
	assert.NilError(t, os.Mkdir(sub, 0o700))
	var st unix.Statfs_t
	assert.NilError(t, unix.Statfs(dir, &st))
	if st.Type != unix.EXT4_SUPER_MAGIC {
		t.Skip("the file system of TMPDIR is not ext4")
	}
	for path, want := range map[string]int{dir: topDir, sub: 0} {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		assert.NilError(t, err)
		flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
		assert.NilError(t, err)
		assert.NilError(t, unix.Close(fd))
		assert.Equal(t, flags&topDir, want, path)
	}
}

// A wait for a mount that does not end asks seldom: each refusal is a line in the
// kernel's log.
func TestPatiently(t *testing.T) {
	t.Parallel()
	asked := 0
	began := time.Now()
	err := patiently(func() error { asked++; return ErrInUse })
	assert.ErrorIs(t, err, ErrInUse)
	assert.Assert(t, time.Since(began) >= patience && asked > 5 && asked <= 17, "%d", asked)
}
