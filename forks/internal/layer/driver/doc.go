// Package driver is what the drivers "overlay" and "copy" have in common: both
// store snapshots as layers and differ only in which of their forks are plain
// directory trees and which are overlays.
//
// What must hold for plain trees, besides what package forks asks of every
// driver:
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
//
// And for overlays:
//
//   - An upper is mounted once. The processes that work in it hold the fork's
//     lock, and the kernel's own mark on a mounted upper is asked before each
//     mount and before an upper is moved or removed.
//   - An upper becomes a layer by rename only when nobody has it mounted.
//   - A layer that a fork is built upon is never removed: the store's lock on
//     its layers is held from the look at them until the fork can be seen.
//   - Where the work tree is not mounted, what stands at its path refuses
//     writes. Somebody else's files there are named and never removed.
//   - A tree below which something is mounted is not taken away.
//   - Checkout needs nothing of what the fork was built upon.
package driver
