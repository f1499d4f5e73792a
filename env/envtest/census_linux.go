package envtest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
)

// settling is how long what ends may take to be gone: the kernel takes a
// namespace apart, and closes files, a moment after the process that held it
// cannot be seen.
const settling = 2 * time.Second

// census is what the tests that are counted had not made when the first of them
// began. Those that run side by side are counted together, by the last: whose a
// process is cannot be told while they run.
var census struct {
	sync.Mutex
	open    int
	places  []string
	before  inventory
	routine goleak.Option
}

// inventory is what this test binary has: each thing under a name that says
// what it is.
type inventory map[string]bool

// Census fails the test if, after its own cleanups, something is left that was
// not there now: processes that descend from this test binary, mounts below
// the test's temporary directories or below places, control groups, descriptors
// or goroutines. It is called first in a test; tests that run in parallel must
// all call it.
func Census(t testing.TB, places ...string) {
	t.Helper()
	prepareCensus()
	census.Lock()
	defer census.Unlock()
	top, _, _ := strings.Cut(t.Name(), "/")
	places = append(places, filepath.Join(os.TempDir(), top))
	if home, err := os.UserHomeDir(); err == nil {
		places = append(places, filepath.Join(home, ".envtest-"), filepath.Join(home, ".sandbox-test-"))
	}
	census.places = append(census.places, places...)
	if census.open++; census.open == 1 {
		census.before = takeInventory(census.places)
		census.routine = goleak.IgnoreCurrent()
	}
	t.Cleanup(func() { closeCensus(t) })
}

// prepareCensus makes what stays for good: orphans come to this process, and
// the sandbox has the thread that it starts its helpers from.
var prepareCensus = sync.OnceFunc(func() {
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) // since Linux 3.4
	_ = sandbox.Probe(sandbox.LevelProcess)                 // tests that need it say so
})

func closeCensus(t testing.TB) {
	census.Lock()
	defer census.Unlock()
	if census.open--; census.open > 0 {
		return
	}
	var left []string
	for deadline := time.Now().Add(settling); ; time.Sleep(10 * time.Millisecond) {
		left = left[:0]
		for what := range takeInventory(census.places) {
			if !census.before[what] {
				left = append(left, what)
			}
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	census.places = nil
	for _, what := range left {
		t.Errorf("left over: %s", what)
	}
	// Tests that have begun to run beside this one are no leak.
	if err := goleak.Find(census.routine, goleak.IgnoreAnyFunction("testing.tRunner")); err != nil {
		t.Errorf("left over: %v", err)
	}
}

func takeInventory(places []string) inventory {
	all := inventory{}
	all.addProcesses()
	all.addMounts(places)
	all.addCgroups()
	all.addDescriptors()
	return all
}

func (all inventory) add(format string, args ...any) { all[fmt.Sprintf(format, args...)] = true }

// addProcesses adds the living descendants of this process.
func (all inventory) addProcesses() {
	for _, pid := range sandbox.Descendants(os.Getpid()) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may be gone by now
		all.add("process %d %q", pid, bytes.TrimRight(bytes.ReplaceAll(line, []byte{0}, []byte(" ")), " "))
	}
}

// addMounts adds what is mounted at, or made of, something below places. Others
// come and go on a busy machine.
func (all inventory) addMounts(places []string) {
	info, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(info)) {
		for _, p := range places {
			if strings.Contains(line, p) {
				all.add("mount %s", strings.TrimSpace(line))
			}
		}
	}
}

// addDescriptors adds what this process has open. Those by which the runtime
// waits are made when they are first needed, and stay.
func (all inventory) addDescriptors() {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && to != "anon_inode:[eventpoll]" && to != "anon_inode:[eventfd]" {
			all.add("descriptor %s of %s", e.Name(), to)
		}
	}
}

// addCgroups adds the control groups of commands that have ended.
func (all inventory) addCgroups() {
	_, groups := sandbox.Left()
	for _, dir := range groups {
		all.add("control group %s", dir)
	}
}
