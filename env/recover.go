package env

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// recover finishes or undoes what a crash cut short, and removes what it left.
// It holds for a state that needs nothing done, so it may be cut short itself.
//
// What is decided by what:
//   - A commit is finished if the work tree already builds upon its snapshot;
//     otherwise nothing of it counts.
//   - Whatever else it was, HEAD was moved by one rename or was not. The work
//     tree is made what HEAD says.
func (e *Env) recover(ctx context.Context, pending *intent) error {
	tree, err := e.workTree()
	noTree := isNotFound(err) || errors.Is(err, ErrDamaged)
	if err != nil && !noTree {
		return err
	}
	if m := e.finishCommit(ctx, tree, pending); m != nil {
		if err := e.save(m); err != nil {
			return err
		}
	}
	if !noTree && misaligned(e.meta, tree) {
		if err := e.realign(ctx, tree, pending); err != nil {
			return err
		}
	}
	if pending != nil {
		if err := e.journal.end(pending.N); err != nil {
			return err
		}
	}
	return e.sweep(ctx)
}

// misaligned says whether the work tree is not the one that HEAD stands for.
func misaligned(m *meta, tree forks.Tree) bool {
	return tree.Interrupted || tree.Base != m.store(m.Head)
}

// finishCommit returns the history with the snapshot of a commit that got as
// far as the work tree, or nil if there is none to add.
func (e *Env) finishCommit(ctx context.Context, tree forks.Tree, pending *intent) *meta {
	if pending == nil || pending.Node == nil || tree.Base != pending.Node.ID || e.meta.find(pending.Node.ID) != nil {
		return nil
	}
	n := *pending.Node
	// The counts are for people to read: a snapshot without them is no worse.
	if c, err := e.driver.Diff(ctx, e.meta.store(n.Parent), n.ID); err == nil {
		n.Stats = statsOf(c)
	}
	m := e.meta.clone()
	m.Nodes = append(m.Nodes, n)
	if !pending.Aside {
		m.Head = n.ID
	}
	return m
}

// realign makes the work tree what HEAD says after a crash between the two.
// What it holds is saved first: someone may have edited it since. If the crash
// came in the middle of a change of the tree, what is saved is a mix, and the
// message says so.
func (e *Env) realign(ctx context.Context, tree forks.Tree, pending *intent) error {
	op := "checkout"
	if pending != nil {
		op = pending.Op
	}
	base, err := e.listedBase(ctx, tree)
	if err != nil {
		return err
	}
	if base != nil {
		message := "found after an interrupted " + op
		if tree.Interrupted {
			message = unclean + op
		}
		saved, err := e.saveAside(ctx, base.ID, message)
		if err != nil {
			return err
		}
		if saved != nil {
			e.opts.notify("what the work tree held was saved as %s (%s)", saved.ID, message)
		}
	}
	if err := e.driver.Checkout(ctx, forks.Work, e.meta.store(e.meta.Head)); err != nil {
		return fmt.Errorf("`agentenv %s` was interrupted, and the work tree cannot be put back to HEAD, %s: %w", op, e.meta.Head, err)
	}
	e.opts.notify("`agentenv %s` was interrupted: the work tree was put back to HEAD, %s", op, e.meta.Head)
	return nil
}

// listedBase returns the node that a work tree builds upon. One that no history
// lists, as when an older meta.json was put back, is listed: the tree's content
// may be in it alone. It is nil if it is not there any more.
func (e *Env) listedBase(ctx context.Context, tree forks.Tree) (*node, error) {
	if n := e.meta.withStore(tree.Base); n != nil {
		return n, nil
	}
	v, err := e.driver.View(ctx, tree.Base)
	if isNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := v.Close(); err != nil {
		return nil, err
	}
	n := node{ID: tree.Base, Parent: e.meta.Head, Message: "found below the work tree, in no history", Created: time.Now(), Kind: KindSaved}
	if c, err := e.driver.Diff(ctx, e.meta.store(n.Parent), n.ID); err == nil {
		n.Stats = statsOf(c)
	}
	if err := e.list(n, false); err != nil {
		return nil, err
	}
	e.opts.notify("the work tree builds upon a snapshot that the history did not list: it is listed as %s", n.ID)
	return e.meta.find(n.ID), nil
}

// unclean begins the message of a snapshot that is a mix of two states.
const unclean = "unclean: left by an interrupted "

// sweep removes the forks, unlisted snapshots and scratch directories of
// processes that died. The lock is held, so nobody is using them.
func (e *Env) sweep(ctx context.Context) error {
	keys, err := e.driver.Forks(ctx)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if k == forks.Work {
			continue
		}
		if err := e.sweepFork(ctx, k); err != nil {
			return err
		}
		step("sweep.fork")
	}
	ids, err := e.driver.Snapshots(ctx)
	if err != nil {
		return err
	}
	stores := e.meta.stores()
	for _, id := range ids {
		if stores[id] {
			continue
		}
		if err := e.driver.RemoveSnapshot(ctx, id); err != nil {
			return err
		}
		step("sweep.snapshot")
	}
	if _, err := e.driver.Sweep(ctx); err != nil {
		return err
	}
	step("sweep.store")
	if err := sweepMeta(e.root); err != nil {
		return err
	}
	step("sweep.meta")
	return e.sweepScratch()
}

// sweepMeta removes histories that were being written when their process died.
func sweepMeta(root string) error {
	entries, err := os.ReadDir(root)
	if err != nil {
		return err
	}
	for _, d := range entries {
		if !strings.HasPrefix(d.Name(), metaTemp) {
			continue
		}
		if err := os.Remove(filepath.Join(root, d.Name())); err != nil {
			return err
		}
	}
	return nil
}

// preview lets a reader see the state that recovery would give. A snapshot that
// is complete but for its listing counts as listed, whether its maker was killed
// or is just about to list it.
func (e *Env) preview(ctx context.Context, pending *intent) {
	if pending == nil {
		return
	}
	tree, err := e.workTree()
	if err != nil {
		return
	}
	if m := e.finishCommit(ctx, tree, pending); m != nil {
		e.meta = m
	}
	// With the lock held, what is pending is in progress, not cut short.
	if misaligned(e.meta, tree) && !held(e.root) {
		e.interrupted = pending
	}
}
