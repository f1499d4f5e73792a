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
//   - In the cgroup of a command, which carries its limits, are the command and what
//     it starts, and no helper. A killed agentenv leaves at most a cgroup with
//     nothing in it, for the next command to remove.
//
// How: agentenv executes itself anew as the init of new namespaces (see
// init_linux.go). The init puts the command's view together from detached
// mounts (world_linux.go and the files of its parts), makes it its root and
// starts the command in a user namespace of its own, from which the mounts
// cannot be undone. Linux 5.12 or later is needed (mount_setattr).
//
// At the level of namespaces commands run under the seccomp filter that Docker has
// by default, less what programs need that make sandboxes of their own
// (seccomp_linux.go, internal/mkfilter). As with Docker's, a 32-bit program can make
// sockets of the families that are denied to others, by socketcall(2), whose arguments
// no filter sees. There is none at the level of processes, which promises no more
// than an end to everything.
//
// A command that shares the user's terminal (Command.Terminal nil, a terminal among
// its streams) can read from it, write to it and change its settings as any program
// can. It cannot push input that the user's shell would execute: the terminal is not
// that of its session, and the filter denies the two ioctls that do so.
//
// The network is the host's, with its ports and abstract sockets, unless the
// command asks for its own (network_linux.go): then the init is in one more
// namespace, which belongs to the user namespace around the command's, so that
// the command can neither change nor leave it. For the way out ([NetworkNAT]) there
// is one more process around the init (nat_init_linux.go), in whose PID namespace
// the forwarder ends with it. A filter that lets only some addresses through would
// be set there, by nftables in the command's network namespace, before the init is
// started; and names by a resolver of ours instead of the host's.
//
// It is no security boundary: the kernel is shared, and so, unless the command asks
// for its own, is the network.
package sandbox
