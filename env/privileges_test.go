package env_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
)

// setuidScript makes programs of which five have more rights than who runs them.
const setuidScript = `for f in s1 s2 s3 s4 g plain; do printf x >$f; chmod 755 $f; done; chmod u+s s?; chmod g+s g
printf x >lock; chmod 2644 lock; mkdir -p sgid; chmod 2755 sgid; `

// told returns the lines that warn of new setuid programs, and forgets them.
func told(said *[]string) []string {
	lines := slices.DeleteFunc(slices.Clone(*said), func(l string) bool { return !strings.Contains(l, "setuid") })
	*said = nil
	return lines
}

// TestPrivilegesInPlace: who may become root by a file that a command, or a
// winner, left in the user's directory is told.
func TestPrivilegesInPlace(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	p := newPlace(t, t.TempDir(), optionsFor("copy"))
	run := func(script string) {
		t.Helper()
		p.with(func(e *env.Env) {
			res, err := e.Exec(t.Context(), shellRun(e, script), false, func(sandbox.Process) {})
			assert.NilError(t, err)
			assert.Equal(t, res.ExitCode, 0)
		})
	}
	want := "setuid, setgid or file capabilities, which count on the host too, are new in " + p.dir + ": "
	run(setuidScript)
	assert.DeepEqual(t, told(&p.said), []string{want + `"g", "s1", "s2" and 2 more`})
	run("printf y >s1; chmod 4755 s1; rm s2; chmod -s s3") // none is new
	assert.Equal(t, len(told(&p.said)), 0)
	assert.NilError(t, os.Chmod(p.dir+"/plain", 0o755|os.ModeSetuid)) // the user himself
	p.commit("mine")
	assert.Equal(t, len(told(&p.said)), 0)
	p.with(func(e *env.Env) {
		_, _, err := e.Promote(t.Context(), frozenBy(t, e, "chmod u+s s3"), "it won")
		assert.NilError(t, err)
	})
	assert.DeepEqual(t, told(&p.said), []string{want + `"s3"`})
}

// TestPrivilegesApplied: and who applies such files.
func TestPrivilegesApplied(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	var said []string
	o := optionsFor("copy")
	o.Notify = func(line string) { said = append(said, line) }
	s := newScene(t, t.TempDir(), o)
	s.exec(t, setuidScript)
	assert.Equal(t, len(told(&said)), 0) // nobody reaches them in the store
	apply := func(opts env.ApplyOptions) {
		t.Helper()
		s.with(t, func(ctx context.Context, e *env.Env) {
			_, err := e.Apply(ctx, "HEAD", opts)
			assert.NilError(t, err)
		})
	}
	apply(env.ApplyOptions{Check: true})
	assert.Equal(t, len(told(&said)), 0)
	apply(env.ApplyOptions{})
	st, err := os.Stat(filepath.Join(s.src, "s1"))
	assert.NilError(t, err)
	assert.Assert(t, st.Mode()&os.ModeSetuid != 0)
	lines := told(&said)
	assert.Assert(t, len(lines) == 1 && strings.HasSuffix(lines[0], s.src+`: "g", "s1", "s2" and 2 more`), "%q", lines)
	s.exec(t, "echo z >plain")
	apply(env.ApplyOptions{})
	assert.Equal(t, len(told(&said)), 0)
}
