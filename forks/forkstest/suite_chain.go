//go:build linux

package forkstest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// chainLength is more than twice the layers that one mount has before they are
// flattened.
const chainLength = 150

// testChain: a long line of snapshots, some of them taken while the tree stays
// visible; each is what it was, also when others have been removed.
func testChain(w *world) {
	r := rand.New(rand.NewPCG(3, 14))
	files := map[string]string{}
	for i := range 20 {
		files[fmt.Sprintf("d%d/s/f%d", i%3, i)] = fmt.Sprint("first ", i)
	}
	id, work := w.work(files)
	trees := map[forks.ID]Manifest{id: work.read()}
	stored := map[forks.ID]Manifest{id: w.stored(id)}
	ids := []forks.ID{id}
	for i := range chainLength {
		if i%20 == 5 {
			work.keep()
		}
		work.in(func(dir string) {
			chainEdit(w, r, dir, i)
			id = w.id()
			trees[id] = Read(w, dir)
		})
		c, err := w.d.Commit(w.ctx, forks.Work, id, nil)
		assert.NilError(w, err)
		assert.Assert(w, len(c.List) > 0)
		ids = append(ids, id)
		if i%5 == 0 {
			stored[id] = w.stored(id)
		}
		if i%20 == 15 {
			work.leave()
			Equal(w, work.read(), trees[id])
		}
	}
	if work.kept != "" {
		work.leave()
	}
	w.open()
	w.clean(forks.Work)
	check := func(ids []forks.ID) {
		for i, id := range ids {
			if stored[id] != nil {
				Equal(w, w.stored(id), stored[id])
			}
			if i%10 == 0 || i == len(ids)-1 {
				Equal(w, w.fork("check", id).read(), trees[id])
				assert.NilError(w, w.d.RemoveFork(w.ctx, "check"))
			}
		}
	}
	check(ids)
	var left []forks.ID
	for i, id := range ids {
		if i%7 == 0 || i == len(ids)-1 {
			left = append(left, id)
			continue
		}
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, id))
	}
	_, err := w.d.Sweep(w.ctx)
	assert.NilError(w, err)
	check(left)
	Equal(w, work.read(), trees[id])
}

// chainEdit makes a few changes: files and directories come, change and go.
func chainEdit(w *world, r *rand.Rand, dir string, i int) {
	path := func() string {
		return filepath.Join(dir, fmt.Sprintf("d%d", r.IntN(4)), []string{"s", "t"}[r.IntN(2)], fmt.Sprint("f", r.IntN(20)))
	}
	for range 2 {
		p := path()
		assert.NilError(w, os.MkdirAll(filepath.Dir(p), 0o755))
		_ = os.RemoveAll(p)
		assert.NilError(w, os.WriteFile(p, fmt.Append(nil, "at ", i), 0o644))
	}
	switch p := path(); r.IntN(5) {
	case 0:
		_ = os.RemoveAll(filepath.Dir(p))
	case 1:
		_ = os.RemoveAll(p)
		_ = os.MkdirAll(p, 0o750)
	case 2:
		_ = os.Chmod(p, 0o700)
	case 3:
		_ = os.Link(p, p+"-l")
	case 4:
		_ = unix.Rename(p, p+"-m")
	}
}
