//go:build linux

package envtest

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
)

// systemTools are what the small system of the rootfs tests is made of.
var systemTools = []string{"sh", "ls", "cat", "id", "touch", "mkdir", "rm", "sleep", "stat", "wc", "head", "mount", "umount", "readlink", "env", "ln", "chown"}

// makeSystem makes a directory with the tools and the libraries they need.
func makeSystem(t *testing.T) string {
	t.Helper()
	need(t, "ldd")
	dir := tempDir(t)
	for _, tool := range systemTools {
		path, err := exec.LookPath(tool)
		assert.NilError(t, err)
		copyFile(t, path, dir+"/bin/"+tool)
		out, err := exec.Command("ldd", path).Output()
		assert.NilError(t, err)
		for _, lib := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
			if !exists(dir + lib) {
				copyFile(t, lib, dir+lib)
			}
		}
	}
	return dir
}

// newSystem makes a bench whose tree is a whole system, with the given
// directories beside its tools.
func newSystem(t *testing.T, s Subject, dirs ...string) *bench {
	t.Helper()
	b := newBench(t, s)
	out, err := exec.Command("cp", "-rl", s.system+"/.", b.tree).CombinedOutput()
	assert.NilError(t, err, string(out))
	for _, d := range dirs {
		assert.NilError(t, os.MkdirAll(b.tree+"/"+d, 0o755))
	}
	b.command.View.At, b.command.View.Home = "", ""
	b.command.View.Hide = nil
	b.command.Env = []string{"PATH=/bin", "HOME=/root"}
	return b
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	write(t, to, read(t, from))
	assert.NilError(t, os.Chmod(to, 0o755))
}

var allDirs = []string{"proc", "dev", "sys", "run", "tmp", "var/tmp", "etc", "root"}

// testRootfs: the tree is the whole system.
func testRootfs(t *testing.T, s Subject) {
	s.system = makeSystem(t)
	t.Run("view", func(t *testing.T) {
		b := newSystem(t, s, allDirs...)
		write(t, b.tree+"/etc/resolv.conf", "")
		write(t, b.tree+"/run/left", "from the tree")
		before := fingerprint(t, b.tree)
		out := b.sh(`pwd; id -u; stat -c %u / /bin/sh; ls /; ls -A /run /dev/shm; [ $$ != 1 ]; [ -d /proc/$$ ]; echo x >/dev/null; ls /sys >/dev/null`)
		assert.Equal(t, out, "/\n0\n0\n0\nbin\ndev\netc\n"+libs(t, b)+"proc\nroot\nrun\nsys\ntmp\n"+tail(t, b)+"var\n/dev/shm:\n\n/run:\nlock\nuser\n")
		assert.Equal(t, fingerprint(t, b.tree), before)
	})
	t.Run("changes", func(t *testing.T) {
		b := newSystem(t, s, allDirs...)
		b.sh("touch /new /tmp/t /var/tmp/v; mkdir /srv; touch /run/gone /dev/shm/gone; chown 0:0 /new")
		assert.Assert(t, exists(b.tree+"/new") && exists(b.tree+"/tmp/t") && exists(b.tree+"/var/tmp/v") && exists(b.tree+"/srv"))
		assert.Equal(t, names(t, b.tree+"/run")+names(t, b.tree+"/dev")+names(t, b.tree+"/proc")+names(t, b.tree+"/etc"), "")
	})
	t.Run("no way out", func(t *testing.T) {
		b := newSystem(t, s, allDirs...)
		r := b.run("sh", "-c", `for m in / /proc /dev /sys /run; do
	umount $m 2>/dev/null && echo "umounted $m"; umount -l $m 2>/dev/null && echo "umounted $m"
done
for m in /proc /sys; do mount -o remount,rw $m 2>/dev/null && echo "remounted $m"; done
mount -o remount,bind,dev / 2>/dev/null && echo "remounted /"
ls -d `+b.dir+` 2>/dev/null && echo "sees the host"
for f in /proc/sysrq-trigger /sys/envtest; do (: >>$f) 2>/dev/null && echo "opened $f"; done; ls /proc/1/root/ 2>/dev/null; true`)
		assert.Equal(t, r.out, "")
	})
	t.Run("resolver", func(t *testing.T) { testSystemResolver(t, s) })
	t.Run("nothing but tools", func(t *testing.T) {
		b := newSystem(t, s)
		before := fingerprint(t, b.tree)
		assert.Equal(t, b.sh("echo runs; cd /bin; [ -x sh ]"), "runs\n")
		assert.Equal(t, fingerprint(t, b.tree), before)
	})
	t.Run("links for directories", func(t *testing.T) {
		b := newSystem(t, s)
		for _, d := range []string{"proc", "dev", "run", "sys"} {
			assert.NilError(t, os.Mkdir(b.dir+"/"+d, 0o755))
			assert.NilError(t, os.Symlink(b.dir+"/"+d, b.tree+"/"+d))
		}
		assert.Equal(t, b.sh("echo runs"), "runs\n")
		assert.Equal(t, names(t, b.dir+"/dev")+names(t, b.dir+"/run"), "")
	})
	t.Run("mounts", func(t *testing.T) {
		b := newSystem(t, s, append(allDirs, "mnt")...)
		write(t, b.dir+"/data/f", "data")
		b.command.View.Binds = []sandbox.Bind{{From: b.dir + "/data", To: "/mnt", Mode: sandbox.ReadOnly},
			{From: b.dir + "/data/f", To: "/run/script", Mode: sandbox.ReadOnly}}
		assert.Equal(t, b.sh("cat /mnt/f /run/script; touch /mnt/x 2>/dev/null || echo refused"), "datadatarefused\n")
		b.command.View.Binds[0].To = "/models"
		assert.ErrorContains(t, b.refused("true"), "/models")
		assert.Assert(t, !exists(b.tree+"/models"))
	})
}

// libs and tail list what of ls / depends on where the host has its libraries.
func libs(t *testing.T, b *bench) string { return pick(t, b, "lib") }
func tail(t *testing.T, b *bench) string { return pick(t, b, "usr") }

func pick(t *testing.T, b *bench, prefix string) string {
	var out strings.Builder
	for _, n := range strings.Fields(names(t, b.tree)) {
		if strings.HasPrefix(n, prefix) {
			out.WriteString(n + "\n")
		}
	}
	return out.String()
}

func testSystemResolver(t *testing.T, s Subject) {
	if _, err := os.Stat("/etc/resolv.conf"); err != nil {
		t.Skip("the host has no /etc/resolv.conf")
	}
	host := read(t, "/etc/resolv.conf")
	t.Run("file", func(t *testing.T) {
		b := newSystem(t, s, allDirs...)
		write(t, b.tree+"/etc/resolv.conf", "tree's own")
		assert.Equal(t, b.sh("cat /etc/resolv.conf"), host)
		assert.Equal(t, read(t, b.tree+"/etc/resolv.conf"), "tree's own")
	})
	t.Run("link into /run", func(t *testing.T) {
		for _, to := range []string{"/run/a/b/resolv.conf", "../run/resolv.conf", "../var/run/r/resolv.conf"} {
			b := newSystem(t, s, allDirs...)
			assert.NilError(t, os.Symlink("../run", b.tree+"/var/run"))
			assert.NilError(t, os.Symlink(to, b.tree+"/etc/resolv.conf"))
			assert.Equal(t, b.sh("cat /etc/resolv.conf"), host)
			assert.Equal(t, names(t, b.tree+"/run"), "")
		}
	})
	t.Run("link to the host", func(t *testing.T) {
		b := newSystem(t, s, allDirs...)
		write(t, b.dir+"/victim", "host's own")
		assert.NilError(t, os.Symlink(b.dir+"/victim", b.tree+"/etc/resolv.conf"))
		assert.Equal(t, b.sh("cat /etc/resolv.conf 2>/dev/null || echo none"), "none\n")
	})
	t.Run("none", func(t *testing.T) {
		b := newSystem(t, s, allDirs...)
		b.sh("true")
		assert.Equal(t, names(t, b.tree+"/etc"), "")
	})
}
