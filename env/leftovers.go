package env

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agentenv/agentenv/forks"
)

// Leftover is something below the root that belongs to no snapshot of the
// history, no work tree and no run.
type Leftover struct {
	// Path is relative to the root.
	Path string
	// Bytes are what it takes on disk.
	Bytes int64
}

// Leftovers lists forks, snapshots that no history lists, and scratch
// directories. While no command runs there is none.
func (e *Env) Leftovers(ctx context.Context) ([]Leftover, error) {
	var paths []string
	for _, dir := range []string{"forks", scratchName, "tmp"} {
		entries, err := os.ReadDir(filepath.Join(e.root, dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, d := range entries {
			paths = append(paths, filepath.Join(dir, d.Name()))
		}
	}
	ids, err := e.driver.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	stores := e.meta.stores()
	for _, id := range ids {
		if !stores[id] {
			paths = append(paths, filepath.Join("nodes", string(id)))
		}
	}
	out := make([]Leftover, 0, len(paths))
	for _, p := range paths {
		if p == filepath.Join("forks", string(forks.Work)) || OfUnlocked(p) {
			continue
		}
		out = append(out, Leftover{Path: p, Bytes: diskUse(filepath.Join(e.root, p))})
	}
	return out, nil
}

// OfUnlocked says whether path, relative to a root, is part of a fork in which
// a command runs that needs no lock ([Env.ExecFork]), and so may be there at any
// time.
func OfUnlocked(path string) bool {
	return strings.HasPrefix(path, "forks/"+freeKey) || strings.HasPrefix(path, scratchName+"/"+freeKey)
}

// diskUse is what path and all below it take on disk, in bytes; what cannot be
// read counts nothing.
func diskUse(path string) int64 {
	const block = 512 // the unit of st_blocks, whatever the file system
	var n int64
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				n += st.Blocks * block
			}
		}
		return nil
	})
	return n
}
