package env

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"

	"github.com/agentenv/agentenv/env/subid"
)

// IDs returns the map of the user namespace in which alone the environment at
// root is opened, or nil if it needs none. An error means that its history is
// gone or cannot be read.
func IDs(root string) (*subid.Map, error) {
	data, err := os.ReadFile(filepath.Join(root, metaName))
	if err != nil {
		return nil, err
	}
	// The format stands first and says it all for most; a history can be long.
	if format, ok := leadingFormat(data); ok && format < metaIDs {
		return nil, nil
	}
	var m meta
	err = json.Unmarshal(data, &m)
	return m.IDs, err
}

// leadingFormat reads the first member of a history, if that is its format.
func leadingFormat(data []byte) (int, bool) {
	dec := json.NewDecoder(bytes.NewReader(data[:min(len(data), 64)]))
	for _, want := range []json.Token{json.Delim('{'), "version"} {
		if t, err := dec.Token(); err != nil || t != want {
			return 0, false
		}
	}
	t, err := dec.Token()
	n, ok := t.(float64)
	return int(n), ok && err == nil
}

// checkIDs refuses to work outside the user namespace that the environment is
// of: files would be taken for somebody else's, or be out of reach.
func (m *meta) checkIDs(root string) error {
	if m.IDs == nil {
		return nil
	}
	here, err := subid.Current()
	if err != nil {
		return err
	}
	if !here.Equal(*m.IDs) {
		return &Error{Kind: ErrUsage, Msg: "the files of the environment at " + root + " have a range of ids, and this process is not in their user namespace", Hint: "use the command agentenv, as the user who made it"}
	}
	return nil
}

// warnStrangers tells of owners that are beyond the environment's ids, or beyond
// this user, if it has none.
func (e *Env) warnStrangers(owners map[string][2]uint32) {
	if e.meta.IDs == nil {
		if len(owners) > 0 {
			e.opts.notify("%d paths belong to users that you cannot give them to: on the disk they are yours, and snapshots keep the owner", len(owners))
		}
		return
	}
	n, such := 0, uint32(math.MaxUint32)
	for _, o := range owners {
		switch uid, gid := subid.Has(e.meta.IDs.UIDs, o[0]), subid.Has(e.meta.IDs.GIDs, o[1]); {
		case uid && gid:
			continue
		case !uid:
			such = min(such, o[0])
		default:
			such = min(such, o[1])
		}
		n++
	}
	if n > 0 {
		e.opts.notify("owners beyond the %d ids that there are (such as %d): commands see those files (%d) as root's; snapshots keep the owner", e.meta.IDs.Size(), such, n)
	}
}

// LooksLikeSystem says whether the directory dir looks like a whole system;
// what it is decides [Init], from what it took in.
func LooksLikeSystem(dir string) bool { return hasShell(dir) }
