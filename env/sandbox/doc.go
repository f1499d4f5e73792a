// Package sandbox runs commands isolated: in namespaces, or (the weakest
// level) as a process group, and ends them with everything they started.
//
// What must hold:
//
//   - When Wait has returned, nothing that the command started is alive, and
//     no mount or namespace of it is left on the host.
//   - The same when agentenv itself dies, at any instant, by any signal: the
//     init of every sandbox holds the reading end of a pipe whose only writer
//     is agentenv and kills all when it closes.
//   - The command sees descriptors 0 to 2 and no other.
//   - What the sandbox itself needs (mount points, a resolver's file, a pivot
//     directory) never turns up in the tree.
//   - It never falls back to less isolation than was asked for.
//
// It is no security boundary: the kernel is shared, and so is the network.
package sandbox
