package env

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env/subid"
)

// TestIDsOfAnotherNamespace: who is not in an environment's user namespace finds
// out which that is, and can do nothing else.
func TestIDsOfAnotherNamespace(t *testing.T) {
	here, err := subid.Current()
	assert.NilError(t, err)
	assert.NilError(t, (&meta{}).checkIDs("/r"))
	assert.NilError(t, (&meta{IDs: &here}).checkIDs("/r"))
	there := &subid.Map{UIDs: []subid.Range{{Inside: 0, Outside: 77, Size: 1}}, GIDs: here.GIDs}
	assert.ErrorIs(t, (&meta{IDs: there}).checkIDs("/r"), ErrUsage)

	root := t.TempDir()
	_, err = IDs(root)
	assert.ErrorIs(t, err, os.ErrNotExist)
	for _, m := range []meta{{Version: metaPlain}, {Version: metaInPlace}, {Version: metaIDs, IDs: there}} {
		data, err := json.Marshal(m)
		assert.NilError(t, err)
		format, ok := leadingFormat(data)
		assert.Assert(t, ok && format == m.Version, "%s", data)
		assert.NilError(t, os.WriteFile(filepath.Join(root, metaName), data, 0o600))
		got, err := IDs(root)
		assert.NilError(t, err)
		assert.DeepEqual(t, got, m.IDs)
	}
	for _, data := range []string{"", "{", "[3]", `{"kind":"x","version":1}`} {
		_, ok := leadingFormat([]byte(data))
		assert.Assert(t, !ok, data)
	}
}
