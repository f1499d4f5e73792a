package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/runner"
)

func long(t *testing.T) {
	if os.Getenv("AGENTENV_TEST_LONG") == "" {
		t.Skip("long: set AGENTENV_TEST_LONG=1, or make test-long")
	}
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
}

// goTreePlan edits the package strings of a Go distribution in three ways. Two
// run at a time: the slow one holds a slot, so that the broken one has its
// verdict before the right one ends the run.
const goTreePlan = `
base: {dir: go}
env: {GOTOOLCHAIN: local, GOPROXY: "off", GOFLAGS: ""}
parallel: 2
candidates:
  - name: slow
    run: |
      printf '\n// Slow but sure.\n' >>src/strings/strings.go
      setsid sh -c 'trap "" TERM; while :; do sleep 1; done' &
      sleep 600
  - name: broken
    run: sed -i 's/^func TrimSpace(s string) string {/&\n\treturn s/' src/strings/strings.go
  - name: right
    run: printf '\nfunc twice(s string) string { return s + s }\n' >>src/strings/strings.go
test: GOROOT=$PWD bin/go test -count=1 strings
`

// TestGoTree runs a tournament over a copy of the Go distribution, some 16,000
// files, whose own tests decide.
func TestGoTree(t *testing.T) {
	long(t)
	asEach(t, func(t *testing.T, p *person) {
		p.withGo(t, "strings")
		base := p.copyIn(t, goRoot(t), "src", "go")
		before := manifest(t, base)
		assert.Assert(t, len(before) > 10000, "only %d paths in %s", len(before), base)
		src := filepath.Dir(base)
		assert.NilError(t, os.WriteFile(filepath.Join(src, "go-tree.yaml"), []byte(goTreePlan), 0o644))

		res := p.tournament(t, src, 0, "-f", "go-tree.yaml", "--grace", "1s")
		assert.Assert(t, res.Promoted && res.Winner != nil, "%+v", res)
		assert.Equal(t, res.Winner.Candidate, "right")
		assert.DeepEqual(t, statuses(res), map[string]runner.Status{
			"right": runner.Passed, "broken": runner.Failed, "slow": runner.Cancelled,
		})
		assert.DeepEqual(t, differences(before, manifest(t, base)), []string(nil)) // the base itself is as it was

		st := p.status(t, base)
		emptyDirs(t, filepath.Join(st.Root, "forks"), filepath.Join(st.Root, "scratch"))
		var log struct{ Snapshots []env.Snapshot }
		assert.NilError(t, json.Unmarshal([]byte(p.must(t, base, "agentenv", "log", "--json")), &log))
		assert.Equal(t, len(log.Snapshots), 2, "of the losers nothing is listed")
		assert.Equal(t, log.Snapshots[0].ID, *res.Winner.Snapshot)
		assert.Equal(t, *log.Snapshots[0].Parent, res.Base)

		p.must(t, base, "agentenv", "checkout", "HEAD")
		st = p.status(t, base)
		assert.Assert(t, !st.Dirty && st.Head == res.Head && st.Head == *res.Winner.Snapshot, "%+v", st)
		const edited = "src/strings/strings.go"
		assert.DeepEqual(t, differences(before, manifest(t, st.WorkTree)), []string{edited})
		diff, code := gitDiff(t, base, st.WorkTree)
		assert.Equal(t, code, 1)
		assert.Assert(t, strings.HasPrefix(diff, "2\t0\t") && strings.HasSuffix(diff, edited+"\n") && strings.Count(diff, "\n") == 1, diff)

		p.must(t, base, "agentenv", "apply")
		diff, code = gitDiff(t, base, st.WorkTree)
		assert.Assert(t, code == 0 && diff == "", diff)
	})
}

// gitDiff is what git says of two directories: lines added, removed, path.
func gitDiff(t *testing.T, a, b string) (string, int) {
	c := exec.Command("git", "diff", "--no-index", "--no-renames", "--numstat", a, b)
	out, _ := c.Output() // it exits 1 when they differ
	assert.Assert(t, c.ProcessState != nil, "git is not there")
	return string(out), c.ProcessState.ExitCode()
}

// statusDoc is what of `status --json` these tests look at.
type statusDoc struct {
	Root     string
	WorkTree string `json:"work_tree"`
	Head     env.ID
	Dirty    bool
	Kind     env.Kind
}

func (p *person) status(t *testing.T, dir string, flags ...string) (st statusDoc) {
	t.Helper()
	out := p.must(t, dir, "agentenv", append(flags, "status", "--json")...)
	assert.NilError(t, json.Unmarshal([]byte(out), &st), out)
	return st
}

// manifest describes every path of a tree, the root included: type and mode,
// owner, links, device, time, content and extended attributes.
func manifest(t *testing.T, dir string) map[string]string {
	t.Helper()
	m := map[string]string{}
	assert.NilError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		m[rel], err = describePath(path)
		return err
	}))
	return m
}

func describePath(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", err
	}
	line := fmt.Sprintf("mode %o owner %d:%d rdev %d mtime %d.%09d", st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		data, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		line += fmt.Sprintf(" links %d sha256 %x", st.Nlink, sha256.Sum256(data))
	case unix.S_IFLNK:
		to, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		line += " to " + to
	}
	return line + xattrsOf(path), nil
}

// xattrsOf lists extended attributes; where the file system has none it is "".
func xattrsOf(path string) string {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil || n == 0 {
		return ""
	}
	names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	slices.Sort(names)
	line := ""
	for _, name := range names {
		n, err := unix.Lgetxattr(path, name, buf)
		if err == nil {
			line += fmt.Sprintf(" %s=%x", name, buf[:n])
		}
	}
	return line
}

// differences are the paths that differ between two manifests, sorted.
func differences(a, b map[string]string) []string {
	paths := maps.Clone(a)
	maps.Copy(paths, b)
	var out []string
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		if a[path] != b[path] {
			out = append(out, path)
		}
	}
	return out
}

const installPlan = `
env: {DEBIAN_FRONTEND: noninteractive}
parallel: 2
candidates:
  - name: nothing
    run: "true"
  - name: installs
    run: |
      apt-get update -q
      apt-get install -y -q --no-install-recommends hello
test: |
  [ -x /usr/bin/hello ]
  hello
`

// TestDebootstrapInstall installs a package in a real system and takes it away
// again.
func TestDebootstrapInstall(t *testing.T) {
	long(t)
	tarball := debianTar(t)
	needMirror(t)
	p := newPerson(t, "root", 0)
	sys := filepath.Join(p.home, "sys")
	assert.NilError(t, os.Mkdir(sys, 0o755))
	out, err := exec.Command("tar", "-C", sys, "--numeric-owner", "--xattrs", "--xattrs-include=*", "-xpf", tarball).CombinedOutput()
	assert.NilError(t, err, string(out))
	base := manifest(t, sys)
	plan := filepath.Join(p.home, "install.yaml")
	assert.NilError(t, os.WriteFile(plan, []byte(installPlan), 0o644))
	root := []string{"--root", filepath.Join(p.home, "env")}
	agentenv := func(args ...string) string {
		t.Helper()
		return p.must(t, p.home, "agentenv", append(slices.Clone(root), args...)...)
	}

	first := agentenv("init", "--from", sys)
	assert.Equal(t, p.status(t, p.home, root...).Kind, env.Rootfs)
	res := p.tournament(t, p.home, 0, append(root, "-f", plan)...)
	assert.Assert(t, res.Winner != nil && res.Promoted, "%+v", res)
	assert.Equal(t, res.Winner.Candidate, "installs")
	assert.Equal(t, statuses(res)["nothing"], runner.Failed)
	assert.Equal(t, string(res.Base), first)

	assert.Equal(t, agentenv("exec", "--", "hello"), "Hello, world!")
	st := p.status(t, p.home, root...)
	assert.Assert(t, !st.Dirty && st.Head == res.Head, "saying hello changed the system: %+v", st)
	assert.Assert(t, slices.Contains(differences(base, manifest(t, st.WorkTree)), "usr/bin/hello"))

	agentenv("checkout", first)
	agentenv("exec", "--", "sh", "-ec", "! [ -e /usr/bin/hello ]; ! hello; ! dpkg -s hello")
	assert.DeepEqual(t, differences(base, manifest(t, st.WorkTree)), []string(nil))
	assert.DeepEqual(t, differences(base, manifest(t, sys)), []string(nil))
	emptyDirs(t, filepath.Join(st.Root, "forks"), filepath.Join(st.Root, "scratch"))
}

// TestDebootstrapTarball takes the same system in from compressed tars as an
// ordinary user, who is uid 0 inside.
func TestDebootstrapTarball(t *testing.T) {
	long(t)
	tarball := debianTar(t)
	p := newPerson(t, "ordinary", ordinaryID)
	for _, c := range []struct {
		name     string
		compress func(io.Writer) (io.WriteCloser, error)
	}{
		{"system.tar.zst", func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) }},
		{"system.tar.gz", func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriterLevel(w, gzip.BestSpeed) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			compressTo(t, filepath.Join(p.home, c.name), tarball, c.compress)
			root := filepath.Join(p.home, c.name+".env")
			p.must(t, p.home, "agentenv", "--root", root, "init", "--tarball", c.name)
			got := p.must(t, p.home, "agentenv", "--root", root, "exec", "--", "sh", "-ec",
				`id -u; . /etc/os-release; echo "$ID"; dpkg-query -W -f '${Status}' apt; touch /etc/mine`)
			assert.Equal(t, got, "0\n"+osRelease(t, "ID")+"\ninstall ok installed")
			st := p.status(t, p.home, "--root", root)
			assert.Assert(t, st.Kind == env.Rootfs && !st.Dirty, "%+v", st)
			shown := p.must(t, p.home, "agentenv", "--root", root, "show", "HEAD")
			assert.Assert(t, strings.Contains(shown, "etc/mine"), shown)
			p.must(t, p.home, "agentenv", "--root", root, "checkout", "HEAD~1")
			p.must(t, p.home, "agentenv", "--root", root, "exec", "--", "sh", "-ec", "! [ -e /etc/mine ]")
		})
	}
}

func compressTo(t *testing.T, path, from string, compress func(io.Writer) (io.WriteCloser, error)) {
	in, err := os.Open(from)
	assert.NilError(t, err)
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	assert.NilError(t, err)
	w, err := compress(out)
	assert.NilError(t, err)
	_, err = io.Copy(w, in)
	assert.NilError(t, err)
	assert.NilError(t, w.Close())
	assert.NilError(t, out.Close())
}

// debianTar is a tar of this machine's release as debootstrap makes it, from
// the mirror that apt here uses. It is kept, so that it is made once.
func debianTar(t *testing.T) string {
	if os.Getuid() != 0 {
		t.Skip("debootstrap needs root")
	}
	codename := osRelease(t, "VERSION_CODENAME")
	file := filepath.Join(keepDir(t), codename+"-minbase.tar")
	if _, err := os.Stat(file); err == nil {
		return file
	}
	if _, err := exec.LookPath("debootstrap"); err != nil {
		t.Skip("debootstrap is not installed")
	}
	dir := filepath.Join(t.TempDir(), "sys")
	out, err := exec.Command("debootstrap", "--variant=minbase", codename, dir, aptMirror(t, codename)).CombinedOutput()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		t.Skipf("debootstrap: %v: %s", err, lines[len(lines)-1])
	}
	out, err = exec.Command("tar", "-C", dir, "--numeric-owner", "--xattrs", "--xattrs-include=*", "-cf", file+".new", ".").CombinedOutput()
	assert.NilError(t, err, string(out))
	assert.NilError(t, os.Rename(file+".new", file))
	return file
}

// aptMirror is where apt on this machine gets the release's main packages.
func aptMirror(t *testing.T, codename string) string {
	out, err := exec.Command("apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages").Output()
	if err != nil {
		t.Skipf("apt-get indextargets: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == codename && f[1] == "main" {
			return f[2]
		}
	}
	t.Skipf("apt has no mirror of %s here", codename)
	return ""
}

// needMirror skips the test where the mirror cannot be reached.
func needMirror(t *testing.T) {
	codename := osRelease(t, "VERSION_CODENAME")
	client := http.Client{Timeout: 20 * time.Second}
	answer, err := client.Get(strings.TrimSuffix(aptMirror(t, codename), "/") + "/dists/" + codename + "/InRelease")
	if err != nil {
		t.Skipf("the mirror that apt uses: %v", err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Skipf("the mirror that apt uses: %s", answer.Status)
	}
}

// osRelease is a value of /etc/os-release.
func osRelease(t *testing.T, key string) string {
	data, err := os.ReadFile("/etc/os-release")
	assert.NilError(t, err)
	for line := range bytes.Lines(data) {
		if v, ok := strings.CutPrefix(string(line), key+"="); ok {
			return strings.Trim(strings.TrimSpace(v), `"`)
		}
	}
	t.Skipf("/etc/os-release has no %s", key)
	return ""
}
