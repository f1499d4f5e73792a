//go:build linux

package forkstest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// Volumes are the file systems that tests run on.
var Volumes = []string{"ext4", "xfs", "btrfs", "tmpfs"}

// volumeSize is the least that mkfs.xfs accepts and room to spare; the loop
// files are sparse and lie in memory.
const volumeSize = "1G"

// fewExt4 is an ext4 that has room for few files.
const fewExt4 = "ext4 with few inodes"

var mounted struct {
	sync.Mutex
	top  string
	dirs map[string]string
	why  map[string]string
}

// Main runs the tests of a driver. It is also what the child processes of the
// tests enter, and it unmounts in the end.
func Main(m *testing.M, b forks.Backend) int {
	backend = b
	if reexec.Init() {
		return 0
	}
	flag.Parse()
	if os.Getenv("AGENTENV_TEST_LONG") == "" {
		quick("rapid.checks", "8")
		quick("rapid.shrinktime", "5s")
		quick("rapid.nofailfile", "true") // the seed is printed
	}
	code := m.Run()
	unmountAll()
	return code
}

// quick sets a flag that the command line does not set.
func quick(name, value string) {
	if f := flag.Lookup(name); f != nil && f.Value.String() == f.DefValue {
		_ = flag.Set(name, value)
	}
}

func unmountAll() {
	mounted.Lock()
	defer mounted.Unlock()
	if mounted.top == "" {
		return
	}
	for _, d := range mounted.dirs {
		_ = unix.Unmount(d, unix.MNT_DETACH)
	}
	_ = unix.Unmount(mounted.top, unix.MNT_DETACH)
	_ = os.Remove(mounted.top)
}

// Volume returns a new empty directory on a file system of the given kind; in a
// child made by [AsUser], one in the directory that it was given.
func Volume(t testing.TB, kind string) string {
	t.Helper()
	if dir := os.Getenv(userDir); dir != "" {
		sub, err := os.MkdirTemp(dir, "t")
		assert.NilError(t, err)
		return sub
	}
	if os.Geteuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	root, why := mountVolume(kind)
	if why != "" {
		t.Skip(why)
	}
	return scratch(t, root)
}

// scratch makes a directory in dir that goes with all that is in it, whatever
// its modes, when the test ends.
func scratch(t testing.TB, dir string) string {
	t.Helper()
	dir, err := os.MkdirTemp(dir, "t")
	assert.NilError(t, err)
	assert.NilError(t, os.Chmod(dir, 0o755))
	t.Cleanup(func() {
		out, err := exec.Command("sh", "-c", `chattr -R -i -a "$1" 2>/dev/null; chmod -R u+rwX "$1" 2>/dev/null; rm -rf "$1"`, "sh", dir).CombinedOutput()
		assert.NilError(t, err, string(out))
	})
	return dir
}

func mountVolume(kind string) (dir, why string) {
	mounted.Lock()
	defer mounted.Unlock()
	if mounted.top == "" {
		top, err := os.MkdirTemp("", "forkstest")
		if err == nil {
			err = unix.Mount("forkstest", top, "tmpfs", 0, "mode=0755,size=4g")
		}
		if err != nil {
			return "", "no place for test volumes: " + err.Error()
		}
		mounted.top, mounted.dirs, mounted.why = top, map[string]string{}, map[string]string{}
	}
	if d, ok := mounted.dirs[kind]; ok {
		return d, mounted.why[kind]
	}
	dir = filepath.Join(mounted.top, kind)
	if err := makeVolume(kind, dir, volumeSize); err != nil {
		mounted.why[kind] = fmt.Sprintf("no %s volume: %v", kind, err)
		_ = os.RemoveAll(dir)
	}
	mounted.dirs[kind] = dir
	return dir, mounted.why[kind]
}

// makeVolume mounts a new file system at dir.
func makeVolume(kind, dir, size string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask
		return err
	}
	if kind == "tmpfs" {
		return unix.Mount("forkstest", dir, "tmpfs", 0, "mode=0755,size="+size)
	}
	img := dir + ".img"
	mkfs := map[string]string{
		"ext4":  "mkfs.ext4 -q -F -m 0",
		fewExt4: "mkfs.ext4 -q -F -m 0 -N 800",
		"xfs":   "mkfs.xfs -q -f -m reflink=1",
		"btrfs": "mkfs.btrfs -q -f",
	}[kind]
	script := fmt.Sprintf("truncate -s %s %s && %s %s >/dev/null 2>&1 && mount -o loop %s %s", size, img, mkfs, img, img, dir)
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	_ = os.Remove(img) // the mount holds it
	if err != nil {
		return fmt.Errorf("%w %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// SmallVolume returns an empty file system of the given size, such as "40m",
// for running out of space.
func SmallVolume(t testing.TB, kind, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	if _, why := mountVolume("tmpfs"); why != "" {
		t.Skip(why)
	}
	dir := filepath.Join(mounted.top, fmt.Sprintf("small%d", os.Getpid())+strings.ReplaceAll(t.Name(), "/", "_"))
	if err := makeVolume(kind, dir, size); err != nil {
		_ = os.RemoveAll(dir)
		t.Skipf("no %s volume: %v", kind, err)
	}
	t.Cleanup(func() {
		assert.NilError(t, unix.Unmount(dir, unix.MNT_DETACH))
		assert.NilError(t, os.Remove(dir))
	})
	return dir
}
