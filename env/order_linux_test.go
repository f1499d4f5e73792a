package env_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
)

// TestWhatIsKeptIsSyncedFirst reads from the kernel's own account in which order
// an operation asked for what: all of a snapshot is flushed before it gets its
// name in nodes/, that before the history that lists it, and the intent before
// what it announces. TestLossOfPower looks at what comes of it; this names the
// call that is missing. btrfs snapshots are flushed by a commit of the file
// system, which no call on a file shows.
func TestWhatIsKeptIsSyncedFirst(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	if out, err := exec.Command("strace", "-f", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("strace is missing (package strace), or tracing is refused: %v %s", err, out)
	}
	for _, backend := range []string{"overlay", "copy"} {
		t.Run(backend, func(t *testing.T) {
			dir := t.TempDir()
			if os.Geteuid() == 0 {
				dir = placeFor(t, backend)
			}
			if p := probeOf(backend, dir); !p.OK {
				t.Skipf("%s does not work here: %s", backend, p.Detail)
			}
			s := newScene(t, dir, optionsFor(backend))
			for _, op := range []string{"commit", "keep", "promote"} {
				t.Run(op, func(t *testing.T) { s.traced(t, op) })
			}
		})
	}
}

// traced runs an operation and checks the order of its calls.
func (s *scene) traced(t *testing.T, op string) {
	old, ref := s.prepare(t, op)
	text, err := json.Marshal(job{Op: op, Root: s.root, Src: s.src, Backend: s.o.Backend, Script: editScript("cand"), Ref: ref})
	assert.NilError(t, err)
	self, err := os.Executable()
	assert.NilError(t, err)
	log := filepath.Join(t.TempDir(), "trace")
	cmd := exec.Command("strace", "-f", "-y", "-o", log, "-e", "trace=fsync,fdatasync,syncfs,rename,renameat,renameat2", self, "-test.run", "^TestStepWorker$")
	cmd.Env = append(os.Environ(), jobVar+"="+string(text))
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, string(out))
	calls := readTrace(t, log)

	e, err := env.Open(context.Background(), s.root, s.o)
	assert.NilError(t, err)
	defer e.Close()
	found := 0
	for _, sn := range e.Log() {
		if slices.ContainsFunc(old, func(o env.Snapshot) bool { return o.ID == sn.ID }) {
			continue
		}
		found++
		calls.checkOrder(t, op, s.root, string(sn.ID))
	}
	assert.Assert(t, found > 0, "no snapshot was made")
}

// call is a system call that was made: where in the trace it began and ended.
type call struct {
	name string
	// paths are those that it names, descriptors first.
	paths      []string
	begun, end int
}

type trace []call

var (
	traced  = regexp.MustCompile(`^(\d+)\s+(?:<\.\.\. )?(\w+)(\(.*| resumed.*)$`)
	tracedP = regexp.MustCompile(`<([^<>]*)>|"([^"]*)"`)
)

// readTrace reads what strace wrote. A call that others interrupt is in two
// lines.
func readTrace(t *testing.T, path string) trace {
	f, err := os.Open(path)
	assert.NilError(t, err)
	defer f.Close()
	var calls trace
	open := map[string]call{} // by thread
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for n := 0; lines.Scan(); n++ {
		m := traced.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		thread, rest := m[1], m[3]
		c := call{name: m[2], begun: n}
		if strings.HasPrefix(rest, " resumed") {
			c = open[thread]
		}
		args, unfinished := strings.CutSuffix(rest, "<unfinished ...>")
		for _, p := range tracedP.FindAllStringSubmatch(args, -1) {
			if p[1] != "" || p[2] != "" {
				c.paths = append(c.paths, p[1]+p[2])
			}
		}
		if unfinished {
			open[thread] = c
			continue
		}
		if c.end = n; strings.HasSuffix(rest, "= 0") {
			calls = append(calls, c)
		}
	}
	assert.NilError(t, lines.Err())
	return calls
}

// synced says whether something was flushed between two lines: all, or a path
// that is as match says.
func (tr trace) synced(after, before int, match func(path string) bool) bool {
	return slices.ContainsFunc(tr, func(c call) bool {
		if !strings.Contains(c.name, "sync") || c.begun < after || c.end > before {
			return false
		}
		return c.name == "syncfs" || match(c.paths[0])
	})
}

// renamed returns the first rename to a path after a line.
func (tr trace) renamed(t *testing.T, after int, to string) call {
	t.Helper()
	i := slices.IndexFunc(tr, func(c call) bool {
		return strings.HasPrefix(c.name, "rename") && c.begun >= after && c.paths[len(c.paths)-1] == to
	})
	assert.Assert(t, i >= 0, "nothing was renamed to %s", to)
	return tr[i]
}

func (tr trace) checkOrder(t *testing.T, op, root, id string) {
	t.Helper()
	node := filepath.Join(root, "nodes", id)
	published := tr.renamed(t, 0, node)
	listed := tr.renamed(t, published.end, filepath.Join(root, "meta.json"))
	assert.NilError(t, filepath.WalkDir(node, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !d.Type().IsRegular() {
			return err
		}
		// While it was made it stood elsewhere.
		rel := strings.TrimPrefix(strings.TrimPrefix(path, node), "/tree")
		if rel != "" {
			assert.Check(t, tr.synced(0, published.begun, func(p string) bool { return strings.HasSuffix(p, rel) }), "%s was not flushed before it was published", path)
		}
		return nil
	}))
	at := func(path string) func(string) bool { return func(p string) bool { return p == path } }
	assert.Check(t, tr.synced(published.end, listed.begun, at(filepath.Join(root, "nodes"))), "nodes/ was not flushed before the history")
	temp := func(p string) bool { return strings.HasPrefix(p, filepath.Join(root, ".meta.json")) }
	assert.Check(t, tr.synced(published.end, listed.begun, temp), "the history was not flushed before it was renamed")
	assert.Check(t, tr.synced(listed.end, math.MaxInt, at(root)), "the root was not flushed after the history was renamed")
	if op != "keep" { // which is one step
		assert.Check(t, tr.synced(0, listed.begun, at(filepath.Join(root, "journal"))), "the intent was not flushed before the history")
	}
}
