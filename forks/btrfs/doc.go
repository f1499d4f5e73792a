// Package btrfs is the driver "btrfs": snapshots are read-only subvolumes, and
// forks are writable snapshots of them. Both cost the same whatever the size of
// the tree, and so do commits and checkouts.
//
// A store's root holds, all directories made with mode 0700:
//
//	nodes/ID/tree     the snapshot, a read-only subvolume
//	nodes/ID/info     what it was made of, as the text of a symlink
//	nodes/ID/record   what an ordinary user cannot set on disk (may be missing)
//	nodes/ID/source   the index of a captured directory (a cache; may be missing)
//	nodes/ID/removed  a marker: the snapshot is removed, a fork has it as its base
//	work/current      the work tree, a subvolume; work/base belongs to it
//	forks/KEY/tree    a fork, with its base beside it
//	work/next         a tree that is to be put in the place of the fork's, or was
//	tmp/NAME/         what is being made; a flock on it says that its maker lives
//
// What must hold, besides what package forks asks of every driver:
//
//   - What stands beside a snapshot is on disk with it or before it. To make a
//     snapshot is to commit a transaction, which has all names and symlinks that
//     were made before; files are synced.
//   - A checkout lets two subvolumes change places. There is no moment at which
//     a fork is neither what it was nor what it is to become, or its base is not
//     known: before either changes, the base link names both, and what is on
//     disk tells which is true.
//   - What differs is found by the transactions that inodes were changed in,
//     where this user may search for them (CAP_SYS_ADMIN), otherwise by a walk
//     that compares inode, ctime, mtime and size. Contents decide wherever these
//     do not, so that both ways give the same answer. A search sees what is on
//     disk: a snapshot is, a fork is after a syncfs.
//   - The transaction and the time to compare with are written down when a
//     snapshot is made. Those of the subvolume change later: a balance, and each
//     snapshot made of it, gives it another generation.
//   - A subvolume is deleted by one ioctl, never by a walk of its tree. Where the
//     user may not (not root, and mounted without user_subvol_rm_allowed), it is
//     made writable, emptied and removed like a directory.
//   - Subvolumes are made and deleted one at a time: each is a transaction
//     commit, and parallel ones are slower.
//   - Nested subvolumes of a captured directory become directories. In a fork
//     they are refused by name at a commit: a snapshot would leave them empty.
//   - Whether the kernel has btrfs is read from /proc/filesystems: it may be
//     built in.
//   - With the build tag no_btrfs, or without cgo, the package builds and its
//     probe says why the driver is missing.
//
// Space: the kernel frees deleted subvolumes later. Sweep waits up to five
// seconds for it, and returns by how much the free space of the file system
// grew; what is not freed by then is not counted.
package btrfs
