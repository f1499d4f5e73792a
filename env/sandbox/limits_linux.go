package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// CheckLimits says which of the limits cannot be enforced here for commands of a
// level, unless they need not be. Its error is an [*Error]. It costs next to
// nothing.
func CheckLimits(level Level, l Limits) error {
	e := enforce(level, l)
	if l.BestEffort || len(e.missing) == 0 {
		return nil
	}
	return &Error{What: "limits", Err: errors.New(strings.Join(e.missing, "; ")), Fix: e.fix}
}

// enforcement is how the limits of a command are enforced here.
type enforcement struct {
	seats []seat
	// limits are those that can be, rlimits those of them that the command
	// gets by setrlimit, not by its cgroup.
	limits, rlimits Limits
	// missing names those that cannot be, and why; fix mends it.
	missing []string
	fix     string
}

// enforce finds out how limits can be enforced. A cgroup carries those of CPUs,
// memory and processes. Without one an ordinary user's processes are counted in
// the command's user namespace (RLIMIT_NPROC).
func enforce(level Level, l Limits) enforcement {
	s := seatsFor(controllersFor(l))
	e := enforcement{seats: s.seats, limits: l}
	e.rlimits.NoFile = l.NoFile
	if s.missing["pids"] != nil && countsProcesses(level) {
		e.rlimits.PIDs = l.PIDs
	} else if err := s.missing["pids"]; err != nil {
		e.miss("pids", strconv.Itoa(l.PIDs), err)
		e.limits.PIDs = 0
	}
	if err := s.missing["memory"]; err != nil {
		e.miss("memory", sizeText(l.Memory), err)
		e.limits.Memory = 0
	}
	if err := s.missing["cpu"]; err != nil {
		e.miss("cpus", strconv.FormatFloat(l.CPUs, 'g', -1, 64), err)
		e.limits.CPUs = 0
	}
	if len(e.missing) > 0 {
		e.fix = fixForLimits(s.missing)
	}
	if most := mostFiles(); l.NoFile > most {
		e.miss("nofile", strconv.Itoa(l.NoFile), fmt.Errorf("the hard limit is %d", most))
		e.limits.NoFile, e.rlimits.NoFile = most, most
		e.fix = strings.TrimPrefix(e.fix+", and raise the hard limit of open files (see limits.conf(5), or LimitNOFILE= of a service)", ", and ")
	}
	return e
}

func (e *enforcement) miss(name, limit string, err error) {
	e.missing = append(e.missing, fmt.Sprintf("%s %s cannot be enforced: %v", name, limit, err))
}

// limited is what limits one command.
type limited struct {
	rlimits Limits
	cgroup  *cgroup
	disk    *diskWatch
}

// limit makes what limits a command. Without limits it still has a cgroup, where
// one can be had, by which all of it can be killed or frozen at one stroke: that
// takes 0.1 ms.
func (s *Sandbox) limit(c Command) (limited, error) {
	e := enforce(c.Level, c.Limits)
	if len(e.missing) > 0 {
		s.tell("limits: " + strings.Join(e.missing, "; "))
	}
	l := limited{rlimits: e.rlimits, disk: newDiskWatch(c)}
	g, err := newCgroup(e.seats, e.limits)
	switch {
	case err == nil:
		l.cgroup = g
	case len(controllersFor(e.limits)) > 0:
		return l, newError("limits", err)
	}
	return l, nil
}

// limiters are the controllers that limit commands.
var limiters = []string{"cpu", "memory", "pids"}

// controllersFor are the controllers that the limits need.
func controllersFor(l Limits) []string {
	var need []string
	for i, wanted := range []bool{l.CPUs > 0, l.Memory > 0, l.PIDs > 0} {
		if wanted {
			need = append(need, limiters[i])
		}
	}
	return need
}

// countsProcesses says whether RLIMIT_NPROC counts the processes of a command's
// user namespace: since Linux 5.14 for everybody but the machine's root; before,
// all processes of a user counted together.
func countsProcesses(level Level) bool {
	return level == LevelNamespaces && !machineRoot() && kernelSince(5, 14)
}

// machineRoot says whether this process is the machine's root, as far as it can
// be seen from here.
var machineRoot = sync.OnceValue(func() bool {
	if os.Geteuid() != 0 {
		return false
	}
	m, err := os.ReadFile("/proc/self/uid_map")
	f := strings.Fields(string(m))
	return err != nil || len(f) < 3 || f[1] == "0"
})

func kernelSince(major, minor int) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	var a, b int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b); err != nil {
		return false
	}
	return a > major || a == major && b >= minor
}

// mostFiles is the most that RLIMIT_NOFILE can be: the hard limit, or for who may
// raise that, what the kernel has at most.
func mostFiles() int {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	most := int(min(l.Max, 1<<30))
	if !mayRaise() {
		return most
	}
	text, err := os.ReadFile("/proc/sys/fs/nr_open")
	if n, nerr := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && nerr == nil {
		return max(most, n)
	}
	return most
}

// mayRaise says whether this process, and its helpers, may raise a hard limit.
var mayRaise = sync.OnceValue(func() bool {
	return machineRoot() && mayMount() && capable(unix.CAP_SYS_RESOURCE)
})

const bestEffort = "go on without by limits.enforce: best-effort"

// fixForLimits says what gives an agentenv like this one the controllers.
func fixForLimits(missing map[string]error) string {
	root := os.Geteuid() == 0
	has := func(target error) bool {
		return slices.ContainsFunc(slices.Collect(maps.Values(missing)), func(e error) bool { return errors.Is(e, target) })
	}
	switch {
	case has(unix.EROFS):
		return "cgroups are read-only here, as in most containers: limit the container itself, or run it with --privileged, or " + bestEffort
	case has(errOutside), has(errNoClone):
		return "run agentenv outside of this container, or " + bestEffort
	case has(errNoHierarchy):
		return "mount the cgroups (sudo mount -t cgroup2 none /sys/fs/cgroup), or " + bestEffort
	case root && has(errNoController):
		return "the kernel, or the container around, does not hand it on: boot with cgroup_enable=memory if it is memory that " +
			"/proc/cgroups says is not enabled, or " + bestEffort
	case root && has(errEscape):
		return "let its service or scope be divided (Delegate=yes, as in systemd-run --scope -p Delegate=yes agentenv …), or " + bestEffort
	case root && has(errOccupied):
		return "run it in a scope of its own: systemd-run --scope -p Delegate=yes agentenv …; or " + bestEffort
	case root:
		return "this root is not the machine's: limit the container itself, or run agentenv as the machine's root, or " + bestEffort
	}
	return fixForUser(slices.Sorted(maps.Keys(missing)))
}

// fixForUser says what gives an ordinary user the controllers.
func fixForUser(controllers []string) string {
	given, managed := userManager()
	switch {
	case !managed:
		return "run agentenv as root, or " + bestEffort
	case len(shared(controllers, given)) == len(controllers):
		return "run it in a scope of its own: systemd-run --user --scope -p Delegate=yes agentenv …; or " + bestEffort
	}
	return "let systemd give them to its users: sudo systemctl set-property user@.service Delegate='cpu memory pids' " +
		"(before version 246 by a drop-in file), log in anew, and run it in a scope of its own: " +
		"systemd-run --user --scope -p Delegate=yes agentenv …; or " + bestEffort
}

// userManager says which controllers a systemd gave to that of this user, if
// there is one on the v2 hierarchy.
func userManager() ([]string, bool) {
	for _, h := range mounted() {
		id := strconv.Itoa(os.Geteuid())
		dir := h.top + "/user.slice/user-" + id + ".slice/user@" + id + ".service"
		if info, err := os.Stat(dir); h.v2 && err == nil && info.IsDir() {
			return words(dir, "cgroup.controllers"), true
		}
	}
	return nil, false
}

// sizeText writes a size as one does in a plan: in the largest unit of which it is
// a whole number, in powers of two where that is as short.
func sizeText(n int64) string {
	best := strconv.FormatInt(n, 10) + "B"
	for _, base := range []struct {
		step  int64
		units []string
	}{{1000, []string{"kB", "MB", "GB", "TB"}}, {1024, []string{"KiB", "MiB", "GiB", "TiB"}}} {
		v := n
		for _, u := range base.units {
			if v == 0 || v%base.step != 0 {
				break
			}
			v /= base.step
			if s := strconv.FormatInt(v, 10); len(s) <= len(strings.TrimRight(best, "BkKMGTi")) {
				best = s + u
			}
		}
	}
	return best
}

// setLimit says which limit ended the command, if one did.
func (p *process) setLimit() {
	r := &p.result
	if p.disk.finish() {
		r.Limit = "disk full (limit " + sizeText(p.disk.limit) + ")"
		if r.ExitCode == 0 {
			// It took TERM for a reason to end well.
			r.ExitCode, r.Signal = 128+int(unix.SIGTERM), unix.SIGTERM
		}
	} else if r.ExitCode != 0 {
		r.Limit = p.cgroup.reached()
	}
}

// reached says which of its limits the cgroup met; empty if none.
func (g *cgroup) reached() string {
	if g == nil {
		return ""
	}
	processes := ""
	for _, d := range g.dirs {
		if g.limits.Memory > 0 && d.has("memory") && d.outOfMemory(g.limits.Memory) {
			return "out of memory (limit " + sizeText(g.limits.Memory) + ")"
		}
		if d.has("memory") && d.killedForMemory() {
			return "out of memory (of the machine, or of a limit around agentenv)"
		}
		if g.limits.PIDs > 0 && d.has("pids") && d.event("pids.events", "max") > 0 {
			processes = fmt.Sprintf("too many processes (limit %d)", g.limits.PIDs)
		}
	}
	return processes
}

// outOfMemory says whether the kernel killed something here since this limit was
// reached: it may also have been the machine's memory that was out.
func (d cgroupDir) outOfMemory(limit int64) bool {
	if d.v2 {
		return d.killedForMemory() && d.event("memory.events", "oom") > 0
	}
	// Newer kernels (6.18) leave memory.failcnt at 0.
	near := limit - limit/8
	return d.killedForMemory() && d.number("memory.max_usage_in_bytes") >= near
}

// killedForMemory says whether the kernel killed something here since memory was
// out, wherever.
func (d cgroupDir) killedForMemory() bool {
	if d.v2 {
		return d.event("memory.events", "oom_kill") > 0
	}
	return d.event("memory.oom_control", "oom_kill") > 0
}

// ProbeCgroups tries what cgroups can do here for this user.
func ProbeCgroups() Cgroups {
	var c Cgroups
	s := seatsFor(limiters)
	for _, place := range s.seats {
		version := 1
		if place.v2 {
			version = 2
		}
		for _, name := range place.controllers {
			switch name {
			case "cpu":
				c.CPU = version
			case "memory":
				c.Memory = version
			case "pids":
				c.PIDs = version
			}
		}
	}
	c.Kill, c.Freeze = tryUnified(seatsFor(nil).seats)
	var why []string
	for _, name := range slices.Sorted(maps.Keys(s.missing)) {
		reason := ": " + s.missing[name].Error()
		if name == "cpu" {
			name = "cpus" // as in a plan
		}
		why = append(why, name+reason)
	}
	if len(why) > 0 {
		c.Fix = fixForLimits(s.missing)
	}
	c.Why = strings.Join(why, "; ")
	return c
}

// tryUnified freezes and kills a cgroup of nobody.
func tryUnified(seats []seat) (kill, freeze bool) {
	if len(seats) == 0 {
		return false, false
	}
	g, err := newCgroup(seats, Limits{})
	if err != nil {
		return false, false
	}
	defer g.remove()
	freeze = g.freeze(time.Second)
	g.thaw()
	return g.unified() != nil && g.unified().write("cgroup.kill", "1") == nil, freeze
}
