//go:build linux

package fsat

import (
	"slices"
	"sync"

	"github.com/moby/sys/user"
)

// Mapped says whether files can have these owners in the user namespace that
// this process is in.
func Mapped(uid, gid uint32) bool {
	return contains(uidMap(), uid) && contains(gidMap(), gid)
}

var (
	uidMap = sync.OnceValue(func() []user.IDMap { return readMap("/proc/self/uid_map") })
	gidMap = sync.OnceValue(func() []user.IDMap { return readMap("/proc/self/gid_map") })
)

// readMap reads a map. Where there is no /proc, all ids are taken for mapped:
// what is not, the kernel refuses.
func readMap(file string) []user.IDMap {
	m, err := user.ParseIDMapFile(file)
	if err != nil {
		return []user.IDMap{{Count: 1 << 32}}
	}
	return m
}

func contains(m []user.IDMap, id uint32) bool {
	return slices.ContainsFunc(m, func(l user.IDMap) bool { return int64(id) >= l.ID && int64(id)-l.ID < l.Count })
}
