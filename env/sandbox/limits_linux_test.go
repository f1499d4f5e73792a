package sandbox_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// levels are those that work here.
func levels(t *testing.T, test func(t *testing.T, level sandbox.Level)) {
	t.Helper()
	for _, level := range []sandbox.Level{sandbox.LevelNamespaces, sandbox.LevelProcess} {
		t.Run(string(level), func(t *testing.T) {
			if err := sandbox.Probe(level); err != nil {
				t.Skip(err)
			}
			test(t, level)
		})
	}
}

// limited is a command with limits that is to run a script; without what the
// machine cannot limit the test is skipped.
func limited(t *testing.T, level sandbox.Level, l sandbox.Limits, script string) sandbox.Command {
	t.Helper()
	if err := sandbox.CheckLimits(level, l); err != nil {
		t.Skip(err)
	}
	c := scene(t, scratchHome(t), level)
	c.Limits, c.Args = l, []string{"sh", "-c", script}
	return c
}

// ran runs a command to its end and gives its result and its output.
func ran(t *testing.T, c sandbox.Command) (sandbox.Result, string) {
	t.Helper()
	envtest.Census(t)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
	assert.NilError(t, err)
	r, err := p.Wait()
	assert.NilError(t, err)
	return r, out.String()
}

func TestOutOfMemory(t *testing.T) {
	levels(t, func(t *testing.T, level sandbox.Level) {
		l := sandbox.Limits{Memory: 64 << 20}
		for name, script := range map[string]string{
			"command":  `exec tail /dev/zero`,
			"child":    `tail /dev/zero; exit 3`,
			"detached": `setsid sh -c 'tail /dev/zero & wait $! || kill -9 '$$ & wait; sleep 30`,
		} {
			t.Run(name, func(t *testing.T) {
				r, out := ran(t, limited(t, level, l, script))
				assert.Equal(t, r.Limit, "out of memory (limit 64MiB)", "%+v\n%s", r, out)
				assert.Assert(t, r.ExitCode != 0)
			})
		}
		t.Run("survived", func(t *testing.T) {
			r, out := ran(t, limited(t, level, l, `tail /dev/zero; exit 0`))
			assert.Equal(t, r.ExitCode, 0, out)
			assert.Equal(t, r.Limit, "")
		})
		t.Run("enough", func(t *testing.T) {
			r, out := ran(t, limited(t, level, l, `head -c 20000000 /dev/zero | tail | wc -c; exit 4`))
			assert.Equal(t, out, "20000000\n")
			assert.Equal(t, r.ExitCode, 4)
			assert.Equal(t, r.Limit, "")
		})
	})
}

// TestTooLittleMemory: a limit in which nothing can start is the command's failure.
func TestTooLittleMemory(t *testing.T) {
	levels(t, func(t *testing.T, level sandbox.Level) {
		r, _ := ran(t, limited(t, level, sandbox.Limits{Memory: 128 << 10}, "true"))
		assert.Equal(t, r.Limit, "out of memory (limit 128KiB)", "%+v", r)
		assert.Assert(t, r.ExitCode != 0)
	})
}

// TestFilesInMemory: files in memory are bounded by the smaller limit.
func TestFilesInMemory(t *testing.T) {
	const sizes = `stat -f -c '%b %S' /dev/shm /run | while read -r n size; do echo $((n*size)); done`
	for want, l := range map[string]sandbox.Limits{
		"1048576\n1048576\n":   {Disk: 1 << 20, Memory: 64 << 20, BestEffort: true},
		"67108864\n67108864\n": {Disk: 1 << 30, Memory: 64 << 20, BestEffort: true},
	} {
		_, out := ran(t, limited(t, sandbox.LevelNamespaces, l, sizes))
		assert.Equal(t, out, want)
	}
	r, out := ran(t, limited(t, sandbox.LevelNamespaces, sandbox.Limits{Disk: 1 << 20}, `head -c 3000000 /dev/zero >/dev/shm/f`))
	assert.Assert(t, r.ExitCode != 0 && strings.Contains(out, "No space left"), out)
}

// TestTooManyProcesses: also those that left the command's session count, and
// threads.
func TestTooManyProcesses(t *testing.T) {
	const count = `n=0; while [ $n -lt 60 ]; do %s sleep 60 & n=$((n+1)); done; exec sleep 0`
	levels(t, func(t *testing.T, level sandbox.Level) {
		for name, script := range map[string]string{
			"children": strings.Replace(count, "%s", "", 1),
			"sessions": strings.Replace(count, "%s", "setsid", 1),
			"bomb":     `b() { b | b & }; b; wait; b; sleep 0.3; exit 1`,
		} {
			t.Run(name, func(t *testing.T) {
				c := limited(t, level, sandbox.Limits{PIDs: 30}, script)
				r, out := ran(t, c)
				assert.Assert(t, r.ExitCode != 0, "it was not limited: %s", out)
				if cgroupsHave("pids") {
					assert.Equal(t, r.Limit, "too many processes (limit 30)", "%+v\n%s", r, out)
				}
			})
		}
		t.Run("enough", func(t *testing.T) {
			r, out := ran(t, limited(t, level, sandbox.Limits{PIDs: 30}, `for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do sleep 0.2 & done; wait; exit 3`))
			assert.Equal(t, r.ExitCode, 3, out)
			assert.Equal(t, r.Limit, "")
		})
	})
}

func cgroupsHave(controller string) bool {
	c := sandbox.ProbeCgroups()
	return map[string]int{"cpu": c.CPU, "memory": c.Memory, "pids": c.PIDs}[controller] != 0
}

// TestProbeCgroups: what the probe says is what commands get.
func TestProbeCgroups(t *testing.T) {
	c := sandbox.ProbeCgroups()
	t.Logf("%+v", c)
	for _, one := range []struct {
		version int
		limits  sandbox.Limits
	}{{c.CPU, sandbox.Limits{CPUs: 1}}, {c.Memory, sandbox.Limits{Memory: 1 << 30}}, {c.PIDs, sandbox.Limits{PIDs: 100}}} {
		err := sandbox.CheckLimits(sandbox.LevelProcess, one.limits)
		assert.Equal(t, err == nil, one.version != 0, "%+v: %v", one.limits, err)
	}
	all := c.CPU != 0 && c.Memory != 0 && c.PIDs != 0
	assert.Equal(t, c.Why == "", all)
	assert.Equal(t, strings.Contains(c.Why, "cpus: "), c.CPU == 0, c.Why) // as in a plan
	assert.Equal(t, c.Fix == "", all)
}

// TestCPUs: two that spin have half of a CPU between them.
func TestCPUs(t *testing.T) {
	levels(t, func(t *testing.T, level sandbox.Level) {
		c := limited(t, level, sandbox.Limits{CPUs: 0.5},
			`for i in 1 2; do timeout 1 sh -c 'while :; do :; done' & done; wait; times`)
		r, out := ran(t, c)
		lines := strings.Fields(out) // own user, own system, children's user, children's system
		assert.Equal(t, len(lines), 4, out)
		var used time.Duration
		for _, l := range lines {
			d, err := time.ParseDuration(l)
			assert.NilError(t, err)
			used += d
		}
		// A period's quota more: the last one may not be over.
		assert.Assert(t, used > 0 && used < r.Duration/2+100*time.Millisecond, "%v of CPU in %v", used, r.Duration)
	})
}

// TestNoFile: the limit is there from the first instant, hard and soft, and the
// helper works under it. One below what the helper needs comes at once.
func TestNoFile(t *testing.T) {
	levels(t, func(t *testing.T, level sandbox.Level) {
		const show = `ulimit -Sn; ulimit -Hn`
		for n, script := range map[int]string{8: `sleep 0.2; ` + show, 32: show, 64: show, 200: show} {
			r, out := ran(t, limited(t, level, sandbox.Limits{NoFile: n}, script))
			assert.Equal(t, r.ExitCode, 0)
			assert.Equal(t, out, strings.Repeat(strconv.Itoa(n)+"\n", 2))
		}
	})
}

func TestNoFileAboveHardLimit(t *testing.T) {
	l := sandbox.Limits{NoFile: 1 << 30}
	err := sandbox.CheckLimits(sandbox.LevelNamespaces, l)
	assert.ErrorContains(t, err, "nofile 1073741824 cannot be enforced: the hard limit is ")
	l.BestEffort = true
	assert.NilError(t, sandbox.CheckLimits(sandbox.LevelNamespaces, l))
}

// TestDiskFull: whoever writes, wherever it counts, is ended.
func TestDiskFull(t *testing.T) {
	const limit = 50 << 20
	cases := []struct {
		name, script string
		overlay      bool // the tree is one
		outside      bool // what is written is not in the tree: there are namespaces
		long         bool
	}{
		{name: "tree", script: `exec dd if=/dev/zero of=big bs=1M count=10240 status=none`},
		{name: "overlay", script: `exec dd if=/dev/zero of=big bs=1M count=10240 status=none`, overlay: true},
		{name: "many", script: `i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero >f$i || exit; done`, long: true},
		{name: "detached", script: `setsid sh -c 'trap "" TERM; dd if=/dev/zero of=big bs=1M count=10240 status=none' & wait`},
		{name: "politely", script: `trap 'exit 0' TERM; dd if=/dev/zero of=big bs=1M count=10240 status=none & wait`},
		{name: "brief", script: `dd if=/dev/zero of=big bs=1M count=60 status=none`, long: true},
		{name: "brief overlay", script: `dd if=/dev/zero of=big bs=1M count=60 status=none`, overlay: true},
		{name: "tmp", script: `exec dd if=/dev/zero of=/tmp/big bs=1M count=10240 status=none`, outside: true},
		{name: "home", script: `exec dd if=/dev/zero of=$HOME/big bs=1M count=10240 status=none`, outside: true, long: true},
	}
	levels(t, func(t *testing.T, level sandbox.Level) {
		for _, test := range cases {
			if level == sandbox.LevelProcess && (test.overlay || test.outside) || test.long && !envtest.Long() {
				continue
			}
			t.Run(test.name, func(t *testing.T) {
				c := limited(t, level, sandbox.Limits{Disk: limit}, test.script)
				c.Env = append(c.Env, "HOME="+c.View.HomeDir)
				// What was there before does not count.
				assert.NilError(t, os.WriteFile(filepath.Join(c.View.Tree.Dir, "before"), make([]byte, limit), 0o644))
				if test.overlay {
					layer(t, &c)
				}
				r, out := ran(t, c)
				assert.Equal(t, r.Limit, "disk full (limit 50MiB)", "%+v\n%s", r, out)
				assert.Assert(t, r.ExitCode != 0)
				if big, err := os.Stat(filepath.Join(c.View.Tree.Dir, "big")); err == nil {
					t.Logf("ended after %v, with %d MiB", r.Duration, big.Size()>>20)
				}
			})
		}
		t.Run("enough", func(t *testing.T) {
			c := limited(t, level, sandbox.Limits{Disk: limit},
				`head -c 30000000 /dev/zero >a; ln a b; truncate -s 1G hole; sleep 0.2; rm -f a b; head -c 30000000 /dev/zero >c; sleep 0.2`)
			r, out := ran(t, c)
			assert.Equal(t, r.ExitCode, 0, out)
			assert.Equal(t, r.Limit, "")
		})
	})
}

// TestKilledLeavesNoCgroup: what a killed agentenv left goes at the next command.
func TestKilledLeavesNoCgroup(t *testing.T) {
	if dir := os.Getenv("SANDBOX_CGROUP"); dir != "" {
		c := scene(t, dir, sandbox.LevelNamespaces)
		c.Limits = sandbox.Limits{PIDs: 100}
		c.Args, c.Stdout = []string{"sh", "-c", "cat /proc/self/cgroup; echo; sleep 1000"}, os.Stdout
		_, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
		assert.NilError(t, err)
		select {}
	}
	if !cgroupsHave("pids") || sandbox.Probe(sandbox.LevelNamespaces) != nil {
		t.Skip("there are no cgroups, or no namespaces, here")
	}
	envtest.Census(t)
	self := func(test, env string) *exec.Cmd {
		cmd := exec.Command("/proc/self/exe", "-test.run", "^"+test+"$")
		cmd.Env = append(os.Environ(), env)
		return cmd
	}
	victim := self(t.Name(), "SANDBOX_CGROUP="+scratchHome(t))
	out, err := victim.StdoutPipe()
	assert.NilError(t, err)
	assert.NilError(t, victim.Start())
	name := ""
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != ""; {
		if base := filepath.Base(lines.Text()); strings.HasPrefix(base, "agentenv-") {
			name = base
		}
	}
	assert.Assert(t, name != "" && len(cgroupsCalled(t, name)) > 0, name)
	assert.NilError(t, victim.Process.Kill())
	_ = victim.Wait() // it was killed
	end := time.Now().Add(10 * time.Second)
	for len(cgroupsCalled(t, name)) > 0 && time.Now().Before(end) {
		// The processes are gone a moment after it.
		assert.NilError(t, self("TestProbeCgroups", "").Run())
	}
	assert.Equal(t, len(cgroupsCalled(t, name)), 0)
}

// cgroupsCalled finds the cgroups of a name.
func cgroupsCalled(t *testing.T, name string) []string {
	t.Helper()
	var found []string
	mounts, err := os.ReadFile("/proc/self/mounts")
	assert.NilError(t, err)
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if !strings.HasPrefix(f[2], "cgroup") {
			continue
		}
		err := filepath.WalkDir(f[1], func(path string, e os.DirEntry, err error) error {
			if err == nil && e.Name() == name {
				found = append(found, path)
			}
			return nil
		})
		assert.NilError(t, err)
	}
	return found
}

// TestLimitsOfUser: who has no cgroups is told so before the start, or runs
// with what there is and is told what is missing.
func TestLimitsOfUser(t *testing.T) {
	if os.Geteuid() == 0 && os.Getenv("SANDBOX_NAMESPACE") == "" {
		t.Run("user", func(t *testing.T) {
			as(t, ordinaryUser(), "^(TestLimitsOfUser|TestTooManyProcesses|TestNoFile)$")
			as(t, ordinaryUser(), "^TestDiskFull$/^namespaces$/^(overlay|tmp)$")
		})
		t.Run("namespace", func(t *testing.T) {
			as(t, inNamespace("SANDBOX_NAMESPACE=1"), "^(TestLimitsOfUser|TestTooManyProcesses|TestNoFile)$")
		})
		return
	}
	if cgroupsHave("memory") {
		t.Skip("this user has cgroups")
	}
	levels(t, func(t *testing.T, level sandbox.Level) {
		c := scene(t, scratchHome(t), level)
		c.Limits = sandbox.Limits{CPUs: 1, Memory: 1 << 30}
		c.Args = []string{"true"}
		_, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
		var e *sandbox.Error
		assert.Assert(t, errors.As(err, &e), "%v", err)
		assert.Equal(t, e.What, "limits")
		t.Log(err)
		for _, part := range []string{"memory 1GiB cannot be enforced: ", "cpus 1 cannot be enforced: ", "limits.enforce: best-effort"} {
			assert.ErrorContains(t, err, part)
		}
		var n notices
		c.Limits.BestEffort = true
		p, err := sandbox.New(sandbox.Options{Notice: n.add}).Start(context.Background(), c)
		assert.NilError(t, err)
		r, err := p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, r.ExitCode, 0)
		said := strings.Join(n.all(), "\n")
		assert.Assert(t, strings.Contains(said, "memory 1GiB cannot be enforced") && strings.Contains(said, "cpus 1"), said)
	})
}

// TestNoFileRaised: the machine's root may have more than his own hard limit.
func TestNoFileRaised(t *testing.T) {
	var was unix.Rlimit
	assert.NilError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
	l := sandbox.Limits{NoFile: 5000}
	lower := unix.Rlimit{Cur: 4000, Max: 4000}
	if !capable(unix.CAP_SYS_RESOURCE) || was.Max <= lower.Max {
		t.Skip("needs CAP_SYS_RESOURCE, and a limit that can be lowered")
	}
	assert.NilError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &lower))
	defer func() { assert.NilError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) }()
	levels(t, func(t *testing.T, level sandbox.Level) {
		_, out := ran(t, limited(t, level, l, `ulimit -Sn; ulimit -Hn`))
		assert.Equal(t, out, "5000\n5000\n")
	})
}

func capable(c int) bool {
	var data [2]unix.CapUserData
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<c) != 0
}
