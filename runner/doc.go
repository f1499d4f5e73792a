// Package runner runs a tournament: it forks the base for every attempt, runs
// the candidate, freezes its tree, tests a fork of what was frozen, and promotes
// the first attempt that passes; of those that pass within 1 ms of it, the earliest
// in the plan. It tells what happens as a stream of events and records it in the
// run's folder.
//
// What must hold:
//
//   - The tree that is promoted is exactly the tree that was frozen after
//     everything the candidate started was dead: nothing of the test, nothing of
//     a writer in the background.
//   - Every attempt ends in one of the seven words of [Status]. A candidate that
//     loses is no error; an error that stops the others means the store itself
//     is damaged.
//   - HEAD moves only to a winner, only after every attempt has ended, and not
//     when the run was interrupted before.
//   - When Run returns, no process, mount or fork of it is left, and the result
//     is written, whatever happened. Clean-up runs under a context that
//     cancelling does not reach.
//   - Neither a reader of events that is slow or stuck, nor the amount of a
//     command's output, holds up an attempt.
//
// A run's folder, runs/<run>/ below the root, holds plan.json (the expanded
// plan), events.ndjson (locked while the run is alive), a log for each command,
// and at the end result.json.
package runner
