//go:build linux

package fsat

import (
	"fmt"
	"os"
	"strings"
	"sync"
)

// Mapped says whether files can have these owners in the user namespace that
// this process is in.
func Mapped(uid, gid uint32) bool {
	return contains(uidMap(), uid) && contains(gidMap(), gid)
}

// extent is one line of a map: ids from first on, as they are inside.
type extent struct{ first, size uint64 }

var (
	uidMap = sync.OnceValue(func() []extent { return readMap("/proc/self/uid_map") })
	gidMap = sync.OnceValue(func() []extent { return readMap("/proc/self/gid_map") })
)

// readMap reads a map. Where there is no /proc, all ids are taken for mapped:
// what is not, the kernel refuses.
func readMap(file string) []extent {
	text, err := os.ReadFile(file)
	if err != nil {
		return []extent{{0, 1 << 32}}
	}
	var m []extent
	for line := range strings.Lines(string(text)) {
		var inside, outside, size uint64
		if _, err := fmt.Sscan(line, &inside, &outside, &size); err == nil {
			m = append(m, extent{inside, size})
		}
	}
	return m
}

func contains(m []extent, id uint32) bool {
	for _, e := range m {
		if uint64(id) >= e.first && uint64(id)-e.first < e.size {
			return true
		}
	}
	return false
}
