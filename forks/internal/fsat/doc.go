// Package fsat reads and writes trees by descriptor: every call names one path
// element in an open directory, so that nothing planted or swapped in a tree
// leads outside it, and the depth of a tree has no limit.
//
// What must hold: symlinks are never followed; nothing but regular files and
// directories is opened for reading or writing; mount points are entered only
// where the caller says so; a file that may be executed is never open for
// writing while the process forks.
package fsat
