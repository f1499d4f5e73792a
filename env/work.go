package env

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// workTree returns the work tree. One whose directory somebody removed counts
// as not there; what somebody put in its place is not ours to remove. Where the
// tree is not mounted now, nothing of it is in that directory.
func (e *Env) workTree() (forks.Tree, error) {
	tree, err := e.standing()
	if errors.Is(err, forks.ErrReplaced) {
		tree, err = e.standing() // another process may just have let go of it
	}
	if errors.Is(err, forks.ErrReplaced) {
		err = e.replacedError()
	}
	return tree, err
}

// standing is the work tree, whose directory, if it stands on the host, is one.
func (e *Env) standing() (forks.Tree, error) {
	tree, err := e.driver.Tree(forks.Work)
	if err != nil || tree.Mount.Overlay != nil {
		return tree, err
	}
	st, err := os.Lstat(tree.Mount.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = forks.ErrNotFound
	case err == nil && !st.IsDir():
		err = forks.ErrReplaced
	}
	if err != nil {
		err = &forks.Error{Op: "open", ID: tree.Mount.Dir, Driver: e.driver.Name(), Err: err}
	}
	return tree, err
}

func (e *Env) replacedError() error {
	return &Error{Kind: ErrDamaged, Msg: e.WorkTree() + " is not the work tree any more", Hint: "move it away, and the next command makes it again from HEAD"}
}

// ensureWork makes the work tree if it is not there: an environment that only
// ran tournaments has none.
func (e *Env) ensureWork(ctx context.Context) (forks.Tree, error) {
	tree, err := e.workTree()
	if !isNotFound(err) {
		return tree, err
	}
	if _, err := e.driver.Tree(forks.Work); err == nil {
		e.opts.notify("the work tree's directory was removed: it is made again from HEAD")
		if err := e.driver.RemoveFork(ctx, forks.Work); err != nil {
			return tree, err
		}
	}
	return e.makeWork(ctx, e.meta.store(e.meta.Head))
}

// standWork returns the work tree ready for commands. It is made if it is not
// there, and where this user can mount it on the host it stands there.
func (e *Env) standWork(ctx context.Context) (forks.Tree, error) {
	tree, err := e.ensureWork(ctx)
	if err != nil {
		return tree, err
	}
	return e.attachWork(ctx, tree)
}

// attachWork makes an existing work tree stand on the host. Where this user
// cannot have it there, it is mounted where each command runs.
func (e *Env) attachWork(ctx context.Context, tree forks.Tree) (forks.Tree, error) {
	if e.meta.IDs != nil {
		return tree, nil // our mounts go when this process does
	}
	at, err := e.driver.Attach(ctx, forks.Work)
	if errors.Is(err, forks.ErrUnsupported) {
		return tree, nil
	}
	if errors.Is(err, forks.ErrReplaced) {
		return tree, e.replacedError()
	}
	if err != nil {
		return tree, e.explainTree(ctx, err)
	}
	e.warn(at.Warnings)
	return at, nil
}

// makeWork makes the work tree, equal to the driver's snapshot store.
func (e *Env) makeWork(ctx context.Context, store ID) (forks.Tree, error) {
	tree, err := e.driver.Fork(ctx, forks.Work, store, forks.ForkOptions{})
	if err != nil {
		return tree, err
	}
	e.warn(tree.Warnings)
	return tree, nil
}

func (e *Env) warn(lines []string) {
	for _, l := range lines {
		e.opts.notify("%s", l)
	}
}

// Commit saves the work tree as a snapshot, child of HEAD, which becomes HEAD.
// With nothing changed it makes none, unless empty is true, and returns HEAD
// and false.
func (e *Env) Commit(ctx context.Context, message string, empty bool) (Snapshot, bool, error) {
	tree, err := e.ensureWork(ctx)
	if err != nil {
		return Snapshot{}, false, err
	}
	s, err := e.commitHead(ctx, message, KindCommit)
	if err != nil {
		return Snapshot{}, false, err
	}
	// After the commit: a tree that is mounted nowhere is kept without a copy.
	if _, err := e.attachWork(ctx, tree); err != nil {
		e.opts.notify("the work tree is not mounted: %v", err)
	}
	if s == nil && empty {
		n := node{ID: newID(), Store: e.meta.store(e.meta.Head), Parent: e.meta.Head, Message: message, Created: time.Now(), Kind: KindCommit}
		if err := e.list(n, true); err != nil {
			return Snapshot{}, false, err
		}
		return e.Head(), true, nil
	}
	if s == nil {
		return e.Head(), false, nil
	}
	return *s, true, nil
}

// SaveWork saves what the work tree holds and no snapshot does; it returns nil
// if there is nothing.
func (e *Env) SaveWork(ctx context.Context, message string) (*Snapshot, error) {
	_, err := e.workTree()
	if isNotFound(err) && !e.meta.InPlace {
		return nil, nil
	}
	if isNotFound(err) { // or refuse to go on without the directory
		_, err = e.ensureWork(ctx)
	}
	if err != nil {
		return nil, err
	}
	return e.commitHead(ctx, message, KindSaved)
}

// commitHead saves the work tree as a child of HEAD, which becomes HEAD. It
// returns nil if nothing changed.
func (e *Env) commitHead(ctx context.Context, message string, kind SnapshotKind) (*Snapshot, error) {
	return e.commitOnto(ctx, node{Parent: e.meta.Head, Message: message, Kind: kind}, false)
}

// saveAside saves the work tree as a child of parent, which is its base; HEAD
// stays. It returns nil if nothing changed.
func (e *Env) saveAside(ctx context.Context, parent ID, message string) (*Snapshot, error) {
	return e.commitOnto(ctx, node{Parent: parent, Message: message, Kind: KindSaved}, true)
}

func (e *Env) commitOnto(ctx context.Context, n node, aside bool) (*Snapshot, error) {
	n.ID, n.Created = newID(), time.Now()
	seq := 0
	changes, err := e.driver.Commit(ctx, forks.Work, n.ID, func() (err error) {
		seq, err = e.journal.begin(intent{Op: "commit", From: n.Parent, To: n.ID, Node: &n, Aside: aside})
		return err
	})
	if err != nil {
		return nil, err
	}
	e.warn(changes.Warnings)
	if len(changes.List) == 0 {
		return nil, nil
	}
	if e.meta.InPlace && n.Kind == KindExec {
		e.warnPrivileged(e.meta.Source, changes.List)
	}
	n.Stats, n.Bytes = statsOf(changes), changes.Bytes
	if err := e.list(n, !aside); err != nil {
		return nil, err
	}
	s := e.meta.snapshot(e.meta.find(n.ID))
	return &s, e.journal.end(seq)
}

// list adds a snapshot to the history, and makes it HEAD if head is true.
func (e *Env) list(n node, head bool) error {
	m := e.meta.clone()
	m.Nodes = append(m.Nodes, n)
	if head {
		m.Head = n.ID
	}
	return e.save(m)
}

// CheckoutResult says what a checkout did.
type CheckoutResult struct {
	ID ID `json:"id"`
	// Saved is the snapshot that holds the work which no snapshot held.
	Saved *ID `json:"saved"`
}

// Checkout makes the work tree equal to what ref names and moves HEAD there.
// Work that no snapshot holds is saved first, unless discard is true; that
// needs no more room than there is in the reserve.
func (e *Env) Checkout(ctx context.Context, ref string, discard bool) (CheckoutResult, error) {
	target, err := e.meta.resolve(ref)
	if err != nil {
		return CheckoutResult{}, err
	}
	res := CheckoutResult{ID: target.ID}
	if discard {
		return res, e.makingRoom(func() error { return e.goTo(ctx, res.ID) })
	}
	saved, err := e.SaveWork(ctx, "before checkout of "+ref)
	if isDamaged(err) {
		return res, &Error{
			Kind: ErrDamaged, Cause: err, Msg: "what the work tree holds cannot be compared with the snapshot below it",
			Hint: fmt.Sprintf("`agentenv checkout %s --discard` gives up what no snapshot holds", ref),
		}
	}
	if err != nil {
		return res, err
	}
	if saved != nil {
		res.Saved = &saved.ID
	}
	return res, e.goTo(ctx, res.ID)
}

// goTo makes the work tree, which may not be there yet, equal to id, moves HEAD
// there and lets the tree stand on the host. It can be repeated.
func (e *Env) goTo(ctx context.Context, id ID) error {
	if _, err := e.ensureWork(ctx); err != nil {
		return err
	}
	if err := e.moveTree(ctx, "checkout", id); err != nil {
		return err
	}
	_, err := e.standWork(ctx)
	return err
}

// isDamaged says whether an error is that a snapshot is not, or not wholly, in
// the store that lists it.
func isDamaged(err error) bool { return errors.Is(err, forks.ErrDamaged) || isNotFound(err) }

// moveTree makes the work tree equal to id and then moves HEAD there: until
// that last step, a crash is undone by going back to HEAD. Whether the tree then
// stands on the host is the caller's affair.
func (e *Env) moveTree(ctx context.Context, op string, id ID) error {
	was, err := e.workTree()
	if err != nil {
		return err
	}
	seq, err := e.journal.begin(intent{Op: op, From: e.meta.Head, To: id})
	if err != nil {
		return err
	}
	if err := e.driver.Checkout(ctx, forks.Work, e.meta.store(id)); err != nil {
		return errors.Join(err, e.undoCheckout(ctx, was))
	}
	m := e.meta.clone()
	m.Head = id
	if err := e.save(m); err != nil {
		return err
	}
	return e.journal.end(seq)
}

// undoCheckout puts the work tree back to HEAD after a checkout that failed
// half way; it stands on the host again if it did before. What cannot be put
// back now is put back by the next command.
func (e *Env) undoCheckout(ctx context.Context, was forks.Tree) error {
	ctx = context.WithoutCancel(ctx)
	tree, err := e.driver.Tree(forks.Work)
	if isNotFound(err) && e.meta.InPlace {
		return nil // the directory is gone, and nothing of it was changed
	}
	if err != nil {
		return err
	}
	if tree.Interrupted {
		if err := e.realign(ctx, tree, nil); err != nil {
			return fmt.Errorf("put the work tree back: %w", err)
		}
	}
	if was.Mount.Overlay == nil {
		_, err = e.attachWork(ctx, tree)
	}
	return err
}
