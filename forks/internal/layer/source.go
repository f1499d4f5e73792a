//go:build linux

package layer

import (
	"context"
	"fmt"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
)

// What stands here is for a driver that stores snapshots in another form, and
// reads the directories that it is given as this package does.

// OpenSource opens a directory to capture or compare.
func OpenSource(dir string) (int, error) { return openSource(dir) }

// Finished returns an error if an apply to the open directory root, which is
// dir, is unfinished: then it is nothing to capture.
func Finished(root int, dir string) error {
	if unfinishedApply(root) {
		return fmt.Errorf("%w in %s: run `agentenv apply` again, or remove %s there", forks.ErrUnfinished, dir, applyName)
	}
	return nil
}

// ScanSource compares the open source directory root with base, which may be
// nil, and with trust is the index of that directory.
func (s *Store) ScanSource(ctx context.Context, root int, base *State, trust bool, src forks.Source) (*Scan, error) {
	o := ScanOptions{Base: base, Trust: trust, InPlace: src.Index != "", Progress: src.Progress, Access: fsat.Access{CrossMounts: src.CrossFilesystems}, FileXattrs: true}
	if base != nil {
		o.Same = s.SameAsStored(base)
	}
	var err error
	if o.Excluded, o.SkipDirs, err = s.exclusions(src); err != nil {
		return nil, err
	}
	scan, err := ScanTree(ctx, root, o)
	if err != nil {
		return nil, sourceError(src.Dir, err)
	}
	if src.Index != "" {
		if err := scan.keepUnseen(base, o.Excluded); err != nil {
			return nil, err
		}
	}
	scan.Delta.own(src.Owners)
	return scan, nil
}
