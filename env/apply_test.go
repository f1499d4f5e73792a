package env

import (
	"testing"

	"gotest.tools/v3/assert"
)

func TestWhatApplyLeavesAlone(t *testing.T) {
	for path, want := range map[string]struct{ alone, withGit bool }{
		"a":                            {false, false},
		".gitignore":                   {false, false},
		"a.git/config":                 {false, false},
		".git":                         {true, true},
		".git/HEAD":                    {true, false},
		".git/objects/ab/cdef":         {true, false},
		".git/refs/heads/main":         {true, false},
		".git/index":                   {true, false},
		".git/objects/info/alternates": {true, true},
		".git/hooks/pre-commit":        {true, true},
		".git/config.worktree":         {true, true},
		".git/commondir":               {true, true},
		".git/modules/m/config":        {true, true},
		"sub/.git":                     {true, true},
		"sub/.git/info/exclude":        {true, true},
		"sub/.git/refs/tags/v1":        {true, false},
	} {
		assert.Equal(t, skipGit(false)(path), want.alone, path)
		assert.Equal(t, skipGit(true)(path), want.withGit, "%s with --git", path)
	}
}
