package env_test

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
)

// TestTrialIsNotSwept: the directory of a probe, which holds no lock of the
// environment, is not taken for a dead one's by the commands that do.
func TestTrialIsNotSwept(t *testing.T) {
	dir := t.TempDir()
	writeSource(t, dir+"/src")
	o, ctx, root := optionsFor("copy"), context.Background(), dir+"/root"
	e, err := env.Init(ctx, root, env.InitOptions{From: dir + "/src", NoWorkTree: true}, o)
	assert.NilError(t, err)
	assert.NilError(t, e.Close())
	stop := make(chan struct{})
	var others sync.WaitGroup
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			e, err := env.Lock(ctx, root, "test", o)
			if !assert.Check(t, err) {
				return
			}
			assert.Check(t, e.Close())
		}
	})
	trials := 0
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end) && !t.Failed(); trials++ {
		env.Trial(root, func(dir string) {
			assert.Check(t, os.Mkdir(dir+"/begun", 0o700))
			assert.Check(t, os.Remove(dir+"/begun"))
		})
	}
	close(stop)
	others.Wait()
	assert.Assert(t, trials > 0)
}
