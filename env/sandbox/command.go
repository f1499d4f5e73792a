package sandbox

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// Level is how strongly a command is kept apart.
type Level string

// The levels, strongest first.
const (
	// LevelNamespaces: user (when not root), mount, PID, IPC and UTS namespaces of
	// its own, the tree as / or over a read-only host.
	LevelNamespaces Level = "namespaces"
	// LevelProcess: a process group and a subreaper; the tree stands at its own
	// path, AGENTENV_TREE. For workspaces only.
	LevelProcess Level = "process"
)

// Home is what a workspace's command has as its home directory.
type Home string

// The kinds of home, as CONTRACT §1 defines them.
const (
	HomeOverlay Home = "overlay"
	HomePrivate Home = "private"
	HomeHost    Home = "host"
)

// Mode is how a host path is brought in.
type Mode string

// The modes of a [Bind].
const (
	ReadOnly  Mode = "ro"
	Overlay   Mode = "overlay"
	ReadWrite Mode = "rw"
)

// Network is what of the network a command sees.
type Network string

// The kinds of network, as CONTRACT §4 defines them. The empty one is the
// host's.
const (
	NetworkHost    Network = "host"
	NetworkPrivate Network = "private"
	NetworkNAT     Network = "nat"
)

// Limits bound a command together with everything that it starts. A zero field
// is no limit.
type Limits struct {
	// CPUs is in cores.
	CPUs float64
	// Memory and Disk are in bytes.
	Memory, Disk int64
	// PIDs is how many processes and threads there may be at once, NoFile how
	// many files each process may have open.
	PIDs, NoFile int
	// BestEffort goes on, with a notice, where this machine cannot enforce a
	// limit; without it the command is not started.
	BestEffort bool
}

// Bind brings the host path From in at To; both are absolute.
type Bind struct {
	From, To string
	Mode     Mode
}

// View is the world a command runs in: which tree, as what, and what of the
// host beside it.
type View struct {
	// Tree is how the tree is reached: a directory of the host, or an overlay
	// that is mounted for this command alone. [LevelProcess] takes a directory
	// only.
	Tree forks.Mount
	// At is the absolute path where a workspace's tree is seen, over the
	// host's read-only system. Empty: the tree is the command's root.
	At string
	// Scratch is an existing, empty directory for this command alone, outside
	// the tree, for uppers and mount points. The caller removes it after
	// Wait (see [RemoveScratch]).
	Scratch string
	// Home and HomeDir (the caller's home, absolute) shape a workspace's home.
	Home    Home
	HomeDir string
	Binds   []Bind
	// Hide holds absolute host paths that the command must not see, such as
	// agentenv's own roots.
	Hide []string
}

// Command is what to run.
type Command struct {
	Level Level
	View  View
	// Args is the command and its arguments. A name without a slash is looked
	// up in PATH of Env, inside.
	Args []string
	// Env is the whole environment, K=V.
	Env []string
	// Dir is the absolute directory to run in, as seen inside.
	Dir string
	// Stdin may be nil for an empty input. Stdout and Stderr may be *os.File,
	// which the command gets as they are, or any writer, which is fed from a
	// pipe; nil discards.
	Stdin          *os.File
	Stdout, Stderr io.Writer
	// Terminal, if not nil, is the user's terminal. The command then has a
	// terminal of its own as its streams, which is connected to this one: raw
	// while the command runs, its size followed, its settings put back however
	// that ends. What the command writes goes to Stdout, or if that is nil to the
	// terminal; Stdin and Stderr are not used.
	Terminal *os.File
	Network  Network
	Limits   Limits
	// Hold, if not nil, stays open as long as anything that the command started
	// is alive, also when agentenv itself is dead by then. The command does not
	// see it. It is what [forks.Driver.Use] gives.
	Hold *os.File
}

// Process is a command that was started.
type Process interface {
	// Signal sends a signal to the command's own process; INT, QUIT, HUP and
	// WINCH to its process group, as a terminal would.
	Signal(sig syscall.Signal) error
	// Stop ends everything: TERM to all, then KILL after grace. It returns at
	// once; Wait tells when it is done. A second Stop with a shorter grace
	// shortens the first. Safe from any goroutine, also after the end.
	Stop(grace time.Duration)
	// Freeze stops all that the command started, where it is, and Thaw lets go on
	// what Freeze stopped; what was stopped already stays so. An error of Freeze
	// means that some run on, such as one that waits for a disk: the others stand
	// still until Thaw. The frozen can be killed; a Stop with a grace wakes them.
	Freeze() error
	Thaw() error
	// Wait returns when the command has ended and nothing it started is left,
	// with all output written. It may be called once.
	Wait() (Result, error)
}

// Result is how a command ended.
type Result struct {
	// ExitCode is the exit status, 128+N after signal N; 127 if the command
	// was not found, 126 if it could not be executed.
	ExitCode int
	// Signal is set when the command itself was ended by a signal.
	Signal syscall.Signal
	// NotStarted says that ExitCode 126 or 127 is of the sandbox, which could
	// not execute Args[0], not of the command; Reason is the cause.
	NotStarted bool
	Reason     string
	// NoDir says that NotStarted is because Command.Dir is not there.
	NoDir bool
	// Limit says which of the command's limits was reached, in words such as
	// "out of memory (limit 2GiB)"; empty if none, or if the command succeeded
	// nevertheless. Of a command with a limit of memory it also says that memory
	// was out around it.
	Limit string
	// Stuck names the processes that hang in the kernel and could not be killed,
	// one line each. What they stand in is still in use.
	Stuck []string
	// Started is when the command was executed, Duration how long it ran.
	Started  time.Time
	Duration time.Duration
}

// Executor starts commands. An error from Start means that the sandbox could
// not be made (an [*Error] says why and what mends it), never that the command
// failed. Cancelling ctx is Stop with no grace.
type Executor interface {
	Start(ctx context.Context, c Command) (Process, error)
}

// ErrSandbox is what every [*Error] is, for errors.Is, except where
// [Error.OfFileSystem] is true.
var ErrSandbox = errors.New("the sandbox could not be made")

// Error says which part of a sandbox could not be made, why, and the command
// or step that mends it.
type Error struct {
	// What is the part: "user namespace", "home overlay", …
	What string
	Err  error
	// Fix is what the user can do; empty if nothing is known, and where the
	// file system is at fault: who knows which one can say more.
	Fix string
}

// namespaceParts are the parts of a sandbox whose making takes no space on a
// file system: ENOSPC is there a limit of namespaces.
var namespaceParts = []string{"namespaces", "user namespace", "mount namespace", "network namespace", "network", "process", "pipes"}

// OfFileSystem says whether the file system of the scratch directory, or of the
// tree, is at fault: it is full or read-only, or a quota is used up.
func (e *Error) OfFileSystem() bool {
	return isOfFileSystem(e.Err) && !slices.Contains(namespaceParts, e.What)
}

func isOfFileSystem(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EROFS)
}

func (e *Error) Error() string {
	s := "cannot make the sandbox's " + e.What + ": " + e.Err.Error()
	if e.Fix != "" {
		s += "; " + e.Fix
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// Is makes an Error an [ErrSandbox], unless it is the file system's fault.
func (e *Error) Is(target error) bool { return target == ErrSandbox && !e.OfFileSystem() }
