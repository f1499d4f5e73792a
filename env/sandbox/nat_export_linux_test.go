package sandbox

import "testing"

// OnlyPath has the programs of ways out looked up in PATH alone.
func OnlyPath(t *testing.T) {
	dirs := toolDirs
	toolDirs = nil
	t.Cleanup(func() { toolDirs = dirs })
}
