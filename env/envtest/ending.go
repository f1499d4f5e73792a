//go:build linux

package envtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// Commands that do not want to end. Each first makes the file ready.
const (
	ignoresTerm = `trap '' TERM INT HUP; touch ready; while :; do sleep 1; done`
	detached    = `setsid sh -c 'trap "" TERM HUP INT; while :; do date +%s%N >beat; sleep 0.02; done' >/dev/null 2>&1 </dev/null & while [ ! -s beat ]; do sleep 0.01; done`
	doubleFork  = `sh -c 'setsid sh -c "while :; do date +%s%N >beat; sleep 0.02; done" & exit' & while [ ! -s beat ]; do sleep 0.01; done`
)

// testEnding: when Wait returns nothing is left, however it was started, and
// Wait does not take long.
func testEnding(t *testing.T, s Subject) {
	for name, script := range map[string]string{
		"detached": detached, "double fork": doubleFork,
		"background": "sleep 60 & (sleep 60) & sleep 60 | cat & touch beat",
		"held pipe":  "sleep 60 & echo x | (cat; sleep 60) & touch beat",
	} {
		t.Run(name, func(t *testing.T) { testLeftover(t, s, script) })
	}
	for name, script := range map[string]string{
		"pipeline": "touch ready; sleep 60 | cat", "subshell": "touch ready; (sleep 60); true",
		"wait": "touch ready; sleep 60 & wait", "ignored TERM": ignoresTerm,
		"stopped": "touch ready; kill -STOP $$; sleep 60",
	} {
		t.Run("stop "+name, func(t *testing.T) { testStop(t, s, script) })
	}
	t.Run("grace", func(t *testing.T) { testGrace(t, s) })
	t.Run("stop again", func(t *testing.T) {
		b := newBench(t, s)
		p, _ := startReady(b, context.Background(), ignoresTerm)
		p.Stop(time.Hour)
		p.Stop(2 * time.Hour) // longer: nothing changes
		p.Stop(20 * time.Millisecond)
		r, err := waitAtMost(t, p, 5*time.Second)
		assert.NilError(t, err)
		assert.Equal(t, r.Signal, kill)
		p.Stop(0) // after the end: nothing
		p.Stop(time.Second)
	})
	t.Run("cancel", func(t *testing.T) { testCancel(t, s) })
	t.Run("cancel many", func(t *testing.T) { testCancelMany(t, s) })
	t.Run("orphans", func(t *testing.T) { testOrphans(t, s) })
	t.Run("fork bomb", func(t *testing.T) {
		b := newBench(t, s)
		p, _ := startReady(b, context.Background(), `f() { sh -c 'sleep 0.01' & }; touch ready; while :; do f; done`)
		p.Stop(0)
		_, err := waitAtMost(t, p, 10*time.Second)
		assert.NilError(t, err)
	})
}

// mark gives the bench's commands an environment by which they are found.
func mark(b *bench) string {
	m := fmt.Sprintf("ENVTEST_MARK=%d.%d", os.Getpid(), time.Now().UnixNano())
	b.command.Env = append(b.command.Env, m)
	return m
}

func startReady(b *bench, ctx context.Context, script string) (sandbox.Process, *bytes.Buffer) {
	b.t.Helper()
	p, out := b.start(ctx, "sh", "-c", script)
	waitFor(b.t, "ready", func() bool { return exists(filepath.Join(b.tree, "ready")) })
	return p, out
}

// waitAtMost fails if Wait takes longer than d.
func waitAtMost(t *testing.T, p sandbox.Process, d time.Duration) (r sandbox.Result, err error) {
	t.Helper()
	done := make(chan struct{})
	go func() { r, err = p.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(d):
		p.Stop(0)
		t.Fatalf("Wait took longer than %v", d)
	}
	return r, err
}

func testLeftover(t *testing.T, s Subject, script string) {
	b := newBench(t, s)
	m := mark(b)
	began := time.Now()
	r := b.run("sh", "-c", script)
	assert.Equal(t, r.ExitCode, 0, r.out)
	assert.Assert(t, time.Since(began) < 10*time.Second)
	assert.Equal(t, len(Alive(m)), 0)
	beat := read(t, b.tree+"/beat")
	time.Sleep(100 * time.Millisecond)
	assert.Equal(t, read(t, b.tree+"/beat"), beat)
}

func testStop(t *testing.T, s Subject, script string) {
	b := newBench(t, s)
	m := mark(b)
	p, _ := startReady(b, context.Background(), script)
	began := time.Now()
	p.Stop(200 * time.Millisecond)
	r, err := waitAtMost(t, p, 10*time.Second)
	assert.NilError(t, err)
	assert.Assert(t, r.ExitCode != 0 || strings.Contains(script, "(sleep"), "%+v", r)
	if script == ignoresTerm {
		assert.Equal(t, r.Signal, kill)
		assert.Equal(t, r.ExitCode, 137)
		assert.Assert(t, time.Since(began) >= 200*time.Millisecond, "no grace was given")
	}
	assert.Equal(t, len(Alive(m)), 0)
}

// testGrace: the command and what it started have until the end of the grace,
// and no longer than they need.
func testGrace(t *testing.T, s Subject) {
	b := newBench(t, s)
	p, out := startReady(b, context.Background(),
		`(trap 'sleep 0.2; echo child; exit' TERM; touch ready; while :; do sleep 0.02; done) &
trap 'echo main; exit 9' TERM; while :; do sleep 0.02; done`)
	began := time.Now()
	p.Stop(20 * time.Second)
	r, err := waitAtMost(t, p, 15*time.Second)
	assert.NilError(t, err)
	assert.Assert(t, time.Since(began) < 15*time.Second)
	assert.Equal(t, r.ExitCode, 9)
	assert.Assert(t, strings.Contains(out.String(), "main\n") && strings.HasSuffix(out.String(), "child\n"), out.String())
}

func testCancel(t *testing.T, s Subject) {
	b := newBench(t, s)
	m := mark(b)
	cause := errors.New("another won")
	ctx, cancel := context.WithCancelCause(context.Background())
	p, _ := startReady(b, ctx, ignoresTerm)
	cancel(cause)
	r, err := waitAtMost(t, p, 5*time.Second)
	assert.NilError(t, err)
	assert.Equal(t, r.Signal, kill)
	b.fresh()
	_, err = s.Executor.Start(ctx, b.command)
	assert.ErrorIs(t, err, cause)
	for i := range 10 { // at any moment of the start
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*2*time.Millisecond)
		b.fresh()
		p, err := s.Executor.Start(ctx, b.command)
		if err == nil {
			_, err = waitAtMost(t, p, 5*time.Second)
			assert.NilError(t, err)
		} else {
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		}
		cancel()
	}
	assert.Equal(t, len(Alive(m)), 0)
}

// testCancelMany: 200 processes, half of them spinning.
func testCancelMany(t *testing.T, s Subject) {
	b := newBench(t, s)
	m := mark(b)
	ctx, cancel := context.WithCancel(context.Background())
	p, _ := startReady(b, ctx, `mkfifo gate
i=0; while [ $i -lt 100 ]; do sleep 1000 & (read x <gate; while :; do :; done) & i=$((i+1)); done; touch ready; : >gate; wait`)
	time.Sleep(50 * time.Millisecond) // until they spin
	began := time.Now()
	cancel()
	_, err := waitAtMost(t, p, 30*time.Second)
	took := time.Since(began)
	assert.NilError(t, err)
	assert.Equal(t, len(Alive(m)), 0)
	t.Logf("200 processes were gone after %v", took)
	limit := 2 * time.Second // a machine that does other things too
	if Long() && s.Level == sandbox.LevelNamespaces {
		limit = 50 * time.Millisecond
	}
	assert.Assert(t, took < limit, "took %v", took)
}

func testOrphans(t *testing.T, s Subject) {
	n := 500
	if Long() {
		n = 20000
	}
	b := newBench(t, s)
	need(t, "python3")
	out := b.sh(fmt.Sprintf(`python3 - <<'P'
import os, time, glob
for i in range(%d):
    p = os.fork()
    if p == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.waitpid(p, 0)
for i in range(100):
    zombies = 0
    for f in glob.glob('/proc/[0-9]*/stat'):
        try: s = open(f).read()
        except OSError: continue
        rest = s[s.rindex(')')+2:].split()
        zombies += rest[0] == 'Z' and int(rest[3]) == os.getsid(0)
    if zombies == 0: break
    time.sleep(0.05)
print(zombies)
P`, n))
	assert.Equal(t, out, "0\n")
}

// testSeparation: commands side by side neither see nor hit each other.
func testSeparation(t *testing.T, s Subject) {
	t.Run("kill all", func(t *testing.T) {
		a, b := newBench(t, s), newBench(t, s)
		p, out := b.start(context.Background(), "sh", "-c", "touch ready; sleep 0.5; touch ok; echo alive")
		waitFor(t, "ready", func() bool { return exists(b.tree + "/ready") })
		r := a.run("sh", "-c", "trap '' TERM; (kill -9 1; kill -SEGV 1; kill -QUIT 1; kill -STOP 1; kill -TERM -1; kill -9 -1); echo still here")
		assert.Equal(t, r.Signal, kill, r.out) // by its own hand
		_, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, out.String(), "alive\n")
	})
	t.Run("many at once", func(t *testing.T) {
		var group errgroup.Group
		for i := range 40 {
			b := newBench(t, s)
			b.command.Args = []string{"sh", "-c", "echo $1 >f; sleep 0.05; cat f", "sh", itoa(i)}
			group.Go(func() error {
				var out bytes.Buffer
				b.command.Stdout = &out
				p, err := s.Executor.Start(context.Background(), b.command)
				if err != nil {
					return err
				}
				if _, err := p.Wait(); err != nil {
					return err
				}
				if out.String() != itoa(i)+"\n" {
					return fmt.Errorf("%d gave %q", i, out.String())
				}
				return nil
			})
		}
		assert.NilError(t, group.Wait())
	})
	t.Run("temporary files", func(t *testing.T) {
		name := fmt.Sprintf("envtest-mark-%d", os.Getpid())
		script := fmt.Sprintf(`for d in /tmp /var/tmp /dev/shm /run; do [ -e $d/%[1]s ] && exit 9; touch $d/%[1]s; done; touch ready; sleep 0.3`, name)
		a, b := newBench(t, s), newBench(t, s)
		p, _ := startReady(a, context.Background(), script)
		r := b.run("sh", "-c", script)
		assert.Equal(t, r.ExitCode, 0, r.out)
		ra, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, ra.ExitCode, 0)
		for _, d := range []string{"/tmp/", "/var/tmp/", "/dev/shm/", "/run/"} {
			assert.Assert(t, !exists(d+name))
		}
	})
	t.Run("System V IPC", func(t *testing.T) {
		need(t, "ipcmk")
		b := newBench(t, s)
		b.sh("ipcmk -M 4096 >/dev/null; ipcs -m | grep -q 4096")
		assert.Equal(t, newBench(t, s).sh("ipcs -m | grep -c 4096 || true"), "0\n")
	})
	t.Run("processes", func(t *testing.T) {
		b := newBench(t, s)
		assert.Equal(t, b.sh("[ $$ != 1 ]; set -- /proc/[0-9]*; echo $#"), "2\n") // init and sh
	})
	t.Run("host name", func(t *testing.T) {
		host, err := os.Hostname()
		assert.NilError(t, err)
		assert.Equal(t, newBench(t, s).sh("uname -n"), host+"\n")
	})
	t.Run("mounts of the host", func(t *testing.T) {
		b := newBench(t, s)
		p, _ := startReady(b, context.Background(), ignoresTerm)
		assert.Equal(t, len(Mounts(t, b.dir)), 0)
		p.Stop(0)
		_, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, len(Mounts(t, b.dir)), 0)
	})
	t.Run("init is out of reach", func(t *testing.T) {
		b := newBench(t, s)
		out := b.sh("cat /proc/1/environ 2>/dev/null | wc -c; readlink /proc/1/root /proc/1/cwd /proc/1/exe /proc/1/fd/* 2>/dev/null | wc -l")
		assert.Equal(t, out, "0\n0\n")
	})
	t.Run("session", func(t *testing.T) {
		need(t, "ps")
		b := newBench(t, s)
		out := b.sh("ps -o pid=,pgid=,sid= -p $$ | tr -s ' ' '\\n' | grep . | sort -u | wc -l")
		assert.Equal(t, out, "1\n")
	})
}
