package sandbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"syscall"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// The socket between agentenv and the helper process of a sandbox carries one
// message after another: first a spec, which is also the word to go, then
// requests; reports come back. agentenv holds the only other end, so the end
// of the stream means that agentenv is dead.
//
// A message is a list of strings of any bytes. It is no JSON, for names need
// not be UTF-8, and since a decoder that works by reflection takes a
// millisecond of the two that a helper has to start.
const (
	initName   = "agentenv-init"   // PID 1 of a sandbox
	reaperName = "agentenv-reaper" // the subreaper of LevelProcess
	// controlFD is the socket's descriptor in the helper.
	controlFD = 3
	// maxMessage bounds a message, in bytes; the kernel takes no more than
	// 6 MiB of arguments and environment (3/4 of _STK_LIM).
	maxMessage = 8 << 20
)

// message is what the socket carries.
type message []string

func (m message) writeTo(w io.Writer) error {
	size := 0
	for _, s := range m {
		size += 4 + len(s)
	}
	b := make([]byte, 4, 4+size)
	binary.NativeEndian.PutUint32(b, uint32(size))
	for _, s := range m {
		b = binary.NativeEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	_, err := w.Write(b)
	return err
}

func readMessage(r io.Reader) (message, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := binary.NativeEndian.Uint32(head[:])
	if size > maxMessage {
		return nil, fmt.Errorf("a message of %d bytes", size)
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, err
	}
	var m message
	for len(b) >= 4 {
		n := binary.NativeEndian.Uint32(b)
		if uint64(n) > uint64(len(b)-4) {
			return nil, io.ErrUnexpectedEOF
		}
		m = append(m, string(b[4:4+n]))
		b = b[4+n:]
	}
	return m, nil
}

func (m *message) add(s ...string)    { *m = append(*m, s...) }
func (m *message) addInt(n int64)     { m.add(strconv.FormatInt(n, 10)) }
func (m *message) addList(l []string) { m.addInt(int64(len(l))); m.add(l...) }

// next takes one string; both ends are one program, so it is there.
func (m *message) next() string {
	if len(*m) == 0 {
		return ""
	}
	s := (*m)[0]
	*m = (*m)[1:]
	return s
}

func (m *message) nextInt() int64 {
	n, _ := strconv.ParseInt(m.next(), 10, 64)
	return n
}

func (m *message) nextList() []string {
	l := make([]string, m.nextInt())
	for i := range l {
		l[i] = m.next()
	}
	return l
}

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

	Network Network
	// Limits are those that a process sets for itself and its children.
	Limits Limits
	// Temp is how many bytes each file system in memory may hold that the command
	// writes to; 0 is what the kernel allows by itself, half of the machine's.
	Temp int64
	// Cgroup is the descriptor of the command's cgroup of v2 in the helper, Tasks
	// are those of its cgroups of v1. TTY is that of the socket over which the
	// helper sends the command's terminal; 0 is none.
	Cgroup, TTY int
	Tasks       []int

	// chroot is where in the helper's root the command's is; empty if they
	// are one.
	chroot string
}

func (s *spec) message() message {
	var m message
	v := s.View
	m.add(v.At, v.Scratch, string(v.Home), v.HomeDir, s.Dir, v.Tree.Dir)
	if o := v.Tree.Overlay; o == nil {
		m.addInt(0)
	} else {
		m.addInt(int64(len(o.Lower)))
		m.add(o.Lower...)
		m.add(o.Dir, o.Upper, o.Work, strconv.FormatBool(o.Volatile))
	}
	m.addInt(int64(len(v.Binds)))
	for _, b := range v.Binds {
		m.add(b.From, b.To, string(b.Mode))
	}
	m.addList(v.Hide)
	m.addList(s.Args)
	m.addList(s.Env)
	m.addInt(int64(s.UID))
	m.addInt(int64(s.GID))
	m.add(string(s.Network))
	m.addInt(int64(s.Limits.PIDs))
	m.addInt(int64(s.Limits.NoFile))
	m.addInt(s.Temp)
	m.addInt(int64(s.Cgroup))
	m.addInt(int64(s.TTY))
	m.addInt(int64(len(s.Tasks)))
	for _, fd := range s.Tasks {
		m.addInt(int64(fd))
	}
	for _, b := range []bool{s.UserNS, s.InUserNS, s.RealRoot} {
		m.add(strconv.FormatBool(b))
	}
	return m
}

func parseSpec(m message) *spec {
	s := &spec{View: View{At: m.next(), Scratch: m.next(), Home: Home(m.next()), HomeDir: m.next()}, Dir: m.next()}
	s.View.Tree.Dir = m.next()
	if lower := m.nextList(); len(lower) > 0 {
		s.View.Tree.Overlay = &forks.Overlay{Lower: lower, Dir: m.next(), Upper: m.next(), Work: m.next(), Volatile: m.next() == "true"}
	}
	for range m.nextInt() {
		s.View.Binds = append(s.View.Binds, Bind{From: m.next(), To: m.next(), Mode: Mode(m.next())})
	}
	s.View.Hide, s.Args, s.Env = m.nextList(), m.nextList(), m.nextList()
	s.UID, s.GID = int(m.nextInt()), int(m.nextInt())
	s.Network = Network(m.next())
	s.Limits.PIDs, s.Limits.NoFile = int(m.nextInt()), int(m.nextInt())
	s.Temp = m.nextInt()
	s.Cgroup, s.TTY = int(m.nextInt()), int(m.nextInt())
	for range m.nextInt() {
		s.Tasks = append(s.Tasks, int(m.nextInt()))
	}
	s.UserNS, s.InUserNS, s.RealRoot = m.next() == "true", m.next() == "true", m.next() == "true"
	return s
}

// Requests: what agentenv asks of a helper later.
const (
	askSignal = "signal" // a number: to the command's own process
	askTerm   = "term"   // TERM to all, then end when all are gone
	askKill   = "kill"   // KILL to all at once
)

// Reports: what a helper says.
const (
	sayNotice  = "notice"  // a line for the user
	sayFailed  = "failed"  // what, text, fix, errno: the sandbox could not be made
	sayStarted = "started" // the command runs
	sayRefused = "refused" // code, reason, "dir" or "": the command's program could not be executed
	sayExit    = "exit"    // wait status, nanoseconds: the command ended
	sayEnding  = "ending"  // all that is left is sent KILL
)

// notExecuted says why the command's program could not be executed.
type notExecuted struct {
	Code   int
	Reason string
	NoDir  bool
}

func (n *notExecuted) Error() string { return n.Reason }

func (n *notExecuted) message() message {
	what := ""
	if n.NoDir {
		what = "dir"
	}
	return message{sayRefused, strconv.Itoa(n.Code), n.Reason, what}
}

// failed tells an [Error].
func failed(err error) message {
	what, fix, text := "view", "", err.Error()
	var e *Error
	if errors.As(err, &e) {
		what, fix, text = e.What, e.Fix, e.Err.Error()
	}
	var errno syscall.Errno
	errors.As(err, &errno)
	return message{sayFailed, what, text, fix, strconv.Itoa(int(errno))}
}

func parseFailed(m message) *Error {
	what, text, fix, errno := m.next(), m.next(), m.next(), syscall.Errno(m.nextInt())
	if errno == 0 {
		return &Error{What: what, Err: errors.New(text), Fix: fix}
	}
	return &Error{What: what, Err: &remoteError{text, errno}, Fix: fix}
}

// remoteError has the helper's words and still matches its errno.
type remoteError struct {
	text  string
	errno syscall.Errno
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.errno }

// exited is how the command itself ended.
type exited struct {
	status syscall.WaitStatus
	ran    time.Duration
}

func (e exited) message() message {
	return message{sayExit, strconv.Itoa(int(e.status)), strconv.FormatInt(int64(e.ran), 10)}
}

func parseExited(m message) *exited {
	return &exited{syscall.WaitStatus(m.nextInt()), time.Duration(m.nextInt())}
}

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
	case !absolute(v.Tree.Dir):
		return bad("the tree's path %q is not absolute", v.Tree.Dir)
	case v.Tree.Overlay != nil && (len(v.Tree.Overlay.Lower) == 0 || !absolute(v.Tree.Overlay.Dir)):
		return bad("the tree's overlay has no layers, or no absolute path")
	case c.Level == LevelProcess && v.Tree.Overlay != nil:
		return &Error{What: "tree", Err: errors.New("the level process has no mounts, and this tree is one"),
			Fix: "use --isolation namespaces, or a fork (exec --fork), or an environment made with --backend copy"}
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
