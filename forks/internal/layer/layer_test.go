//go:build linux

package layer

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

// build makes a state from paths; a value of "-" is removed, "/" a directory,
// "~" a directory passed through, "=" an opaque one, anything else a file with
// that mtime.
func build(t interface {
	Helper()
	Fatal(...any)
}, layer forks.ID, paths map[string]string) *State {
	t.Helper()
	b := NewBuilder(len(paths)+1, layer)
	at := map[string]uint32{".": b.Add(0, "", Node{Mode: unix.S_IFDIR | 0o755, Layer: NoLayer}, nil)}
	names := slices.SortedFunc(maps.Keys(paths), func(x, y string) int {
		return slices.Compare(strings.Split(x, "/"), strings.Split(y, "/"))
	})
	for _, p := range names {
		n := Node{Mode: unix.S_IFDIR | 0o755, Layer: NoLayer}
		switch v := paths[p]; v {
		case "-":
			n = Node{Flags: Removed, Layer: NoLayer}
		case "/":
		case "~":
			n = Node{Mode: unix.S_IFDIR, Flags: Through, Layer: NoLayer}
		case "=":
			n.Flags = Opaque
		default:
			n = Node{Mode: unix.S_IFREG | 0o644, MtimeNsec: uint32(v[0])}
		}
		at[p] = b.Add(at[dirOf(p)], baseOf(p), n, EncodeExtra("", []Xattr{{Name: "user.p", Value: p}}))
	}
	s, err := b.State()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// show is the reverse of build for whole states.
func show(s *State) map[string]string {
	m := map[string]string{}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		v := "/"
		if n.IsReg() {
			v = string(rune(n.MtimeNsec)) + string(s.LayerOf(uint32(i)))
		}
		m[s.Path(uint32(i))] = v
	}
	return m
}

func TestMerge(t *testing.T) {
	base := build(t, "0", map[string]string{"a": "1", "d": "/", "d/x": "1", "d/y": "1", "e": "/", "e/z": "1", "f": "1"})
	one := build(t, "1", map[string]string{"a": "-", "d": "~", "d/x": "2", "d/n": "2", "e": "-", "f": "/", "f/g": "2"})
	two := build(t, "2", map[string]string{"a": "3", "d": "~", "d/n": "-", "e": "/", "e/new": "3", "f": "3"})
	want := map[string]string{".": "/", "a": "32", "d": "/", "d/x": "21", "d/y": "10", "e": "/", "e/new": "32", "f": "32"}
	whole, err := Fold([]*State{base, one, two})
	assert.NilError(t, err)
	assert.DeepEqual(t, show(whole), want)
	step, err := Merge(base, one, true)
	assert.NilError(t, err)
	step, err = Merge(step, two, true)
	assert.NilError(t, err)
	assert.DeepEqual(t, show(step), want)
	bad := build(t, "3", map[string]string{"gone": "~", "gone/x": "1"})
	_, err = Merge(base, bad, true)
	assert.ErrorIs(t, err, forks.ErrDamaged)
}

// Folding a chain in pairs gives what applying one difference after the other
// gives, whatever the differences are.
func TestFoldOrder(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		chain := []*State{build(t, "0", map[string]string{"a": "/", "a/a": "1", "b": "1"})}
		step := chain[0]
		for i := range rapid.IntRange(1, 7).Draw(r, "length") {
			delta := randomDelta(r, step, forks.ID(fmt.Sprint(i+1)))
			chain = append(chain, delta)
			var err error
			step, err = Merge(step, delta, true)
			assert.NilError(r, err)
		}
		folded, err := Fold(chain)
		assert.NilError(r, err)
		if a, b := show(folded), show(step); !maps.Equal(a, b) {
			r.Fatalf("folded %v, step by step %v", a, b)
		}
	})
}

// randomDelta changes one directory of s at random.
func randomDelta(r *rapid.T, s *State, id forks.ID) *State {
	paths := map[string]string{}
	have := show(s)
	for _, top := range []string{"a", "b"} {
		kinds := []string{"", "2", "/"}
		if have[top] != "" {
			kinds = append(kinds, "-")
		}
		if have[top] == "/" {
			kinds = append(kinds, "~")
		}
		kind := rapid.SampledFrom(kinds).Draw(r, top)
		if kind == "" {
			continue
		}
		paths[top] = kind
		for _, sub := range []string{"a", "b"} {
			if kind != "/" && kind != "~" {
				continue
			}
			p := top + "/" + sub
			switch v := rapid.SampledFrom([]string{"", "3", "-"}).Draw(r, p); {
			case v == "" || v == "-" && have[p] == "":
			default:
				paths[p] = v
			}
		}
	}
	return build(r, id, paths)
}

func TestRecord(t *testing.T) {
	s := build(t, "ab", map[string]string{"a": "1", "d": "~", "d/x": "-", "d/y": "=", "d/y/z": "9"})
	s.Nodes[1].MtimeSec, s.Nodes[1].UID, s.Nodes[1].GID, s.Nodes[1].Size = -1e9, 3e9, 4e9, 9<<40
	b := EncodeRecord(Header{ID: "ab", Base: "cd"}, s)
	h, got, err := DecodeRecord(b)
	assert.NilError(t, err)
	assert.Equal(t, h, Header{ID: "ab", Base: "cd"})
	assert.DeepEqual(t, show(got), show(s))
	assert.Assert(t, SameMeta(s, 1, got, 1))
	assert.Assert(t, bytes.Equal(EncodeRecord(h, got), b))
	short, err := DecodeHeader(b[:min(len(b), headerSize)])
	assert.NilError(t, err)
	assert.Equal(t, short, h)
	for range 2000 {
		bad := bytes.Clone(b)
		bad[rand.IntN(len(bad))] ^= 1 << rand.IntN(8)
		_, _, err := DecodeRecord(bad)
		assert.Assert(t, err != nil)
		_, _, err = DecodeRecord(b[:rand.IntN(len(b))])
		assert.Assert(t, err != nil)
	}
}

// FuzzRecord: whatever the bytes, decoding ends, with an error or a tree.
func FuzzRecord(f *testing.F) {
	f.Add([]byte{0, 0, 0})
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, body []byte) {
		s := &State{Nodes: make([]Node, 8), heap: body}
		if s.decodeNodes(&reader{buf: body}) == nil {
			show(s)
		}
	})
}

func TestIndex(t *testing.T) {
	s := build(t, "ab", map[string]string{"a": "1", "d": "/", "d/x": "2"})
	path := filepath.Join(t.TempDir(), "index")
	assert.NilError(t, SaveIndex(path, "ab", s))
	base, got, err := LoadIndex(path)
	assert.NilError(t, err)
	assert.Equal(t, base, forks.ID("ab"))
	assert.DeepEqual(t, show(got), show(s))
}

// big is a state of n files, 100 to a directory.
func big(t *testing.B, n int) *State {
	paths := map[string]string{}
	for i := range n {
		d := fmt.Sprintf("d%04d", i/100)
		paths[d] = "/"
		paths[fmt.Sprintf("%s/file%02d.go", d, i%100)] = "1"
	}
	return build(t, "ab", paths)
}

func BenchmarkDecodeRecord100k(b *testing.B) {
	record := EncodeRecord(Header{ID: "ab"}, big(b, 100000))
	b.SetBytes(int64(len(record)))
	for b.Loop() {
		_, _, err := DecodeRecord(record)
		assert.NilError(b, err)
	}
}

func BenchmarkIndex100k(b *testing.B) {
	s := big(b, 100000)
	for i := 0; b.Loop(); i++ {
		path := filepath.Join(b.TempDir(), fmt.Sprint(i))
		assert.NilError(b, SaveIndex(path, "ab", s))
		_, _, err := LoadIndex(path)
		assert.NilError(b, err)
	}
}
