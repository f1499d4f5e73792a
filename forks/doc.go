// Package forks stores trees and forks them. It defines the words, the
// [Driver] that every backend implements, and how one is chosen.
//
// Words, used here and nowhere differently:
//
//   - A snapshot is a read-only state of a whole tree, named by an [ID]. It is
//     complete and durable from the moment a method that makes one returns,
//     and it never changes afterwards.
//   - The base of a snapshot is the snapshot it was stored against. What a
//     snapshot shares with its base is stored once. The base of a snapshot is
//     a matter of storage: a history may re-parent what it shows.
//   - A fork is a private, writable tree, named by a [Key]. It starts equal to
//     a snapshot, its base. The work tree of an environment is a fork too, with
//     the key [Work].
//
// What must hold, for every driver:
//
//   - A stored inode is never writable from a fork.
//   - Every property of a tree survives: bytes, holes, hard-link groups, modes
//     with suid, sgid and sticky, owners, times in nanoseconds (also of
//     directories and symlinks, also before 1970), xattrs, ACLs, capabilities,
//     FIFOs, sockets, device nodes, names of any bytes, and all of it for the
//     tree's own root.
//   - No path is followed: walks go from directory descriptor to directory
//     descriptor, and nothing outside the tree is touched, whatever is planted
//     or swapped inside it. Anything but regular files and directories is
//     never opened.
//   - A directory given to [Driver.Capture] is never modified.
//   - What a crash leaves behind is found by [Driver.Snapshots] and
//     [Driver.Forks] and can be removed; it never makes a listed snapshot
//     incomplete.
//
// This package and those below it know nothing of plans, environments or
// command lines.
package forks
