//go:build linux

package forkstest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// sights numbers the places where trees are shown, in all processes of a test.
var sights atomic.Int64

// show makes the tree of a fork visible: where it stands, or mounted in a new
// directory below top, in use until hide is called.
func show(ctx context.Context, d forks.Driver, key forks.Key, top string) (dir string, hide func() error, err error) {
	t, err := d.Tree(key)
	if err != nil {
		return "", nil, err
	}
	if t.Mount.Overlay == nil {
		return t.Mount.Dir, func() error { return nil }, nil
	}
	_, release, err := d.Use(ctx, key)
	if err != nil {
		return "", nil, err
	}
	if t, err = d.Tree(key); err == nil { // as it is now that nobody else changes it
		dir = filepath.Join(top, fmt.Sprintf("%d-%d", os.Getpid(), sights.Add(1)))
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = order{At: dir, Mount: &t.Mount}.give()
	}
	if err != nil {
		release()
		return "", nil, err
	}
	return dir, func() error {
		err := order{At: dir}.give()
		release()
		return errors.Join(err, os.Remove(dir))
	}, nil
}

// hideAll takes down what processes that were killed had mounted below top.
func hideAll(top string) error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], top+"/") {
			err = errors.Join(err, order{At: f[4]}.give())
		}
	}
	return err
}

// tree is a fork as the tests see it.
type tree struct {
	w    *world
	key  forks.Key
	kept string // where it is shown until left, if it is
	hide func() error
}

// seen is the directory where trees are mounted.
func (w *world) seen() string { return filepath.Join(w.dir, "seen") }

func (t *tree) show() (dir string, hide func() error) {
	t.w.Helper()
	dir, hide, err := show(t.w.ctx, t.w.d, t.key, t.w.seen())
	if errors.Is(err, errNoMounter) {
		t.w.Skip(err)
	}
	assert.NilError(t.w, err)
	return dir, hide
}

// in shows the tree while fn runs.
func (t *tree) in(fn func(dir string)) {
	t.w.Helper()
	if t.kept != "" {
		fn(t.kept)
		return
	}
	dir, hide := t.show()
	defer func() { assert.NilError(t.w, hide()) }()
	fn(dir)
}

// keep shows the tree until leave is called, over commits too.
func (t *tree) keep() string {
	t.w.Helper()
	assert.Equal(t.w, t.kept, "")
	t.kept, t.hide = t.show()
	t.w.Cleanup(func() {
		if t.kept != "" {
			t.leave()
		}
	})
	return t.kept
}

func (t *tree) leave() {
	t.w.Helper()
	t.kept = ""
	assert.NilError(t.w, t.hide())
}

// sh runs a script in the tree.
func (t *tree) sh(script string) (out string) {
	t.w.Helper()
	t.in(func(dir string) { out = shell(t.w, dir, script) })
	return out
}

func (t *tree) read() (m Manifest) {
	t.w.Helper()
	t.in(func(dir string) { m = Read(t.w, dir) })
	return m
}

// mounted says whether the tree is one that has to be mounted.
func (t *tree) mounted() bool {
	t.w.Helper()
	f, err := t.w.d.Tree(t.key)
	assert.NilError(t.w, err)
	return f.Mount.Overlay != nil
}
