package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// hierarchy is a hierarchy of cgroups that is mounted where this process sees it.
type hierarchy struct {
	v2 bool
	// controllers of v1 are those of the mount.
	controllers []string
	// top is the mount point, own the directory of the cgroup that this process
	// is in; empty if that lies outside of what is mounted.
	top, own string
}

// mounted finds the hierarchies, and removes from where commands' cgroups are made
// those that nobody uses any more. Both are done once in the life of this process.
var mounted = sync.OnceValue(func() []hierarchy {
	all := hierarchies()
	for _, h := range all {
		h.sweep()
	}
	return all
})

// hierarchies finds the hierarchies. They are where the mounts say, and what
// is mounted may be a part: a container's.
func hierarchies() []hierarchy {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	membership, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	return parseHierarchies(string(mounts), string(membership))
}

// parseHierarchies reads mountinfo and cgroup (see proc(5)). Of two mounts of one
// hierarchy it takes the first in which our own cgroup is seen.
func parseHierarchies(mounts, membership string) []hierarchy {
	var found []hierarchy
	for line := range strings.Lines(mounts) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		place, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(place) < 5 || len(kind) < 3 || kind[0] != "cgroup" && kind[0] != "cgroup2" {
			continue
		}
		h := hierarchy{v2: kind[0] == "cgroup2", top: unescapeMount(place[4])}
		if !h.v2 {
			for _, o := range strings.Split(kind[2], ",") {
				if slices.Contains(limiters, o) {
					h.controllers = append(h.controllers, o)
				}
			}
		}
		if path, ok := ownCgroup(membership, h); ok {
			h.own = seenAt(h.top, unescapeMount(place[3]), path)
		}
		known := slices.IndexFunc(found, func(o hierarchy) bool { return o.v2 == h.v2 && slices.Equal(o.controllers, h.controllers) })
		switch {
		case known >= 0 && found[known].own == "":
			found[known] = h
		case known < 0 && (h.v2 || len(h.controllers) > 0):
			found = append(found, h)
		}
	}
	return found
}

// ownCgroup is the path of our cgroup in the hierarchy.
func ownCgroup(membership string, h hierarchy) (string, bool) {
	for line := range strings.Lines(membership) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) < 3 {
			continue
		}
		if h.v2 && f[0] == "0" || !h.v2 && len(shared(h.controllers, strings.Split(f[1], ","))) > 0 {
			return f[2], true
		}
	}
	return "", false
}

// seenAt is where path is seen, when root is mounted at top; empty if it is not.
func seenAt(top, root, path string) string {
	rest, ok := strings.CutPrefix(path, strings.TrimSuffix(root, "/"))
	if !ok || rest != "" && rest[0] != '/' || strings.HasPrefix(path, "/..") {
		return ""
	}
	return filepath.Join(top, rest)
}

// unescapeMount undoes the octal escapes of mountinfo.
func unescapeMount(s string) string {
	for _, e := range [][2]string{{`\040`, " "}, {`\011`, "\t"}, {`\012`, "\n"}, {`\134`, `\`}} {
		s = strings.ReplaceAll(s, e[0], e[1])
	}
	return s
}

// cgroupMain is where agentenv moves itself, and who is beside it, when the
// cgroup that they are in was delegated: one with controllers for those below it may
// hold no processes.
const cgroupMain = "agentenv.main"

// cgroupParent is the cgroup around those of commands, where there are controllers
// of v2. It keeps them in force: whoever manages the cgroups above (systemd)
// cannot take away a controller that one below hands on.
const cgroupParent = "agentenv"

// seat is a place, in one hierarchy, for the cgroups of commands.
type seat struct {
	dir         string
	v2          bool
	controllers []string
	// pids is the limit of processes that holds for agentenv itself and would not
	// for commands here; 0 is none.
	pids int
}

// mkdirTries bounds the race with others that remove, or have just made, the
// cgroup around theirs.
const mkdirTries = 20

// mkdir makes a cgroup at the seat, and first the one around it if the last command
// that ended took that away.
func (s seat) mkdir(name string) error {
	var err error
	for range mkdirTries {
		if err = s.mkdirParent(); err == nil {
			err = unix.Mkdir(name, 0o755)
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
			break
		}
	}
	if errno, ok := err.(unix.Errno); ok {
		return &os.PathError{Op: "mkdir", Path: name, Err: errno}
	}
	return err
}

// mkdirParent makes sure of the cgroup around those with controllers of v2, and that
// it hands them on.
func (s seat) mkdirParent() error {
	if !s.v2 || len(s.controllers) == 0 {
		return nil
	}
	if err := unix.Mkdir(s.dir, 0o755); err != nil && err != unix.EEXIST {
		return err
	}
	err := handDown(s.dir, s.controllers)
	if err != nil {
		_ = unix.Rmdir(s.dir) // it is of no use, unless others use it
	}
	return err
}

// handDown makes dir hand on the controllers, and before it, where it has them no
// more, those above it: systemd takes away what nobody has in use, as it is between
// two commands.
func handDown(dir string, controllers []string) error {
	if len(shared(controllers, words(dir, subtreeControl))) == len(controllers) {
		return nil
	}
	above := filepath.Dir(dir)
	_, outside := os.Stat(filepath.Join(above, subtreeControl))
	if len(shared(controllers, words(dir, "cgroup.controllers"))) < len(controllers) && outside == nil {
		if err := handDown(above, controllers); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, subtreeControl), []byte(enabling(controllers)), 0)
}

// subtreeControl is the file of a cgroup that lists what it hands on.
const subtreeControl = "cgroup.subtree_control"

// enabling is what switches controllers on.
func enabling(controllers []string) string {
	return "+" + strings.Join(controllers, " +")
}

// seating is where the cgroups of commands with some limits are made.
type seating struct {
	seats []seat
	// missing says why controllers limit nothing here.
	missing map[string]error
}

var (
	seatingsMu sync.Mutex
	seatings   = map[string]seating{}
)

// seatsFor finds places for cgroups with the controllers, and tries them. With
// none, it is a place to kill and to freeze, if there is one. What was found
// once is kept.
func seatsFor(controllers []string) seating {
	seatingsMu.Lock()
	defer seatingsMu.Unlock()
	key := strings.Join(controllers, " ")
	s, ok := seatings[key]
	if !ok {
		s = findSeats(mounted(), controllers)
		seatings[key] = s
	}
	return s
}

var (
	errNoHierarchy  = errors.New("no hierarchy of cgroups that has it is mounted")
	errNoController = errors.New("the cgroups here do not have it")
	errOutside      = errors.New("the cgroup that agentenv is in lies outside of what is mounted")
	errOccupied     = errors.New("the cgroup that agentenv is in has processes, and is not delegated to be divided")
	errEscape       = errors.New("the cgroup that agentenv is in has a limit of its own, which commands beside it would escape")
	errNoClone      = errors.New("this kernel, or a filter, has no clone3, which is to start a command in a cgroup")
)

// findSeats takes each controller from where it is: at most one hierarchy has it.
func findSeats(all []hierarchy, controllers []string) seating {
	s := seating{missing: map[string]error{}}
	for _, c := range controllers {
		s.missing[c] = errNoHierarchy
	}
	for _, h := range all {
		if h.v2 {
			s.take(h, shared(controllers, slices.Collect(maps.Keys(s.missing))))
		} else if mine := shared(h.controllers, controllers); len(mine) > 0 {
			s.take(h, mine)
		}
	}
	// The one that can kill comes first.
	slices.SortStableFunc(s.seats, func(a, b seat) int {
		switch {
		case a.v2 == b.v2:
			return 0
		case a.v2:
			return -1
		}
		return 1
	})
	return s
}

// take adds a seat with as many of the controllers as can be had. On v2 one with
// none still kills and freezes.
func (s *seating) take(h hierarchy, controllers []string) {
	got := controllers[:0:0]
	for _, c := range controllers {
		if _, err := h.seat([]string{c}); err == nil {
			got = append(got, c)
		} else if s.missing[c] == errNoHierarchy || !errors.Is(err, errNoController) {
			s.missing[c] = err
		}
	}
	place, err := h.seat(got)
	if err == nil && len(got) > 0 {
		err = place.try()
	}
	switch {
	case err == nil && (h.v2 || len(got) > 0):
		s.seats = append(s.seats, place)
		for _, c := range got {
			delete(s.missing, c)
		}
	case len(got) > 0:
		for _, c := range got {
			s.missing[c] = err
		}
		s.take(h, nil)
	}
}

// shared are the controllers that are in both lists.
func shared(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(c string) bool { return !slices.Contains(b, c) })
}

// seat finds a place for cgroups with the controllers. On v1 that is our own cgroup:
// limits around us hold for commands too, and a helper finds the way back, after
// it has started the command, one up. On v2 it is the nearest cgroup, from our own
// upwards, that can hand on the controllers. Limits of those on the way up would not
// hold for commands, so there must be none; of processes, of which systemd sets one
// on all that it starts, each command has the least instead.
func (h hierarchy) seat(controllers []string) (seat, error) {
	switch {
	case h.own == "":
		return seat{}, errOutside
	case !h.v2:
		return seat{dir: h.own, controllers: controllers}, writable(h.own, "tasks")
	case !clonesInto():
		return seat{}, errNoClone
	}
	var first error
	pids := 0
	for dir := h.own; ; dir = filepath.Dir(dir) {
		s, err := h.seatAt(dir, controllers)
		if err == nil {
			s.pids = pids
			return s, nil
		}
		if first == nil || errors.Is(first, errNoController) {
			first = err
		}
		if len(dir) <= len(h.top) {
			return seat{}, first
		}
		if file := limitIn(dir); file != "" && !errors.Is(first, os.ErrPermission) {
			return seat{}, fmt.Errorf("%w (%s)", errEscape, file)
		}
		if n, err := strconv.Atoi(strings.Join(words(dir, "pids.max"), "")); err == nil && (pids == 0 || n < pids) {
			pids = max(n, 1)
			controllers = append(shared(controllers, []string{"cpu", "memory"}), "pids")
		}
	}
}

// limitIn names a file of the cgroup with a limit other than that of processes; empty
// if there is none.
func limitIn(dir string) string {
	for _, file := range []string{"memory.max", "memory.high", "memory.swap.max", "cpu.max", "cpuset.cpus", "io.max"} {
		if w := words(dir, file); len(w) > 0 && w[0] != "max" {
			return file
		}
	}
	return ""
}

// clonesInto says whether there is clone3, which starts a process in a cgroup of
// v2 (Linux 5.7).
var clonesInto = sync.OnceValue(func() bool {
	_, _, err := unix.RawSyscall(unix.SYS_CLONE3, 0, 0, 0)
	return err == unix.EINVAL // for there are no arguments
})

// writable says whether we may make cgroups below dir, and move processes to dir and
// to those below it.
func writable(dir, list string) error {
	for _, f := range []string{dir, filepath.Join(dir, list)} {
		if err := unix.Access(f, unix.W_OK); err != nil {
			return &os.PathError{Op: "write", Path: f, Err: err}
		}
	}
	return nil
}

func (h hierarchy) seatAt(dir string, controllers []string) (seat, error) {
	if len(shared(controllers, words(dir, "cgroup.controllers"))) < len(controllers) {
		return seat{}, errNoController
	}
	if err := writable(dir, "cgroup.procs"); err != nil {
		return seat{}, err
	}
	if len(controllers) == 0 {
		return seat{dir: dir, v2: true}, nil
	}
	if err := h.enable(dir, controllers); err != nil {
		return seat{}, err
	}
	return seat{dir: filepath.Join(dir, cgroupParent), v2: true, controllers: controllers}, nil
}

// words are those of a file of a cgroup.
func words(dir, file string) []string {
	text, _ := os.ReadFile(filepath.Join(dir, file)) // not there: none
	return strings.Fields(string(text))
}

// enable hands the controllers on to the cgroups below dir. Of all cgroups with
// processes in them only the root of the hierarchy can: memory is refused (EBUSY),
// and with cpu or pids dir would become one of threads, below which no command can
// be. From a cgroup that was delegated to us they are moved out of the way.
func (h hierarchy) enable(dir string, controllers []string) error {
	if !isRootCgroup(dir) && len(words(dir, "cgroup.procs")) > 0 {
		if dir != h.own || !h.delegated() {
			return errOccupied
		}
		if err := evacuate(dir); err != nil {
			return err
		}
	}
	if len(shared(controllers, words(dir, subtreeControl))) == len(controllers) {
		return nil
	}
	return os.WriteFile(filepath.Join(dir, subtreeControl), []byte(enabling(controllers)), 0)
}

// isRootCgroup says whether dir is the root of its hierarchy, also of what is above
// a container.
func isRootCgroup(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "cgroup.type"))
	return errors.Is(err, os.ErrNotExist)
}

// delegated says whether our own cgroup is ours to divide: systemd marks those
// that it gave away (man systemd.resource-control, Delegate=; the mark that a
// user may read is of version 251 and later); the top of what a container sees
// is the container's.
func (h hierarchy) delegated() bool {
	for _, attr := range []string{"user.delegate", "trusted.delegate"} {
		var value [4]byte
		if n, err := unix.Getxattr(h.own, attr, value[:]); err == nil && string(value[:n]) == "1" {
			return true
		}
	}
	return h.own == h.top || isUserScope(h.own)
}

// isUserScope says whether dir is a scope that the systemd of this user manages: no
// version of that marks what it gave away (as of 252), but all that is there is the
// user's, and in a scope no process is systemd's.
func isUserScope(dir string) bool {
	var st unix.Stat_t
	name := filepath.Base(dir)
	return strings.Contains(dir, "/user@") && strings.HasSuffix(name, ".scope") && name != "init.scope" &&
		unix.Stat(dir, &st) == nil && int(st.Uid) == os.Geteuid()
}

// evacuate moves all processes that are in dir itself to one below it.
func evacuate(dir string) error {
	main := filepath.Join(dir, cgroupMain)
	if err := unix.Mkdir(main, 0o755); err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkdir", Path: main, Err: err}
	}
	const looks = 10 // others may start processes meanwhile
	for range looks {
		pids := words(dir, "cgroup.procs")
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			err := os.WriteFile(filepath.Join(main, "cgroup.procs"), []byte(pid), 0)
			if err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
	return &os.PathError{Op: "move processes from", Path: dir, Err: unix.EBUSY}
}

// try makes a cgroup at the seat, and removes it.
func (s seat) try() error {
	// The limits are far from any use.
	g, err := newCgroup([]seat{s}, Limits{CPUs: 1 << 10, Memory: 1 << 40, PIDs: 1 << 20})
	g.remove()
	return err
}

// sweep removes the cgroups of this hierarchy that nobody uses any more, where we
// would make ours. Processes in one have neither an agentenv nor a helper any
// more, which both were killed: they are killed too.
func (h hierarchy) sweep() {
	if h.own == "" {
		return
	}
	sweepBelow(h.own, h.v2)
	for dir := h.own; h.v2 && len(dir) >= len(h.top); dir = filepath.Dir(dir) {
		sweepBelow(filepath.Join(dir, cgroupParent), true)
	}
}

func sweepBelow(dir string, v2 bool) {
	entries, _ := os.ReadDir(dir) // what can be read is enough
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), cgroupPrefix) {
			sweepCgroup(filepath.Join(dir, e.Name()), v2)
		}
	}
}

func sweepCgroup(dir string, v2 bool) {
	f, err := os.Open(dir)
	if err != nil {
		return
	}
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return // somebody's
	}
	cgroupDir{File: f, v2: v2}.kill()
	removeCgroup(dir)
}
