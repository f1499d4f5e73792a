package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/all"
)

// stubborn does not want to end: it ignores what it can, and so does a child that
// left its session.
const stubborn = `trap "" TERM INT HUP; (setsid sh -c 'trap "" TERM INT HUP; while :; do sleep 1; done' &); while :; do sleep 1; done`

// started is a command of the program that goes on beside the test.
type started struct {
	*exec.Cmd
	t        *testing.T
	out, err bytes.Buffer
}

func (u *owner) begin(t *testing.T, args ...string) *started {
	t.Helper()
	s := &started{Cmd: u.command(u.src, "agentenv", append([]string{"--root", u.root}, args...)...), t: t}
	s.Stdout, s.Stderr = &s.out, &s.err
	assert.NilError(t, s.Start())
	return s
}

// below are the processes below the command.
func (s *started) below() []int { return sandbox.Descendants(s.Process.Pid) }

// ends waits for the command and checks its exit status, and that a second later
// nothing is left of it.
func (s *started) ends(code int, within time.Duration) {
	s.t.Helper()
	over := make(chan struct{})
	go func() { _ = s.Wait(); close(over) }()
	select {
	case <-over:
	case <-time.After(within):
		_ = s.Process.Kill()
		<-over
		s.t.Fatalf("it did not end within %v:\n%s", within, s.err.String())
	}
	assert.Equal(s.t, s.ProcessState.ExitCode(), code, "%s%s", s.out.String(), s.err.String())
	s.gone()
}

// gone checks that within a second nothing that the command started lives.
func (s *started) gone() {
	s.t.Helper()
	for end := time.Now().Add(time.Second); ; time.Sleep(5 * time.Millisecond) {
		left := sandbox.Descendants(os.Getpid())
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			out, _ := exec.Command("ps", "-o", "pid,ppid,stat,args", "-p", strings.Trim(strings.ReplaceAll(fmt.Sprint(left), " ", ","), "[]")).Output()
			s.t.Fatalf("left over of %q:\n%s", s.Args, out)
		}
	}
}

// TestTournamentInterrupted: the first interrupt leaves the grace, the second
// does not; TERM is as the first. The result and the events are written.
func TestTournamentInterrupted(t *testing.T) {
	envtest.Census(t)
	onBackends(t, func(t *testing.T, u *owner) {
		u.init(t, "base")
		head := u.agentenv(t, "head")
		for name, c := range map[string]struct {
			grace   string
			signals []unix.Signal
			code    int
		}{
			"once":  {"300ms", []unix.Signal{unix.SIGINT}, 130},
			"twice": {"1h", []unix.Signal{unix.SIGINT, unix.SIGINT}, 130},
			"TERM":  {"300ms", []unix.Signal{unix.SIGTERM}, 143},
		} {
			events := filepath.Join(u.home, name+".events")
			s := u.begin(t, "tournament", "--json", "--events", events, "--grace", c.grace, "--test", "true", "--", stubborn, "sleep 1000")
			waitUntil(t, "both run", func() bool {
				data, _ := os.ReadFile(events)
				return bytes.Count(data, []byte(`"running"`)) == 2 && len(s.below()) >= 6
			})
			for i, sig := range c.signals {
				time.Sleep(time.Duration(i) * 200 * time.Millisecond)
				assert.NilError(t, unix.Kill(s.Process.Pid, sig))
			}
			s.ends(c.code, 5*time.Second)
			var res struct{ Run, Status string }
			assert.NilError(t, json.Unmarshal(s.out.Bytes(), &res), s.out.String())
			kept, err := os.ReadFile(filepath.Join(u.root, "runs", res.Run, "result.json"))
			assert.NilError(t, err)
			assert.Equal(t, strings.TrimSpace(string(kept)), strings.TrimSpace(s.out.String()))
			data, err := os.ReadFile(events)
			assert.NilError(t, err)
			lines := strings.Split(strings.TrimSpace(string(data)), "\n")
			assert.Assert(t, strings.Contains(lines[len(lines)-1], `"ended"`), lines[len(lines)-1])
		}
		assert.Equal(t, u.agentenv(t, "head"), head)
		u.swept(t)
	})
}

// soakTime is how long TestSoak runs, if AGENTENV_SOAK does not say so.
const soakTime = 10 * time.Minute

// TestSoak runs tournaments and commands and sends signals to whatever of them is
// there. Each ends, and nothing is left of it; at the end the store is whole.
func TestSoak(t *testing.T) {
	if !envtest.Long() {
		t.Skip("slow: set AGENTENV_TEST_LONG=1")
	}
	length := soakTime
	if text := os.Getenv("AGENTENV_SOAK"); text != "" {
		var err error
		length, err = time.ParseDuration(text)
		assert.NilError(t, err)
	}
	envtest.Census(t)
	people := 1
	if os.Getuid() == 0 {
		people = 2 // root and an ordinary user
	}
	each := length / time.Duration(people*len(all.Backends()))
	onBackends(t, func(t *testing.T, u *owner) { soak(t, u, each) })
}

func soak(t *testing.T, u *owner, length time.Duration) {
	u.init(t, "base")
	u.tree(t)
	free, rounds := freeBytes(t, u.root), 0
	for end := time.Now().Add(length); time.Now().Before(end); rounds++ {
		soakRound(t, u)
	}
	u.swept(t)
	u.agentenv(t, "status")
	for _, s := range u.log(t) {
		u.agentenv(t, "show", string(s.ID))
	}
	u.agentenv(t, "runs")
	lost := free - freeBytes(t, u.root)
	t.Logf("%d rounds, %d snapshots, %d KiB", rounds, len(u.log(t)), lost>>10)
	perRound := int64(256 << 10) // a run's folder and a snapshot of a few files
	assert.Assert(t, lost < int64(rounds+64)*perRound, "%d bytes are lost", lost)
}

// soakRound runs something and sends up to six signals to what is there of it.
func soakRound(t *testing.T, u *owner) {
	t.Helper()
	mixed := `i=0; while [ $i -lt 20 ]; do echo $i >d1/by; sleep 0.02; (sleep 0.1 &); i=$((i+1)); done`
	commands := [][]string{
		{"tournament", "--plain", "--timeout", "2s", "--grace", "200ms", "--test", "sleep 0.1", "--", mixed, "exit 1", stubborn},
		{"tournament", "--plain", "--isolation", "process", "--timeout", "2s", "--grace", "200ms", "--test", "false", "--", mixed, stubborn},
		{"exec", "--timeout", "2s", "--", "sh", "-c", mixed},
		{"exec", "--fork", "--keep", "--timeout", "1s", "--", "sh", "-c", mixed},
		{"exec", "--fork", "--timeout", "1s", "--", "sh", "-c", stubborn},
	}
	if u.backend != "copy" {
		commands = append(commands[:1], commands[2:]...) // the level process takes no mounted tree
	}
	s := u.begin(t, commands[rand.IntN(len(commands))]...)
	over := make(chan struct{})
	go func() { _ = s.Wait(); close(over) }()
	signals := []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGKILL, unix.SIGSTOP}
	for range rand.IntN(7) {
		time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond)
		members := append(s.below(), s.Process.Pid)
		_ = unix.Kill(members[rand.IntN(len(members))], signals[rand.IntN(len(signals))]) // it may be gone
	}
	// Who stopped agentenv itself lets it go on.
	for end := time.Now().Add(20 * time.Second); ; {
		_ = unix.Kill(s.Process.Pid, unix.SIGCONT)
		select {
		case <-over:
			s.gone()
			return
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(end) {
			out, _ := exec.Command("ps", "-eo", "pid,ppid,stat,wchan:20,args", "--forest").Output()
			_ = s.Process.Kill()
			t.Fatalf("%q does not end:\n%s%s", s.Args, s.err.String(), out)
		}
	}
}
