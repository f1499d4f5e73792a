package env

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/gofrs/flock"
	"github.com/moby/sys/mountinfo"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// DeletedAll says what became of an environment that was to be removed.
type DeletedAll struct {
	Root string `json:"root"`
	// Snapshots is how many there were.
	Snapshots int `json:"snapshots"`
	// RootRemoved says whether the root is gone; if not, Left names what is in
	// it that is not agentenv's.
	RootRemoved bool     `json:"root_removed"`
	Left        []string `json:"left,omitempty"`
	// Kept is the work tree of an environment in place: the user's own
	// directory, which stays as it is.
	Kept string `json:"kept,omitempty"`
}

// DeleteAll removes the environment at root: snapshots, work tree, forks, runs,
// history, and the directory if nothing foreign is in it. It refuses while
// another process holds the lock, runs a command in a fork or uses a mounted
// work tree, and then removes nothing. The environment may be damaged; one whose
// history is gone is still known by what lies in its root. It can be repeated
// after a crash or failure in its middle.
func DeleteAll(ctx context.Context, root string, opts Options) (d DeletedAll, err error) {
	d.Root = root
	if err := checkOurs(root); err != nil {
		return d, err
	}
	if real, err := filepath.EvalSymlinks(root); err == nil {
		root = real // as the kernel names what is mounted below it
	}
	lock, err := lockForAll(ctx, root, opts)
	if err != nil {
		return d, err
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()
	backends := opts.Backends
	if m, err := readMeta(root); err == nil {
		if err := m.checkIDs(root); err != nil {
			return d, err
		}
		d.Snapshots = len(m.Nodes)
		if m.InPlace {
			d.Kept = m.Source
		}
		backends = slices.DeleteFunc(slices.Clone(backends), func(b forks.Backend) bool { return b.Name != m.Backend })
	}
	if err := emptyAll(ctx, root, backends); err != nil {
		return d, err
	}
	step("delete-all.emptied")
	if err := removeOwn(root); err != nil {
		return d, err
	}
	left, err := os.ReadDir(root)
	if err != nil {
		return d, err
	}
	for _, l := range left {
		d.Left = append(d.Left, l.Name())
	}
	if len(left) == 0 {
		err = os.Remove(root)
		d.RootRemoved = err == nil
	}
	return d, err
}

// nodeName is what every driver calls a snapshot.
var nodeName = regexp.MustCompile("^[0-9a-f]{16}$")

// checkOurs says whether root is an environment's. Without a history it is one
// if all in it bears our names and something of it can be nobody else's.
func checkOurs(root string) error {
	if Exists(root) {
		return nil
	}
	none := &Error{Kind: ErrNotFound, Msg: "no environment at " + root, Hint: "name its root with --root"}
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return none
	}
	if err != nil {
		return err
	}
	ours := false
	for _, d := range entries {
		if !isOwn(d.Name()) {
			none.Hint = fmt.Sprintf("it holds %s, which is not agentenv's", d.Name())
			return none
		}
		ours = ours || d.Name() == lockName || d.Name() == reserveName
	}
	nodes, _ := os.ReadDir(filepath.Join(root, "nodes"))
	ours = ours || exists(filepath.Join(root, "work", string(forks.Work))) ||
		slices.ContainsFunc(nodes, func(d fs.DirEntry) bool { return nodeName.MatchString(d.Name()) })
	if !ours {
		return none
	}
	return nil
}

// lockForAll takes the lock, for which there may be no room.
func lockForAll(ctx context.Context, root string, opts Options) (*flock.Flock, error) {
	lock, err := acquire(ctx, root, "delete --all", opts.Notify)
	if isNoRoom(err) && giveUpReserve(root) {
		lock, err = acquire(ctx, root, "delete --all", opts.Notify)
	}
	var busy *Error
	if errors.As(err, &busy) && busy.Kind == ErrBusy {
		return nil, &Error{Kind: ErrHeld, Msg: busy.Msg, Hint: busy.Hint}
	}
	return lock, err
}

// emptyAll lets the drivers remove what is theirs, once it is sure that nobody
// uses it. What none of them removes, as it is damaged, removeOwn does.
func emptyAll(ctx context.Context, root string, backends []forks.Backend) error {
	err := eachDriver(ctx, root, backends, func(d forks.Driver) error { return checkUnused(ctx, root, d) })
	if err != nil {
		return err
	}
	err = eachDriver(ctx, root, backends, func(d forks.Driver) error {
		_ = d.Detach(ctx, forks.Work) // what stays mounted is named below
		return nil
	})
	if err != nil {
		return err
	}
	if _, err := takeOff(filepath.Join(root, "forks")); err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(root))
	if err != nil {
		return fmt.Errorf("read the mounts: %w", err)
	}
	for _, m := range mounts {
		if m.Mountpoint != root {
			return &Error{Kind: ErrHeld, Msg: "something is mounted at " + m.Mountpoint, Hint: "`umount " + m.Mountpoint + "` and try again"}
		}
	}
	giveUpReserve(root) // to remove may need room
	err = eachDriver(ctx, root, backends, func(d forks.Driver) error {
		emptyStore(ctx, d)
		return nil
	})
	if err != nil {
		return err
	}
	if err := putAside(root); err != nil {
		return err
	}
	return eachDriver(ctx, root, backends, func(d forks.Driver) error {
		_, _ = d.Sweep(ctx) // removeOwn says what is left, and why
		return nil
	})
}

// eachDriver calls fn with each driver that can open the store, one after the
// other: what one holds, no other can use.
func eachDriver(ctx context.Context, root string, backends []forks.Backend, fn func(forks.Driver) error) error {
	for _, b := range backends {
		d, err := b.Open(ctx, root)
		if err != nil {
			continue // it cannot have made any of this
		}
		err = fn(d)
		_ = d.Close() // what it held is about to go
		if err != nil {
			return err
		}
	}
	return nil
}

// checkUnused says whether a process uses a fork, or the mounted work tree.
func checkUnused(ctx context.Context, root string, d forks.Driver) error {
	keys, err := d.Forks(ctx)
	if err != nil {
		return nil // of a store so damaged no fork can be used
	}
	for _, k := range keys {
		_, release, err := d.Use(ctx, k)
		if errors.Is(err, forks.ErrInUse) {
			return &Error{Kind: ErrHeld, Msg: fmt.Sprintf("a command runs in the fork %s of %s", k, root), Hint: "wait until it ends, or stop it"}
		}
		if err == nil {
			release()
		}
	}
	tree, err := d.Tree(forks.Work)
	if err != nil || !d.Features().Mounted || tree.Mount.Overlay != nil {
		return nil
	}
	if users := usersOf(tree.Mount.Dir); len(users) > 0 {
		return heldError(tree.Mount.Dir, users)
	}
	return nil
}

// putAside moves what is still in the places of snapshots and forks to where
// the drivers remove what a crash left.
func putAside(root string) error {
	var left []string
	for _, pattern := range []string{"nodes/*", "forks/*", "work"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		left = append(left, found...)
	}
	if len(left) == 0 {
		return nil
	}
	tmp := filepath.Join(root, "tmp")
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return err
	}
	aside, err := os.MkdirTemp(tmp, "all-")
	if err != nil {
		return err
	}
	for _, path := range left {
		_ = os.Rename(path, filepath.Join(aside, filepath.Base(path))) // else it is removed where it is
	}
	return nil
}

// removeOwn removes all of a root that is agentenv's; the history last but the
// lock, so that an environment of which something could not be removed is found
// again.
func removeOwn(root string) error {
	names := slices.DeleteFunc(slices.Clone(ownNames), func(n string) bool { return n == metaName || n == lockName })
	for _, name := range names {
		if err := sandbox.RemoveScratch(filepath.Join(root, name)); err != nil {
			return err
		}
		step("delete-all.removed-one")
	}
	if err := sweepMeta(root); err != nil {
		return err
	}
	for _, name := range []string{metaName, lockName} {
		if err := os.Remove(filepath.Join(root, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		step("delete-all.removed-one")
	}
	return nil
}
