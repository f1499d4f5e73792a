package runner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
)

// leakNames bounds how many leakers are named.
const leakNames = 20

// traces are what was there before a run and is not its doing: the mount points
// below the root.
type traces map[string]int

// tracesBelow lists the mount points below root, with how often each is mounted
// upon.
func tracesBelow(root string) traces {
	out := make(traces)
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(root))
	if err != nil {
		return out // measure says so
	}
	for _, m := range mounts {
		out[m.Mountpoint]++
	}
	return out
}

// realPath is path without symlinks, as far as it can be told.
func realPath(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	return path
}

// measure counts what the run left behind.
func (t *tournament) measure(ctx context.Context) (Leaks, error) {
	l := Leaks{Names: []string{}}
	perr := l.processes(t.root, t.res.Run)
	_, groups := sandbox.Left()
	for _, dir := range groups {
		l.name("control group %s", dir)
	}
	merr := l.mounts(t.root, t.before)
	left, berr := t.Env.Leftovers(ctx)
	for _, f := range left {
		l.Bytes += f.Bytes
		l.name("%s (%d bytes)", f.Path, f.Bytes)
	}
	return l, errors.Join(perr, merr, berr)
}

func (l *Leaks) name(format string, args ...any) {
	if len(l.Names) < leakNames {
		l.Names = append(l.Names, fmt.Sprintf(format, args...))
	}
}

func (l *Leaks) mounts(root string, before traces) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(root))
	if err != nil {
		return err
	}
	seen := make(traces)
	for _, m := range mounts {
		if seen[m.Mountpoint]++; seen[m.Mountpoint] > before[m.Mountpoint] {
			l.Mounts++
			l.name("mount %s", m.Mountpoint)
		}
	}
	return nil
}

// lingering is how long what was killed may take to be gone.
const lingering = 500 * time.Millisecond

// leftProcesses are those that the sandbox knows of.
func leftProcesses() []int {
	for end := time.Now().Add(lingering); ; time.Sleep(10 * time.Millisecond) {
		if pids, _ := sandbox.Left(); len(pids) == 0 || time.Now().After(end) {
			return pids
		}
	}
}

// processes counts those that the sandbox knows of, that carry the run's name, or
// that stand in one of the store's trees. The work tree does not count: a person
// may stand there.
func (l *Leaks) processes(root, run string) error {
	left := leftProcesses()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, d := range entries {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if dir := filepath.Join("/proc", d.Name()); slices.Contains(left, pid) || marked(dir, run) || standsBelow(dir, root) {
			l.Processes++
			comm, _ := os.ReadFile(filepath.Join(dir, "comm")) // it may be gone by now
			l.name("process %d (%s)", pid, strings.TrimSpace(string(comm)))
		}
	}
	return nil
}

// marked says whether a process was started by the run. One whose environment
// cannot be read is another user's.
func marked(dir, run string) bool {
	data, err := os.ReadFile(filepath.Join(dir, "environ"))
	if err != nil {
		return false
	}
	mark := []byte("AGENTENV_RUN=" + run)
	for v := range bytes.SplitSeq(data, []byte{0}) {
		if bytes.Equal(v, mark) {
			return true
		}
	}
	return false
}

// standsBelow says whether a process has its root or working directory in a
// tree of the store that may be this run's.
func standsBelow(dir, root string) bool {
	for _, link := range []string{"root", "cwd"} {
		at, err := os.Readlink(filepath.Join(dir, link))
		if err != nil {
			continue
		}
		below, ok := strings.CutPrefix(at, root+"/")
		if ok && !strings.HasPrefix(below, "work/") && !env.OfUnlocked(below) {
			return true
		}
	}
	return false
}
