package sandbox_test

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// BenchmarkStart compares a command that does nothing with a bwrap that makes
// the same namespaces and mounts, one after the other, and reports the medians
// and their ratio. The bar is 2.
func BenchmarkStart(b *testing.B) {
	dir := b.TempDir()
	for _, d := range []string{"tree", "scratch"} {
		assert.NilError(b, os.Mkdir(dir+"/"+d, 0o755))
	}
	home, err := os.UserHomeDir()
	assert.NilError(b, err)
	c := sandbox.Command{
		Level: sandbox.LevelNamespaces, Args: []string{"true"}, Env: os.Environ(),
		View: sandbox.View{Tree: forks.Mount{Dir: dir + "/tree"}, At: "/mnt", Scratch: dir + "/scratch", Home: sandbox.HomePrivate, HomeDir: home},
	}
	args := []string{"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
		"--tmpfs", "/tmp", "--tmpfs", "/var/tmp", "--tmpfs", "/run", "--tmpfs", "/dev/shm", "--tmpfs", home, "--bind", dir + "/tree", "/mnt", "true"}
	if _, err := exec.LookPath("bwrap"); err != nil {
		b.Skip("bwrap is not installed")
	}
	s := sandbox.New(sandbox.Options{})
	var ours, theirs []time.Duration
	for b.Loop() {
		began := time.Now()
		p, err := s.Start(context.Background(), c)
		assert.NilError(b, err)
		_, err = p.Wait()
		assert.NilError(b, err)
		ours = append(ours, time.Since(began))
		assert.NilError(b, sandbox.RemoveScratch(c.View.Scratch))
		assert.NilError(b, os.Mkdir(c.View.Scratch, 0o755))
		began = time.Now()
		assert.NilError(b, exec.Command("bwrap", args...).Run())
		theirs = append(theirs, time.Since(began))
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	us, them := ours[len(ours)/2], theirs[len(theirs)/2]
	b.ReportMetric(float64(us.Microseconds())/1000, "ms")
	b.ReportMetric(float64(them.Microseconds())/1000, "bwrap-ms")
	b.ReportMetric(float64(us)/float64(them), "ratio")
}
