// Package btrfs is the room of the driver "btrfs", whose snapshots are
// read-only subvolumes and whose forks are subvolume snapshots: both cost the
// same whatever the size of the tree.
//
// What must hold, besides what package forks asks of every driver:
//
//   - It needs the ioctls of btrfs and works for root, or where the file system
//     is mounted with user_subvol_rm_allowed. Whether the kernel has btrfs is
//     read from /proc/filesystems: it may be built in.
//   - A subvolume is deleted by one ioctl, BTRFS_IOC_SNAP_DESTROY_V2, never by
//     a walk of its tree.
//   - Snapshots are made from one goroutine: each is a transaction commit, and
//     parallel ones are slower.
//   - Nested subvolumes of a captured directory become directories or are
//     refused by name; a subvolume snapshot would leave them empty.
//   - With the build tag no_btrfs, or without cgo, the package builds and its
//     probe says why the driver is missing.
package btrfs
