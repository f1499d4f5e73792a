package runner

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

// atEachLevel runs f with the real sandbox, at each level of isolation.
func atEachLevel(t *testing.T, files map[string]string, f func(t *testing.T, w *world, plan func(test string, runs ...string) *specs.Plan)) {
	t.Parallel()
	for _, l := range []specs.Isolation{specs.Process, specs.Namespaces} {
		t.Run(string(l), func(t *testing.T) {
			t.Parallel()
			if err := sandbox.Probe(sandbox.Level(l)); err != nil {
				t.Skip(err)
			}
			f(t, newWorld(t, files, sandbox.New(sandbox.Options{})), func(test string, runs ...string) *specs.Plan {
				p := newPlan(test, runs...)
				p.Isolation = l
				return p
			})
		})
	}
}

// What is promoted is what was frozen: nothing of the test, nothing of a writer
// that the candidate left in the background (PS01), which is gone when the test
// runs.
func TestHeadIsTheFrozenTree(t *testing.T) {
	beat := `while :; do date +%s%N >beat; echo >"late.$(date +%s%N)"; sleep 0.02; done`
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		r, err := w.run(t.Context(), plan(
			`echo dropping >dropping; echo changed >f; a=$(cat beat); sleep 0.3; [ "$a" = "$(cat beat)" ]`,
			`setsid sh -c 'trap "" TERM HUP INT; `+beat+`' >/dev/null 2>&1 </dev/null & (sh -c '`+beat+`' &) ; sleep 0.2; echo new >f; exit 0`))
		assert.NilError(t, err)
		assert.Equal(t, r.Status, RunPromoted, "%+v", reason(r.Attempts[0]))
		assert.Equal(t, w.work("f"), "new\n")
		assert.Equal(t, w.work("dropping"), "absent")
		changes, err := w.env.Changes(t.Context(), r.Head)
		assert.NilError(t, err)
		assert.Equal(t, len(changes.List), *r.Attempts[0].Changes)
		dirty, err := w.env.WorkChanges(t.Context())
		assert.NilError(t, err)
		assert.Equal(t, len(dirty.List), 0)
	})
}

// Everything of a timeout ends by the grace, whatever it does against it, and
// so does everything of a loser (TC01, TC04, PS03).
func TestNothingOutlivesItsEnd(t *testing.T) {
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		p := plan("true", `sleep 61 | cat`, `sleep 62 & wait`, `kill -STOP $$`, `trap "" TERM INT HUP; while :; do sleep 1; done`, "sleep 1.5")
		for i := range 3 {
			p.Candidates[i].Timeout = specs.Duration(300 * time.Millisecond)
		}
		p.Grace = specs.Duration(300 * time.Millisecond)
		start := time.Now()
		r, err := w.run(t.Context(), p)
		assert.NilError(t, err)
		assert.Equal(t, statuses(r), "timeout timeout timeout cancelled passed")
		assert.Assert(t, time.Since(start) < 30*time.Second)
	})
}

// A candidate gets an empty input, only its descriptors, and nothing of the
// store (PS12, LM07).
func TestWhatACandidateSees(t *testing.T) {
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		r, err := w.run(t.Context(), plan("true", `if read x; then exit 9; fi; set -- $(ls /proc/self/fd); [ $# -le 4 ] || exit 8; pwd; echo to-stderr >&2`))
		assert.NilError(t, err)
		assert.Equal(t, statuses(r), "passed", reason(r.Attempts[0]))
		data, err := os.ReadFile(*r.Attempts[0].Log)
		assert.NilError(t, err)
		assert.Assert(t, strings.HasSuffix(string(data), "\nto-stderr\n"), string(data))
		want := w.env.MountAt()
		if r.Isolation == string(specs.Process) {
			want = w.root
		}
		assert.Assert(t, strings.HasPrefix(string(data), want), string(data))
	})
}

// A long text reaches the shell through the sandbox too (LM05), and leaves no
// file in the tree.
func TestLongScriptInside(t *testing.T) {
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		pad := strings.Repeat("# filling\n", 20<<10)
		r, err := w.run(t.Context(), plan(pad+"grep -q yes f", pad+"echo yes >f"))
		assert.NilError(t, err)
		assert.Equal(t, statuses(r), "passed", reason(r.Attempts[0]))
		assert.Equal(t, *r.Attempts[0].Changes, 1)
	})
}

// A candidate that removes its own tree harms nobody else (FI09).
func TestOwnTreeRemoved(t *testing.T) {
	atEachLevel(t, map[string]string{"a": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		p := plan("test -f b", `rm -rf "$PWD"`, `mv "$PWD" "$PWD.away"`, "touch b")
		p.Parallel = 1
		r, err := w.run(t.Context(), p)
		assert.NilError(t, err)
		assert.Equal(t, statuses(r), "failed failed passed", "%v %v", reason(r.Attempts[0]), reason(r.Attempts[1]))
		assert.Equal(t, w.work("a"), "x")
	})
}

// A shell that is not there is the candidate's failure, told as such.
func TestNoSuchShell(t *testing.T) {
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		p := plan("true", "true")
		p.Shell = []string{"no-such-shell", "-c"}
		r, err := w.run(t.Context(), p)
		assert.NilError(t, err)
		assert.Equal(t, statuses(r), "failed")
		assert.Equal(t, *r.Attempts[0].ExitCode, exitNotFound)
		assert.Assert(t, strings.Contains(reason(r.Attempts[0]), "no-such-shell"), reason(r.Attempts[0]))
	})
}

// doomedRoot tells the test's own program to run a tournament that is killed.
const doomedRoot = "RUNNER_TEST_DOOMED"

// runDoomed runs candidates that never end.
func runDoomed(root string) {
	e, err := env.Lock(context.Background(), root, "tournament", env.Options{Backends: testBackends, Executor: sandbox.New(sandbox.Options{})})
	if err != nil {
		panic(err)
	}
	p := newPlan("exec sleep 333", "echo 1 >f", "setsid sleep 333", `trap "" TERM; echo alive; while :; do sleep 1; done`)
	p.Isolation = specs.Isolation(os.Getenv(doomedRoot + "_ISOLATION"))
	_, err = Run(context.Background(), Options{
		Env: e, Plan: p, Base: e.Head(), Caller: os.Environ(), HomeDir: os.Getenv("HOME"),
		Sinks: []Sink{func(e Event) {
			if e.Type == EventTesting || e.Type == EventRunning && e.Candidate != "c1" {
				os.Stdout.WriteString(e.Run + "\n")
			}
		}},
	})
	panic(err)
}

// Killing the harness leaves nothing that the next command does not find and
// remove: processes end at once, forks and frozen trees at the next lock (PF18).
func TestKilledHarness(t *testing.T) {
	atEachLevel(t, map[string]string{"f": "x"}, func(t *testing.T, w *world, plan func(string, ...string) *specs.Plan) {
		head := w.env.Head().ID
		assert.NilError(t, w.env.Close())
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), doomedRoot+"="+w.root, doomedRoot+"_ISOLATION="+string(plan("").Isolation))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		assert.NilError(t, err)
		assert.NilError(t, cmd.Start())
		run := readRun(t, out, 3)
		alive, err := Load(filepath.Join(w.root, "runs"), run)
		assert.NilError(t, err)
		assert.Equal(t, alive.Status, Running)
		assert.Equal(t, len(alive.Attempts), 0)
		log, _, err := LogPath(alive, "c3", false)
		assert.NilError(t, err)
		for deadline := time.Now().Add(10 * time.Second); readLog(t, &log) == "" && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		assert.NilError(t, cmd.Process.Signal(syscall.SIGKILL))
		_ = cmd.Wait() // it was killed

		w.env, err = env.Lock(t.Context(), w.root, "test", env.Options{Backends: testBackends, Executor: sandbox.New(sandbox.Options{})})
		assert.NilError(t, err)
		left, err := w.env.Leftovers(t.Context())
		assert.NilError(t, err)
		assert.Equal(t, len(left), 0, "%v", left)
		waitGone(t, realPath(w.root), run)
		assert.Equal(t, w.env.Head().ID, head)
		dead, err := Load(w.env.RunsDir(), run)
		assert.NilError(t, err)
		assert.Equal(t, dead.Status, RunInterrupted)
		assert.Equal(t, statuses(dead), "cancelled cancelled cancelled")
		assert.Equal(t, *dead.Attempts[0].Changes, 1)
		assert.Equal(t, readLog(t, &log), "alive\n")
		times, err := sandbox.ReadTimes(log)
		assert.NilError(t, err)
		assert.Assert(t, !times.At(0).IsZero())
	})
}

// readRun reads n lines, each the name of the run.
func readRun(t *testing.T, out interface{ Read([]byte) (int, error) }, n int) string {
	var text string
	buf := make([]byte, 4096)
	for strings.Count(text, "\n") < n {
		k, err := out.Read(buf)
		assert.NilError(t, err)
		text += string(buf[:k])
	}
	return strings.SplitN(text, "\n", 2)[0]
}

// waitGone waits until no process of the run is left: the death of the harness
// is told to its sandboxes, and each takes its own time to end.
func waitGone(t *testing.T, root, run string) {
	deadline := time.Now().Add(10 * time.Second)
	for {
		var l Leaks
		assert.NilError(t, l.processes(root, run))
		if l.Processes == 0 {
			return
		}
		assert.Assert(t, time.Now().Before(deadline), "%v", l.Names)
		time.Sleep(20 * time.Millisecond)
	}
}
