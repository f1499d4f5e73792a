package runner

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

// usage is what this process, and the store below root, has of things that could
// pile up.
type usage struct {
	descriptors, mounts, threads, goroutines int
	resident                                 int64 // bytes
}

func usageNow(t *testing.T, root string) usage {
	t.Helper()
	count := func(dir string) int {
		entries, err := os.ReadDir(dir)
		assert.NilError(t, err)
		return len(entries)
	}
	text := func(file string) string {
		data, err := os.ReadFile(file)
		assert.NilError(t, err)
		return string(data)
	}
	var pages int64
	for _, d := range strings.Fields(text("/proc/self/statm"))[1] {
		pages = 10*pages + int64(d-'0')
	}
	return usage{
		descriptors: count("/proc/self/fd"), mounts: strings.Count(text("/proc/self/mountinfo"), root),
		threads: count("/proc/self/task"), goroutines: runtime.NumGoroutine(),
		resident: pages * int64(os.Getpagesize()),
	}
}

// most is the larger of each.
func (u usage) most(v usage) usage {
	return usage{max(u.descriptors, v.descriptors), max(u.mounts, v.mounts), max(u.threads, v.threads),
		max(u.goroutines, v.goroutines), max(u.resident, v.resident)}
}

// TestManyAttempts: nothing of this process grows with the number of attempts.
func TestManyAttempts(t *testing.T) {
	attempts := 60
	if envtest.Long() {
		attempts = 500
	}
	for _, level := range []specs.Isolation{specs.Namespaces, specs.Process} {
		t.Run(string(level), func(t *testing.T) {
			if err := sandbox.Probe(sandbox.Level(level)); err != nil {
				t.Skip(err)
			}
			w := newWorld(t, map[string]string{"f": "x"}, sandbox.New(sandbox.Options{}))
			p := newPlan("false", "echo some output; (sleep 0.05 &); echo $AGENTENV_ATTEMPT >f")
			p.Isolation, p.Parallel, p.Candidates[0].Repeat = level, 16, attempts
			o := w.options(p)
			var mu sync.Mutex
			var early, late usage
			ended := 0
			o.Sinks = append(o.Sinks, func(e Event) {
				if e.Type != EventStatus {
					return
				}
				now := usageNow(t, w.root)
				mu.Lock()
				defer mu.Unlock()
				// The first fifth fills what is kept for good: buffers, idle threads.
				switch ended++; {
				case ended >= attempts/5 && ended < attempts*2/5:
					early = early.most(now)
				case ended >= attempts*4/5:
					late = late.most(now)
				}
			})
			r, err := Run(t.Context(), o)
			assert.NilError(t, err)
			assert.Equal(t, r.Count(Failed), attempts)
			w.checkResult(r)
			t.Logf("early %+v, late %+v", early, late)
			// Of 16 at once each may have more at one moment than at another.
			assert.Assert(t, late.descriptors <= early.descriptors+32, "descriptors")
			assert.Assert(t, late.goroutines <= early.goroutines+32, "goroutines")
			assert.Assert(t, late.threads <= early.threads+8, "threads")
			assert.Assert(t, late.mounts <= early.mounts, "mounts")
			assert.Assert(t, late.resident <= early.resident+8<<20, "resident memory")
		})
	}
}
