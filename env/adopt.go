package env

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Adopt says that the directory which the workspace at root was taken from, or
// in which it is in place, was moved and is dir now. A root that lies where
// those of this user do by default is renamed, so that it is found from dir. It
// returns where the root is then, and can be repeated after a crash.
func Adopt(ctx context.Context, root, dir string, getenv func(string) string, opts Options) (string, error) {
	e, err := Lock(ctx, root, "init --adopt", opts)
	if err != nil {
		return "", err
	}
	to, err := e.adopt(ctx, dir, getenv)
	if err == nil && to != root {
		// A mount below it would keep the old path.
		if _, err = e.Umount(ctx); err == nil {
			err = renameRoot(root, to)
		}
	}
	return to, errors.Join(err, e.Close())
}

// adopt notes the directory and returns where the root belongs.
func (e *Env) adopt(ctx context.Context, dir string, getenv func(string) string) (string, error) {
	dir, err := e.checkAdopt(dir)
	if err != nil {
		return "", err
	}
	to := e.root
	if home := dataHome(getenv); home != "" && filepath.Dir(e.root) == home && e.root != filepath.Join(home, "default") {
		to = RootOf(dir, getenv)
		if to != e.root && exists(to) {
			return "", &Error{Kind: ErrExists, Msg: fmt.Sprintf("%s has an environment of its own, at %s", dir, to), Hint: "remove that first, if it is of no use"}
		}
	}
	if e.meta.Source == dir {
		return to, nil
	}
	was, m := e.meta.Source, e.meta.clone()
	for i := range m.Nodes {
		if m.Nodes[i].Source == was {
			m.Nodes[i].Source = dir
		}
	}
	if a, ok := m.Applied[was]; ok {
		delete(m.Applied, was)
		m.Applied[dir] = a
	}
	if m.MountAt == was {
		m.MountAt = dir
	}
	m.Source = dir
	err = e.save(m)
	step("adopt.saved")
	return to, err
}

// checkAdopt says whether the environment can be one of dir, and returns its
// path without symlinks.
func (e *Env) checkAdopt(dir string) (string, error) {
	was := e.meta.Source
	if e.meta.Kind != Workspace || was == "" {
		return "", &Error{Kind: ErrUsage, Msg: "the environment at " + e.root + " was taken from no directory that could have been moved"}
	}
	var err error
	if e.meta.InPlace {
		dir, err = checkInPlace(e.root, InitOptions{From: dir})
	} else if dir, err = CheckDir(dir); err == nil {
		err = checkOutside(e.root, dir)
	}
	if err != nil || dir == was {
		return dir, err
	}
	if st, err := os.Lstat(was); err == nil && st.IsDir() { // a symlink to where it is now is no second one
		return "", &Error{Kind: ErrExists, Msg: fmt.Sprintf("%s, whose environment %s is, is still there", was, e.root), Hint: "only one whose directory was moved can be adopted; for another copy make another with `agentenv init`"}
	}
	return dir, nil
}

// renameRoot moves a root, durably, to a name that is free.
func renameRoot(root, to string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, root, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err != nil {
		return &os.LinkError{Op: "rename", Old: root, New: to, Err: err}
	}
	step("adopt.renamed")
	return syncDir(filepath.Dir(to))
}
