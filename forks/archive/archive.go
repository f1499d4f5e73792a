// Package archive brings trees in from archives. [Extract] unpacks a tar into
// an empty directory, which a driver then captures.
//
// What must hold:
//
//   - Everything a tar can say of a tree arrives: bytes, holes, hard-link
//     groups, modes with suid, sgid and sticky whatever the umask, owners,
//     times in nanoseconds (also of directories and symlinks, also before
//     1970), xattrs, ACLs, capabilities, FIFOs, device nodes, names of any
//     bytes, and all of it for the tree's own root. What cannot be made here
//     is named in a warning; an owner that cannot be set is handed back.
//   - Nothing outside the directory is read, made or changed, whatever the
//     archive says. A symlink's text is kept byte for byte, but no symlink is
//     followed, not even one that stays inside.
//   - An archive that is cut or damaged is an error, never a smaller tree.
//   - Memory does not grow with what the archive claims, only with the number
//     of its entries.
//
// The rules for archives that contradict themselves: the last entry of a name
// wins, and replaces whatever the name held, a directory with all below it
// included (a directory entry for a directory keeps what is in it). A hard
// link is a link to what its target's name holds at that moment, or, if there
// is nothing yet, at the end of the archive. An entry below a file replaces
// the file; an entry below a symlink is refused. Missing parents are made with
// mode 0755. Whiteout names such as ".wh.x" are ordinary files here.
//
// The format is read by our own code and not by archive/tar because that
// gives no access to the holes of sparse files: a disk image of a terabyte
// would be read as a terabyte of zeros and lose its holes.
package archive

import (
	"errors"
	"fmt"
	"strings"
)

// Options say how [Extract] works.
type Options struct {
	// MaxSize is the most bytes of file content that are written; 0 stands for
	// what is free on the file system of the directory. Holes do not count.
	MaxSize int64
	// Progress, if set, is called at most ten times a second, and at the end,
	// with the entries and bytes written so far.
	Progress func(files, bytes int64)
}

// Result says what [Extract] made.
type Result struct {
	// Files counts the entries that were made, of any type; Bytes is the
	// file content written.
	Files, Bytes int64
	// Warnings name what could not be kept, one line for each kind of loss.
	Warnings []string
	// Owners holds, by path relative to the tree ("." is its root), the user
	// and group id of every entry to which they could not be given. It is
	// nil when all were set.
	Owners map[string][2]uint32
}

// What [Extract]'s errors wrap, for errors.Is.
var (
	// ErrFormat: the input is no tar, or a cut or damaged one.
	ErrFormat = errors.New("not a usable tar")
	// ErrUnsafe: an entry would reach outside the tree.
	ErrUnsafe = errors.New("unsafe entry")
	// ErrTooLarge: the content is larger than is allowed or free.
	ErrTooLarge = errors.New("too large")
)

// Error is an archive that was refused. Its text leaves out the archive's
// name, which the caller knows and puts in front.
type Error struct {
	// Entry is the name of the entry that it is about, as the archive writes
	// it; empty when it is about the archive as a whole.
	Entry string
	// Kind is [ErrFormat], [ErrUnsafe] or [ErrTooLarge]; nil when the system
	// refused something, which Err then says.
	Kind error
	// Reason says what is wrong, in words that follow the entry's name.
	Reason string
	Err    error
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.Entry != "" {
		fmt.Fprintf(&b, "entry %s ", shown(e.Entry))
	}
	b.WriteString(e.Reason)
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	return b.String()
}

// Unwrap gives both the kind and the cause.
func (e *Error) Unwrap() []error {
	var list []error
	for _, err := range []error{e.Kind, e.Err} {
		if err != nil {
			list = append(list, err)
		}
	}
	return list
}

// shown quotes a name for a message: one line, no control characters, and not
// longer than a terminal takes.
func shown(name string) string {
	const most = 200
	if len(name) > most {
		return fmt.Sprintf("%q… (%d bytes)", name[:most], len(name))
	}
	return fmt.Sprintf("%q", name)
}

// warnings gathers what could not be kept: one line for each kind, with the
// first entry and the number of them. The kinds are fixed texts, so their
// number does not depend on the archive.
type warnings struct {
	kinds []string
	first map[string]string
	count map[string]int
}

func (w *warnings) add(kind, entry string) {
	if w.count == nil {
		w.first, w.count = map[string]string{}, map[string]int{}
	}
	if w.count[kind] == 0 {
		w.kinds = append(w.kinds, kind)
		w.first[kind] = entry
	}
	w.count[kind]++
}

func (w *warnings) lines() []string {
	var lines []string
	for _, kind := range w.kinds {
		line := kind
		if first := w.first[kind]; first != "" {
			line += ": " + shown(first)
		}
		if n := w.count[kind]; n > 1 {
			line += fmt.Sprintf(" and %d more", n-1)
		}
		lines = append(lines, line)
	}
	return lines
}
