package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/env/subid"
)

// parts are what isolation is made of, with what is lost without each.
var parts = []struct {
	part              sandbox.Part
	name, works, lost string
}{
	{sandbox.PartUserNamespace, "user namespace", "one was made", "without root nothing can be isolated; with root, commands keep fewer powers"},
	{sandbox.PartMounts, "mount namespace", "a file system was mounted in one", "candidates cannot have a tree, a /tmp and a home of their own"},
	{sandbox.PartOverlay, "overlay mount", "one was mounted", "forks are copies, which cost time and space; a home cannot be an overlay"},
	{sandbox.PartPIDNamespace, "PID namespace", "/proc was mounted in one", "processes that a command leaves behind are harder to find"},
	{sandbox.PartNetworkNamespace, "network private", "one with a loopback was made", "candidates share the host's ports"},
	{sandbox.PartFilter, "seccomp filter", "one was set", "commands may use every system call that the kernel has"},
	{sandbox.PartTerminal, "terminal", "one was opened", "no `agentenv shell`, no `exec -t`"},
}

func partChecks(root string) []check {
	checks := make([]check, len(parts))
	for i, p := range parts {
		checks[i] = check{Name: p.name, OK: true, Detail: p.works}
		if err := tryPart(root, p.part); err != nil {
			checks[i] = checks[i].failed(err, p.lost)
		}
	}
	return checks
}

func tryPart(root string, part sandbox.Part) error {
	if part != sandbox.PartOverlay {
		return sandbox.ProbePart(part, "")
	}
	dir, err := env.MakeTemp(root, "agentenv-doctor-")
	if err != nil {
		return err
	}
	defer sandbox.RemoveScratch(dir)
	return sandbox.ProbePart(part, dir)
}

func natCheck() check {
	c := check{Name: "network nat", OK: true}
	tool, err := sandbox.TryNAT()
	if err != nil {
		return c.failed(err, "candidates with a network of their own cannot reach others")
	}
	c.Detail = "by " + tool
	return c
}

func limitsCheck(g sandbox.Cgroups) check {
	c := check{Name: "limits"}
	var can, cannot []string
	for _, l := range []struct {
		name    string
		version int
		one     sandbox.Limits
	}{{"cpus", g.CPU, sandbox.Limits{CPUs: 1}}, {"memory", g.Memory, sandbox.Limits{Memory: 1 << 30}}, {"pids", g.PIDs, sandbox.Limits{PIDs: 100}}} {
		switch {
		case l.version > 0:
			can = append(can, fmt.Sprintf("%s by cgroup v%d", l.name, l.version))
		case sandbox.CheckLimits(sandbox.LevelNamespaces, l.one) == nil:
			can = append(can, l.name+" by setrlimit")
		default:
			cannot = append(cannot, l.name)
		}
	}
	c.OK, c.Detail = len(cannot) == 0, strings.Join(can, ", ")
	if !c.OK {
		c.Detail = strings.TrimPrefix(c.Detail+"; "+whyNot(cannot, g.Why), "; ")
		c.Lost, c.Fix = "a plan cannot limit "+strings.Join(cannot, ", "), g.Fix
	}
	return c
}

// whyNot says why limits cannot be had, without the paths of cgroups, which are
// long, and what several have in common once.
func whyNot(limits []string, why string) string {
	var reasons []string
	of := map[string][]string{}
	for _, name := range limits {
		for reason := range strings.SplitSeq(why, "; ") {
			text, ok := strings.CutPrefix(reason, strings.TrimSuffix(name, "s")+": ")
			if all, is := strings.CutPrefix(reason, name+": "); is {
				text, ok = all, true
			}
			if !ok {
				continue
			}
			text = text[strings.LastIndex(text, ": ")+1:]
			text = strings.TrimSpace(text)
			if of[text] == nil {
				reasons = append(reasons, text)
			}
			of[text] = append(of[text], name)
		}
	}
	for i, r := range reasons {
		reasons[i] = strings.Join(of[r], " and ") + ": no cgroup for it: " + r
	}
	return strings.Join(reasons, "; ")
}

func freezeCheck(g sandbox.Cgroups) check {
	c := check{Name: "freeze and kill", OK: g.Freeze && g.Kill, Detail: "at one stroke, by cgroup v2"}
	if !c.OK {
		c.Detail = "one process after the other, by signals: no cgroup v2 that can be used"
		c.Lost = "snapshots of a tree in use are less consistent"
		c.Fix = fixForFreeze()
	}
	return c
}

func fixForFreeze() string {
	const boot = "boot with systemd.unified_cgroup_hierarchy=1"
	switch {
	case os.Geteuid() == 0:
		return "have a cgroup v2 that can be written: " + boot + "; a container needs --privileged"
	case hasUserManager():
		return "run where a cgroup is yours: systemd-run --user --scope -p Delegate=yes agentenv …"
	}
	return "run as root where there is a cgroup v2 (" + boot + ")"
}

// hasUserManager says whether there is a systemd of this user, which gives out
// cgroups.
func hasUserManager() bool {
	run := fmt.Sprintf("/run/user/%d/", os.Geteuid())
	for _, socket := range []string{"bus", "systemd/private"} {
		if _, err := os.Stat(run + socket); err == nil {
			return true
		}
	}
	return false
}

// idsCheck tries the ids that the environment at root has, if it is there and has
// any; usable is false if it cannot be opened without them.
func idsCheck(root string) (c check, usable bool) {
	c = check{Name: "subordinate ids", OK: true}
	m, err := env.IDs(root)
	if err != nil { // no environment, or who opens it says what is wrong
		m = nil
	}
	detail, err := probeIDs(m)
	var e *subid.Error
	if errors.As(err, &e) {
		err = &hintedError{errors.New(e.Msg), e.Fix}
	}
	if err != nil {
		lost := "without root, a rootfs has one user: apt, postgres and the like do not work in it"
		if m != nil {
			lost = "the environment at " + root + ", whose files have them, cannot be opened"
		}
		return c.failed(err, lost), m == nil
	}
	c.Detail = detail
	return c, true
}

func probeIDs(m *subid.Map) (string, error) {
	if m != nil {
		if err := m.Check(); err != nil {
			return "", err
		}
	}
	if os.Geteuid() != 0 {
		if err := sandbox.ProbePart(sandbox.PartUserNamespace, ""); err != nil {
			return "", err
		}
	}
	return subid.Probe(m)
}

// leastKernel has mount_setattr.
const leastKernel = "5.12"

func kernelCheck() check {
	var u unix.Utsname
	_ = unix.Uname(&u) // it fails for no reason
	release := unix.ByteSliceToString(u.Release[:])
	c := check{Name: "kernel", OK: true, Detail: release}
	var have, want [2]int
	_, err := fmt.Sscanf(release, "%d.%d", &have[0], &have[1])
	fmt.Sscanf(leastKernel, "%d.%d", &want[0], &want[1])
	if err == nil && (have[0] < want[0] || have[0] == want[0] && have[1] < want[1]) {
		c.OK, c.Lost, c.Fix = false, "isolation does not work", "install Linux "+leastKernel+" or later"
	}
	return c
}

// reflinkCheck clones a file that has no name.
func reflinkCheck(dir string) check {
	c := check{Name: "reflink", OK: true, Detail: "a file was cloned in " + dir}
	from, err := namelessFile(dir)
	if err == nil {
		defer from.Close()
		var to *os.File
		if to, err = namelessFile(dir); err == nil {
			defer to.Close()
			err = unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
		}
	}
	if err != nil {
		c.OK, c.Detail = false, fmt.Sprintf("not in %s: %v", dir, err)
		c.Lost = "copies of trees share no space, and take as long as their size"
		c.Fix = "choose a root on btrfs or XFS with --root"
	}
	return c
}

func namelessFile(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	return f, err
}

// What is little, on the root's file system: a dozen forks of a project fill it.
const (
	littleSpace  = 2 << 30 // bytes
	littleInodes = 100_000
)

func spaceCheck(dir string) check {
	mount, st := fileSystemOf(dir)
	free := int64(st.Bavail) * st.Bsize
	c := check{Name: "space", Detail: roomOn(dir)}
	c.OK = free >= littleSpace && (st.Files == 0 || st.Ffree >= littleInodes)
	if !c.OK {
		c.Lost = "forks and snapshots may not fit"
		c.Fix = "make room on " + mount + ", or choose a root elsewhere with --root"
	}
	return c
}

// Watches needed for a tree of 100,000 files, were each in a directory of its
// own, and instances for a few programs that watch.
const (
	enoughWatches   = 100_000
	enoughInstances = 64
)

func watchesCheck() check {
	watches, instances := inotifyLimit("max_user_watches"), inotifyLimit("max_user_instances")
	c := check{Name: "inotify", OK: true, Detail: fmt.Sprintf("%d watches, %d instances", watches, instances)}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err == nil {
		unix.Close(fd)
	} else {
		c.Detail += ": " + err.Error()
	}
	if err != nil || watches < enoughWatches || instances < enoughInstances {
		c.OK, c.Lost = false, "changes of large trees are found by scanning them"
		c.Fix = fmt.Sprintf("run: sudo sysctl fs.inotify.max_user_watches=%d fs.inotify.max_user_instances=%d",
			max(watches, 5*enoughWatches), max(instances, 8*enoughInstances))
	}
	return c
}

func inotifyLimit(name string) int {
	text, _ := os.ReadFile("/proc/sys/fs/inotify/" + name) // 0 then
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}

// enoughFiles lets a few hundred attempts run at once.
const enoughFiles = 4096

func filesCheck() check {
	var l unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &l) // 0 then
	c := check{Name: "open files", OK: l.Max >= enoughFiles, Detail: fmt.Sprintf("%d at most", l.Max)}
	if !c.OK {
		c.Lost = "fewer attempts can run at once"
		c.Fix = "raise the hard limit (nofile in /etc/security/limits.conf, LimitNOFILE= of a service), or use --parallel"
	}
	return c
}
