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
		return parents[ch.Path] && onlyDirTime(ch)
	})
	return c
}

// onlyDirTime says whether nothing but a directory's time changed.
func onlyDirTime(ch forks.Change) bool {
	if ch.Kind != forks.Modified || ch.Old.Mode&modeType != modeDir {
		return false
	}
	return ch.Old.Mode == ch.New.Mode && ch.Old.UID == ch.New.UID && ch.Old.GID == ch.New.GID && maps.Equal(ch.Old.Xattrs, ch.New.Xattrs)
}
