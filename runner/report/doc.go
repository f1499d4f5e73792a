// Package report tells people and programs what a tournament does and did: live
// lines of text, a table at the end, JSON, and a stream of events.
//
// What must hold:
//
//   - It only reads events, results and logs, never an environment.
//   - Nothing that a command or a plan wrote acts on the terminal, or on a CI
//     system that reads the log: control characters are made visible, lines are
//     prefixed, and the only control sequences are colours of our own.
//   - The words are those of [runner.Status], in every format.
package report
