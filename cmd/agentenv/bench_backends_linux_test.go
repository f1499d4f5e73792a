package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
)

// The figures of single drivers. They are taken inside one process, from the
// opening of the environment to its closing, and beside them stands what the
// same work costs in bare system calls: the directories, the renames and every
// fsync that a promise needs.

const (
	benchFew    = 1_000 // files of the small tree, against benchFiles
	benchLayers = 64

	barForkRoot = 300 * time.Microsecond
	barForkUser = 700 * time.Microsecond
	barFlat     = 1.5 // × the small tree
	barSaved    = 1.5 // × bare system calls, after
	barSavedTo  = time.Millisecond
	barCheckout = 20 * time.Millisecond // over bare system calls
	benchUser   = 61235                 // an uid that nobody has
)

// forkChild names, in the environment of a child, what it is to measure.
const forkChild = "AGENTENV_BENCH_FORK"

// forkTimes adds the rows of what a fork costs at the driver.
func (f *figures) forkTimes(t *testing.T) {
	for _, who := range []struct {
		name string
		uid  uint32
		bar  time.Duration
	}{{"root", 0, barForkRoot}, {"ordinary user", benchUser, barForkUser}} {
		for _, layers := range []int{1, benchLayers} {
			work := fmt.Sprintf("overlay fork, %s, %d layers", who.name, layers)
			var p50 [2]time.Duration
			for i, files := range []int{benchFew, benchFiles} {
				ours, bare, err := f.forkTime(t, who.uid, files, layers)
				if err != nil {
					f.skip(work, err.Error())
					return
				}
				p50[i] = ours
				f.row(ours > who.bar, fmt.Sprintf("%s, %d files : bare calls", work, files), us(ours), us(bare),
					fmt.Sprintf("%.2f", float64(ours)/float64(bare)), "≤ "+us(who.bar), forkRuns)
			}
			f.flat(work, p50[0], p50[1], forkRuns)
		}
	}
}

func us(d time.Duration) string { return fmt.Sprintf("%.3f ms", float64(d.Nanoseconds())/1e6) }

// flat adds a row that compares the large tree with the small one.
func (f *figures) flat(work string, few, many time.Duration, n int) {
	ratio := float64(many) / float64(few)
	f.row(ratio > barFlat, fmt.Sprintf("%s, %d files : %d files", work, benchFiles, benchFew), us(many), us(few),
		fmt.Sprintf("%.2f", ratio), fmt.Sprintf("≤ %.1f ×", barFlat), n)
}

const forkRuns = 201

// forkTime runs TestForkChild as uid and returns what it measured.
func (f *figures) forkTime(t *testing.T, uid uint32, files, layers int) (ours, bare time.Duration, err error) {
	dir, err := os.MkdirTemp(f.dir, "fork-")
	assert.NilError(t, err)
	assert.NilError(t, os.Chmod(f.dir, 0o755))
	assert.NilError(t, os.Chown(dir, int(uid), int(uid)))
	program, err := os.ReadFile("/proc/self/exe")
	assert.NilError(t, err)
	exe := filepath.Join(dir, "child") // where the user can read it
	assert.NilError(t, os.WriteFile(exe, program, 0o755))
	c := exec.Command(exe, "-test.run=^TestForkChild$", "-test.v")
	c.Dir = dir
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d", forkChild, dir, files, layers), "HOME="+dir, "TMPDIR="+dir)
	if os.Geteuid() == 0 && uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	out, err := c.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if _, serr := fmt.Sscanf(line, "p50 %d %d", &ours, &bare); serr == nil {
			return ours, bare, nil
		}
		if why, ok := strings.CutPrefix(line, "refused "); ok {
			return 0, 0, fmt.Errorf("%s", strings.TrimSpace(why))
		}
	}
	t.Fatalf("%v\n%s", err, out)
	return 0, 0, nil
}

// TestForkChild is the child of forkTime.
func TestForkChild(t *testing.T) {
	var dir string
	var files, layers int
	if _, err := fmt.Sscanf(os.Getenv(forkChild), "%s %d %d", &dir, &files, &layers); err != nil {
		t.Skip("this is a part of make bench")
	}
	d, top, why := layered(t, dir, files, layers)
	if why != "" {
		fmt.Println("refused", why)
		return
	}
	var ours, bare []time.Duration
	for i := range forkRuns {
		key := forks.Key(fmt.Sprint("k", i))
		began := time.Now()
		_, err := d.Fork(t.Context(), key, top, forks.ForkOptions{})
		ours = append(ours, time.Since(began))
		assert.NilError(t, err)
		assert.NilError(t, d.RemoveFork(t.Context(), key))
		bare = append(bare, bareFork(t, filepath.Join(dir, fmt.Sprint("bare", i))))
	}
	fmt.Println("p50", median(ours).Nanoseconds(), median(bare).Nanoseconds())
}

// layered opens an overlay store and fills it with a snapshot of that many
// files that lies on that many layers.
func layered(t *testing.T, dir string, files, layers int) (d forks.Driver, top forks.ID, why string) {
	b, probes, err := forks.Choose(t.Context(), all.Backends(), "overlay", dir)
	if err != nil {
		for _, p := range probes {
			why = p.Detail
		}
		return nil, "", why + " "
	}
	src := filepath.Join(dir, "src")
	smallFiles(t, src, files)
	d, err = b.Open(t.Context(), filepath.Join(dir, "store"))
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, d.Close()) })
	top = "00000001"
	_, err = d.Capture(t.Context(), top, "", forks.Source{Dir: src})
	assert.NilError(t, err)
	for i := 1; i < layers; i++ {
		tree, err := d.Fork(t.Context(), "layers", top, forks.ForkOptions{})
		assert.NilError(t, err)
		upper := filepath.Join(tree.Mount.Overlay.Dir, tree.Mount.Overlay.Upper)
		assert.NilError(t, os.WriteFile(filepath.Join(upper, fmt.Sprint("layer", i)), nil, 0o644))
		top = forks.ID(fmt.Sprintf("%08x", i+1))
		_, err = d.Commit(t.Context(), "layers", top, nil)
		assert.NilError(t, err)
		assert.NilError(t, d.RemoveFork(t.Context(), "layers"))
	}
	unix.Sync()
	return d, top, ""
}

// bareFork makes what an overlay needs to be mounted, and moves it into place.
func bareFork(t *testing.T, at string) time.Duration {
	began := time.Now()
	for _, d := range []string{"", "/tree", "/work"} {
		assert.NilError(t, os.Mkdir(at+d, 0o700))
	}
	assert.NilError(t, os.Symlink("00000001", at+"/base"))
	assert.NilError(t, os.Symlink("00000001", at+"/lower"))
	assert.NilError(t, os.Rename(at, at+".forked"))
	return time.Since(began)
}

// backends adds the rows of commit and checkout of the drivers for which these
// take the same time whatever the size of the tree.
func (f *figures) backends(t *testing.T) {
	if os.Geteuid() != 0 {
		f.skip("commit and checkout, overlay and btrfs", "the work tree is changed from outside, which needs root")
		return
	}
	f.backend(t, "overlay", f.mkdir(t, "overlay"), bareOverlay)
	dir, err := f.volume(t, "mkfs.btrfs -q")
	if err != nil {
		f.skip("commit and checkout, btrfs", err.Error())
		return
	}
	f.backend(t, "btrfs", dir, bareBtrfs)
}

// savedTimes are what saving one changed file and going back took.
type savedTimes struct{ commit, checkout, bareCommit, bareCheckout time.Duration }

const savedRuns = 21

func (f *figures) backend(t *testing.T, name, dir string, bare func(*testing.T, string, int) (commit, checkout time.Duration)) {
	var got [2]savedTimes
	for i, files := range []int{benchFew, benchFiles} {
		at := filepath.Join(dir, fmt.Sprint(files))
		src := filepath.Join(at, "src")
		smallFiles(t, src, files)
		root := filepath.Join(at, "root")
		if _, probes, err := forks.Choose(t.Context(), all.Backends(), name, dir); err != nil {
			f.skip("commit and checkout, "+name, probes[0].Detail)
			return
		}
		f.timed(t, "agentenv", "--root", root, "--backend", name, "init", "--from", src)
		f.settle(t, at)
		got[i] = f.saved(t, root, at, bare)
		if root := filepath.Join(at, "root"); name == "overlay" {
			f.timed(t, "agentenv", "--root", root, "umount")
		}
		bar := time.Duration(barSaved*float64(got[i].bareCommit)) + barSavedTo
		f.row(got[i].commit > bar, fmt.Sprintf("commit, %s, 1 of %d files changed : bare calls", name, files), us(got[i].commit), us(got[i].bareCommit),
			fmt.Sprintf("%.2f", float64(got[i].commit)/float64(got[i].bareCommit)), "≤ "+us(bar), savedRuns)
		f.row(got[i].checkout > got[i].bareCheckout+barCheckout, fmt.Sprintf("checkout, %s, 1 of %d files differs : bare calls", name, files), us(got[i].checkout), us(got[i].bareCheckout),
			fmt.Sprintf("%.2f", float64(got[i].checkout)/float64(got[i].bareCheckout)), "≤ +"+ms(barCheckout), savedRuns)
	}
	f.flat("commit, "+name, got[0].commit, got[1].commit, savedRuns)
	f.flat("checkout, "+name, got[0].checkout, got[1].checkout, savedRuns)
}

// saved changes a file, commits, and goes back to the snapshot before, in turns
// with the bare calls.
func (f *figures) saved(t *testing.T, root, dir string, bare func(*testing.T, string, int) (commit, checkout time.Duration)) savedTimes {
	ctx := context.Background()
	var commits, checkouts, bareCommits, bareCheckouts []time.Duration
	within := func(what func(*env.Env)) time.Duration {
		began := time.Now()
		e, err := env.Lock(ctx, root, "bench", env.Options{Backends: all.Backends()})
		assert.NilError(t, err)
		what(e)
		assert.NilError(t, e.Close())
		return time.Since(began)
	}
	for i := range savedRuns {
		file := filepath.Join(root, "work", "current", "d00", "e07", "changed")
		assert.NilError(t, os.WriteFile(file, []byte(strconv.Itoa(i)), 0o644))
		commits = append(commits, within(func(e *env.Env) {
			_, made, err := e.Commit(ctx, "bench", false)
			assert.NilError(t, err)
			assert.Assert(t, made)
		}))
		checkouts = append(checkouts, within(func(e *env.Env) {
			_, err := e.Checkout(ctx, "HEAD~1", false)
			assert.NilError(t, err)
		}))
		commit, checkout := bare(t, dir, i)
		bareCommits, bareCheckouts = append(bareCommits, commit), append(bareCheckouts, checkout)
	}
	return savedTimes{median(commits), median(checkouts), median(bareCommits), median(bareCheckouts)}
}

// bareSwitch is what every operation that moves HEAD pays: two journal lines
// and a new history, durably.
func bareSwitch(t *testing.T, dir string) {
	journal, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	assert.NilError(t, err)
	defer journal.Close()
	for range 2 {
		_, err := journal.WriteString(`{"n":1,"op":"commit","from":"0000000000000000","to":"0000000000000000"}` + "\n")
		assert.NilError(t, err)
		assert.NilError(t, journal.Sync())
	}
	bareFile(t, filepath.Join(dir, ".meta"), strings.Repeat("x", 4096))
	assert.NilError(t, os.Rename(filepath.Join(dir, ".meta"), filepath.Join(dir, "meta")))
	bareSync(t, dir)
}

func bareFile(t *testing.T, path, content string) {
	f, err := os.Create(path)
	assert.NilError(t, err)
	_, err = f.WriteString(content)
	assert.NilError(t, err)
	assert.NilError(t, f.Sync())
	assert.NilError(t, f.Close())
}

func bareSync(t *testing.T, dirs ...string) {
	for _, dir := range dirs {
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		assert.NilError(t, err)
		assert.NilError(t, unix.Fsync(fd))
		assert.NilError(t, unix.Close(fd))
	}
}

// bareOverlay stores one changed file as a layer, and mounts another stack.
func bareOverlay(t *testing.T, dir string, i int) (commit, checkout time.Duration) {
	at := filepath.Join(dir, fmt.Sprint("bare", i))
	for _, d := range []string{"", "/u", "/w", "/m"} {
		assert.NilError(t, os.Mkdir(at+d, 0o755))
	}
	began := time.Now()
	for _, d := range []string{"/n", "/n/tree", "/n/tree/d00", "/n/tree/d00/e07"} {
		assert.NilError(t, os.Mkdir(at+d, 0o755))
	}
	bareFile(t, at+"/n/tree/d00/e07/changed", "1")
	bareFile(t, at+"/n/record", strings.Repeat("x", 300))
	bareSync(t, at+"/n/tree/d00/e07", at+"/n/tree/d00", at+"/n/tree", at+"/n")
	assert.NilError(t, os.Rename(at+"/n", at+"/node"))
	bareSync(t, at)
	bareSwitch(t, dir)
	commit = time.Since(began)

	mount := func() {
		m := forks.Mount{Overlay: &forks.Overlay{Dir: dir, Lower: []string{fmt.Sprint("bare", i, "/node/tree"), "src"}, Upper: fmt.Sprint("bare", i, "/u"), Work: fmt.Sprint("bare", i, "/w")}}
		fd, err := m.Open()
		assert.NilError(t, err)
		assert.NilError(t, unix.MoveMount(fd, "", unix.AT_FDCWD, at+"/m", unix.MOVE_MOUNT_F_EMPTY_PATH))
		assert.NilError(t, unix.Close(fd))
	}
	mount()
	began = time.Now()
	assert.NilError(t, unix.Unmount(at+"/m", 0))
	mount()
	bareSwitch(t, dir)
	checkout = time.Since(began)
	assert.NilError(t, unix.Unmount(at+"/m", 0))
	return commit, checkout
}

// The two calls of linux/btrfs.h and their arguments.
const (
	btrfsSnapCreateV2 = 0x50009417
	btrfsSnapDestroy  = 0x5000940f
	btrfsReadOnly     = 1 << 1
)

type btrfsArgs struct {
	fd   int64
	name [4088]byte
}

type btrfsArgsV2 struct {
	fd             int64
	transid, flags uint64
	unused         [4]uint64
	name           [4040]byte
}

func ioctlAt(t *testing.T, dir string, call uintptr, arg unsafe.Pointer) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	assert.NilError(t, err)
	defer unix.Close(fd)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), call, uintptr(arg))
	assert.Equal(t, errno, unix.Errno(0))
}

func bareSnapshot(t *testing.T, of, dir, name string, flags uint64) {
	fd, err := unix.Open(of, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	assert.NilError(t, err)
	defer unix.Close(fd)
	args := btrfsArgsV2{fd: int64(fd), flags: flags}
	copy(args.name[:], name)
	ioctlAt(t, dir, btrfsSnapCreateV2, unsafe.Pointer(&args))
}

// bareBtrfs makes a read-only snapshot of the work tree, and puts a writable one
// of it in the place of another.
func bareBtrfs(t *testing.T, dir string, i int) (commit, checkout time.Duration) {
	snap, work := fmt.Sprint("bare", i), fmt.Sprint("work", i)
	began := time.Now()
	bareSnapshot(t, filepath.Join(dir, "root", "work", "current"), dir, snap, btrfsReadOnly)
	bareSync(t, dir)
	bareSwitch(t, dir)
	commit = time.Since(began)
	bareSnapshot(t, filepath.Join(dir, snap), dir, work, 0)
	began = time.Now()
	bareSnapshot(t, filepath.Join(dir, snap), dir, work+".new", 0)
	assert.NilError(t, unix.Renameat2(unix.AT_FDCWD, filepath.Join(dir, work+".new"), unix.AT_FDCWD, filepath.Join(dir, work), unix.RENAME_EXCHANGE))
	args := btrfsArgs{}
	copy(args.name[:], work+".new")
	ioctlAt(t, dir, btrfsSnapDestroy, unsafe.Pointer(&args))
	bareSwitch(t, dir)
	return commit, time.Since(began)
}
