//go:build linux

package forkstest

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
)

// testReplace: a directory that is not of the store becomes equal to a snapshot
// by content: its directories stay the same, files are exchanged, what is
// excluded is left alone; and Compare says what differs.
func testReplace(w *world) {
	src := w.src(nil)
	TrickyTree(w, src, false)
	a := w.capture(src)
	want := Read(w, src)
	target := filepath.Join(w.dir, "target")
	Write(w, target, map[string]string{"plain/was/a/dir": "x", "names": "a file", "extra/f": "x", "modes/ro/f": "other", "links/a/one": "kept open", "kept/f": "mine"})
	shell(w, target, `ln -s /nowhere big; mkfifo attr; chmod 555 extra`)
	inodes := `stat -c %i . modes modes/ro links links/a`
	before := shell(w, target, inodes)
	f, err := os.Open(filepath.Join(target, "links/a/one"))
	assert.NilError(w, err)
	defer f.Close()

	source := forks.Source{Dir: target, Exclude: []string{"kept"}, Index: filepath.Join(w.dir, "index")}
	differ, err := w.d.Compare(w.ctx, a, source)
	assert.NilError(w, err)
	c, err := w.d.Replace(w.ctx, a, source)
	assert.NilError(w, err)
	assert.DeepEqual(w, backwards(lines(differ)), lines(c))
	got := Read(w, target)
	assert.Assert(w, got["kept"] != "" && got["kept/f"] != "", "what is excluded is gone")
	delete(got, "kept")
	delete(got, "kept/f")
	Equal(w, got, want)
	assert.Equal(w, shell(w, target, inodes), before)
	open := make([]byte, 9)
	_, err = f.ReadAt(open, 0)
	assert.NilError(w, err)
	assert.Equal(w, string(open), "kept open")
	w.replaceAgain(a, source)
}

// replaceAgain changes what was replaced and takes it back and forth.
func (w *world) replaceAgain(a forks.ID, source forks.Source) {
	w.Helper()
	compare := func(id forks.ID, want ...string) {
		w.Helper()
		c, err := w.d.Compare(w.ctx, id, source)
		assert.NilError(w, err)
		assert.DeepEqual(w, strings.Join(lines(c), "\n"), strings.Join(want, "\n"))
	}
	compare(a)
	first := Read(w, source.Dir)
	shell(w, source.Dir, `t=$(stat -c %y .); printf PLAIN >plain; rm empty; mkdir empty; echo n >empty/n; touch -d @77 empty/n empty; touch -d "$t" .`)
	edited := Read(w, source.Dir)
	compare(a, "type empty", "added empty/n", "modified plain")
	b := w.id()
	_, err := w.d.Capture(w.ctx, b, a, source)
	assert.NilError(w, err)
	compare(b)
	for range 3 {
		for _, to := range []struct {
			id   forks.ID
			want Manifest
		}{{a, first}, {b, edited}} {
			c, err := w.d.Replace(w.ctx, to.id, source)
			assert.NilError(w, err)
			assert.Equal(w, len(c.List), 3, "%v", lines(c))
			Equal(w, Read(w, source.Dir), to.want)
			compare(to.id)
		}
		w.open()
	}
	// An index that is lost or of something else costs time, and nothing else.
	assert.NilError(w, os.WriteFile(source.Index, []byte("x"), 0o600))
	compare(b)
	assert.NilError(w, os.Remove(source.Index))
	compare(b)
}

// backwards turns what one state has against another around.
func backwards(l []string) []string {
	var back []string
	for _, s := range l {
		switch kind, path, _ := strings.Cut(s, " "); kind {
		case "added":
			back = append(back, "removed "+path)
		case "removed":
			back = append(back, "added "+path)
		default:
			back = append(back, s)
		}
	}
	return back
}
