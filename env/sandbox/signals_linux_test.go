package sandbox_test

import (
	"bytes"
	"context"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/envtest"
	"github.com/agentenv/agentenv/env/sandbox"
)

// No signal that a Go program can catch, sent from inside, ends or stops the helper, and
// the command inherits none of its dispositions: nothing is ignored.
func TestSignalsToHelper(t *testing.T) {
	envtest.Census(t)
	script := `i=1; while [ $i -lt 65 ]; do case $i in 9|19|32|33|34) ;; *) kill -$i $PPID;; esac; i=$((i+1)); done
grep -E '^Sig(Ign|Blk):' /proc/self/status; exit 7`
	for _, level := range []sandbox.Level{sandbox.LevelNamespaces, sandbox.LevelProcess} {
		t.Run(string(level), func(t *testing.T) {
			if err := sandbox.Probe(level); err != nil {
				t.Skip(err)
			}
			c := scene(t, scratchHome(t), level)
			var out bytes.Buffer
			c.Args, c.Stdout, c.Stderr = []string{"bash", "-c", script}, &out, &out
			p, err := sandbox.New(sandbox.Options{}).Start(context.Background(), c)
			assert.NilError(t, err)
			res, err := p.Wait()
			assert.NilError(t, err)
			assert.Equal(t, res.ExitCode, 7, "%+v %s", res, out.String())
			assert.Equal(t, out.String(), "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n")
		})
	}
}

func TestSignalsToHelperAsUser(t *testing.T) { as(t, ordinaryUser(), "^TestSignalsToHelper$") }

func TestSignalsToHelperInUserNamespace(t *testing.T) { as(t, inNamespace(), "^TestSignalsToHelper$") }
