// Package env keeps one environment: a tree with its history, below a root.
// It opens and makes environments, finds roots, resolves REFs, commits,
// checks out, forks, promotes, applies, and recovers after a crash. Commands
// run in its trees through an [Executor].
//
// What must hold:
//
//   - At most one process changes an environment at a time (agentenv.lock,
//     an flock that dies with its process). Reading needs no lock and writes
//     nothing.
//   - Commands in throw-away forks ([Env.ExecFork]) need no lock either: what
//     is in use is locked by itself, and nobody removes it.
//   - A snapshot is in the history (meta.json) only when the driver has it
//     complete and durable. meta.json is replaced atomically and durably, and
//     one of a newer format is never rewritten.
//   - Work that no snapshot holds is never lost unless the user said so: it
//     is saved before anything takes its place.
//   - After a crash at any instant, HEAD and the work tree are the old ones or
//     the new ones: the next command that writes finishes or undoes what the
//     journal and the driver say was cut short, and readers show what it will
//     find.
//
// The work tree is a fork of the driver's or, in place, a directory of the
// user's own, which inPlace makes look like one.
//
// It knows nothing of plans, tournaments or command lines.
package env
