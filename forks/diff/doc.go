// Package diff is the room for showing what differs between two states of a
// tree: name and status, counts, and a patch that `git apply` accepts, with
// binary files, modes, symlinks and deletions.
//
// What must hold:
//
//   - It reads states through forks.View and the changes that a driver's Diff
//     or Status returned; it imports no driver.
//   - Its memory does not grow with the size of a file.
//   - Names are shown as git quotes them: any bytes come back the same.
//   - A directory called .git is left out of patches.
package diff
