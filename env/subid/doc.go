// Package subid gives an ordinary user the ids that /etc/subuid and
// /etc/subgid grant him: it runs the program again in a user namespace in which
// he is 0 and they are 1, 2, 3 and so on, as rootless container engines do. There
// files can have owners and processes can change their user, so that apt and
// postgres work in a system of the user's own.
//
// What must hold:
//
//   - The maps are written by newuidmap and newgidmap, which check them against
//     the files; this package only asks for what the files say.
//   - What a store holds has the ids of one map. Whoever opens it is in a
//     namespace with that map ([Current]) or leaves it alone: what other ids own
//     cannot be read, and would be recorded as somebody else's.
//   - The process inside has the caller's streams, directory and environment. It
//     is in a session of its own, so that a signal, whoever it came from, reaches
//     it once, by the process outside. That one only passes on signals, stops and
//     the exit status. When it is killed, the one inside is killed too.
//   - Its mount namespace is its own: what it mounts, nobody else sees, and it
//     goes when the process does.
package subid
