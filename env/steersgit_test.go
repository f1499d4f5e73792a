package env

import (
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/forks"
)

func TestSteersGit(t *testing.T) {
	for path, want := range map[string]bool{
		".git/config": true, ".git/config.worktree": true, ".git/hooks": true, ".git/hooks/post-checkout": true,
		".git/info/attributes": true, ".git/objects/info/alternates": true, ".git/commondir": true,
		".git/modules/sub/config": true, ".git/modules/a/b/hooks/x": true, ".git/worktrees/w/config.worktree": true,
		"sub/.git/config": true, "sub/.git": true, ".git": true,
		".git/COMMIT_EDITMSG": false, ".git/HEAD": false, ".git/index": false, ".git/objects/in/fo": false,
		".git/refs/heads/config": false, ".git/logs/refs/heads/hooks/x": false, ".git/refs/heads/info": false,
		".git/modules/sub/refs/heads/hooks": false, ".git/modules/sub/logs/refs/heads/config": false,
		"config": false, "hooks/x": false, ".gitconfig": false, ".github/hooks/x": false, "git/config": false,
	} {
		file := forks.Entry{Path: path, Mode: modeRegular | 0o644}
		assert.Equal(t, steersGit(forks.Change{Path: path, Kind: forks.Modified, Old: &file, New: &file}), want, path)
		assert.Equal(t, steersGit(forks.Change{Path: path, Kind: forks.Removed, Old: &file}), want, path)
		assert.Equal(t, steersGit(forks.Change{Path: path, Kind: forks.Added, New: &file}), want, path)
	}
	// The time of the directory itself changes with every commit.
	dir := forks.Entry{Path: ".git", Mode: modeDir | 0o755}
	assert.Equal(t, steersGit(forks.Change{Path: ".git", Kind: forks.Modified, Old: &dir, New: &dir}), false)
	file := forks.Entry{Path: ".git", Mode: modeRegular | 0o644}
	assert.Equal(t, steersGit(forks.Change{Path: ".git", Kind: forks.Type, Old: &dir, New: &file}), true)
}
