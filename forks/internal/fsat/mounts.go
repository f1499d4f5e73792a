//go:build linux

package fsat

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
)

// MountPoint is a place where something is mounted.
type MountPoint struct {
	// Path is relative to the directory that was asked about; "." is itself.
	Path string
	// Type is the file system's, as in /proc/filesystems.
	Type string
}

// Mounts lists what this mount namespace has mounted upon the directory tree
// and below it, in the order in which it was mounted. A tree that is not there
// has none.
func Mounts(tree string) ([]MountPoint, error) {
	// The kernel knows no symlinks on the way; what is last is ours.
	parent, err := filepath.EvalSymlinks(filepath.Dir(tree))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	tree = filepath.Join(parent, filepath.Base(tree))
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(tree))
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	var found []MountPoint
	for _, m := range mounts {
		rel, err := filepath.Rel(tree, m.Mountpoint)
		if err != nil {
			return nil, err
		}
		found = append(found, MountPoint{rel, m.FSType})
	}
	return found, nil
}
