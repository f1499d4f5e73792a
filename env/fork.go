package env

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// Fork is a private, writable tree in which commands run. Its methods must not
// overlap, but those of different forks may.
type Fork struct {
	env  *Env
	tree forks.Tree
}

// Fork makes a fork of a snapshot of the history, for commands of the given
// level. It is safe for use by several goroutines while nothing changes the
// history.
func (e *Env) Fork(ctx context.Context, key forks.Key, base ID, level sandbox.Level) (*Fork, error) {
	return e.forkStore(ctx, key, e.meta.store(base), level)
}

// ForkFrozen makes a fork of a frozen tree, for commands of the given level.
// It is safe for use by several goroutines.
func (e *Env) ForkFrozen(ctx context.Context, key forks.Key, f Frozen, level sandbox.Level) (*Fork, error) {
	return e.forkStore(ctx, key, f.store, level)
}

func (e *Env) forkStore(ctx context.Context, key forks.Key, store ID, level sandbox.Level) (*Fork, error) {
	tree, err := e.driver.Fork(ctx, key, store, forks.ForkOptions{Plain: level == sandbox.LevelProcess})
	if err != nil {
		return nil, err
	}
	return &Fork{env: e, tree: tree}, nil
}

// freeKey begins the keys of the forks in which commands run that hold no
// lock. All others are of somebody who holds it.
const freeKey = "exec."

// sweepFork removes a fork, unless it is one in which a command runs that needs
// no lock. The lock is held: all others are of processes that died, and those
// who still work in them are about to.
func (e *Env) sweepFork(ctx context.Context, key forks.Key) error {
	if !strings.HasPrefix(string(key), freeKey) {
		// Whatever a loss of power left of it is removed.
		if _, release, err := e.driver.Use(ctx, key); err == nil {
			release()
		}
	}
	err := e.removeFork(ctx, key)
	switch {
	case errors.Is(err, forks.ErrInUse):
		return nil
	case errors.Is(err, ErrHeld):
		e.opts.notify("%v", err) // until then it stays, and is in nobody's way
		return nil
	}
	return err
}

// removeFork removes a fork that nobody uses, also if something is still mounted
// there.
func (e *Env) removeFork(ctx context.Context, key forks.Key) error {
	err := e.driver.RemoveFork(ctx, key)
	if err == nil || errors.Is(err, forks.ErrInUse) {
		return err
	}
	some, uerr := e.unmountFork(key)
	if uerr != nil {
		return uerr
	}
	if !some {
		return err
	}
	return e.driver.RemoveFork(ctx, key)
}

// Tree is the fork as a place on the host.
func (f *Fork) Tree() forks.Tree { return f.tree }

// Frozen is the state of a fork that Freeze kept: complete and durable, and in
// no history until [Env.Keep] or [Env.Promote] lists it, or [Env.Drop] lets it
// go.
type Frozen struct {
	// ID is the id that the snapshot has once it is listed.
	ID      ID
	Changes forks.Changes
	base    ID
	store   ID
	kind    SnapshotKind
}

// Freeze keeps the fork's present state. Nothing may be running in it.
func (f *Fork) Freeze(ctx context.Context, base ID) (Frozen, error) {
	id := newID()
	changes, err := f.env.driver.Commit(ctx, f.tree.Key, id, nil)
	if err != nil {
		return Frozen{}, err
	}
	fr := Frozen{ID: id, Changes: shown(changes), base: base, store: id, kind: KindTournament}
	if len(changes.List) == 0 {
		fr.store = f.tree.Base
		return fr, nil
	}
	f.tree, err = f.env.driver.Tree(f.tree.Key) // what was its upper may be a layer now
	return fr, err
}

// Remove removes the fork and all it holds. What Freeze kept stays.
func (f *Fork) Remove(ctx context.Context) error { return f.env.removeFork(ctx, f.tree.Key) }

// Drop lets go of a frozen tree that nobody will list.
func (e *Env) Drop(ctx context.Context, f Frozen) error {
	if f.store != f.ID {
		return nil
	}
	return e.driver.RemoveSnapshot(ctx, f.ID)
}

// Keep lists a frozen tree in the history, as a child of its base. HEAD stays.
func (e *Env) Keep(f Frozen, message string) (Snapshot, error) {
	n := f.node(message)
	if err := e.list(n, false); err != nil {
		return Snapshot{}, err
	}
	return e.meta.snapshot(&n), nil
}

func (f Frozen) node(message string) node {
	n := node{
		ID: f.ID, Parent: f.base, Message: message, Created: time.Now(), Kind: f.kind,
		Stats: statsOf(f.Changes), Bytes: f.Changes.Bytes,
	}
	if f.store != f.ID {
		n.Store = f.store
	}
	return n
}

// Promote lists a frozen tree, makes the work tree equal to it and then makes it
// HEAD. Work that no snapshot holds is saved first and returned. If the work
// tree cannot be changed, HEAD stays where it was, and the frozen tree stays
// listed.
func (e *Env) Promote(ctx context.Context, f Frozen, message string) (Snapshot, *Snapshot, error) {
	saved, err := e.SaveWork(ctx, "before promotion: "+message)
	if err != nil {
		return Snapshot{}, nil, err
	}
	head, err := e.promote(ctx, f, message)
	return head, saved, err
}

func (e *Env) promote(ctx context.Context, f Frozen, message string) (Snapshot, error) {
	was, err := e.workTree()
	if isNotFound(err) && !e.meta.InPlace {
		if err := e.list(f.node(message), true); err != nil {
			return Snapshot{}, err
		}
		return e.Head(), nil
	}
	s, err := e.Keep(f, message)
	if err != nil {
		return s, err
	}
	if e.meta.InPlace {
		if err := e.checkSteering(ctx, s.ID); err != nil {
			return s, err
		}
	}
	ctx = context.WithoutCancel(ctx)
	err = e.moveTree(ctx, "tournament", s.ID)
	if err == nil && e.meta.InPlace {
		e.warnPrivileged(e.meta.Source, f.Changes.List)
	}
	if err == nil && was.Mount.Overlay == nil {
		_, err = e.attachWork(ctx, was) // it stood on the host
	}
	if err != nil {
		if e.meta.Head == s.ID { // all is done, but may not be durable
			return s, err
		}
		return s, fmt.Errorf("HEAD stays %s, and the winner is kept as %s, which `agentenv checkout %s` makes HEAD: %w", e.meta.Head, s.ID, s.ID, err)
	}
	return e.Head(), nil
}

// Run is a command to run in a tree, and what it sees of the host.
type Run struct {
	Level sandbox.Level
	Home  sandbox.Home
	// HomeDir is the caller's home.
	HomeDir string
	Binds   []sandbox.Bind
	Network sandbox.Network
	Limits  sandbox.Limits
	// Terminal is as in [sandbox.Command].
	Terminal *os.File
	Args     []string
	// Message is that of the snapshot which follows, if not the command line.
	Message string
	// Env is the environment; [Env.Environ] gives it what the kind of tree
	// needs. AGENTENV_TREE is added where the tree stands at a path of its own.
	Env []string
	// Dir is relative to the tree, or absolute as the command sees it; empty
	// is the tree's top.
	Dir            string
	Stdin          *os.File
	Stdout, Stderr io.Writer
}

// Start runs a command in the fork. It is safe for use by several goroutines
// on different forks.
func (f *Fork) Start(ctx context.Context, r Run) (sandbox.Process, error) {
	return f.env.start(ctx, f.tree, r)
}

// start runs a command in a tree, which is in use until it has ended; its
// scratch directory goes with it.
func (e *Env) start(ctx context.Context, tree forks.Tree, r Run) (sandbox.Process, error) {
	hold, release, err := e.driver.Use(ctx, tree.Key)
	if errors.Is(err, forks.ErrReplaced) && tree.Key == forks.Work {
		err = e.replacedError()
	}
	if err != nil {
		return nil, err
	}
	p, err := e.startHeld(ctx, tree, hold, r)
	if err != nil {
		release()
		return nil, e.explainTree(ctx, err)
	}
	p.release = release
	return p, nil
}

func (e *Env) startHeld(ctx context.Context, tree forks.Tree, hold *os.File, r Run) (*process, error) {
	scratch, err := e.scratchFor(tree.Key)
	if err != nil {
		return nil, err
	}
	at := e.MountAt()
	if r.Level == sandbox.LevelProcess {
		at = tree.Mount.Dir
		r.Env = append(without(r.Env, "AGENTENV_TREE"), "AGENTENV_TREE="+at)
	}
	c := sandbox.Command{
		Level: r.Level,
		View: sandbox.View{
			Tree: tree.Mount, Scratch: scratch, Home: r.Home, HomeDir: r.HomeDir,
			Binds: r.Binds, Hide: e.hide(),
		},
		Args: r.Args, Env: r.Env, Dir: at, Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr, Hold: hold,
		Network: r.Network, Limits: r.Limits, Terminal: r.Terminal,
	}
	if e.meta.Kind == Workspace {
		c.View.At = e.meta.MountAt
	}
	switch {
	case filepath.IsAbs(r.Dir):
		c.Dir = r.Dir
	case r.Dir != "":
		c.Dir = filepath.Join(at, r.Dir)
	}
	p, err := e.opts.Executor.Start(ctx, c)
	if err != nil {
		_ = sandbox.RemoveScratch(scratch) // the start's failure is what matters; sweep tries again
		return nil, err
	}
	return &process{Process: p, scratch: scratch, unmount: e.unmountAfter(tree.Key, r.Level)}, nil
}

// process lets go of its tree, of what it mounted there and of its scratch
// directory when it has ended.
type process struct {
	sandbox.Process
	scratch string
	unmount func()
	release func()
	once    sync.Once
}

func (p *process) Wait() (sandbox.Result, error) {
	res, err := p.Process.Wait()
	p.once.Do(func() {
		if len(res.Stuck) > 0 {
			p.release()
			return // it is in use; sweep removes it later
		}
		p.unmount()
		p.release()
		if rerr := sandbox.RemoveScratch(p.scratch); err == nil {
			err = rerr
		}
	})
	return res, err
}

// without is env less a variable.
func without(env []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}

// hide lists the host paths that no command may see: this root, and the place
// where the roots of others are by default.
func (e *Env) hide() []string {
	hide := []string{e.root}
	if home := dataHome(os.Getenv); home != "" {
		hide = append(hide, home)
	}
	if e.root != systemRoot {
		hide = append(hide, systemRoot)
	}
	return hide
}

// rootfsPath is the search path of a rootfs, as Debian's login gives it to
// root.
const rootfsPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Environ returns env as commands of this environment get it: in a rootfs HOME
// and PATH are that system's own, and AGENTENV is set.
func (e *Env) Environ(env []string) []string {
	out := slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		k, _, _ := strings.Cut(kv, "=")
		return k == "AGENTENV" || k == "PWD" || k == "OLDPWD" ||
			e.meta.Kind == Rootfs && (k == "HOME" || k == "PATH" || k == "USER" || k == "LOGNAME" || k == "SHELL" || k == "TMPDIR")
	})
	if e.meta.Kind == Rootfs {
		out = append(out, "HOME=/root", "USER=root", "LOGNAME=root", "PATH="+rootfsPath)
	}
	return append(out, "AGENTENV=1")
}
