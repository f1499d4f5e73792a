package subid

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"
)

// of is a kind of ids whose file has the given content.
func of(t *testing.T, content string) kind {
	k := uids
	k.file, k.own = filepath.Join(t.TempDir(), "subuid"), func() int { return 1000 }
	assert.NilError(t, os.WriteFile(k.file, []byte(content), 0o644))
	return k
}

func TestMine(t *testing.T) {
	me := caller()
	for content, want := range map[string][]Range{
		me + ":100000:65536\n": {{0, 1000, 1}, {1, 100000, 65536}},
		// Others' ranges, junk, one given twice and one with ourselves in it.
		"# x\nother:5:9\n" + me + ":200000:65000\n" + me + ":200000:65000\n" + me + ":1:5000\n" + me + ":300000:1000\n": {{0, 1000, 1}, {1, 200000, 65000}, {65001, 300000, 1000}},
	} {
		got, err := of(t, content).mine()
		assert.NilError(t, err)
		assert.DeepEqual(t, got, want)
	}
	for content, says := range map[string]string{
		"":                      "no ids: sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 ",
		"other:100000:65536\n":  "no ids: sudo usermod --add-subuids 165536-231071 ",
		me + ":100000:100\n":    "only 100 ids: sudo usermod --add-subuids 100100-165635 ",
		me + ":100000:\nfoo\n:": "no ids",
	} {
		_, err := of(t, content).mine()
		assert.ErrorContains(t, err, says)
	}
}

func TestCheck(t *testing.T) {
	me := caller()
	m := []Range{{0, 1000, 1}, {1, 100000, 65536}}
	assert.NilError(t, of(t, me+":90000:100000\n").check(m))
	assert.ErrorContains(t, of(t, me+":100000:65535\n").check(m), "sudo usermod --add-subuids 100000-165535 "+me)
	other := of(t, me+":100000:65536\n")
	other.own = func() int { return 1001 }
	assert.ErrorContains(t, other.check(m), "it is of the user with id 1000, and this is 1001")
	assert.ErrorContains(t, other.check(nil), "without the user himself")
}

func TestHelpersMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := os.Stat("/usr/bin/" + uids.helper); err == nil {
		path, err := uids.program()
		assert.Assert(t, err == nil && path == "/usr/bin/"+uids.helper, "%s %v", path, err)
	}
	usual := programDirs
	programDirs = []string{""}
	defer func() { programDirs = usual }()
	_, err := Mine()
	var e *Error
	assert.Assert(t, errors.As(err, &e), "%v", err)
	assert.ErrorContains(t, err, "newuidmap is not installed: sudo apt-get install uidmap")
	assert.ErrorContains(t, Map{}.Check(), "newuidmap is not installed")
}

func TestInside(t *testing.T) {
	m := []Range{{0, 1000, 1}, {1, 100000, 10}}
	for outside, want := range map[int64]int64{1000: 0, 100000: 1, 100009: 10} {
		got, ok := Inside(m, outside)
		assert.Assert(t, ok && got == want && Has(m, uint32(got)), "%d is %d", outside, got)
	}
	for _, outside := range []int64{0, 999, 1001, 99999, 100010} {
		_, ok := Inside(m, outside)
		assert.Assert(t, !ok, "%d is mapped", outside)
	}
	assert.Assert(t, !Has(m, 11))
}

// TestProbe: what it says is true for whoever runs this.
func TestProbe(t *testing.T) {
	detail, err := Probe(nil)
	if _, mine := Mine(); mine != nil && os.Geteuid() != 0 {
		assert.ErrorContains(t, err, mine.Error())
		return
	}
	assert.NilError(t, err)
	assert.Assert(t, detail != "")
}
