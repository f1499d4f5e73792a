//go:build linux

package forkstest

import (
	"fmt"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// testRemoveSnapshot: what others build upon stays until the last of them goes.
func testRemoveSnapshot(w *world) {
	a, work := w.work(map[string]string{"f": "1", "g": "1"})
	var ids []forks.ID
	var trees []Manifest
	for i := range 6 {
		work.sh(fmt.Sprintf("echo %d >>f; touch new%d", i, i))
		trees = append(trees, work.read())
		ids = append(ids, w.commit(forks.Work))
	}
	assert.NilError(w, w.d.RemoveSnapshot(w.ctx, a))
	for _, i := range []int{0, 2, 4} {
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, ids[i]))
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, ids[i]))
	}
	left, err := w.d.Snapshots(w.ctx)
	assert.NilError(w, err)
	assert.DeepEqual(w, left, []forks.ID{ids[1], ids[3], ids[5]})
	_, err = w.d.View(w.ctx, ids[0])
	assert.ErrorIs(w, err, forks.ErrNotFound)
	for _, i := range []int{1, 3, 5, 1} {
		w.checkout(forks.Work, ids[i])
		Equal(w, work.read(), trees[i])
	}
	w.open()
	for _, i := range []int{5, 3, 1} {
		assert.NilError(w, w.d.RemoveSnapshot(w.ctx, ids[i]))
	}
	w.clean(forks.Work) // its base is still there for it
	work.sh(`echo more >>g`)
	assert.DeepEqual(w, w.status(forks.Work), []string{"modified g"})
	assert.NilError(w, w.d.RemoveFork(w.ctx, forks.Work))
	w.empty()
}
