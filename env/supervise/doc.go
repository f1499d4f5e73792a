// Package supervise runs an unmodified agent in an environment, takes a
// snapshot after every change it makes, and carries it over a rollback: kill,
// restore, start again.
//
// What must hold:
//
//   - No change, no snapshot; a change is in a snapshot at the latest
//     max-delay after it was made, and the last one is taken after the agent
//     has ended.
//   - A snapshot of a living tree shows one instant of it; where the processes
//     cannot be frozen it says that it may not.
//   - The agent's exit code, its output, its terminal's settings and its
//     signals are those it would have without agentenv.
//   - A change that the kernel did not report (a full queue, no watches left)
//     is found all the same, by a scan.
package supervise
