package runner

import (
	"strconv"
	"strings"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// A process that left its session, its directory and its environment behind is
// still found and named, as what the run left over.
func TestLeakerIsNamed(t *testing.T) {
	envtest.Census(t)
	w := newWorld(t, map[string]string{"f": "x"}, plainExecutor{})
	r, err := Run(t.Context(), w.options(newPlan("true",
		`cd /; env -i /usr/bin/setsid -f /bin/sleep 1000 >/dev/null 2>&1 </dev/null; sleep 0.1`)))
	assert.NilError(t, err)
	left := sandbox.Strays()
	for _, pid := range left {
		assert.NilError(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	assert.Equal(t, len(left), 1)
	assert.Equal(t, r.Leaks.Processes, 1, "%v", r.Leaks.Names)
	assert.Equal(t, strings.Join(r.Leaks.Names, "\n"), "process "+strconv.Itoa(left[0])+" (sleep)")
}
