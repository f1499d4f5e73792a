package env

import (
	"os"
	"testing"

	"gotest.tools/v3/assert"
)

func writeFile(t *testing.T, path, data string) {
	t.Helper()
	assert.NilError(t, os.WriteFile(path, []byte(data), 0o644))
}

func appendFile(t *testing.T, path, data string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	assert.NilError(t, err)
	_, err = f.WriteString(data)
	assert.NilError(t, err)
	assert.NilError(t, f.Close())
}
