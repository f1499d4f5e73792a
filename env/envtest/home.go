//go:build linux

package envtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// fillHome gives the bench a home with settings, secrets and caches.
func fillHome(b *bench) {
	for _, f := range []string{".bashrc", ".cache/tool/f", ".config/gh/hosts.yml", ".config/app/conf", ".ssh/id", ".gnupg/k",
		".aws/c", ".kube/c", ".netrc", ".docker/config.json", "src/go.mod"} {
		write(b.t, b.home+"/"+f, "home")
	}
	assert.NilError(b.t, os.Symlink(".bashrc", b.home+"/.profile"))
	assert.NilError(b.t, os.Chmod(b.home+"/.cache", 0o750))
	assert.NilError(b.t, os.Chmod(b.home, 0o710))
	b.command.View.Home = sandbox.HomeOverlay
}

// seesHome is a script that prints what a command finds in an overlaid home
// and changes what it can.
const seesHome = `cd ~; stat -c %a . .cache; cat .bashrc .profile .cache/tool/f .config/app/conf src/go.mod; echo
for s in .ssh .gnupg .aws .kube .netrc .docker .config/gh; do [ ! -e $s ] || echo "sees $s"; done
for f in .bashrc .cache/tool/f .config/app/conf new .cache/new src/new; do echo changed >$f; done
rm -r .config/app; mkdir .ssh .config/gh; touch .ssh/known_hosts; cat .cache/tool/f`

const seenHome = "710\n750\nhomehomehomehomehome\nchanged\n"

// testHome: the kinds of home.
func testHome(t *testing.T, s Subject) {
	t.Run("overlay", func(t *testing.T) {
		b := newBench(t, s)
		fillHome(b)
		before := fingerprint(t, b.home)
		assert.Equal(t, b.sh(seesHome), seenHome)
		assert.Equal(t, fingerprint(t, b.home), before)
		// The next command starts from the caller's home again.
		assert.Equal(t, b.sh("cat ~/.bashrc; ls ~/new 2>/dev/null || echo none"), "homenone\n")
	})
	t.Run("overlay with the store in the home", func(t *testing.T) { testStoreInHome(t, s, "home") })
	t.Run("overlay with the store in the home behind a link", func(t *testing.T) { testStoreInHome(t, s, "link") })
	t.Run("overlay with mounts below", func(t *testing.T) { testHomeMounts(t, s) })
	t.Run("overlay where no upper can be", func(t *testing.T) { testNoUpper(t, s) })
	t.Run("private", func(t *testing.T) {
		b := newBench(t, s)
		fillHome(b)
		b.command.View.Home = sandbox.HomePrivate
		before := fingerprint(t, b.home)
		assert.Equal(t, b.sh("ls -A ~; touch ~/x; cd ~; pwd"), b.home+"\n")
		assert.Equal(t, fingerprint(t, b.home), before)
		assert.Equal(t, b.sh("ls -A ~"), "")
	})
	t.Run("host", func(t *testing.T) {
		b := newBench(t, s)
		fillHome(b)
		b.command.View.Home = sandbox.HomeHost
		b.command.View.Hide = append(b.command.View.Hide, b.home+"/src")
		assert.Equal(t, b.sh("cat ~/.ssh/id; echo real >~/made; ls ~/src"), "home")
		assert.Equal(t, read(t, b.home+"/made"), "real\n")
	})
	t.Run("unusable", func(t *testing.T) { testUnusableHome(t, s) })
	t.Run("missing", func(t *testing.T) {
		b := newBench(t, s)
		b.command.View.Home, b.command.View.HomeDir = sandbox.HomeOverlay, b.dir+"/nohome"
		b.command.Env = append(b.command.Env, "HOME="+b.dir+"/nohome")
		assert.Equal(t, b.sh("cd ~; pwd; touch x; ls"), b.dir+"/nohome\nx\n")
		assert.Assert(t, !exists(b.dir+"/nohome"))
	})
	t.Run("behind a link", func(t *testing.T) {
		b := newBench(t, s)
		fillHome(b)
		assert.NilError(t, os.Symlink("home", b.dir+"/link"))
		b.command.View.HomeDir = b.dir + "/link"
		b.command.Env = append(b.command.Env, "HOME="+b.dir+"/link")
		assert.Equal(t, b.sh(seesHome), seenHome)
		assert.Equal(t, read(t, b.home+"/.bashrc"), "home")
	})
}

// testStoreInHome: by default our store, and the scratch directory with it,
// lies in the home, where no overlay of the whole home can be.
func testStoreInHome(t *testing.T, s Subject, name string) {
	b := newBench(t, s)
	fillHome(b)
	assert.NilError(t, os.Symlink("home", b.dir+"/link"))
	b.home = b.dir + "/" + name
	b.command.View.HomeDir, b.command.Env[1] = b.home, "HOME="+b.home
	store := b.home + "/.local/share/agentenv"
	b.hidden, b.scratch = store, store+"/root/runs/scratch"
	b.tree = store + "/root/forks/1"
	assert.NilError(t, os.MkdirAll(b.scratch, 0o755))
	write(t, b.home+"/.local/share/fonts/f", "font")
	write(t, b.home+"/.local/bin/tool", "tool")
	write(t, b.tree+"/f", "x")
	write(t, b.home+"/large", strings.Repeat("x", 2<<20))
	b.command.View.Tree.Dir, b.command.View.Scratch, b.command.View.Hide = b.tree, b.scratch, []string{store}
	b.command.View.At = b.home + "/proj"
	real := strings.Replace(store, b.home, b.dir+"/home", 1)
	before := fingerprint(t, b.dir+"/home", real)
	assert.Equal(t, b.sh(seesHome), seenHome)
	assert.Equal(t, b.sh(`cat f ~/.local/share/fonts/f ~/.local/bin/tool; wc -c <~/large; ls -A ~/.local/share
echo new >~/.local/share/fonts/f; touch ~/.local/share/y ~/.local/bin/y; touch done`), "xfonttool2097152\nfonts\n")
	assert.Equal(t, names(t, b.tree), "done f")
	assert.Equal(t, fingerprint(t, b.dir+"/home", real), before)
}

// testHomeMounts: what is mounted below the home is read-only and named.
func testHomeMounts(t *testing.T, s Subject) {
	needRoot(t)
	b := newBench(t, s)
	fillHome(b)
	m := b.home + "/data/disk"
	assert.NilError(t, os.MkdirAll(m, 0o755))
	write(t, b.home+"/data/beside/f", "beside")
	if err := unix.Mount("none", m, "tmpfs", 0, ""); err != nil {
		t.Skip("cannot mount: ", err)
	}
	t.Cleanup(func() { assert.Check(t, unix.Unmount(m, 0)) })
	write(t, m+"/f", "disk")
	assert.Equal(t, b.sh(seesHome), seenHome)
	assert.Equal(t, b.sh(`cd ~/data; cat beside/f disk/f; echo x >beside/f; echo x 2>/dev/null >disk/f || echo refused`), "besidediskrefused\n")
	assert.Equal(t, read(t, b.home+"/data/beside/f"), "beside")
	if s.Notices != nil {
		assert.Assert(t, strings.Contains(strings.Join(s.Notices(), "\n"), m+" is a mount of its own"), s.Notices())
	}
}

// testNoUpper: in a container all is an overlay already, and an overlay cannot
// hold another one's changes.
func testNoUpper(t *testing.T, s Subject) {
	needRoot(t)
	b := newBench(t, s)
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		assert.NilError(t, os.Mkdir(b.dir+"/"+d, 0o755))
	}
	options := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", b.dir)
	var err error
	for _, o := range []string{options, options + ",userxattr"} {
		if err = unix.Mount("none", b.dir+"/merged", "overlay", 0, o); err == nil {
			break
		}
	}
	if err != nil {
		t.Skip("cannot mount an overlay: ", err)
	}
	t.Cleanup(func() { assert.Check(t, unix.Unmount(b.dir+"/merged", unix.MNT_DETACH)) })
	b.home, b.scratch = b.dir+"/merged/home", b.dir+"/merged/scratch"
	assert.NilError(t, os.Mkdir(b.home, 0o755))
	b.command.View.HomeDir, b.command.View.Scratch = b.home, b.scratch
	b.command.Env[1] = "HOME=" + b.home
	fillHome(b)
	before := fingerprint(t, b.home)
	assert.Equal(t, b.sh(seesHome), seenHome)
	assert.Equal(t, fingerprint(t, b.home), before)
	if s.Notices != nil {
		assert.Assert(t, strings.Contains(strings.Join(s.Notices(), "\n"), "kept in memory"), s.Notices())
	}
}

func testUnusableHome(t *testing.T, s Subject) {
	for _, kind := range []sandbox.Home{sandbox.HomeOverlay, sandbox.HomePrivate} {
		for name, dir := range map[string]func(*bench) string{
			"unset": func(*bench) string { return "" }, "root": func(*bench) string { return "/" },
			"the tree": func(b *bench) string { return b.tree }, "in the tree": func(b *bench) string { return filepath.Join(b.command.View.At, "h") },
			"its place": func(b *bench) string { return b.command.View.At },
		} {
			t.Run(fmt.Sprint(name, " ", kind), func(t *testing.T) {
				b := newBench(t, s)
				write(t, b.tree+"/h/f", "x")
				b.command.View.Home, b.command.View.HomeDir = kind, dir(b)
				b.command.Env[1] = "HOME=" + dir(b)
				assert.Equal(t, b.sh(`ls -A ~; touch ~/x; cat h/f; [ "$HOME" != / ] && [ "$HOME" != "$PWD" ]`), "x")
				assert.Equal(t, names(t, b.tree)+names(t, b.tree+"/h"), "hf")
			})
		}
	}
}
