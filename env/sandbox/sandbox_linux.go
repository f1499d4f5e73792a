package sandbox

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"

	"github.com/moby/sys/reexec"
	"github.com/moby/sys/userns"
	"golang.org/x/sys/unix"
)

// Sandbox is the [Executor] of this package. Its helper processes are the
// program itself, executed anew under another name; they never reach main.
type Sandbox struct {
	notice func(string)
	mu     sync.Mutex
	said   map[string]bool
}

// New makes a Sandbox.
func New(opts Options) *Sandbox {
	return &Sandbox{notice: opts.Notice, said: map[string]bool{}}
}

// tell passes a notice on, once.
func (s *Sandbox) tell(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.notice != nil && !s.said[line] {
		s.said[line] = true
		s.notice(line)
	}
}

// Start implements [Executor]. It returns when the command was executed, could
// not be, or its sandbox could not be made.
func (s *Sandbox) Start(ctx context.Context, c Command) (Process, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	if err := CheckNetwork(c.Level, c.Network); err != nil {
		return nil, err
	}
	if err := CheckLimits(c.Level, c.Limits); err != nil {
		return nil, err
	}
	p, err := s.launch(c)
	if err != nil {
		return nil, err
	}
	p.uncancel = context.AfterFunc(ctx, func() { p.Stop(0) })
	<-p.ready
	if p.failed != nil {
		<-p.done
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		return nil, p.failed
	}
	return p, nil
}

// launch starts the helper of a sandbox and tells it what to do.
func (s *Sandbox) launch(c Command) (_ *process, err error) {
	sp := newSpec(c)
	attr, err := helperAttr(c.Level, sp)
	if err != nil {
		return nil, &Error{What: "user namespace", Err: err}
	}
	nat, err := planNetwork(sp)
	if err != nil {
		return nil, err
	}
	var o outside
	defer func() {
		o.release()
		if err != nil {
			o.abandon()
		}
	}()
	if err := o.open(s, c); err != nil {
		return nil, err
	}
	cmd := o.helper(c, sp)
	cmd.SysProcAttr = attr
	nat.wrap(cmd)
	if err := start(cmd); err != nil {
		if e := explainNetwork(sp, errnoOf(err)); e != nil {
			return nil, e
		}
		return nil, explain("namespaces", fmt.Errorf("start of its init: %w", errnoOf(err)))
	}
	p := newProcess(c.Level, cmd, o.ours, o.streams, s.tell)
	p.cgroup, p.disk = o.limits.cgroup, o.limits.disk
	if p.terminal = o.terminal; p.terminal != nil {
		p.terminal.hangUp = p.hungUp
	}
	p.send(sp.message()...)
	go p.follow()
	go p.wake()
	return p, nil
}

// outside is what of a sandbox is not in it.
type outside struct {
	terminal     *terminal // nil if the command has none
	streams      *streams
	ours, theirs *os.File // the ends of the helper's socket
	limits       limited
}

// open makes all of it, or leaves what it made for abandon.
func (o *outside) open(s *Sandbox, c Command) (err error) {
	if o.terminal, err = newTerminal(c); err != nil {
		return err
	}
	if o.terminal != nil {
		c.Stdin, c.Stdout, c.Stderr = nil, nil, nil
	}
	if o.streams, err = newStreams(c); err == nil {
		o.ours, o.theirs, err = controlPair()
	}
	if err != nil {
		return &Error{What: "pipes", Err: err, Fix: fixFor(err)}
	}
	o.limits, err = s.limit(c)
	return err
}

// helper is the helper to start, whose files sp is told of.
func (o *outside) helper(c Command, sp *spec) *exec.Cmd {
	name := initName
	if c.Level == LevelProcess {
		name = reaperName
		adoptOrphans()
	}
	cmd := reexec.Command(name)
	cmd.Env = []string{} // nothing of the caller's may be read from /proc/1/environ
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = o.streams.child[0], o.streams.child[1], o.streams.child[2]
	sp.Limits = o.limits.rlimits
	cmd.ExtraFiles = []*os.File{o.theirs} // controlFD
	cmd.ExtraFiles = o.terminal.attachTo(cmd.ExtraFiles, sp)
	cmd.ExtraFiles = o.limits.cgroup.attachTo(cmd.ExtraFiles, sp)
	if c.Hold != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, c.Hold)
	}
	return cmd
}

// release closes what is the helper's, whether it was started or not.
func (o *outside) release() {
	o.theirs.Close() // none is no error
	o.terminal.release()
	o.streams.release()
}

// abandon lets go of what was to be ours, since there is no helper.
func (o *outside) abandon() {
	o.ours.Close()
	o.limits.cgroup.remove()
	o.terminal.abandon()
	o.streams.abandon()
}

func newSpec(c Command) *spec {
	sp := &spec{
		View: c.View, Args: c.Args, Env: c.Env, Dir: c.Dir,
		UID: os.Geteuid(), GID: os.Getegid(),
		UserNS: !mayMount(), Network: c.Network, Limits: c.Limits, Temp: leastSet(c.Limits.Disk, c.Limits.Memory),
	}
	sp.InUserNS = sp.UserNS || userns.RunningInUserNS()
	sp.RealRoot = sp.UID == 0 && !userns.RunningInUserNS()
	if sp.Dir == "" {
		sp.Dir = "/"
		if c.Level == LevelProcess {
			sp.Dir = c.View.Tree.Dir
		} else if c.View.At != "" {
			sp.Dir = c.View.At
		}
	}
	return sp
}

// leastSet is the smaller of two limits, of which 0 is none.
func leastSet(a, b int64) int64 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// MayMount says whether this process may mount file systems as it is, for others
// on this machine (or in its container) to see.
func MayMount() bool { return mayMount() }

// mayMount says whether this process may make namespaces and mounts as it is.
// The capability counts only for root: another user's is lost when the helper
// is executed.
var mayMount = sync.OnceValue(func() bool {
	return os.Geteuid() == 0 && capable(unix.CAP_SYS_ADMIN)
})

// capable says whether this process has the capability c, one of the first 32, in
// force.
func capable(c int) bool {
	var data [2]unix.CapUserData
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<c) != 0
}

// helperNamespaces are those of every helper of LevelNamespaces.
const helperNamespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

// helperAttr says in what the helper is started. It must outlive us, to kill the
// others while it still holds what they use: our death wakes it if somebody
// stopped it.
func helperAttr(level Level, s *spec) (*syscall.SysProcAttr, error) {
	attr := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGCONT}
	if level == LevelProcess {
		return attr, nil
	}
	attr.Cloneflags = helperNamespaces
	if s.ownNetwork() {
		attr.Cloneflags |= syscall.CLONE_NEWNET
	}
	if !s.UserNS {
		return attr, nil
	}
	uids, gids, err := outerMaps(s)
	attr.Cloneflags |= syscall.CLONE_NEWUSER
	attr.UidMappings, attr.GidMappings = uids, gids
	attr.GidMappingsEnableSetgroups = s.setgroups()
	return attr, err
}

// controlPair makes the two ends of a helper's socket; ours can be polled.
func controlPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control"), nil
}

// starter runs functions on one thread that never ends. Pdeathsig follows the
// thread that forked: from any other goroutine a helper could be killed in
// the middle of its life, when the scheduler lets that thread go.
var starter = sync.OnceValue(func() chan<- func() {
	// What agentenv itself was given beyond its streams is not for helpers.
	unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC)
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

func start(cmd *exec.Cmd) error {
	done := make(chan error, 1)
	starter() <- func() {
		helpers.Lock()
		defer helpers.Unlock()
		err := cmd.Start()
		if err == nil {
			helpers.pids[cmd.Process.Pid] = true
		}
		done <- err
	}
	return <-done
}
