package env_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// TestMakingRoomWithoutAny: on a file system without any room, what makes room
// works.
func TestMakingRoomWithoutAny(t *testing.T) {
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	ways := map[string]func(ctx context.Context, o env.Options, root string, ref env.ID) error{
		"delete": func(ctx context.Context, o env.Options, root string, ref env.ID) error {
			e, err := env.Lock(ctx, root, "delete", o)
			if err != nil {
				return err
			}
			_, err = e.Delete(ctx, string(ref))
			return closing(e, err)
		},
		"checkout --discard": func(ctx context.Context, o env.Options, root string, ref env.ID) error {
			e, err := env.Lock(ctx, root, "checkout --discard", o)
			if err != nil {
				return err
			}
			_, err = e.Checkout(ctx, "HEAD", true)
			return closing(e, err)
		},
		"delete --all": func(ctx context.Context, o env.Options, root string, ref env.ID) error {
			_, err := env.DeleteAll(ctx, root, o)
			return err
		},
	}
	for _, b := range []string{"overlay", "copy"} {
		t.Run(b, func(t *testing.T) {
			dir := forkstest.SmallVolume(t, "ext4", "48m")
			o := optionsFor(b)
			if p := probeOf(b, dir); !p.OK {
				t.Skipf("%s does not work here: %s", b, p.Detail)
			}
			t.Cleanup(func() { unmountBelow(t, dir) })
			for name, way := range ways {
				s := newScene(t, filepath.Join(dir, strings.ReplaceAll(name, " ", "")), o)
				reserve := filepath.Join(s.root, "agentenv.reserve")
				st, err := os.Stat(reserve)
				assert.NilError(t, err)
				assert.Assert(t, st.Sys() != nil && st.Size() == 1<<20)
				big := s.exec(t, "head -c 3000000 /dev/urandom >big")
				s.exec(t, "rm big")
				s.with(t, func(ctx context.Context, e *env.Env) {
					_, err := e.Checkout(ctx, string(s.base), true)
					assert.NilError(t, err)
					_, err = e.Exec(ctx, shellRun(e, "head -c 3000000 /dev/urandom >big"), true, func(sandbox.Process) {})
					assert.NilError(t, err)
				})
				filler := filepath.Join(dir, "filler")
				fillUp(t, filler)
				err = way(context.Background(), o, s.root, big)
				assert.NilError(t, err, name)
				assert.NilError(t, os.Remove(filler))
				unix.Sync()
				if name == "delete --all" {
					assert.Assert(t, !exists(s.root))
					continue
				}
				s.with(t, func(_ context.Context, e *env.Env) { nothingLeft(t, e) })
				assert.Assert(t, exists(reserve), "the reserve is not made anew")
				_, err = env.DeleteAll(context.Background(), s.root, o)
				assert.NilError(t, err)
			}
		})
	}
}
