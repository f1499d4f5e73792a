package env_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// TestLossOfPower takes a copy of the disk at random instants while a process
// commits, checks out and promotes. What the kernel had not written by then is
// not in the copy: it is what a machine finds that lost its power. Every
// snapshot whose making had been reported is in it, whole.
//
// The disk is a file on a file system that copies files at one instant by
// sharing their blocks.
func TestLossOfPower(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting a disk of its own needs root")
	}
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	for _, b := range all.Backends() {
		kinds := []string{volumeFor(b.Name)}
		if os.Getenv("AGENTENV_TEST_LONG") != "" && b.Name != "btrfs" {
			kinds = []string{"ext4", "xfs", "btrfs"}
		}
		for _, kind := range kinds {
			t.Run(b.Name+" on "+kind, func(t *testing.T) { losePower(t, b.Name, kind) })
		}
	}
}

// powerVar holds the job of a child of TestLossOfPower, as JSON.
const powerVar = "AGENTENV_TEST_POWER_JOB"

func losePower(t *testing.T, backend, kind string) {
	d := newDisk(t, kind)
	src := filepath.Join(d.at, "src")
	writeSource(t, src)
	if p := probeOf(backend, d.at); !p.OK {
		t.Skipf("%s does not work here: %s", backend, p.Detail)
	}
	local := filepath.Join(t.TempDir(), "src")
	out, err := exec.Command("cp", "-a", src, local).CombinedOutput()
	assert.NilError(t, err, string(out))
	unix.Sync() // the source is not ours to keep

	losses := 2
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		losses = 25
	}
	w := startPowered(t, job{Op: "power", Root: filepath.Join(d.at, "root"), Src: src, Backend: backend})
	var taken []loss
	for i := range losses {
		w.waitFor(t, len(w.reports())+1+rand.IntN(2))
		if i%2 == 0 {
			// Right after a report, before anything else flushes what it did not.
			w.pause(t)
		} else {
			time.Sleep(time.Duration(rand.IntN(60)) * time.Millisecond)
		}
		taken = append(taken, loss{w.reports(), d.copy(t, i)})
		w.resume(t)
	}
	w.waitFor(t, len(w.reports())+3)
	w.stop(t)
	d.unmount(t)
	all := w.reports()
	states := map[string]forkstest.Manifest{}
	for _, l := range taken {
		d.mount(t, l.image)
		checkLoss(t, l, all, local, d.at, backend, states)
		d.unmount(t)
		assert.NilError(t, os.Remove(l.image))
	}
}

// report is a line of the worker: the snapshot that it was told of, the name of
// its state, and HEAD.
type report struct {
	ID, Head env.ID
	State    string
}

type loss struct {
	reported []report
	image    string
}

// checkLoss looks at what is on a disk after a loss of power.
func checkLoss(t *testing.T, l loss, all []report, src, at, backend string, states map[string]forkstest.Manifest) {
	t.Helper()
	ctx := context.Background()
	root := filepath.Join(at, "root")
	if len(l.reported) == 0 {
		return // init had not returned
	}
	r, err := env.Open(ctx, root, optionsFor(backend))
	assert.NilError(t, err)
	for _, s := range r.Log() {
		stored(t, r, s.ID) // whatever is listed can be read
	}
	for _, rep := range l.reported {
		if states[rep.State] == nil {
			states[rep.State] = stateOf(t, src, rep.State)
		}
		forkstest.Equal(t, stored(t, r, rep.ID), states[rep.State])
	}
	assert.NilError(t, r.Close())

	e, err := env.Lock(ctx, root, "test", optionsFor(backend))
	assert.NilError(t, err)
	defer func() { assert.NilError(t, e.Close()) }()
	from := len(l.reported) - 1
	ok := slices.ContainsFunc(all[from:], func(rep report) bool { return rep.Head == e.Head().ID })
	assert.Assert(t, ok, "HEAD is %s: older than what was reported, %+v", e.Head().ID, all[from])
	nothingLeft(t, e)
	head := e.Head()
	_, err = e.Checkout(ctx, string(head.ID), false)
	assert.NilError(t, err)
	s, created, err := e.Commit(ctx, "", false)
	assert.NilError(t, err)
	assert.Assert(t, !created && s.ID == head.ID, "the tree is not what was checked out")
}

// stateOf is the state of a snapshot that the worker reported.
func stateOf(t *testing.T, src, name string) forkstest.Manifest {
	if name == "" {
		return forkstest.Read(t, src)
	}
	if name, ok := strings.CutSuffix(name, few); ok {
		return edited(t, src, name, fewScript)
	}
	return edited(t, src, name)
}

// few ends the name of a state that fewScript made of another.
const few = " and a few"

const fewScript = "echo more >more; echo more >>d0/0; rm d0/3; touch -d '2002-02-02 02:02:02' more d0/0 d0 .\n"

// disk is a file system on a file.
type disk struct{ kind, image, at string }

func newDisk(t *testing.T, kind string) *disk {
	host := forkstest.Volume(t, "xfs")
	d := &disk{kind: kind, image: filepath.Join(host, "disk"), at: filepath.Join(host, "at")}
	mkfs := map[string]string{"ext4": "mkfs.ext4 -q -F", "xfs": "mkfs.xfs -q -f", "btrfs": "mkfs.btrfs -q -f"}[kind]
	out, err := exec.Command("sh", "-c", fmt.Sprintf("mkdir %s && truncate -s 320M %s && %s %s", d.at, d.image, mkfs, d.image)).CombinedOutput()
	if err != nil {
		t.Skipf("no %s disk: %v %s", kind, err, out)
	}
	d.mount(t, d.image)
	t.Cleanup(func() { _ = unix.Unmount(d.at, unix.MNT_DETACH) }) // a test that failed
	return d
}

func (d *disk) mount(t *testing.T, image string) {
	t.Helper()
	options := "loop"
	if d.kind == "xfs" {
		options += ",nouuid" // namespaces of the killed may hold the first disk a little longer
	}
	out, err := exec.Command("mount", "-t", d.kind, "-o", options, image, d.at).CombinedOutput()
	assert.NilError(t, err, string(out))
}

func (d *disk) unmount(t *testing.T) {
	t.Helper()
	// A work tree may be mounted on it.
	out, err := exec.Command("sh", "-c", `for i in 1 2 3 4 5 6 7 8 9; do umount -R "$1" && exit; sleep 0.2; done; exit 1`, "sh", d.at).CombinedOutput()
	assert.NilError(t, err, string(out))
}

// copy copies the disk as it is at one instant.
func (d *disk) copy(t *testing.T, n int) string {
	t.Helper()
	path := d.image + "-" + strconv.Itoa(n)
	from, err := os.Open(d.image)
	assert.NilError(t, err)
	defer from.Close()
	to, err := os.Create(path)
	assert.NilError(t, err)
	defer to.Close()
	assert.NilError(t, unix.IoctlFileClone(int(to.Fd()), int(from.Fd())))
	return path
}

// powered is the process that works while the power is lost.
type powered struct {
	cmd *exec.Cmd
	// goOn takes a byte for each report after which it is to go on.
	goOn io.Writer
	mu   sync.Mutex
	list []report
	// hold says that it is not to go on, waits that it has reported since.
	hold, waits bool
	text        strings.Builder
	done        chan struct{}
}

func startPowered(t *testing.T, j job) *powered {
	text, err := json.Marshal(j)
	assert.NilError(t, err)
	w := &powered{done: make(chan struct{})}
	w.cmd = exec.Command("/proc/self/exe", "-test.run", "^TestPowerWorker$", "-test.v")
	w.cmd.Env = append(os.Environ(), powerVar+"="+string(text))
	out, err := w.cmd.StdoutPipe()
	assert.NilError(t, err)
	w.goOn, err = w.cmd.StdinPipe()
	assert.NilError(t, err)
	assert.NilError(t, w.cmd.Start())
	t.Cleanup(func() { _ = w.cmd.Process.Kill() })
	go w.read(out)
	return w
}

func (w *powered) read(out io.Reader) {
	defer close(w.done)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var r report
		w.mu.Lock()
		if json.Unmarshal(lines.Bytes(), &r) == nil {
			w.list = append(w.list, r)
			if w.waits = w.hold; !w.hold {
				_, _ = w.goOn.Write([]byte("\n")) // it may have been killed
			}
		} else {
			w.text.WriteString(lines.Text() + "\n")
		}
		w.mu.Unlock()
	}
}

// pause waits for a report after which the worker does nothing until resume.
func (w *powered) pause(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	w.hold, w.waits = true, false
	n := len(w.list)
	w.mu.Unlock()
	w.waitFor(t, n+1)
}

func (w *powered) resume(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waits {
		_, err := w.goOn.Write([]byte("\n"))
		assert.NilError(t, err)
	}
	w.hold, w.waits = false, false
}

func (w *powered) reports() []report {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.list)
}

// waitFor waits until the worker has reported n snapshots.
func (w *powered) waitFor(t *testing.T, n int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); len(w.reports()) < n; time.Sleep(time.Millisecond) {
		select {
		case <-w.done:
			t.Fatalf("the worker ended: %s", w.text.String())
		default:
		}
		assert.Assert(t, time.Now().Before(end), "the worker is too slow")
	}
}

func (w *powered) stop(t *testing.T) {
	t.Helper()
	assert.NilError(t, w.cmd.Process.Kill())
	<-w.done
	_ = w.cmd.Wait() // killed
}

// TestPowerWorker commits, checks out and promotes, and reports what it is told.
func TestPowerWorker(t *testing.T) {
	text := os.Getenv(powerVar)
	if text == "" {
		t.Skip("runs only as a child of TestLossOfPower")
	}
	var j job
	assert.NilError(t, json.Unmarshal([]byte(text), &j))
	ctx := context.Background()
	e, err := env.Init(ctx, j.Root, env.InitOptions{From: j.Src}, optionsFor(j.Backend))
	assert.NilError(t, err)
	states := map[env.ID]string{}
	tell := func(id env.ID, state string) {
		states[id] = state
		line, err := json.Marshal(report{ID: id, Head: e.Head().ID, State: state})
		assert.NilError(t, err)
		fmt.Printf("%s\n", line)
		_, err = os.Stdin.Read(make([]byte, 1))
		assert.NilError(t, err)
	}
	base := e.Head().ID
	tell(base, "")
	for n := 0; ; n++ {
		name := fmt.Sprintf("edit%d", n)
		_, err := e.Exec(ctx, shellRun(e, editScript(name)), n%2 == 0, func(sandbox.Process) {})
		assert.NilError(t, err)
		if n%2 == 0 {
			_, _, err := e.Commit(ctx, name, false)
			assert.NilError(t, err)
		}
		tell(e.Head().ID, name)
		// A commit of a few files flushes them one by one.
		_, err = e.Exec(ctx, shellRun(e, fewScript), true, func(sandbox.Process) {})
		assert.NilError(t, err)
		_, _, err = e.Commit(ctx, name, false)
		assert.NilError(t, err)
		tell(e.Head().ID, name+few)
		log := e.Log()
		back := log[rand.IntN(len(log))].ID
		_, err = e.Checkout(ctx, string(back), false)
		assert.NilError(t, err)
		tell(back, states[back])
		name = fmt.Sprintf("cand%d", n)
		var won env.ID
		assert.NilError(t, inCandidate(ctx, e, job{Ref: base, Script: editScript(name)}, func(fr env.Frozen) error {
			s, _, err := e.Promote(ctx, fr, name)
			won = s.ID
			return err
		}))
		tell(won, name)
	}
}
