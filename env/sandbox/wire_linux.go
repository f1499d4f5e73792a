package sandbox

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// The socket between agentenv and the helper process of a sandbox carries one
// JSON value after another: first a spec, which is also the word to go, then
// requests; reports come back. agentenv holds the only other end, so the end
// of the stream means that agentenv is dead.
const (
	initName   = "agentenv-init"   // PID 1 of a sandbox
	reaperName = "agentenv-reaper" // the subreaper of LevelProcess
	// controlFD is the socket's descriptor in the helper.
	controlFD = 3
)

// spec is what a helper is to do.
type spec struct {
	View View
	Args []string
	Env  []string
	Dir  string
	// UID and GID are the caller's, in the namespace of agentenv.
	UID, GID int
	// UserNS says that the helper has a user namespace of its own, in which
	// the caller is 0 (or, for root, everybody is who he was).
	UserNS bool
	// InUserNS says that the helper is in any user namespace but the first.
	InUserNS bool
	// RealRoot says that the caller's uid 0 is the machine's.
	RealRoot bool

	// chroot is where in the helper's root the command's is; empty if they
	// are one.
	chroot string
}

// request is what agentenv asks of a helper later.
type request struct {
	Signal syscall.Signal `json:",omitempty"` // to the command's own process
	Term   bool           `json:",omitempty"` // TERM to all, then end when all are gone
	Kill   bool           `json:",omitempty"` // KILL to all at once
}

// report is what a helper says; one field is set.
type report struct {
	Notice  string        `json:",omitempty"`
	Failed  *failure      `json:",omitempty"` // the sandbox could not be made
	Started *started      `json:",omitempty"`
	Refused *notExecuted  `json:",omitempty"`
	Exit    *exitedReport `json:",omitempty"`
}

type started struct{ PID int }

type exitedReport struct {
	Status   syscall.WaitStatus
	Duration time.Duration
}

// notExecuted says why the command's program could not be executed.
type notExecuted struct {
	Code   int
	Reason string
}

func (n *notExecuted) Error() string { return n.Reason }

// failure is an [Error] on its way out of the helper.
type failure struct {
	What, Text, Fix string
	Errno           syscall.Errno
}

func newFailure(err error) *failure {
	f := &failure{What: "view", Text: err.Error()}
	var e *Error
	if errors.As(err, &e) {
		f.What, f.Fix, f.Text = e.What, e.Fix, e.Err.Error()
	}
	errors.As(err, &f.Errno)
	return f
}

func (f *failure) err() *Error {
	err := errors.New(f.Text)
	if f.Errno != 0 {
		err = &remoteError{f.Text, f.Errno}
	}
	return &Error{What: f.What, Err: err, Fix: f.Fix}
}

// remoteError has the helper's words and still matches its errno.
type remoteError struct {
	text  string
	errno syscall.Errno
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.errno }

// validate says what is wrong with a command before anything is made.
func (c Command) validate() error {
	bad := func(format string, args ...any) error {
		return &Error{What: "view", Err: fmt.Errorf(format, args...)}
	}
	v := c.View
	switch {
	case c.Level != LevelNamespaces && c.Level != LevelProcess:
		return bad("unknown level %q", c.Level)
	case len(c.Args) == 0 || c.Args[0] == "":
		return bad("no command was given")
	case !absolute(v.Tree):
		return bad("the tree's path %q is not absolute", v.Tree)
	case v.At != "" && (!absolute(v.At) || v.At == "/"):
		return bad("a tree cannot be seen at %q", v.At)
	case c.Dir != "" && !absolute(c.Dir):
		return bad("the working directory %q is not absolute", c.Dir)
	case c.Level == LevelProcess && v.At == "":
		return &Error{What: "view", Err: errors.New("a whole system cannot be the root of a mere process"),
			Fix: "use --isolation namespaces"}
	case c.Level == LevelNamespaces && !absolute(v.Scratch):
		return bad("the scratch directory's path %q is not absolute", v.Scratch)
	case c.Level == LevelProcess && len(v.Binds) > 0:
		return &Error{What: "mounts", Err: errors.New("the level process has no mounts"), Fix: "use --isolation namespaces"}
	}
	for _, b := range v.Binds {
		if !absolute(b.From) || !absolute(b.To) {
			return bad("the mount %s:%s is not of two absolute paths", b.From, b.To)
		}
	}
	return nil
}

func absolute(p string) bool { return p != "" && p[0] == '/' }
