//go:build linux

package driver

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// member is an uid that nobody has, ownGroup its group, and others one of the
// further groups that it is in.
const (
	member   = 61236
	ownGroup = 61237
	others   = 61238
	// memberDir names the directory of a child that is the member.
	memberDir = "AGENTENV_TEST_MEMBER_DIR"
)

const inNamespaceName = "agentenv-test-in-namespace"

func init() { reexec.Register(inNamespaceName, inNamespaceMain) }

// inNamespaceMain mounts a tree and runs a shell's text in it.
func inNamespaceMain() {
	var m forks.Mount
	err := json.Unmarshal([]byte(os.Args[1]), &m)
	if err == nil {
		err = func() error {
			fd, err := m.Open()
			if err != nil {
				return err
			}
			cmd := exec.Command("sh", "-e", "-c", os.Args[2])
			cmd.Dir = fmt.Sprintf("/proc/self/fd/%d", fd)
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
			return cmd.Run()
		}()
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func inNamespace(t *testing.T, m forks.Mount, text string) {
	t.Helper()
	b, err := json.Marshal(m)
	assert.NilError(t, err)
	cmd := exec.Command(reexec.Self())
	cmd.Args = []string{inNamespaceName, string(b), text}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Geteuid(), HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}},
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_CHOWN, unix.CAP_FSETID},
	}
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, "%s", out)
}

// Files of a group of which the user is a member, but which his user namespace
// does not know, can be written in every fork; the group stays in the record,
// and plain trees have it.
func TestGroupOfMember(t *testing.T) {
	if dir := os.Getenv(memberDir); dir != "" {
		asMember(t, dir)
		return
	}
	dir := forkstest.Volume(t, "ext4")
	if forkstest.IsUser() {
		t.Skip("to be in other groups needs root")
	}
	assert.NilError(t, os.Chown(dir, member, others))
	assert.NilError(t, os.Chmod(dir, 0o755|os.ModeSetgid)) // the store's directory is of that group, too
	exe, err := os.Open("/proc/self/exe")
	assert.NilError(t, err)
	defer exe.Close()
	cmd := exec.Command("/proc/self/fd/3", "-test.run=^TestGroupOfMember$", "-test.v")
	cmd.ExtraFiles = []*os.File{exe}
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), memberDir+"="+dir, "HOME="+dir, "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: member, Gid: ownGroup, Groups: []uint32{others}}}
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, "%s", out)
}

func asMember(t *testing.T, dir string) {
	for _, o := range []Options{overlayOptions, copyOptions} {
		dir := filepath.Join(dir, o.Name)
		assert.NilError(t, os.Mkdir(dir, 0o755))
		src := filepath.Join(dir, "src")
		forkstest.Write(t, src, map[string]string{"a": "1\n", "shared/b": "1\n", "own": "1\n"})
		for path, gid := range map[string]int{"a": others, "shared": others, "shared/b": others, "own": ownGroup, ".": ownGroup} {
			assert.NilError(t, os.Chown(filepath.Join(src, path), -1, gid))
		}
		assert.NilError(t, os.Chmod(filepath.Join(src, "shared"), 0o775|os.ModeSetgid))
		d := open(t, dir, o)
		ctx := t.Context()
		_, err := d.Capture(ctx, "a0", "", forks.Source{Dir: src})
		assert.NilError(t, err)
		groupIs(t, d, "a0", "a", others)
		ours(t, d.store.NodePath("a0"))

		tree, err := d.Fork(ctx, "k", "a0", forks.ForkOptions{})
		assert.NilError(t, err)
		assert.Assert(t, tree.Mount.Overlay != nil)
		inNamespace(t, tree.Mount, "echo 2 >>a; echo 2 >>shared/b; echo new >shared/c; mkdir shared/d; echo 2 >>own")
		c, err := d.Commit(ctx, "k", "b0", nil)
		assert.NilError(t, err)
		assert.Equal(t, len(c.List), 6)
		ours(t, d.store.NodePath("b0"))
		for _, path := range []string{"a", "shared", "shared/b"} {
			groupIs(t, d, "b0", path, others)
		}
		groupIs(t, d, "b0", "own", ownGroup)

		plain, err := d.Fork(ctx, "p", "b0", forks.ForkOptions{Plain: true})
		assert.NilError(t, err)
		for path, gid := range map[string]uint32{"a": others, "shared": others, "shared/b": others, "own": ownGroup} {
			var st unix.Stat_t
			assert.NilError(t, unix.Lstat(filepath.Join(plain.Mount.Dir, path), &st))
			assert.Equal(t, st.Gid, gid, path)
		}
		forkstest.Write(t, plain.Mount.Dir, map[string]string{"a": "3"})
		_, err = d.Commit(ctx, "p", "c0", nil)
		assert.NilError(t, err)
		groupIs(t, d, "c0", "a", others)
		ours(t, d.store.NodePath("c0"))
	}
}

func groupIs(t *testing.T, d *driver, id forks.ID, path string, gid uint32) {
	t.Helper()
	v, err := d.View(t.Context(), id)
	assert.NilError(t, err)
	defer v.Close()
	e, err := v.Lookup(path)
	assert.NilError(t, err)
	assert.Equal(t, e.GID, gid, path)
}

// ours fails if anything in a layer is of another group than the user's own.
func ours(t *testing.T, node string) {
	t.Helper()
	assert.NilError(t, filepath.WalkDir(node, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		assert.NilError(t, unix.Lstat(path, &st))
		assert.Equal(t, st.Gid, uint32(ownGroup), path)
		return nil
	}))
}
