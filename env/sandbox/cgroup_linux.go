package sandbox

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroup is the control group of one command. There is one directory for it in
// each hierarchy that it needs: the unified one (v2), which can kill and freeze,
// and those of v1 that have controllers to limit with.
//
// Only the command and what it starts is in it, never a helper: PID 1 of a
// sandbox must not be what the kernel picks when memory is out.
//
// Each directory is locked (flock, shared with the helper, which holds the same
// open file) as long as agentenv or the helper lives. So a sweep knows what
// nobody uses, whoever was killed, with no pid to compare.
//
// A nil *cgroup is none; its methods do nothing.
type cgroup struct {
	dirs   []cgroupDir // the unified hierarchy's first
	limits Limits
}

// cgroupDir is a cgroup in one hierarchy.
type cgroupDir struct {
	*os.File // open and locked; its name is its path
	v2       bool
	// controllers are those that limit here.
	controllers []string
}

// has says whether the controller limits in this hierarchy.
func (d cgroupDir) has(controller string) bool { return slices.Contains(d.controllers, controller) }

// cgroupPrefix begins the names of cgroups of commands.
const cgroupPrefix = "agentenv-"

// newCgroup makes a cgroup at the seats, with the limits.
func newCgroup(seats []seat, l Limits) (*cgroup, error) {
	for _, s := range seats {
		if s.pids > 0 && (l.PIDs == 0 || s.pids < l.PIDs) {
			l.PIDs = s.pids
		}
	}
	g := &cgroup{limits: l}
	for _, s := range seats {
		d, err := s.makeDir()
		if err == nil {
			g.dirs = append(g.dirs, d)
			err = d.fit()
		}
		if err == nil {
			err = d.limit(l)
		}
		if err != nil {
			g.remove()
			return nil, err
		}
	}
	return g, nil
}

// makeDir makes a directory and locks it. One that a sweep took for a leftover,
// in the moment before it was locked, is made anew.
func (s seat) makeDir() (cgroupDir, error) {
	for {
		var id [6]byte
		_, _ = rand.Read(id[:]) // never fails
		name := filepath.Join(s.dir, cgroupPrefix+hex.EncodeToString(id[:]))
		if err := s.mkdir(name); err != nil {
			return cgroupDir{}, err
		}
		d, err := os.Open(name)
		if err == nil && unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			var opened, there unix.Stat_t
			if unix.Fstat(int(d.Fd()), &opened) == nil && unix.Stat(name, &there) == nil && opened.Ino == there.Ino {
				return cgroupDir{d, s.v2, s.controllers}, nil
			}
		}
		if err == nil {
			d.Close()
		} else if !errors.Is(err, os.ErrNotExist) {
			return cgroupDir{}, err
		}
	}
}

// fit says whether processes can be in a cgroup: not below one of threads.
func (d cgroupDir) fit() error {
	if kind := strings.TrimSpace(string(d.read("cgroup.type"))); d.v2 && kind != "domain" {
		return fmt.Errorf("%s is a %s", d.Name(), kind)
	}
	return nil
}

// cpuPeriod is the time, in µs, in which a quota of CPU is used up: the kernel's
// default. leastQuota is the least that it takes.
const (
	cpuPeriod  = 100_000
	leastQuota = 1_000
)

// limit sets those of the limits whose controllers are here.
func (d cgroupDir) limit(l Limits) error {
	if l.CPUs > 0 && d.has("cpu") {
		if err := d.limitCPUs(l.CPUs); err != nil {
			return err
		}
	}
	if l.Memory > 0 && d.has("memory") {
		if err := d.limitMemory(l.Memory); err != nil {
			return err
		}
	}
	if l.PIDs > 0 && d.has("pids") {
		return d.write("pids.max", strconv.Itoa(max(l.PIDs, d.leastPIDs())))
	}
	return nil
}

// leastPIDs is the least limit with which a command can be started: on v1 the
// thread that starts it counts for a moment.
func (d cgroupDir) leastPIDs() int {
	if d.v2 {
		return 1
	}
	return 2
}

func (d cgroupDir) limitCPUs(cpus float64) error {
	quota := strconv.Itoa(max(leastQuota, int(math.Round(min(cpus, 1e6)*cpuPeriod))))
	if d.v2 {
		return d.write("cpu.max", quota+" "+strconv.Itoa(cpuPeriod))
	}
	if err := d.write("cpu.cfs_period_us", strconv.Itoa(cpuPeriod)); err != nil {
		return err
	}
	err := d.write("cpu.cfs_quota_us", quota)
	if errors.Is(err, unix.EINVAL) {
		return nil // the cgroup around has less, which then holds
	}
	return err
}

// limitMemory bounds memory, and swap to nothing where that can be had.
func (d cgroupDir) limitMemory(bytes int64) error {
	limit, swap, swapLimit := "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", strconv.FormatInt(bytes, 10)
	if d.v2 {
		limit, swap, swapLimit = "memory.max", "memory.swap.max", "0"
	}
	if err := d.write(limit, strconv.FormatInt(bytes, 10)); err != nil {
		return err
	}
	if err := d.write(swap, swapLimit); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// write writes to a file of the cgroup.
func (d cgroupDir) write(file, text string) error {
	fd, err := unix.Openat(int(d.Fd()), file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Write(fd, []byte(text))
		unix.Close(fd)
	}
	if err != nil {
		return &os.PathError{Op: "write", Path: filepath.Join(d.Name(), file), Err: err}
	}
	return nil
}

// read reads a small file of the cgroup; nothing if it is not there.
func (d cgroupDir) read(file string) []byte {
	fd, err := unix.Openat(int(d.Fd()), file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), file)
	defer f.Close()
	var b bytes.Buffer
	_, _ = b.ReadFrom(f) // of a cgroup that was removed there is nothing to read
	return b.Bytes()
}

// event is a number of a file of lines "name number"; 0 if it is not there.
func (d cgroupDir) event(file, name string) int64 {
	for line := range strings.Lines(string(d.read(file))) {
		if n, ok := strings.CutPrefix(line, name+" "); ok {
			v, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
			return v
		}
	}
	return 0
}

// number is that of a file which holds one; 0 if it is not there.
func (d cgroupDir) number(file string) int64 {
	n, _ := strconv.ParseInt(strings.TrimSpace(string(d.read(file))), 10, 64)
	return n
}

// unified is the directory in the v2 hierarchy, nil if there is none.
func (g *cgroup) unified() *cgroupDir {
	if g == nil || len(g.dirs) == 0 || !g.dirs[0].v2 {
		return nil
	}
	return &g.dirs[0]
}

// procs lists the processes in the cgroup, as this process's PID namespace
// numbers them; 0 is one that it cannot see.
func (d cgroupDir) procs() []int {
	var pids []int
	for line := range strings.Lines(string(d.read("cgroup.procs"))) {
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// kill sends KILL to all that are in the cgroup. On v2 (5.14 and later) nobody
// can fork away from it; otherwise it looks until it has seen nobody new,
// killLooks times at most.
func (g *cgroup) kill() {
	if g == nil || len(g.dirs) == 0 {
		return
	}
	g.dirs[0].kill()
}

// killLooks bounds the looks of kill: each finds what forked during the one
// before.
const killLooks = 1000

func (d cgroupDir) kill() {
	if d.v2 && d.write("cgroup.kill", "1") == nil {
		return
	}
	killed := map[int]bool{}
	for range killLooks {
		fresh := false
		for _, pid := range d.procs() {
			if pid > 0 && !killed[pid] {
				killed[pid], fresh = true, true
				_ = unix.Kill(pid, unix.SIGKILL) // an error means that it is gone
			}
		}
		if !fresh {
			return
		}
	}
}

// freeze stops all that are in the cgroup and says whether they stand still; false
// after wait, or where only v1 is: its freezer is never used, for what it froze
// cannot be killed when its owner is dead. Who froze must thaw, or kill, which
// works on the frozen.
func (g *cgroup) freeze(wait time.Duration) bool {
	d := g.unified()
	if d == nil || d.write("cgroup.freeze", "1") != nil {
		return false
	}
	fd, err := unix.Openat(int(d.Fd()), "cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	for end := time.Now().Add(wait); ; {
		if d.event("cgroup.events", "frozen") == 1 {
			return true
		}
		left := time.Until(end)
		if left <= 0 {
			return false
		}
		// The kernel tells of each change. Of one between the look and this
		// it may not: so it is no long wait.
		left = min(left, time.Millisecond) + time.Millisecond
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, int(left.Milliseconds()))
	}
}

// thaw lets go on what freeze stopped.
func (g *cgroup) thaw() {
	if d := g.unified(); d != nil {
		_ = d.write("cgroup.freeze", "0") // it can only fail if the cgroup is gone
	}
}

// remove lets go of the cgroup, and removes it. The kernel may need a moment after
// the death of the last process; what stays is for the next sweep.
func (g *cgroup) remove() {
	if g == nil {
		return
	}
	for _, d := range g.dirs {
		removeCgroup(d.Name())
		d.Close()
	}
	g.dirs = nil
}

// removeTries and removePause bound the wait for a cgroup to be empty: 50 ms.
const (
	removeTries = 50
	removePause = time.Millisecond
)

// removeCgroup removes a cgroup, and first those below it: of an agentenv that the
// command ran.
func removeCgroup(dir string) {
	removeBelow(dir)
	for range removeTries {
		if err := unix.Rmdir(dir); err != unix.EBUSY {
			break
		}
		time.Sleep(removePause)
	}
	if parent := filepath.Dir(dir); filepath.Base(parent) == cgroupParent {
		_ = unix.Rmdir(parent) // the last one does it
	}
}

func removeBelow(dir string) {
	entries, _ := os.ReadDir(dir) // what can be read is enough
	for _, e := range entries {
		if e.IsDir() {
			below := filepath.Join(dir, e.Name())
			removeBelow(below)
			_ = unix.Rmdir(below) // else the one around it says so
		}
	}
}
