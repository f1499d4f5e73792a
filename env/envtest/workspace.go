//go:build linux

package envtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// testWorkspace: the tree stands at its own path in the host's system, which
// cannot be changed.
func testWorkspace(t *testing.T, s Subject) {
	t.Run("absolute paths", func(t *testing.T) { testAbsolute(t, s) })
	t.Run("own root removed", func(t *testing.T) {
		b := newBench(t, s)
		write(t, b.tree+"/a", "a")
		write(t, b.dir+"/outside", "o")
		r := b.run("sh", "-c", `rm -rf "$PWD" ../outside; mv . ../x; mv "$PWD" "$PWD.x"`)
		assert.Assert(t, r.ExitCode != 0)
		assert.Equal(t, names(t, b.tree), "") // its content was the command's to remove
		assert.Assert(t, exists(b.dir+"/outside") && exists(b.hidden+"/secret"))
	})
	t.Run("read-only host", func(t *testing.T) { testReadOnlyHost(t, s) })
	t.Run("owner", func(t *testing.T) {
		b := newBench(t, s)
		out := b.sh("id -u; id -g; stat -c %u:%g .; touch f; stat -c %u:%g f /tmp /run /dev/shm")
		id := fmt.Sprintf("%d:%d\n", os.Getuid(), os.Getgid())
		assert.Equal(t, out, strings.Replace(id, ":", "\n", 1)+id+id+id+id+id)
	})
	t.Run("git", func(t *testing.T) {
		need(t, "git")
		b := newBench(t, s)
		out, err := exec.Command("git", "init", "-q", b.tree).CombinedOutput()
		assert.NilError(t, err, string(out))
		write(t, b.tree+"/f", "x")
		assert.Equal(t, b.sh("git status --porcelain"), "?? f\n")
	})
	t.Run("places for the tree", func(t *testing.T) { testPlaces(t, s) })
	t.Run("nothing in the tree", func(t *testing.T) {
		b := newBench(t, s)
		write(t, b.tree+"/only", "x")
		before := fingerprint(t, b.tree)
		b.sh("true")
		assert.Equal(t, fingerprint(t, b.tree), before)
	})
	t.Run("hidden", func(t *testing.T) { testHidden(t, s) })
	t.Run("TMPDIR", func(t *testing.T) {
		for _, dir := range []string{"/tmp/envtest-tmp/x", ""} {
			b := newBench(t, s)
			if dir == "" {
				dir = b.dir + "/tmp"
			}
			assert.NilError(t, os.MkdirAll(dir, 0o755))
			t.Cleanup(func() { os.RemoveAll("/tmp/envtest-tmp") })
			b.command.Env = append(b.command.Env, "TMPDIR="+dir)
			b.sh("touch $(mktemp)x $TMPDIR/mark")
			assert.Equal(t, names(t, dir), "")
		}
	})
	t.Run("devices", func(t *testing.T) { testDevices(t, s) })
	t.Run("resolver", func(t *testing.T) {
		if _, err := os.Stat("/etc/resolv.conf"); err != nil {
			t.Skip("the host has no /etc/resolv.conf")
		}
		assert.Equal(t, newBench(t, s).sh("cat /etc/resolv.conf"), read(t, "/etc/resolv.conf"))
	})
}

// testAbsolute: a link or a path that names the original's absolute path leads
// to the fork, never to the original.
func testAbsolute(t *testing.T, s Subject) {
	b := newBench(t, s)
	at := b.command.View.At
	write(t, at+"/data/f", "original")
	write(t, b.tree+"/data/f", "fork")
	assert.NilError(t, os.Symlink(at+"/data", b.tree+"/link"))
	assert.Equal(t, b.sh("cat link/f; echo changed >link/f; cat "+at+"/data/f"), "forkchanged\n")
	assert.Equal(t, read(t, at+"/data/f"), "original")
	assert.Equal(t, read(t, b.tree+"/data/f"), "changed\n")
}

func testReadOnlyHost(t *testing.T, s Subject) {
	b := newBench(t, s)
	b.command.Env = append(b.command.Env, "STORE="+b.hidden)
	r := b.run("sh", "-c", `
for f in /envtest-x /etc/envtest-x /usr/envtest-x `+b.dir+`/envtest-x /sys/envtest-x; do touch $f 2>/dev/null && echo "wrote $f"; done
for m in / /etc /sys; do
	mount -o remount,rw $m 2>/dev/null && echo "remounted $m"
	mount -o remount,bind,rw $m 2>/dev/null && echo "remounted $m"
done
mount -o remount,bind,dev /tmp 2>/dev/null && echo "remounted /tmp"
for m in / /tmp /var/tmp /run /proc /dev /dev/null "$PWD" "$HOME" "$STORE"; do
	umount $m 2>/dev/null && echo "umounted $m"
	umount -l $m 2>/dev/null && echo "umounted $m"
done
if [ $(id -u) = 0 ]; then
	for f in /proc/sys/kernel/printk_delay /proc/sysrq-trigger; do (: >>$f) 2>/dev/null && echo "opened $f"; done
	mknod null c 1 3 2>/dev/null && echo "made a device"
fi
hostname envtest-x 2>/dev/null && echo "renamed the host"
true`)
	assert.Equal(t, r.out, "")
	assert.Assert(t, !exists("/etc/envtest-x") && !exists("/envtest-x"))
}

// testPlaces: the place need not exist on the host.
func testPlaces(t *testing.T, s Subject) {
	home := func(b *bench) string { return b.home }
	for _, c := range []struct {
		name string
		at   func(*bench) string
	}{
		{"in /tmp", func(*bench) string { return "/tmp/envtest-gone/deep/tree" }},
		{"in the root", func(*bench) string { return "/envtest-gone/tree" }},
		{"in a system directory", func(*bench) string { return "/usr/share/envtest-gone/tree" }},
		{"in /run", func(*bench) string { return "/run/envtest-gone" }},
		{"in the home", func(b *bench) string { return home(b) + "/src/gone" }},
		{"at a space and a colon", func(b *bench) string { return b.dir + "/a b:c,d\\e" }},
		{"below the hidden store", func(b *bench) string { return b.hidden + "/trees/x" }},
		{"where it lies", func(b *bench) string { return b.tree }},
	} {
		for _, kind := range []sandbox.Home{sandbox.HomePrivate, sandbox.HomeOverlay} {
			t.Run(c.name+" "+string(kind), func(t *testing.T) {
				b := newBench(t, s)
				b.command.View.Home = kind
				b.command.View.At = c.at(b)
				write(t, b.tree+"/f", "x")
				assert.Equal(t, b.sh("pwd; ls; touch new"), c.at(b)+"\nf\n")
				assert.Equal(t, names(t, b.tree), "f new")
				assert.Equal(t, names(t, b.home), "")
				assert.Equal(t, names(t, b.hidden), "secret")
			})
		}
	}
	t.Run("in the real home", func(t *testing.T) {
		b := newBench(t, s)
		b.command.View.Home = sandbox.HomeHost
		b.command.View.At = b.home + "/gone"
		e := b.refused("true")
		assert.ErrorContains(t, e, b.home+"/gone")
		assert.Assert(t, e.Fix != "")
		assert.Equal(t, names(t, b.home), "")
	})
	t.Run("beside a large directory", func(t *testing.T) {
		b := newBench(t, s)
		for i := range 300 {
			write(t, fmt.Sprintf("%s/many/%d", b.dir, i), "x")
		}
		assert.NilError(t, os.Symlink("1", b.dir+"/many/link"))
		b.command.View.At = b.dir + "/many/gone"
		assert.Equal(t, b.sh("cd ..; ls | wc -l; cat 299 link; touch y 2>/dev/null || echo refused"), "302\nxxrefused\n")
	})
}

func testHidden(t *testing.T, s Subject) {
	b := newBench(t, s)
	write(t, b.dir+"/file", "secret")
	b.command.View.Hide = append(b.command.View.Hide, b.dir+"/file", b.dir+"/not-there")
	out := b.sh(fmt.Sprintf(`ls -A %s; cat %s; touch %s/x 2>/dev/null || echo refused`, b.hidden, b.dir+"/file", b.hidden))
	assert.Equal(t, out, "refused\n")
	// A tree and a scratch directory that lie in the store are used all the same.
	tree, scratch := b.hidden+"/runs/tree", b.hidden+"/runs/scratch"
	write(t, tree+"/f", "x")
	assert.NilError(t, os.Mkdir(scratch, 0o755))
	b.command.View.Tree.Dir, b.scratch, b.command.View.Scratch = tree, scratch, scratch
	assert.Equal(t, b.sh("cat f; ls -A "+b.hidden), "x")
}

func testDevices(t *testing.T, s Subject) {
	b := newBench(t, s)
	assert.Equal(t, strings.Join(strings.Fields(b.sh("ls /dev")), " "),
		"fd full null ptmx pts random shm stderr stdin stdout tty urandom zero")
	b.sh(`echo x >/dev/null; [ $(head -c 4 /dev/zero | wc -c) = 4 ]; head -c 1 /dev/urandom >/dev/null
echo via >/dev/stderr; echo x >/dev/full && exit 1; touch /dev/shm/x; [ "$(stat -c %a /dev/shm /tmp | tr '\n' ' ')" = "1777 1777 " ]`)
	if _, err := exec.LookPath("python3"); err == nil {
		assert.Equal(t, b.sh(`python3 -c 'import os, pty; m, s = pty.openpty(); print(os.ttyname(s))'`), "/dev/pts/0\n")
	}
	if os.Geteuid() == 0 {
		// A device that lies in the tree is none inside.
		if err := exec.Command("mknod", b.tree+"/disk", "c", "1", "3").Run(); err == nil {
			assert.Equal(t, b.sh("cat disk 2>/dev/null || echo refused"), "refused\n")
		}
	}
}

// fingerprint describes all of a tree that a first diff would show, but for
// the directories without.
func fingerprint(t *testing.T, tree string, without ...string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(tree, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if slices.Contains(without, p) {
			return filepath.SkipDir
		}
		i, err := d.Info()
		if err == nil {
			fmt.Fprintln(&b, p, i.Mode(), i.ModTime().UnixNano())
		}
		return err
	})
	assert.NilError(t, err)
	return b.String()
}
