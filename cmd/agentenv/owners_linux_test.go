package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// TestOwnersOfTarball: an ordinary user learns of the owners in an archive that he
// cannot give files to, and sees what the snapshot keeps.
func TestOwnersOfTarball(t *testing.T) {
	asEach(t, func(t *testing.T, p *person) {
		tree := filepath.Join(p.home, "tree")
		assert.NilError(t, os.Mkdir(tree, 0o755))
		assert.NilError(t, os.WriteFile(filepath.Join(tree, "a"), nil, 0o644))
		out, err := exec.Command("tar", "--owner=54321", "--group=54321", "-cf", tree+".tar", "-C", tree, ".").CombinedOutput()
		assert.NilError(t, err, string(out))
		root := filepath.Join(p.home, "root")
		_, errs, code := p.run(t, p.home, "agentenv", "--root", root, "init", "--tarball", tree+".tar")
		assert.Equal(t, code, 0, errs)
		assert.Equal(t, strings.Contains(errs, "2 paths belong to users that you cannot give them to"), p.uid != 0, errs)
		shown, _, _ := p.run(t, p.home, "agentenv", "--root", root, "-v", "show", "HEAD")
		assert.Assert(t, strings.Contains(shown, "A  54321:54321  a\n"), shown)
		shown, _, _ = p.run(t, p.home, "agentenv", "--root", root, "show", "HEAD")
		assert.Assert(t, strings.Contains(shown, "A  a\n"), shown)
	})
}
