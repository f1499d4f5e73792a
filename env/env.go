package env

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/gofrs/flock"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// Executor starts commands in a tree; package sandbox has the ones there are.
type Executor = sandbox.Executor

// Options say how to open or make an environment.
type Options struct {
	// Backends are the drivers there are.
	Backends []forks.Backend
	// Backend is the one asked for; empty or [forks.Auto] leaves it to the
	// environment, or to what works.
	Backend string
	// Executor runs commands; it may be nil where none is run.
	Executor Executor
	// Notify is told what the user should know, one line at a time.
	Notify func(line string)
	// Git lets a promotion in place bring hooks, config and info of a .git.
	Git bool
	// Owners holds the owners (uid, gid) of paths below the directory that is
	// taken in, where this process does not see them: they are not mapped.
	Owners map[string][2]uint32
	// Progress is told how much of a long copy is done.
	Progress func(files, bytes int64)
}

func (o Options) notify(format string, args ...any) {
	if o.Notify != nil {
		o.Notify(fmt.Sprintf(format, args...))
	}
}

// backend is the name of the driver asked for, or [forks.Auto].
func (o Options) backend() (string, error) {
	if o.Backend == "" || o.Backend == forks.Auto {
		return forks.Auto, nil
	}
	names := forks.Auto
	for _, b := range o.Backends {
		if b.Name == o.Backend {
			return b.Name, nil
		}
		names += ", " + b.Name
	}
	return "", &Error{Kind: ErrUsage, Msg: fmt.Sprintf("no backend %q in this agentenv", o.Backend), Hint: "there are " + names}
}

// Env is an open environment. One opened with [Open] only reads; one opened
// with [Lock] may change and holds the lock until Close. Its methods are not
// safe for use by several goroutines, except where they say so.
type Env struct {
	root    string
	opts    Options
	meta    *meta
	driver  forks.Driver
	lock    *flock.Flock
	journal *journal
	// interrupted is the operation that a crash cut short and that the next
	// command which writes will finish or undo; only a reader sees one.
	interrupted *intent
	// probes are those by which a new environment's driver was chosen.
	probes []forks.Probe
}

// Open opens the environment at root for reading, as recovery would leave it.
func Open(ctx context.Context, root string, opts Options) (*Env, error) {
	m, err := readMeta(root)
	if err != nil {
		return nil, err
	}
	e := &Env{root: root, opts: opts, meta: m}
	if e.driver, err = openDriver(ctx, root, m, opts); err != nil {
		return nil, err
	}
	if p, ok := e.driver.(*inPlace); ok {
		p.source.IndexReadOnly = true
	}
	pending, _, err := readPending(root)
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	e.preview(ctx, pending)
	return e, nil
}

// Lock opens the environment at root for changing it. It waits for short
// operations of others, and finishes or undoes what a crash cut short.
func Lock(ctx context.Context, root, op string, opts Options) (*Env, error) {
	if _, err := readMeta(root); err != nil {
		return nil, err
	}
	lock, err := acquire(ctx, root, op, opts.Notify)
	if err != nil {
		return nil, err
	}
	e := &Env{root: root, opts: opts, lock: lock}
	if err := e.load(ctx); err != nil {
		err = errors.Join(err, e.Close())
		if isNoRoom(err) && slices.Contains(roomOps, op) && giveUpReserve(root) {
			return Lock(ctx, root, op, opts)
		}
		return nil, err
	}
	makeReserve(root)
	return e, nil
}

// load reads the state under the lock and recovers it.
func (e *Env) load(ctx context.Context) (err error) {
	if e.meta, err = readMeta(e.root); err != nil {
		return err
	}
	if e.driver, err = openDriver(ctx, e.root, e.meta, e.opts); err != nil {
		return err
	}
	if err := e.holdWork(ctx); err != nil {
		return err
	}
	pending, last, err := readPending(e.root)
	if err != nil {
		return err
	}
	if e.journal, err = openJournal(e.root, last, pending == nil); err != nil {
		return err
	}
	return e.recover(ctx, pending)
}

// holdWork waits until nobody is at work in the work tree any more: when
// agentenv was killed, what ran in it is killed too, but a moment later.
func (e *Env) holdWork(ctx context.Context) error {
	_, release, err := e.driver.Use(ctx, forks.Work)
	if isDamaged(err) || errors.Is(err, forks.ErrReplaced) {
		return nil // nobody can be; who needs the tree is told
	}
	if errors.Is(err, forks.ErrInUse) {
		return &Error{Kind: ErrBusy, Msg: "the work tree of " + e.root + " is in use, though the agentenv that ran a command in it has ended", Hint: "wait until that command has ended, or end it"}
	}
	if err != nil {
		return fmt.Errorf("take the work tree: %w", err)
	}
	release()
	return nil
}

// openDriver opens the driver that the environment was made with. It is never
// another: a store read by the wrong driver would be destroyed.
func openDriver(ctx context.Context, root string, m *meta, opts Options) (forks.Driver, error) {
	if err := m.checkIDs(root); err != nil {
		return nil, err
	}
	name, err := opts.backend()
	if err != nil {
		return nil, err
	}
	if name != forks.Auto && name != m.Backend {
		return nil, &Error{Kind: ErrUsage, Msg: fmt.Sprintf("the environment at %s was made with --backend %s and keeps it", root, m.Backend), Hint: "leave --backend out, or make another environment"}
	}
	i := slices.IndexFunc(opts.Backends, func(b forks.Backend) bool { return b.Name == m.Backend })
	if i < 0 {
		return nil, &Error{Kind: ErrUsage, Msg: fmt.Sprintf("the environment at %s needs the %s backend, which this agentenv does not have", root, m.Backend)}
	}
	d, err := opts.Backends[i].Open(ctx, root)
	if err != nil {
		return nil, explainBackend(ctx, opts.Backends, m.Backend, root, err)
	}
	if m.InPlace {
		return newInPlace(d, root, m, opts), nil
	}
	return d, nil
}

// Close lets go of the lock and of what the driver holds open.
func (e *Env) Close() error {
	var errs []error
	if e.driver != nil {
		errs = append(errs, e.driver.Close())
	}
	if e.journal != nil {
		errs = append(errs, e.journal.f.Close())
	}
	if e.lock != nil {
		errs = append(errs, e.lock.Unlock())
	}
	return errors.Join(errs...)
}

// Root is the environment's root, absolute.
func (e *Env) Root() string { return e.root }

// Kind says whether the tree is a system or a directory.
func (e *Env) Kind() Kind { return e.meta.Kind }

// MountAt is where commands see a workspace's tree; for a rootfs it is "/".
func (e *Env) MountAt() string {
	if e.meta.Kind == Rootfs {
		return "/"
	}
	return e.meta.MountAt
}

// Source is the directory that the environment was taken from, or "".
func (e *Env) Source() string { return e.meta.Source }

// RunsDir is the directory that holds a folder for each tournament.
func (e *Env) RunsDir() string { return filepath.Join(e.root, runsName) }

// InPlace says whether the work tree is the directory that the environment was
// taken from.
func (e *Env) InPlace() bool { return e.meta.InPlace }

// WorkTree is the path of the work tree; it may not be there yet.
func (e *Env) WorkTree() string {
	if e.meta.InPlace {
		return e.meta.Source
	}
	return filepath.Join(e.root, "work", string(forks.Work))
}

// Log lists every snapshot, newest first.
func (e *Env) Log() []Snapshot { return e.meta.snapshots() }

// Head is the snapshot that the work tree was last equal to.
func (e *Env) Head() Snapshot { return e.meta.snapshot(e.meta.find(e.meta.Head)) }

// Resolve finds the snapshot that ref names.
func (e *Env) Resolve(ref string) (Snapshot, error) {
	n, err := e.meta.resolve(ref)
	if err != nil {
		return Snapshot{}, err
	}
	return e.meta.snapshot(n), nil
}

// Branches lists the snapshots that have no child, newest first.
func (e *Env) Branches() []Snapshot {
	parents := make(map[ID]bool, len(e.meta.Nodes))
	for _, n := range e.meta.Nodes {
		parents[n.Parent] = true
	}
	return slices.DeleteFunc(e.Log(), func(s Snapshot) bool { return parents[s.ID] })
}

// Ancestors lists id and its ancestors, nearest first.
func (e *Env) Ancestors(id ID) []Snapshot {
	var out []Snapshot
	for n := e.meta.find(id); n != nil; n = e.meta.find(n.Parent) {
		out = append(out, e.meta.snapshot(n))
	}
	return out
}

// View opens a snapshot's tree for reading.
func (e *Env) View(ctx context.Context, id ID) (forks.View, error) {
	return e.driver.View(ctx, e.meta.store(id))
}

// Changes returns what a snapshot changed against its parent; for the first
// one, all it holds.
func (e *Env) Changes(ctx context.Context, id ID) (forks.Changes, error) {
	n := e.meta.find(id)
	if n == nil {
		return forks.Changes{}, &Error{Kind: ErrNotFound, Msg: fmt.Sprintf("no snapshot %q", id)}
	}
	return e.changesOf(ctx, n)
}

func (e *Env) changesOf(ctx context.Context, n *node) (forks.Changes, error) {
	if n.Parent == "" {
		return e.contents(ctx, n.ID)
	}
	return e.Diff(ctx, n.Parent, n.ID)
}

// contents lists all that a snapshot holds, as added.
func (e *Env) contents(ctx context.Context, id ID) (forks.Changes, error) {
	v, err := e.View(ctx, id)
	if err != nil {
		return forks.Changes{}, err
	}
	defer v.Close()
	var c forks.Changes
	err = v.Walk(func(ent forks.Entry) error {
		c.List = append(c.List, forks.Change{Path: ent.Path, Kind: forks.Added, New: &ent})
		return ctx.Err()
	})
	return c, err
}

// Diff returns what changed from snapshot a to snapshot b.
func (e *Env) Diff(ctx context.Context, a, b ID) (forks.Changes, error) {
	c, err := e.driver.Diff(ctx, e.meta.store(a), e.meta.store(b))
	return shown(c), err
}

// save writes m as the new history.
func (e *Env) save(m *meta) error {
	if e.lock == nil {
		return errors.New("internal: the environment is open for reading only")
	}
	replaced, err := m.write(e.root)
	if replaced {
		e.meta = m
	}
	return err
}
