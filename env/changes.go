package env

import (
	"maps"
	"path"
	"slices"

	"github.com/agentenv/agentenv/forks"
)

// shown leaves out of changes the directories that changed in nothing but
// their time, and that because a name in them came or went: the snapshot keeps
// the time, and whoever reads the list learns nothing from it.
func shown(c forks.Changes) forks.Changes {
	parents := make(map[string]bool, len(c.List))
	for _, ch := range c.List {
		if ch.Path != "." {
			parents[path.Dir(ch.Path)] = true
		}
	}
	c.List = slices.DeleteFunc(slices.Clone(c.List), func(ch forks.Change) bool {
		return parents[ch.Path] && ch.Kind == forks.Modified && ch.Old != nil && ch.New != nil && sameButTime(*ch.Old, *ch.New)
	})
	return c
}

func sameButTime(a, b forks.Entry) bool {
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID && maps.Equal(a.Xattrs, b.Xattrs)
}
