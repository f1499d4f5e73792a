package env

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// messageMax bounds a command line that becomes a snapshot's message, in
// bytes: enough to know it again in a log.
const messageMax = 200

// ExecResult says what a command in the work tree came to.
type ExecResult struct {
	sandbox.Result
	// Head is HEAD afterwards; Created says whether it is a new snapshot.
	Head    Snapshot
	Created bool
}

// Exec saves what the work tree holds and no snapshot does, runs a command in
// it, and saves what that changed, unless noCommit is true. started is given
// the process, so that signals can be passed on.
func (e *Env) Exec(ctx context.Context, r Run, noCommit bool, started func(sandbox.Process)) (ExecResult, error) {
	saved, err := e.SaveWork(ctx, "before "+r.message())
	if err != nil {
		return ExecResult{}, err
	}
	if saved != nil {
		e.opts.notify("changes made since HEAD were saved as %s", saved.ID)
	}
	tree, err := e.standWork(ctx)
	if err != nil {
		return ExecResult{}, err
	}
	p, err := e.start(ctx, tree, r)
	if err != nil {
		return ExecResult{}, err
	}
	started(p)
	res := ExecResult{}
	if res.Result, err = p.Wait(); err != nil {
		return res, err
	}
	if err := stuckError(res.Result, "what the command changed is in the work tree, and the next command saves it"); err != nil {
		return res, err
	}
	if !noCommit {
		// What the command did is kept, however it ended.
		s, err := e.commitHead(context.WithoutCancel(ctx), r.message(), KindExec)
		if err != nil {
			return res, err
		}
		res.Created = s != nil
	}
	res.Head = e.Head()
	return res, nil
}

// ForkResult says what a command in a fork of its own came to.
type ForkResult struct {
	sandbox.Result
	// Base is what the fork was made of.
	Base Snapshot
	// Kept is the snapshot of what the command left, nil unless that was asked
	// for; Created says whether it is a new one and not Base.
	Kept    *Snapshot
	Created bool
}

// ExecFork runs a command in a fork of the snapshot that ref names, and removes
// the fork. With keep, what the command left becomes a snapshot, child of that
// one; HEAD stays. It needs no lock, but to keep the result, and may run in any
// number of processes at once. started is as for [Env.Exec]; a ctx that is
// cancelled after the command's end stops the wait for the lock.
func (e *Env) ExecFork(ctx context.Context, ref string, r Run, keep bool, started func(sandbox.Process)) (res ForkResult, err error) {
	if res.Base, err = e.Resolve(ref); err != nil {
		return res, err
	}
	f, err := e.Fork(ctx, freeKey+forks.Key(newID()), res.Base.ID, r.Level)
	if isNotFound(err) && e.Stale() {
		return res, &Error{Kind: ErrNotFound, Msg: fmt.Sprintf("snapshot %s was deleted while it was being forked", res.Base.ID)}
	}
	if err != nil {
		return res, e.explainTree(ctx, err)
	}
	defer func() {
		if len(res.Stuck) == 0 {
			err = errors.Join(err, f.Remove(context.WithoutCancel(ctx)))
		}
	}()
	e.warn(f.tree.Warnings)
	p, err := f.Start(ctx, r)
	if err != nil {
		return res, err
	}
	started(p)
	if res.Result, err = p.Wait(); err != nil {
		return res, err
	}
	err = stuckError(res.Result, "its fork goes with the next command, once it has ended")
	if err != nil || !keep {
		return res, err
	}
	kept, err := e.keepFork(ctx, f, res.Base, r.message())
	if err != nil {
		return res, err
	}
	res.Kept, res.Created = &kept, kept.ID != res.Base.ID
	return res, nil
}

// keepFork lists what a fork holds. The lock is taken before the fork is
// frozen: what is frozen and not listed, another process may sweep away.
func (e *Env) keepFork(ctx context.Context, f *Fork, base Snapshot, message string) (s Snapshot, err error) {
	l, err := e.lockWhenFree(ctx)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	fr, err := f.Freeze(context.WithoutCancel(ctx), e.survivor(l, base.ID))
	if err != nil {
		return s, err
	}
	e.warn(fr.Changes.Warnings)
	if len(fr.Changes.List) == 0 {
		return base, nil
	}
	fr.kind = KindExec
	return l.Keep(fr, message)
}

// survivor is id, or if it was deleted since e was opened, the nearest ancestor
// that was not.
func (e *Env) survivor(now *Env, id ID) ID {
	for _, s := range e.Ancestors(id) {
		if now.meta.find(s.ID) != nil {
			return s.ID
		}
	}
	return now.meta.Head
}

// keepRetry is the pause between two tries for a lock that a long operation
// holds.
const keepRetry = 200 * time.Millisecond

// lockWhenFree is [Lock] for what is done already and must not be lost: it
// waits for long operations too.
func (e *Env) lockWhenFree(ctx context.Context) (*Env, error) {
	for told := false; ; {
		l, err := Lock(ctx, e.root, "exec", e.opts)
		if !errors.Is(err, ErrBusy) {
			return l, err
		}
		if !told {
			e.opts.notify("the result is kept later: %v", err)
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(keepRetry):
		}
	}
}

// stuckError says what could not be ended of a command; nil if nothing.
func stuckError(r sandbox.Result, hint string) error {
	if len(r.Stuck) == 0 {
		return nil
	}
	return &Error{Kind: forks.ErrInUse, Msg: strings.Join(r.Stuck, ", ") + " and cannot be killed", Hint: hint}
}

// message is that of the snapshot of what r left.
func (r Run) message() string {
	if r.Message != "" {
		return r.Message
	}
	return messageOf(r.Args)
}

// messageOf is a command as one line of bounded length.
func messageOf(args []string) string {
	s := strings.Join(strings.Fields(strings.Join(args, " ")), " ")
	if len(s) > messageMax {
		s = strings.ToValidUTF8(s[:messageMax], "") + "…"
	}
	return s
}
