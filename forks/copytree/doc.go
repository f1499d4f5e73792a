// Package copytree is the driver "copy": it needs nothing but a file system.
// Snapshots are layers of package layer; the work tree and the forks are plain
// directory trees, made by sharing blocks (FICLONE) where the file system can,
// else by copying.
//
// What must hold, besides what package forks asks of every driver:
//
//   - A stored file is never linked to from a tree: every file of a tree is an
//     inode of its own.
//   - A file is unchanged if its inode, ctime, size, mtime, mode and owner are
//     those of the index. Before an index entry is made, dirty pages of the file
//     are written out, so that a later store through a mapping changes the times;
//     an entry with a ctime younger than 10 ms is compared by content next time;
//     Fork and Checkout return when later changes must have other ctimes. On
//     tmpfs, where stores through a mapping may change no time, regular files
//     are always compared by content.
//   - Checkout makes everything new in full, out of sight, before it changes
//     anything in the tree. Files are replaced by rename, directories that are in
//     both keep their inodes. While it works, the fork is marked as unsettled:
//     after a crash its index is not believed.
//   - Who is not root gets forks that belong to him; owners, device nodes and
//     privileged attributes stay in the record and do not count as changed.
package copytree
