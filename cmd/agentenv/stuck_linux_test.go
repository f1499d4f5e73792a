package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/runner"
)

// TestStuckCandidate: a candidate that hangs in the kernel is an error that names
// it, the others go on, and what it stands in goes with the next command after its
// end.
func TestStuckCandidate(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("freezing a file system needs root")
	}
	envtest.Census(t)
	p := newPerson(t, "root", 0)
	src := smallEnvironment(t, p)
	volume := newVolume(t, "ext4", "16M", "")
	dir, err := os.Open(volume)
	assert.NilError(t, err)
	defer dir.Close()
	const freezeFS, thawFS = 0xC0045877, 0xC0045878 // FIFREEZE, FITHAW
	assert.NilError(t, unix.IoctlSetInt(int(dir.Fd()), freezeFS, 0))
	thaw := func() error { return unix.IoctlSetInt(int(dir.Fd()), thawFS, 0) }
	defer thaw() // an error means that it is thawed
	began := time.Now()
	out, errs, code := p.run(t, src, "agentenv", "tournament", "--mount", volume+":/mnt:rw", "--timeout", "300ms", "--grace", "100ms",
		"--test", "true", "--", "exec dd if=/dev/zero of=/mnt/f count=1", "exit 1")
	assert.Equal(t, code, exitHarness, "%s%s", out, errs)
	assert.Assert(t, time.Since(began) < 15*time.Second)
	all := out + errs
	for _, part := range []string{"(dd) hangs in the kernel (state D", "c2  failed", "left over: 1 process,"} {
		assert.Assert(t, strings.Contains(all, part), "no %q in:\n%s", part, all)
	}
	assert.NilError(t, thaw())
	forks := filepath.Join(p.home, ".local/share/agentenv/*/forks/*")
	waitUntil(t, "nothing is left of it", func() bool {
		p.must(t, src, "agentenv", "commit")
		left, err := filepath.Glob(forks)
		assert.NilError(t, err)
		return len(left) == 0
	})
	assert.Equal(t, statuses(p.tournament(t, src, 0, "--test", "true", "--", "true"))["c1"], runner.Passed)
}
