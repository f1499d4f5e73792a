package forks

import (
	"context"
	"io"
	"os"
	"time"
)

// ID names a snapshot: lower-case hex, chosen by the caller, unique in a store.
type ID string

// Key names a fork in a store: one path element of [a-z0-9._-], at most 128
// bytes, not starting with a dot.
type Key string

// Work is the key of an environment's work tree. Its tree stands at
// work/current below the store's root, where it stands anywhere.
const Work Key = "current"

// Driver keeps the snapshots and forks of one store, a directory on one file
// system. Methods may be called from several goroutines, but two calls that
// name the same fork must not overlap. The caller makes sure that only one
// process at a time changes a store; reads need no lock.
//
// Every error is an [*Error].
type Driver interface {
	// Name is the word users write: "btrfs", "overlay", "copy".
	Name() string

	// Features says what this driver can do on this store.
	Features() Features

	// Capture stores the directory src as snapshot id. With a base, only what
	// differs from it is stored; where base was captured from the same
	// directory, unchanged files are recognised without being read. The
	// returned Changes are against base (all added when base is "").
	Capture(ctx context.Context, id, base ID, src Source) (Changes, error)

	// Compare returns what the directory src has changed against snapshot base;
	// it stores nothing.
	Compare(ctx context.Context, base ID, src Source) (Changes, error)

	// Replace makes the directory src.Dir, which is not of this store, equal to
	// snapshot id and returns what it changed. What src leaves out, and what
	// other file systems hold below it, stays as it is. Files are replaced by
	// rename, directories that are in both keep their inodes. What differs from
	// src.Held, or comes while Replace is at work, stays as it is and is named
	// in Warnings: no snapshot has it. It can be repeated after a crash in its
	// middle, with the same or another id. An error that is [ErrUntouched] says
	// that nothing was changed.
	Replace(ctx context.Context, id ID, src Source) (Changes, error)

	// Fork makes the fork key, equal to base, and returns it ready to be
	// mounted and written to. No other process removes it while this driver
	// is open or a [Driver.Use] of it lasts.
	Fork(ctx context.Context, key Key, base ID, o ForkOptions) (Tree, error)

	// Tree returns an existing fork, or an error that is [ErrNotFound].
	Tree(key Key) (Tree, error)

	// Attach makes a fork stand at Mount.Dir on the host and returns it so. It
	// is no error if it does already; it is [ErrUnsupported] if its tree is
	// one that this user can mount only in a namespace.
	Attach(ctx context.Context, key Key) (Tree, error)

	// Detach takes back what Attach did; no error if it was not done. Where
	// something is mounted below the tree, it is refused, as are Checkout and
	// RemoveFork then.
	Detach(ctx context.Context, key Key) error

	// Use says that processes are about to work in the fork. The file is to be
	// handed to the first of them, which keeps it open as long as any of them
	// lives; release is called when all are gone. While either holds, no other
	// process can use or remove the fork: it waits a little for those who are
	// just ending, then it gets [ErrInUse].
	Use(ctx context.Context, key Key) (file *os.File, release func(), err error)

	// Status returns what the fork has changed against its base. It reads no
	// file whose inode, ctime, size and mtime say that it did not change.
	Status(ctx context.Context, key Key) (Changes, error)

	// Commit stores the fork's present state as snapshot id, whose base is the
	// fork's base; from then on the fork's base is id. With no change it makes
	// no snapshot, leaves the fork as it was and returns empty Changes. intent,
	// if not nil, is called when it is known that there will be a snapshot and
	// before anything points to it; its error ends the commit.
	Commit(ctx context.Context, key Key, id ID, intent func() error) (Changes, error)

	// Checkout makes the fork equal to snapshot id, which becomes its base.
	// It needs nothing of what the fork was based on, which may be damaged.
	// Unless the driver's trees are mounted or replaced ([Features]),
	// directories that are in both keep their inodes. Whatever the fork held is
	// lost: the caller commits first. It can be repeated after a crash in its
	// middle, with the same or another id.
	Checkout(ctx context.Context, key Key, id ID) error

	// RemoveFork removes a fork and all it holds. A fork that is not there is
	// no error; one that another process uses is [ErrInUse].
	RemoveFork(ctx context.Context, key Key) error

	// RemoveSnapshot gives back the storage of a snapshot. Storage that other
	// snapshots build upon stays, unlisted, until the last of them goes.
	// A snapshot that is not there is no error.
	RemoveSnapshot(ctx context.Context, id ID) error

	// View opens a snapshot for reading.
	View(ctx context.Context, id ID) (View, error)

	// Diff returns what changed from snapshot a to snapshot b.
	Diff(ctx context.Context, a, b ID) (Changes, error)

	// Apply brings what changed from snapshot from to snapshot to into the
	// directory dir, which is not of this store. Where dir differs both from
	// from and from to, that path is a conflict; with any conflict nothing is
	// written.
	Apply(ctx context.Context, from, to ID, dir string, opts ApplyOptions) (ApplyResult, error)

	// Snapshots lists the ids of the complete snapshots that the store holds
	// and that have not been removed; Forks the keys of its forks. Both
	// include what a crash left.
	Snapshots(ctx context.Context) ([]ID, error)
	Forks(ctx context.Context) ([]Key, error)

	// Sweep removes storage that no snapshot and no fork needs (what a crash
	// in the middle of a method left) and returns the bytes freed.
	Sweep(ctx context.Context) (int64, error)

	// Close lets go of what the driver holds open. Forks and snapshots stay.
	Close() error
}

// Features says what a driver can do. Callers branch on these, never on names.
type Features struct {
	// ConstantFork: a fork costs the same whatever the size of its base.
	ConstantFork bool
	// Mounted: the work tree is only there where its Tree.Mount is mounted.
	Mounted bool
	// Replaced: Checkout puts another tree in the place of the fork's. Who has
	// a working directory in the old one has one that is gone; Tree names them
	// in its Warnings.
	Replaced bool
	// SharedExtents: copies share their blocks on disk (FICLONE works).
	SharedExtents bool
	// Owners: files can be given any owner; if not, owners are kept in the
	// record alone.
	Owners bool
	// Devices: device nodes can be made; if not, they are kept in the record
	// and left out of forks, with a warning.
	Devices bool
}

// Tree is a fork as a place.
type Tree struct {
	Key  Key
	Base ID
	// Mount says how the tree is reached.
	Mount Mount
	// Interrupted says that a Checkout of this fork was cut short: it is
	// neither what it was nor what it was to become, until the next Checkout.
	Interrupted bool
	// Warnings name what could not be made as it is in the snapshot, one
	// line each, bounded in number.
	Warnings []string
}

// ForkOptions say how [Driver.Fork] works.
type ForkOptions struct {
	// Plain asks for a tree that is a directory without any mount, for
	// commands that run without namespaces. It may take time for each file.
	Plain bool
}

// Mount says how a tree becomes visible: a directory to bind, or an overlay to
// mount. [Mount.Open] does either.
type Mount struct {
	// Dir is the absolute path where the tree stands on the host, or with
	// Overlay would stand if it were attached.
	Dir string
	// Overlay is what is to be mounted; nil if the tree stands at Dir.
	Overlay *Overlay
}

// Overlay is a tree made of frozen layers and a private directory above them.
// It is mounted once at a time: a second mount of the same Upper sees and
// leaves stale files.
type Overlay struct {
	// Dir is an absolute path; the others are relative to it.
	Dir string
	// Lower holds the layers, the nearest first. It is empty where one of them
	// is missing or damaged; then nothing can be mounted.
	Lower []string
	// Upper takes what is written; Work is the kernel's own, empty before
	// each mount, on the same file system.
	Upper, Work string
	// Volatile: nothing written is synced by the mount; who keeps the tree
	// syncs what is kept.
	Volatile bool
}

// Source is a directory to capture.
type Source struct {
	Dir string
	// Exclude holds doublestar patterns relative to Dir; what matches is left
	// out with all below it. A pattern without a slash matches at any depth.
	Exclude []string
	// Skip holds absolute paths that are left out, such as the store itself.
	Skip []string
	// CrossFilesystems also takes in what other file systems hold below Dir.
	// Without it the mount points are kept as empty directories and named in
	// Warnings.
	CrossFilesystems bool
	// Owners holds the owner (uid, gid) of paths below Dir whose inodes could
	// not be given it, as when an ordinary user unpacked an archive. It takes
	// the place of what the inode says.
	Owners map[string][2]uint32
	// Index, if set, is the absolute path of a file, in a directory of the
	// caller's outside of Dir or left out of it, in which the driver keeps
	// what it knows of Dir from one call to the next, so that unchanged files
	// are recognised without being read whatever the base. It is a cache.
	Index string
	// Held, for [Driver.Replace], is the snapshot that holds what Dir was when
	// it was last stored. Without it, all that Replace finds when it begins may
	// be lost.
	Held ID
	// IndexReadOnly leaves the Index as it is, for who only looks.
	IndexReadOnly bool
	// Progress, if set, is called now and then with what was captured so far,
	// from any goroutine.
	Progress func(files, bytes int64)
}

// Change is one path that differs between two states.
type Change struct {
	// Path is relative to the tree, with slashes, any bytes; "." is the root.
	Path string
	Kind ChangeKind
	// Old and New describe the path before and after; nil where it is absent.
	Old, New *Entry
}

// ChangeKind says how a path differs.
type ChangeKind string

// The kinds of change, as CONTRACT §5 writes them.
const (
	Added    ChangeKind = "added"
	Removed  ChangeKind = "removed"
	Modified ChangeKind = "modified"
	Type     ChangeKind = "type"
)

// Changes are the paths that differ, in order of their path's bytes, and what
// the user should know about them.
type Changes struct {
	List []Change
	// Bytes is the disk space that Capture or Commit took to store them.
	Bytes int64
	// Warnings name what could not be kept, one line each, bounded in number.
	Warnings []string
}

// Entry describes one path of a snapshot.
type Entry struct {
	Path string
	// Mode is st_mode: type and permissions, with suid, sgid and sticky.
	Mode     uint32
	UID, GID uint32
	// Size is the length of a regular file, or of a symlink's target.
	Size  int64
	Mtime time.Time
	Rdev  uint64
	// Target is a symlink's text.
	Target string
	// Link is not 0 for a regular file with several names in the tree; the
	// names with the same number are one file.
	Link uint64
	// Xattrs are all extended attributes that the driver keeps, ACLs and
	// capabilities included.
	Xattrs map[string]string
}

// View reads a snapshot. It is safe for use by several goroutines.
type View interface {
	// Lookup returns the entry at path, or an error that is [ErrNotFound].
	Lookup(path string) (Entry, error)
	// Walk calls fn for every entry, parents before children, each
	// directory's names in byte order, until fn returns an error.
	// Returning [SkipDir] for a directory leaves out what is below it.
	Walk(fn func(Entry) error) error
	// Open returns the bytes of a regular file.
	Open(path string) (io.ReadSeekCloser, error)
	Close() error
}

// ApplyOptions say how [Driver.Apply] works.
type ApplyOptions struct {
	// Check only looks for conflicts.
	Check bool
	// Skip says which paths are left alone.
	Skip func(path string) bool
}

// ApplyResult lists what [Driver.Apply] wrote (with Check: would write) and
// where it was in the way, in byte order.
type ApplyResult struct {
	Applied   []string
	Conflicts []string
	Warnings  []string
}
