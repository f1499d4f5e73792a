package forks

import (
	"errors"
	"io/fs"
	"strings"
)

// The sentinels that an [*Error] wraps, besides the system's own errors.
var (
	// ErrNotFound: no such snapshot, fork or path.
	ErrNotFound = errors.New("not found")
	// ErrExists: the id or key is taken.
	ErrExists = errors.New("already exists")
	// ErrUnsupported: this driver cannot do that here.
	ErrUnsupported = errors.New("not supported")
	// ErrInUse: another process works in the fork.
	ErrInUse = errors.New("in use by another process")
	// ErrUnfinished: an Apply to this directory was cut short or is at work;
	// repeated, it completes.
	ErrUnfinished = errors.New("an apply is not finished")
	// ErrUntouched: what was to be changed is as it was.
	ErrUntouched = errors.New("nothing was changed")
	// ErrReplaced: what stands in the place of a fork is something else.
	ErrReplaced = errors.New("is something else now")
	// ErrDamaged: the store's own data is incomplete or unreadable.
	ErrDamaged = errors.New("damaged")
	// ErrUnkeepable: the tree holds what no snapshot can keep, such as a nested
	// subvolume; the error names it.
	ErrUnkeepable = errors.New("cannot be kept in a snapshot")
)

// SkipDir, returned by the function given to [View.Walk], leaves out what is
// below the present directory.
var SkipDir = fs.SkipDir

// Error says which operation on what failed in which driver, and why.
type Error struct {
	// Op is the operation: "capture", "fork", "commit", …
	Op string
	// ID is the snapshot, fork or path that it was about.
	ID string
	// Driver is the driver's name.
	Driver string
	Err    error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.ID != "" {
		b.WriteString(" " + e.ID)
	}
	if e.Driver != "" {
		b.WriteString(" (" + e.Driver + ")")
	}
	b.WriteString(": " + e.Err.Error())
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }
