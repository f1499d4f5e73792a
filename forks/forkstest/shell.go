//go:build linux

package forkstest

import (
	"fmt"
	"os/exec"
	"syscall"
	"testing"

	"gotest.tools/v3/assert"
)

// shell runs a script in dir.
func shell(t testing.TB, dir, script string) string {
	t.Helper()
	cmd := exec.Command("sh", "-ec", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	assert.NilError(t, err, "%s\n%s", script, out)
	return string(out)
}

func hasTool(name string) bool {
	_, err := exec.LookPath(name)
	return err == nil
}

func withUmask(mask int, fn func()) {
	old := syscall.Umask(mask)
	defer syscall.Umask(old)
	fn()
}

// allocated is what du says of dir; what it may not look into counts nothing.
func allocated(t testing.TB, dir string) int64 {
	t.Helper()
	var kib int64
	_, err := fmt.Sscan(shell(t, dir, "du -sk . 2>/dev/null | cut -f1"), &kib)
	assert.NilError(t, err)
	return kib << 10
}
