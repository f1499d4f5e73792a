package sandbox_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// atLevels runs a test at each level that this machine has.
func atLevels(t *testing.T, test func(t *testing.T, level sandbox.Level)) {
	for _, level := range []sandbox.Level{sandbox.LevelNamespaces, sandbox.LevelProcess} {
		t.Run(string(level), func(t *testing.T) {
			if err := sandbox.Probe(level); err != nil {
				t.Skip(err)
			}
			envtest.Census(t)
			test(t, level)
		})
	}
}

// launch starts a shell script, and waits until it has made the file ready.
func launch(t *testing.T, level sandbox.Level, script string) (sandbox.Process, string) {
	t.Helper()
	c := scene(t, scratchHome(t), level)
	c.Args = []string{"sh", "-c", script}
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	t.Cleanup(func() { p.Stop(0) })
	eventually(t, "ready", func() bool { return exists(c.View.Tree.Dir + "/ready") })
	return p, c.View.Tree.Dir
}

// beats are processes of many kinds that each write to a file of their own.
const beats = `beat() { while :; do echo >>"$1"; sleep 0.01; done; }
beat main-child & (beat orphan &) ; setsid sh -c 'trap "" TERM TSTP; while :; do echo >>session; sleep 0.01; done' &
sh -c 'kill -STOP $$; while :; do echo >>stopped; sleep 0.01; done' &
until [ -s main-child -a -s orphan -a -s session ]; do sleep 0.01; done; sleep 0.1; touch ready; beat main`

// sizes are the sizes of the files that beats writes.
func sizes(t *testing.T, tree string) map[string]int64 {
	t.Helper()
	m := map[string]int64{}
	for _, name := range []string{"main", "main-child", "orphan", "session", "stopped"} {
		if st, err := os.Stat(filepath.Join(tree, name)); err == nil {
			m[name] = st.Size()
		}
	}
	return m
}

// TestFreeze: everything stands still until Thaw, except what stood still by
// itself, which stays so.
func TestFreeze(t *testing.T) {
	atLevels(t, func(t *testing.T, level sandbox.Level) {
		p, tree := launch(t, level, beats)
		eventually(t, "all beat", func() bool { return len(sizes(t, tree)) == 4 })
		for range 3 {
			assert.NilError(t, p.Freeze())
			before := sizes(t, tree)
			assert.Equal(t, len(before), 4, "%v", before)
			time.Sleep(50 * time.Millisecond)
			assert.DeepEqual(t, sizes(t, tree), before)
			assert.NilError(t, p.Freeze()) // nothing is left to do
			assert.NilError(t, p.Thaw())
			eventually(t, "all go on", func() bool {
				for name, n := range sizes(t, tree) {
					if n <= before[name] {
						return false
					}
				}
				return true
			})
			assert.Assert(t, !exists(tree+"/stopped"), "what had stopped itself was woken")
		}
		p.Stop(0)
		_, err := p.Wait()
		assert.NilError(t, err)
		assert.ErrorIs(t, p.Freeze(), os.ErrProcessDone)
		assert.NilError(t, p.Thaw())
	})
}

// TestFrozenEnds: the frozen can be killed, and told to end.
func TestFrozenEnds(t *testing.T) {
	atLevels(t, func(t *testing.T, level sandbox.Level) {
		for _, grace := range []time.Duration{0, 10 * time.Second} {
			p, _ := launch(t, level, `(trap "echo child >told; exit" TERM; touch ready; while :; do sleep 0.01; done) & wait`)
			assert.NilError(t, p.Freeze())
			began := time.Now()
			p.Stop(grace)
			_, err := p.Wait()
			assert.NilError(t, err)
			assert.Assert(t, time.Since(began) < 5*time.Second)
		}
	})
}

// TestFrozenShell: a shell with job control does not take a child that was frozen
// with it for one that stopped.
func TestFrozenShell(t *testing.T) {
	atLevels(t, func(t *testing.T, level sandbox.Level) {
		p, tree := launch(t, level, `set -m; touch ready; sleep 0.7; echo $? >status`)
		for range 5 {
			assert.NilError(t, p.Freeze())
			time.Sleep(20 * time.Millisecond)
			assert.NilError(t, p.Thaw())
		}
		r, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, r.ExitCode, 0)
		status, err := os.ReadFile(tree + "/status")
		assert.NilError(t, err)
		assert.Equal(t, string(status), "0\n")
	})
}

// TestStoppedHelper: a helper that somebody stopped holds up no end.
func TestStoppedHelper(t *testing.T) {
	atLevels(t, func(t *testing.T, level sandbox.Level) {
		p, tree := launch(t, level, `touch ready; until [ -e end ]; do sleep 0.01; done`)
		pids := helpers(t)
		assert.Equal(t, len(pids), 1)
		pid, err := strconv.Atoi(pids[0])
		assert.NilError(t, err)
		assert.NilError(t, syscall.Kill(pid, syscall.SIGSTOP))
		began := time.Now()
		assert.NilError(t, os.WriteFile(tree+"/end", nil, 0o644))
		_, err = p.Wait()
		assert.NilError(t, err)
		assert.Assert(t, time.Since(began) < 5*time.Second)

		p, _ = launch(t, level, `touch ready; sleep 1000 & sleep 1000`)
		pid, err = strconv.Atoi(helpers(t)[0])
		assert.NilError(t, err)
		assert.NilError(t, syscall.Kill(pid, syscall.SIGSTOP))
		began = time.Now()
		p.Stop(0)
		_, err = p.Wait()
		assert.NilError(t, err)
		assert.Assert(t, time.Since(began) < 2*time.Second)
	})
}

// TestReaperKilled: at the level process a command can kill its reaper. What it
// started is ended all the same, whatever it looks like.
func TestReaperKilled(t *testing.T) {
	envtest.Census(t)
	c := scene(t, scratchHome(t), sandbox.LevelProcess)
	var out bytes.Buffer
	c.Stdout = &out
	c.Args = []string{"sh", "-c", `cd /; for i in 1 2 3; do
env -i "$(command -v setsid)" "$(command -v sleep)" 1000 >/dev/null 2>&1 & echo $!; done
(trap "" TERM HUP; setsid sh -c 'sleep 1000 & sleep 1000' >/dev/null 2>&1 &) ; sleep 0.1; kill -9 $PPID; sleep 1000`}
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	began := time.Now()
	r, err := p.Wait()
	assert.NilError(t, err)
	assert.Assert(t, time.Since(began) < 5*time.Second)
	assert.Equal(t, r.Signal, syscall.SIGKILL)
	assert.Equal(t, len(sandbox.Strays()), 0)
	pids := strings.Fields(out.String())
	assert.Equal(t, len(pids), 3)
	for _, pid := range pids {
		assert.Assert(t, !exists("/proc/"+pid), "%s is alive", pid)
	}
}

// TestFrozenVictim is what TestKilledFrozen kills.
func TestFrozenVictim(t *testing.T) {
	dir := os.Getenv("SANDBOX_FROZEN")
	if dir == "" {
		t.Skip("only run by TestKilledFrozen")
	}
	c := scene(t, dir, sandbox.Level(os.Getenv("SANDBOX_LEVEL")))
	c.Args = []string{"sh", "-c", `(setsid sleep 1000 &); touch ready; while :; do :; done`}
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	eventually(t, "ready", func() bool { return exists(dir + "/tree/ready") })
	assert.NilError(t, p.Freeze())
	if os.Getenv("SANDBOX_STOP_HELPER") != "" {
		pid, _ := strconv.Atoi(helpers(t)[0])
		assert.NilError(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
	assert.NilError(t, os.WriteFile(dir+"/frozen", nil, 0o600))
	time.Sleep(time.Hour)
}

// TestKilledFrozen: when agentenv is killed, what it froze dies too, also if
// somebody stopped the helper.
func TestKilledFrozen(t *testing.T) {
	for _, stop := range []string{"", "1"} {
		atLevels(t, func(t *testing.T, level sandbox.Level) {
			dir := scratchHome(t)
			cmd := exec.Command("/proc/self/exe", "-test.run", "^TestFrozenVictim$")
			cmd.Env = append(os.Environ(), "SANDBOX_FROZEN="+dir, "SANDBOX_LEVEL="+string(level), "SANDBOX_STOP_HELPER="+stop)
			assert.NilError(t, cmd.Start())
			eventually(t, "frozen", func() bool { return exists(dir + "/frozen") })
			assert.Assert(t, len(sandbox.Descendants(cmd.Process.Pid)) >= 3)
			assert.NilError(t, cmd.Process.Kill())
			_ = cmd.Wait() // it was killed
			eventually(t, "the end of all", func() bool { return len(helpers(t)) == 0 })
		})
	}
}

// lives are the tests of this file.
const lives = "^(TestFreeze|TestFrozenEnds|TestFrozenShell|TestStoppedHelper|TestReaperKilled|TestKilledFrozen)$"

func TestLifeAsUser(t *testing.T) { as(t, ordinaryUser(), lives) }

func TestLifeInUserNamespace(t *testing.T) { as(t, inNamespace(), lives) }
