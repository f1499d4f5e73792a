package env

import "errors"

// The kinds of failure that callers tell apart. An [*Error] wraps one of
// them; errors of the drivers, the sandbox and the system pass as they are.
var (
	// ErrUsage: what was asked for makes no sense.
	ErrUsage = errors.New("usage")
	// ErrNotFound: no such environment, snapshot, tag or input.
	ErrNotFound = errors.New("not found")
	// ErrAmbiguous: a prefix that several ids share.
	ErrAmbiguous = errors.New("ambiguous")
	// ErrExists: it is already there.
	ErrExists = errors.New("exists")
	// ErrHeld: it is in use and cannot be removed.
	ErrHeld = errors.New("held")
	// ErrBusy: another process holds the environment's lock.
	ErrBusy = errors.New("busy")
	// ErrConflict: it is in the way of what was asked for.
	ErrConflict = errors.New("conflict")
	// ErrDamaged: the store's own data cannot be read.
	ErrDamaged = errors.New("damaged")
)

// Error is one clear line for the user: what is wrong with what, and what to
// do about it.
type Error struct {
	// Kind is one of the sentinels above.
	Kind error
	// Msg says what is wrong with what.
	Msg string
	// Hint says what to do; empty if the message says it all.
	Hint string
	// Cause is what lies below, if anything.
	Cause error
}

func (e *Error) Error() string {
	s := e.Msg
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// Unwrap returns the kind and the cause, so that errors.Is finds both.
func (e *Error) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Cause}
}
