//go:build linux

package forkstest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func TestMain(m *testing.M) { os.Exit(Main(m, forks.Backend{})) }

// An overlay is mounted for an ordinary user whose own processes have no
// capability, so that what modes forbid stays forbidden.
func TestMounter(t *testing.T) {
	if !AsUser(t, Volume(t, "ext4")) {
		return
	}
	dir := Volume(t, "ext4")
	Write(t, dir, map[string]string{"lower/locked/f": "x", "lower/f": "lower", "upper/": "", "work/": "", "at/": ""})
	shell(t, dir, `chmod 0 lower/locked`)
	mount := forks.Mount{Dir: filepath.Join(dir, "tree"), Overlay: &forks.Overlay{Dir: dir, Lower: []string{"lower"}, Upper: "upper", Work: "work"}}
	at := filepath.Join(dir, "at")
	for range 2 {
		err := order{At: at, Mount: &mount}.give()
		assert.NilError(t, err)
		assert.Equal(t, shell(t, at, `cat f; ! ls locked 2>/dev/null; echo upper >f; mkdir -p new; stat -c %u new | grep -qx "$(id -u)"`), "lower")
		assert.NilError(t, hideAll(dir))
		assert.Equal(t, shell(t, dir, `ls at; cat upper/f`), "upper\n")
		shell(t, dir, `printf lower >upper/f; rm -rf work; mkdir work`)
	}
	var caps [2]unix.CapUserData
	assert.NilError(t, unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]))
	assert.Equal(t, caps, [2]unix.CapUserData{{Inheritable: caps[0].Inheritable}, {Inheritable: caps[1].Inheritable}})
}
