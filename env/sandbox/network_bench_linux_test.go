package sandbox_test

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// BenchmarkNetwork compares a command that does nothing in the host's network with
// one in its own, one after the other, and reports the medians and what the
// network takes until the command is started. The bar is 1 ms.
func BenchmarkNetwork(b *testing.B) {
	s := sandbox.New(sandbox.Options{})
	c := scene(b, b.TempDir(), sandbox.LevelNamespaces)
	c.Args, c.View.Home = []string{"true"}, sandbox.HomePrivate
	took := map[sandbox.Network][]time.Duration{}
	for b.Loop() {
		for _, n := range []sandbox.Network{sandbox.NetworkHost, sandbox.NetworkPrivate} {
			c.Network = n
			began := time.Now()
			p, err := s.Start(context.Background(), c)
			assert.NilError(b, err)
			took[n] = append(took[n], time.Since(began))
			_, err = p.Wait()
			assert.NilError(b, err)
			assert.NilError(b, sandbox.RemoveScratch(c.View.Scratch))
			assert.NilError(b, os.Mkdir(c.View.Scratch, 0o755))
		}
	}
	ms := func(n sandbox.Network) float64 {
		slices.Sort(took[n])
		return float64(took[n][len(took[n])/2].Microseconds()) / 1000
	}
	b.ReportMetric(ms(sandbox.NetworkHost), "host-ms")
	b.ReportMetric(ms(sandbox.NetworkPrivate), "private-ms")
	b.ReportMetric(ms(sandbox.NetworkPrivate)-ms(sandbox.NetworkHost), "difference-ms")
}
