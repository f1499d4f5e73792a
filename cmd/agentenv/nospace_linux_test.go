package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/runner"
)

// onSmallVolumes runs test for every driver on a small file system of its own.
func onSmallVolumes(t *testing.T, test func(t *testing.T, u *owner, volume string)) {
	if os.Getuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	if err := sandbox.Probe(sandbox.LevelNamespaces); err != nil {
		t.Skip(err)
	}
	for i, b := range all.Backends() {
		t.Run(b.Name, func(t *testing.T) {
			asEach(t, func(t *testing.T, p *person) {
				if leftOut(t, i, p) {
					return
				}
				kind, size, options := "ext4", "48M", "-m 0"
				if b.Name == "btrfs" {
					kind, size, options = "btrfs", "200M", ""
				}
				volume := newVolume(t, kind, size, options)
				test(t, newOwner(t, p, b.Name, volume), volume)
			})
		})
	}
}

// fill takes all room of a volume but some bytes. It can be called again.
func fill(t *testing.T, volume string, but int64) (free func()) {
	t.Helper()
	path := filepath.Join(volume, "filler")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	assert.NilError(t, err)
	defer f.Close()
	for block := make([]byte, 1<<20); len(block) > 0; {
		if _, err := f.Write(block); err != nil {
			assert.ErrorIs(t, err, unix.ENOSPC)
			block = block[:len(block)/2]
		}
	}
	if st, err := f.Stat(); but > 0 && err == nil {
		assert.NilError(t, f.Truncate(st.Size()-but))
	}
	assert.NilError(t, f.Sync())
	return func() { assert.NilError(t, os.Remove(path)); unix.Sync() }
}

// refused runs a command that has to end with status 3 (exec: 125) and returns
// what it said, as its JSON has it.
func (u *owner) refused(t *testing.T, args ...string) (code, said string) {
	t.Helper()
	out, errs, status := u.run(t, u.src, "agentenv", append([]string{"--root", u.root, "--json"}, args...)...)
	want := exitHarness
	if args[0] == "exec" {
		want = exitOwnFailure
	}
	assert.Equal(t, status, want, "%v: %s%s", args, out, errs)
	var doc struct {
		Error struct{ Code, Message, Hint string }
	}
	assert.NilError(t, json.Unmarshal([]byte(out), &doc), "%s", out)
	return doc.Error.Code, doc.Error.Message + ": " + doc.Error.Hint
}

// noSpace checks that a command is refused for want of space, and says where.
func (u *owner) noSpace(t *testing.T, volume string, args ...string) {
	t.Helper()
	code, said := u.refused(t, args...)
	assert.Equal(t, code, "no_space", said)
	assert.Assert(t, strings.Contains(said, volume) && strings.Contains(said, "free now"), "%v: %s", args, said)
	assert.Assert(t, strings.Contains(said, "agentenv delete REF") && strings.Contains(said, "checkout HEAD --discard"), "%v: %s", args, said)
}

// TestNoSpace fills the file system and looks at what each command does then.
func TestNoSpace(t *testing.T) {
	onSmallVolumes(t, func(t *testing.T, u *owner, volume string) {
		base := u.init(t, "base")
		big := "; head -c 3000000 /dev/urandom >big"
		for _, but := range []int64{0, 1 << 20} {
			edit := fmt.Sprintf("edit%d", but)
			u.agentenv(t, "exec", "--no-commit", "--", "sh", "-c", stateScript(edit)+big)
			before := u.log(t)
			free := fill(t, volume, but)
			room := freeBytes(t, volume)
			if but == 0 {
				for _, args := range [][]string{{"commit"}, {"checkout", string(base)}, {"tag", "a-tag"}} {
					fill(t, volume, 0) // what failed before gave back what it took
					u.noSpace(t, volume, args...)
				}
			}
			// A fork may need no room. Where it does, the disk is to blame.
			_, forked, status := u.run(t, u.src, "agentenv", "--root", u.root, "exec", "--fork", "--", "true")
			if status != 0 {
				assert.Assert(t, strings.Contains(forked, "free now") && !strings.Contains(forked, "--home"), forked)
			}
			// Whether there is room for a fork or not, there is none for what a
			// candidate writes.
			out, errs, code := u.run(t, u.src, "agentenv", "--root", u.root, "tournament", "--plain", "--test", "true", "--", "head -c 3000000 /dev/urandom >big2")
			assert.Assert(t, code == exitNo || code == exitHarness, "%s%s", out, errs)
			assert.Assert(t, strings.Contains(strings.ToLower(errs+out), "no space"), errs+out)
			other := u.root + "-other"
			init, said, code := u.run(t, u.src, "agentenv", "--root", other, "--backend", u.backend, "init", "--from", u.bigSource(t))
			assert.Equal(t, code, exitHarness, init)
			assert.Assert(t, strings.Contains(said, volume), said)
			_, err := os.Lstat(other)
			assert.Assert(t, os.IsNotExist(err), "a half environment was left")
			// Reading needs no room.
			assert.Assert(t, len(u.log(t)) >= len(before))
			u.agentenv(t, "status", "--json")
			u.agentenv(t, "show", "HEAD")
			if but == 0 {
				assert.Equal(t, len(u.log(t)), len(before))
				left := room - freeBytes(t, volume)
				assert.Assert(t, left < 256<<10, "%d bytes were left by what failed", left)
			}
			free()

			assert.Equal(t, u.tree(t), whole(edit))
			u.swept(t)
			u.agentenv(t, "commit", "-m", "there is room again")
			contains(t, u.log(t), before, "after no space")
			u.agentenv(t, "checkout", string(base))
			assert.Equal(t, u.tree(t), whole("base"))
		}
	})
}

// bigSource is a directory elsewhere that the volume has no room for.
func (u *owner) bigSource(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(u.home, "big")
	assert.NilError(t, os.MkdirAll(dir, 0o755))
	f, err := os.Create(filepath.Join(dir, "f"))
	assert.NilError(t, err)
	_, err = f.Write(make([]byte, 2<<20))
	assert.NilError(t, err)
	_, err = f.WriteAt([]byte("end"), 64<<20)
	assert.NilError(t, err)
	assert.NilError(t, f.Close())
	u.own(t, dir)
	return dir
}

// TestNoQuota runs into a quota, which is a limit of btrfs for a subvolume.
func TestNoQuota(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounting a test volume needs root")
	}
	for _, b := range all.Backends() {
		if b.Name == "btrfs" {
			continue // its snapshots are subvolumes of their own, which such a limit does not reach
		}
		t.Run(b.Name, func(t *testing.T) {
			asEach(t, func(t *testing.T, p *person) {
				volume := newVolume(t, "btrfs", "300M", "")
				quota(t, "quota", "enable", volume)
				quota(t, "subvolume", "create", filepath.Join(volume, p.name))
				runIntoQuota(t, newOwner(t, p, b.Name, volume), volume)
			})
		})
	}
}

func runIntoQuota(t *testing.T, u *owner, volume string) {
	base := u.init(t, "base")
	u.agentenv(t, "exec", "--no-commit", "--", "sh", "-c", stateScript("edit")+"; head -c 3000000 /dev/urandom >big")
	before := u.log(t)
	unix.Sync()
	quota(t, "qgroup", "limit", "1M", filepath.Join(volume, u.name))
	code, said := u.refused(t, "commit")
	assert.Equal(t, code, "no_space", said)
	assert.Assert(t, strings.Contains(said, "quota") && strings.Contains(said, volume), said)
	assert.Equal(t, len(u.log(t)), len(before))
	quota(t, "quota", "disable", volume) // a limit that is exceeded cannot be lifted
	assert.Equal(t, u.tree(t), whole("edit"))
	u.swept(t)
	u.agentenv(t, "checkout", string(base))
	assert.Equal(t, u.tree(t), whole("base"))
}

func quota(t *testing.T, args ...string) {
	t.Helper()
	out, err := exec.Command("btrfs", args...).CombinedOutput()
	assert.NilError(t, err, string(out))
}

// TestReadOnlyFileSystem: reading works, and what would write says why not.
func TestReadOnlyFileSystem(t *testing.T) {
	onSmallVolumes(t, func(t *testing.T, u *owner, volume string) {
		base := u.init(t, "base")
		_, _, _ = u.run(t, u.src, "agentenv", "--root", u.root, "umount") // a mounted work tree keeps the file system busy
		remount(t, volume, "ro")
		assert.Equal(t, len(u.log(t)), 1)
		u.agentenv(t, "head")
		u.agentenv(t, "show", string(base))
		for _, args := range [][]string{{"commit"}, {"checkout", string(base)}, {"tag", "x"}, {"exec", "--", "true"}, {"exec", "--fork", "--", "true"}, {"tournament", "--test", "true", "--", "true"}} {
			code, said := u.refused(t, args...)
			assert.Equal(t, code, "permission", said)
			assert.Assert(t, strings.Contains(said, "read-only") && strings.Contains(said, volume), said)
		}
		remount(t, volume, "rw")
		assert.Equal(t, u.tree(t), whole("base"))
	})
}

// A directory in place can be read-only where the root is not, and be on the
// same file system.
func TestReadOnlyDirectory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount")
	}
	top := t.TempDir()
	dir := filepath.Join(top, "dir")
	assert.NilError(t, os.Mkdir(dir, 0o755))
	assert.NilError(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { assert.NilError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	assert.NilError(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o644)
	assert.ErrorIs(t, err, unix.EROFS)
	assert.Equal(t, hintOf(explain(filepath.Join(top, "root"), err)), "the file system at "+dir+" is read-only: mount it writable")
}

func remount(t *testing.T, volume, mode string) {
	t.Helper()
	out, err := exec.Command("mount", "-o", "remount,"+mode, volume).CombinedOutput()
	assert.NilError(t, err, string(out))
}

// TestFewOpenFiles: with too few files a command does its work or says so.
func TestFewOpenFiles(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		base := u.init(t, "base")
		refused := 0
		step := 12
		if os.Getenv("AGENTENV_TEST_LONG") != "" {
			step = 1
		}
		for n := 8; n <= 40; n += step {
			edit := fmt.Sprintf("edit%d", n)
			u.agentenv(t, "exec", "--no-commit", "--", "sh", "-c", stateScript(edit))
			before := u.log(t)
			for _, args := range []string{"commit", "checkout " + string(base), "tag t", "log", "status"} {
				out, errs, code := u.run(t, u.src, "sh", "-c", fmt.Sprintf("ulimit -n %d; exec agentenv --root %s %s", n, u.root, args))
				if code == 0 {
					continue
				}
				refused++
				assert.Equal(t, code, exitHarness, "%d files: %s: %s%s", n, args, out, errs)
				assert.Assert(t, strings.Contains(errs, "ulimit -n"), "%d files: %s: %s", n, args, errs)
			}
			after := u.log(t)
			contains(t, after, before, "few files")
			tree := u.tree(t)
			assert.Assert(t, tree == whole(edit) || tree == whole("base"), tree)
			u.swept(t)
		}
		t.Logf("%d commands were refused", refused)
	})
}

// TestUnkeepable: a candidate that makes what no snapshot can hold has failed;
// agentenv has not.
func TestUnkeepable(t *testing.T) {
	onSmallVolumes(t, func(t *testing.T, u *owner, volume string) {
		if u.backend != "btrfs" {
			t.Skip("only a btrfs snapshot leaves something out")
		}
		u.init(t, "base")
		out, errs, code := u.run(t, u.src, "agentenv", "--root", u.root, "--json", "tournament", "--test", "true", "--", "btrfs subvolume create nested")
		assert.Equal(t, code, exitNo, "%s%s", out, errs)
		var res runner.Result
		assert.NilError(t, json.Unmarshal([]byte(out), &res))
		assert.Equal(t, res.Attempts[0].Status, runner.Failed)
		assert.Assert(t, strings.Contains(*res.Attempts[0].Reason, "nested"), *res.Attempts[0].Reason)
	})
}
