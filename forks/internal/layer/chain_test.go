//go:build linux

package layer

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

// anyDelta changes s at random, three levels deep.
func anyDelta(r *rapid.T, s *State, id forks.ID) *State {
	have := show(s)
	paths := map[string]string{}
	var dir func(path string, depth int, fresh bool)
	dir = func(path string, depth int, fresh bool) {
		for _, name := range []string{"a", "b", "c"} {
			p := join(path, name)
			kinds := []string{"", "", "2"}
			if depth < 3 {
				kinds = append(kinds, "/", "=")
			}
			if have[p] != "" && !fresh {
				kinds = append(kinds, "-")
			}
			if have[p] == "/" && !fresh {
				kinds = append(kinds, "~", "~")
			}
			kind := rapid.SampledFrom(kinds).Draw(r, p)
			if kind == "" {
				continue
			}
			paths[p] = kind
			if kind == "/" || kind == "=" || kind == "~" {
				dir(p, depth+1, fresh || kind == "=" || have[p] != "/")
			}
		}
	}
	dir(".", 1, false)
	return build(r, id, paths)
}

// walk lists what a chain has, as show does for a state.
func walk(t interface {
	Helper()
	Fatal(...any)
}, c *chain) map[string]string {
	m := map[string]string{}
	var dir func(s spot, path string)
	dir = func(s spot, path string) {
		names, err := c.names(s)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			k, _, err := c.child(s, n)
			if err != nil {
				t.Fatal(err)
			}
			p := join(path, n)
			m[p] = "/"
			if k.node.IsDir() {
				dir(k, p)
				continue
			}
			m[p] = string(rune(k.node.MtimeNsec)) + string(c.ids[k.layer])
		}
	}
	top, err := c.root()
	if err != nil {
		t.Fatal(err)
	}
	m["."] = "/"
	dir(top, ".")
	return m
}

// Read path by path, a chain of layers is what it is when it is folded: also
// through lookup files, and flattened in part.
func TestChainIsState(t *testing.T) {
	dir := t.TempDir()
	files := 0
	rapid.Check(t, func(r *rapid.T) {
		whole := build(r, "0", map[string]string{"a": "/", "a/a": "1", "a/b": "/", "a/b/c": "1", "b": "1"})
		deltas := []*State{whole}
		for i := range rapid.IntRange(1, 6).Draw(r, "length") {
			delta := anyDelta(r, whole, forks.ID(fmt.Sprint(i+1)))
			deltas = append(deltas, delta)
			var err error
			whole, err = Merge(whole, delta, true)
			assert.NilError(r, err)
		}
		c := &chain{}
		for _, d := range slices.Backward(deltas) {
			c.ids = append(c.ids, d.Layers[0])
			if !rapid.Bool().Draw(r, "lookup") {
				c.tables = append(c.tables, stateTable{d})
				continue
			}
			files++
			path := filepath.Join(dir, fmt.Sprint(files))
			assert.NilError(r, writeLookup(path, d, 7))
			l, err := openLookup(path, d.Layers[0], 7)
			assert.NilError(r, err)
			c.tables = append(c.tables, l)
		}
		if a, b := walk(r, c), show(whole); !maps.Equal(a, b) {
			r.Fatalf("the chain has %v, the state %v", a, b)
		}
		for i := range whole.Nodes {
			p := whole.Path(uint32(i))
			s, ok, err := c.find(p)
			assert.NilError(r, err)
			assert.Assert(r, ok, p)
			extra, err := c.extra(s)
			assert.NilError(r, err)
			assert.DeepEqual(r, extra, whole.rawExtra(uint32(i)))
		}
	})
}

// Whatever is changed in a lookup file, it is an error or makes no difference.
func TestDamagedLookup(t *testing.T) {
	paths := map[string]string{}
	for i := range 40 {
		d := fmt.Sprintf("d%02d", i)
		paths[d] = "/"
		for j := range 40 {
			paths[fmt.Sprintf("%s/file%02d", d, j)] = "1"
		}
	}
	s := build(t, "ab", paths)
	path := filepath.Join(t.TempDir(), "lookup")
	assert.NilError(t, writeLookup(path, s, 7))
	good, err := os.ReadFile(path)
	assert.NilError(t, err)
	want := show(s)
	for i := range 300 {
		bad := slices.Clone(good)
		if i%3 == 0 {
			bad = bad[:rand.IntN(len(bad))]
		} else {
			bad[rand.IntN(len(bad))] ^= 1 << rand.IntN(8)
		}
		assert.NilError(t, os.WriteFile(path, bad, 0o600))
		l, err := openLookup(path, "ab", 7)
		if err != nil {
			continue
		}
		failed := &fatal{}
		func() {
			defer func() { _ = recover() }()
			c := &chain{ids: []forks.ID{"ab"}, tables: []table{l}}
			assert.Assert(t, maps.Equal(walk(failed, c), want))
		}()
		var bl *errLookup
		assert.Assert(t, failed.err == nil || errors.As(failed.err, &bl), "%v", failed.err)
	}
	_, err = openLookup(path, "ab", 8)
	assert.Assert(t, err != nil, "a lookup file of another record was taken")
}

// fatal keeps the error that a walk ends with.
type fatal struct{ err error }

func (f *fatal) Helper() {}

func (f *fatal) Fatal(args ...any) {
	f.err, _ = args[0].(error)
	panic(f)
}

// A lookup file that is damaged while it is in use is made anew.
func TestLookupMadeAnew(t *testing.T) {
	store := NewStore(t.TempDir())
	paths := map[string]string{}
	for i := range 3000 {
		paths[fmt.Sprintf("file%04d", i)] = "1"
	}
	s := build(t, "ab", paths)
	assert.NilError(t, store.makeDirs())
	assert.NilError(t, os.Mkdir(store.NodePath("ab"), 0o700))
	assert.NilError(t, os.WriteFile(filepath.Join(store.NodePath("ab"), "record"), EncodeRecord(Header{ID: "ab"}, s), 0o600))
	_, err := store.openChain("ab") // makes it
	assert.NilError(t, err)
	path := filepath.Join(store.NodePath("ab"), "lookup")
	b, err := os.ReadFile(path)
	assert.NilError(t, err)
	for i := len(b) / 2; i < len(b); i++ {
		b[i] ^= 1
	}
	assert.NilError(t, os.WriteFile(path, b, 0o600))
	store = NewStore(store.Dir)
	tries := 0
	assert.NilError(t, store.reading(func() error {
		tries++
		c, err := store.openChain("ab")
		if err != nil {
			return err
		}
		_, ok, err := c.find("file2999")
		assert.Assert(t, ok || err != nil)
		return err
	}))
	assert.Equal(t, tries, 2)
	now, err := os.ReadFile(path)
	assert.NilError(t, err)
	assert.Assert(t, string(now) != string(b))
	left, err := os.ReadDir(filepath.Join(store.Dir, "tmp"))
	assert.NilError(t, err)
	assert.Equal(t, len(left), 0)
}
