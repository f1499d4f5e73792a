package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
)

// The figures that agentenv has to keep, measured beside what one would use
// instead. Both sides of a row run in turns, in one run and on the same files,
// and what is shown are medians. Unless a row says otherwise, times are wall
// time of the whole command, from fork to exit, with warm caches; what was
// written before is flushed first, so that nobody pays for another's writes.
// TMPDIR chooses the file system of all that is not on a volume of its own.

const (
	benchFiles     = 100_000 // in the tree of many small files
	benchSnapshots = 1_000
	benchAttempts  = 64
	benchProcesses = 200
	benchOutput    = 2 << 30 // bytes

	barInit   = 1.0 // × cp -a + sync -f
	barCommit = 1.3 // × find -printf
	barExec   = 2.0 // × bwrap
	barRace   = 2.0 // × two of unshare + overlay mount + true
	barRead   = 20 * time.Millisecond
	barStart  = 3 * time.Millisecond
	barCancel = 50 * time.Millisecond
	barMemory = 32 << 20 // bytes above idle
)

// figures measures and collects rows.
type figures struct {
	agentenv  string // the program to measure
	dir, home string
	rows      []string
	missed    int
}

// TestFigures prints the table of `make bench`. AGENTENV names the program.
func TestFigures(t *testing.T) {
	f := &figures{agentenv: os.Getenv("AGENTENV")}
	if f.agentenv == "" {
		t.Skip("set AGENTENV to the program to measure, or make bench")
	}
	var err error
	f.dir, err = os.MkdirTemp("", "agentenv-bench-")
	assert.NilError(t, err)
	t.Cleanup(func() { assert.Check(t, sandbox.RemoveScratch(f.dir)) })
	f.home = f.mkdir(t, "home")
	// Those that remove many files come last, for the sake of ext4; see initOn.
	t.Run("init", f.inits)
	t.Run("fork", f.forkTimes)
	t.Run("backends", f.backends)
	t.Run("commit", f.commit)
	t.Run("start", f.start)
	t.Run("history", f.history)
	t.Run("exec", f.exec)
	t.Run("cancel", f.cancel)
	t.Run("output", f.output)
	t.Run("tournament", f.tournament)
	f.print()
}

func (f *figures) print() {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "work\t| ours\t| baseline\t| ratio\t| bar\t| n\t|")
	for _, row := range f.rows {
		fmt.Fprintln(w, row)
	}
	_ = w.Flush()
	fmt.Printf("%d of %d rows missed their bar\n", f.missed, len(f.rows))
}

// row adds a line; missed says whether it is over its bar.
func (f *figures) row(missed bool, work, ours, baseline, ratio, bar string, n int) {
	mark := ""
	if missed {
		f.missed++
		mark = " MISSED"
	}
	f.rows = append(f.rows, fmt.Sprintf("%s\t| %s\t| %s\t| %s\t| %s\t| %d\t|%s", work, ours, baseline, ratio, bar, n, mark))
}

// skip adds a line for what cannot be measured here.
func (f *figures) skip(work, why string) {
	f.rows = append(f.rows, fmt.Sprintf("%s\t| skipped: %s\t|\t|\t|\t|\t|", work, why))
}

// compare runs both sides n times in turns and adds a row with a ratio.
func (f *figures) compare(work string, bar float64, n int, ours, theirs func() time.Duration) {
	var us, them []time.Duration
	for i := range n {
		if i%2 == 0 {
			us, them = append(us, ours()), append(them, theirs())
		} else {
			them, us = append(them, theirs()), append(us, ours())
		}
	}
	a, b := median(us), median(them)
	ratio := float64(a) / float64(b)
	f.row(ratio > bar, work, ms(a), ms(b), fmt.Sprintf("%.2f", ratio), fmt.Sprintf("≤ %.1f ×", bar), n)
}

// within runs work n times and adds a row with a time.
func (f *figures) within(work string, bar time.Duration, n int, ours func() time.Duration) {
	var us []time.Duration
	for range n {
		us = append(us, ours())
	}
	m := median(us)
	f.row(m > bar, work, ms(m), "", "", "≤ "+ms(bar), n)
}

func median[T int64 | time.Duration](v []T) T {
	slices.Sort(v)
	return v[len(v)/2]
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

func (f *figures) mkdir(t *testing.T, name string) string {
	dir := filepath.Join(f.dir, name)
	assert.NilError(t, os.MkdirAll(dir, 0o755))
	return dir
}

// timed runs a command, with its output thrown away, and returns its wall time.
func (f *figures) timed(t *testing.T, name string, args ...string) time.Duration {
	t.Helper()
	return f.exits(t, 0, name, args...)
}

func (f *figures) exits(t *testing.T, code int, name string, args ...string) time.Duration {
	t.Helper()
	if name == "agentenv" {
		name = f.agentenv
	}
	c := exec.Command(name, args...)
	c.Dir, c.Env = f.dir, append(os.Environ(), "HOME="+f.home, "XDG_DATA_HOME="+f.home+"/data")
	var stderr strings.Builder
	c.Stderr = &stderr
	began := time.Now()
	err := c.Run()
	took := time.Since(began)
	assert.Assert(t, c.ProcessState != nil, "%v", err)
	assert.Equal(t, c.ProcessState.ExitCode(), code, "%s %q: %v\n%s", name, args, err, stderr.String())
	return took
}

// settle flushes the file system of dir.
func (f *figures) settle(t *testing.T, dir string) { f.timed(t, "sync", "-f", dir) }

// smallFiles makes a tree of n files of 200 to 3,200 bytes, 50 to a directory.
func smallFiles(t *testing.T, dir string, n int) {
	content := make([]byte, 3200)
	for i := range content {
		content[i] = byte('a' + i%26)
	}
	for i := range n {
		d := filepath.Join(dir, fmt.Sprintf("d%02d", i/2500), fmt.Sprintf("e%02d", i/50%50))
		if i%50 == 0 {
			assert.NilError(t, os.MkdirAll(d, 0o755))
		}
		assert.NilError(t, os.WriteFile(filepath.Join(d, fmt.Sprintf("f%05d.txt", i)), content[:200+i%3000], 0o644))
	}
}

// environment makes an environment of n small files, with a work tree, and
// returns its root and the work tree.
func (f *figures) environment(t *testing.T, name string, n int, global ...string) (root, work string) {
	src := f.mkdir(t, name+"/src")
	smallFiles(t, src, n)
	root = filepath.Join(f.dir, name, "root")
	f.timed(t, "agentenv", append(append([]string{"--root", root}, global...), "init", "--from", src)...)
	f.timed(t, "agentenv", "--root", root, "checkout", "HEAD")
	t.Cleanup(func() { _ = exec.Command(f.agentenv, "--root", root, "umount").Run() })
	f.settle(t, f.dir)
	return root, filepath.Join(root, "work", "current")
}

// start: a command that does nothing but start.
func (f *figures) start(t *testing.T) {
	f.within("agentenv version", barStart, 41, func() time.Duration { return f.timed(t, "agentenv", "version") })
}

// history: commands that only read, over many snapshots of a small tree.
func (f *figures) history(t *testing.T) {
	root, _ := f.environment(t, "history", 100)
	e, err := env.Lock(context.Background(), root, "bench", env.Options{Backends: all.Backends()})
	assert.NilError(t, err)
	for i := range benchSnapshots - 1 {
		_, _, err := e.Commit(context.Background(), fmt.Sprint("snapshot ", i), true)
		assert.NilError(t, err)
	}
	assert.Equal(t, len(e.Log()), benchSnapshots)
	assert.NilError(t, e.Close())
	for _, cmd := range []string{"status", "log"} {
		f.within(fmt.Sprintf("%s, %d snapshots", cmd, benchSnapshots), barRead, 21, func() time.Duration {
			return f.timed(t, "agentenv", "--root", root, cmd)
		})
	}
}

// exec: `exec -- true` in a workspace against a bwrap that makes the same
// namespaces and mounts; bwrap has an empty home where ours is an overlay.
func (f *figures) exec(t *testing.T) {
	const work = "exec -- true"
	if _, err := exec.LookPath("bwrap"); err != nil {
		f.skip(work, "bwrap is not installed")
		return
	}
	root, tree := f.environment(t, "exec", 100)
	args := []string{"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
		"--tmpfs", "/tmp", "--tmpfs", "/var/tmp", "--tmpfs", "/run", "--tmpfs", "/dev/shm", "--tmpfs", f.home, "--bind", tree, "/mnt", "true"}
	f.compare(work+" : bwrap", barExec, 31,
		func() time.Duration { return f.timed(t, "agentenv", "--root", root, "exec", "--", "true") },
		func() time.Duration { return f.timed(t, "bwrap", args...) })
}

// tournament: no-op candidates against, for each attempt, two namespaces with
// an overlay mount, as many at a time. The test says no, for a pass would
// cancel those that have not run yet.
func (f *figures) tournament(t *testing.T) {
	root, tree := f.environment(t, "tournament", 100)
	args := []string{"--root", root, "tournament", "--test", "false", "--"}
	for range benchAttempts {
		args = append(args, "true")
	}
	f.compare(fmt.Sprintf("tournament, %d no-ops : 2 × (unshare + overlay) each", benchAttempts), barRace, 7,
		func() time.Duration { return f.exits(t, exitNo, "agentenv", args...) },
		func() time.Duration { return f.overlays(t, tree, 2*benchAttempts) })
}

// overlays is the time that n commands take which mount an overlay over lower
// in namespaces of their own, one a CPU at a time.
func (f *figures) overlays(t *testing.T, lower string, n int) time.Duration {
	dir, err := os.MkdirTemp(f.dir, "overlays-")
	assert.NilError(t, err)
	defer func() { assert.NilError(t, sandbox.RemoveScratch(dir)) }()
	for i := range n {
		for _, d := range []string{"u", "w", "m"} {
			assert.NilError(t, os.MkdirAll(filepath.Join(dir, strconv.Itoa(i), d), 0o755))
		}
	}
	var group errgroup.Group
	group.SetLimit(runtime.NumCPU())
	began := time.Now()
	for i := range n {
		group.Go(func() error {
			at := filepath.Join(dir, strconv.Itoa(i))
			mount := fmt.Sprintf("mount -t overlay overlay -o userxattr,lowerdir=%s,upperdir=%s/u,workdir=%s/w %s/m && exec true", lower, at, at, at)
			out, err := exec.Command("unshare", "-Urmpfiu", "sh", "-c", mount).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	err = group.Wait()
	took := time.Since(began)
	assert.NilError(t, err)
	return took
}

// cancel: from Stop to the return of Wait, when nothing of an attempt is left,
// half of whose processes spin.
func (f *figures) cancel(t *testing.T) {
	script := fmt.Sprintf(`i=0; while [ $i -lt %d ]; do sleep 1000 & sh -c 'while :; do :; done' & i=$((i+1)); done; echo ready; wait`, benchProcesses/2)
	c := sandbox.Command{Level: sandbox.LevelNamespaces, Args: []string{"sh", "-c", script}, Env: []string{"PATH=" + os.Getenv("PATH")}, Dir: "/mnt"}
	c.View = sandbox.View{Tree: forks.Mount{Dir: f.mkdir(t, "cancel")}, At: "/mnt", Home: sandbox.HomePrivate, HomeDir: f.home}
	s := sandbox.New(sandbox.Options{})
	f.within(fmt.Sprintf("cancel, %d processes, half spinning", benchProcesses), barCancel, 7, func() time.Duration {
		c.View.Scratch = f.mkdir(t, "scratch")
		defer func() { assert.NilError(t, sandbox.RemoveScratch(c.View.Scratch)) }()
		r, w, err := os.Pipe()
		assert.NilError(t, err)
		defer r.Close()
		c.Stdout = w
		p, err := s.Start(context.Background(), c)
		assert.NilError(t, err)
		assert.NilError(t, w.Close())
		line, err := bufio.NewReader(r).ReadString('\n')
		assert.NilError(t, err)
		assert.Equal(t, line, "ready\n")
		began := time.Now()
		p.Stop(0)
		_, err = p.Wait()
		took := time.Since(began)
		assert.NilError(t, err)
		return took
	})
}

// output: the most memory that agentenv itself, without its helpers, ever had
// resident in a tournament whose candidate writes much, above the same of one
// that writes nothing. It is VmHWM, looked at every 10 ms: what wait4 tells
// also counts the memory of whoever started the program.
func (f *figures) output(t *testing.T) {
	root, _ := f.environment(t, "output", 100)
	peak := func(candidate string) int64 {
		return f.peakMemory(t, "--root", root, "tournament", "--test", "true", "--", candidate)
	}
	var idle, busy []int64
	const n = 5
	for range n {
		idle = append(idle, peak("true"))
		busy = append(busy, peak(fmt.Sprintf("yes | head -c %d", benchOutput)))
	}
	a, b := median(busy), median(idle)
	f.row(a-b > barMemory, fmt.Sprintf("peak memory, %d GB of output : of none", benchOutput>>30), mib(a), mib(b),
		fmt.Sprintf("+%s", mib(a-b)), "≤ +"+mib(barMemory), n)
}

func (f *figures) peakMemory(t *testing.T, args ...string) int64 {
	c := exec.Command(f.agentenv, args...)
	c.Dir, c.Env = f.dir, append(os.Environ(), "HOME="+f.home)
	assert.NilError(t, c.Start())
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	var peak int64
	for {
		if n, ok := highWater(c.Process.Pid); ok {
			peak = max(peak, n)
		}
		select {
		case err := <-done:
			assert.NilError(t, err)
			assert.Assert(t, peak > 0)
			return peak
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// highWater is the largest resident set that a process had, in bytes.
func highWater(pid int) (int64, bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n << 10, err == nil
		}
	}
	return 0, false
}

// commit: one file changed in a large work tree, against one find that looks
// at as much of each file as commit has to.
func (f *figures) commit(t *testing.T) {
	root, work := f.environment(t, "commit", benchFiles, "--backend", "copy")
	i := 0
	f.compare(fmt.Sprintf("commit, copy, 1 of %d files changed : find -printf", benchFiles), barCommit, 11,
		func() time.Duration {
			i++
			assert.NilError(t, os.WriteFile(filepath.Join(work, "d07", "e07", "changed"), []byte(strconv.Itoa(i)), 0o644))
			return f.timed(t, "agentenv", "--root", root, "commit")
		},
		func() time.Duration { return f.timed(t, "find", work, "-printf", `%p %i %C@ %s %T@\n`) })
}

// inits: taking a directory in, which makes the first snapshot and the work
// tree, against copying it once and flushing that, on each file system here.
func (f *figures) inits(t *testing.T) {
	f.initOn(t, fsName(f.dir), f.mkdir(t, "volume"), "cp", "-a")
	for _, v := range []struct{ name, mkfs string }{{"xfs", "mkfs.xfs -q -m reflink=1"}, {"btrfs", "mkfs.btrfs -q"}} {
		dir, err := f.volume(t, v.mkfs)
		if err != nil {
			f.skip("init --from, "+v.name, err.Error())
			continue
		}
		f.initOn(t, v.name, dir, "cp", "-a", "--reflink=always")
	}
}

// initOn adds the rows of one file system, of which dir is a directory.
func (f *figures) initOn(t *testing.T, name, dir string, cp ...string) {
	small, dist := filepath.Join(dir, "small"), filepath.Join(dir, "go")
	smallFiles(t, small, benchFiles)
	f.timed(t, "cp", "-a", goRoot(t)+"/.", dist)
	for _, tree := range []struct{ name, dir string }{{"the Go tree", dist}, {fmt.Sprintf("%d files", benchFiles), small}} {
		// What was made stays until the end: for minutes after many files were
		// removed, ext4 takes longer and longer to make new ones.
		i := 0
		fresh := func(took func(at string) time.Duration) time.Duration {
			f.settle(t, dir)
			i++
			return took(fmt.Sprint(tree.dir, "-", i))
		}
		f.compare(fmt.Sprintf("init --from, %s, %s : %s + sync -f", name, tree.name, strings.Join(cp, " ")), barInit, 5,
			func() time.Duration {
				return fresh(func(at string) time.Duration { return f.timed(t, "agentenv", "--root", at, "init", "--from", tree.dir) })
			},
			func() time.Duration {
				return fresh(func(at string) time.Duration {
					return f.timed(t, cp[0], append(cp[1:], tree.dir, at)...) + f.timed(t, "sync", "-f", at)
				})
			})
	}
}

// volume makes a file system on a loop file and mounts it until the test ends.
func (f *figures) volume(t *testing.T, mkfs string) (string, error) {
	if os.Getuid() != 0 {
		return "", fmt.Errorf("a loop volume needs root")
	}
	dir, err := os.MkdirTemp(f.dir, "volume-")
	assert.NilError(t, err)
	image := dir + ".img"
	assert.NilError(t, os.WriteFile(image, nil, 0o600))
	assert.NilError(t, os.Truncate(image, 16<<30))
	args := append(strings.Fields(mkfs), image)
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s: %w %s", args[0], err, strings.TrimSpace(string(out)))
	}
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("mount: %w %s", err, strings.TrimSpace(string(out)))
	}
	t.Cleanup(func() { assert.Check(t, exec.Command("umount", dir).Run()) })
	return dir, nil
}

// fsName is the name of the file system that dir is on.
func fsName(dir string) string {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err.Error()
	}
	names := map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.TMPFS_MAGIC: "tmpfs"}
	if name, ok := names[int64(st.Type)]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", st.Type)
}
