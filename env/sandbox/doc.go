// Package sandbox runs commands isolated: in namespaces, or (the weakest
// level) as a process group, and ends them with everything they started.
//
// What must hold:
//
//   - When Wait has returned, nothing that the command started is alive, and
//     no mount or namespace of it is left on the host.
//   - The same when agentenv itself dies, at any instant, by any signal: the
//     init of every sandbox holds one end of a socket whose only other holder
//     is agentenv and kills all when it closes.
//   - The command sees descriptors 0 to 2 and no other. What it is to hold
//     ([Command].Hold) its init holds: a lock on a tree ends when nothing in that
//     tree is alive, and no earlier.
//   - A tree that is an overlay is mounted in the mount namespace of its command
//     alone, and is unmounted when Wait returns.
//   - What the sandbox itself needs (mount points, a resolver's file, a pivot
//     directory) never turns up in the tree. So a system that lacks a
//     directory to mount over, such as /dev, runs without that mount, and the
//     user is told.
//   - It never falls back to less isolation than was asked for.
//
// How: agentenv executes itself anew as the init of new namespaces (see
// init_linux.go). The init puts the command's view together from detached
// mounts (world_linux.go and the files of its parts), makes it its root and
// starts the command in a user namespace of its own, from which the mounts
// cannot be undone. Linux 5.12 or later is needed (mount_setattr).
//
// The network is the host's. A network namespace would be one more flag of
// helperAttr and one more part of a layout.
//
// It is no security boundary: the kernel is shared, and so is the network.
package sandbox
