//go:build linux

package layer

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/step"
	"golang.org/x/sys/unix"
)

// CommitUpper stores what the scan found as snapshot id, which becomes the
// fork's base. Unless live says that somebody works in the fork, the upper
// itself becomes the layer, so that no bytes are copied. intent is as in
// [forks.Driver.Commit].
func (s *Store) CommitUpper(ctx context.Context, u *Upper, id forks.ID, live bool, intent func() error) (c forks.Changes, err error) {
	if u.Delta == nil {
		return u.Changes()
	}
	if intent == nil {
		intent = func() error { return nil }
	}
	chain, err := s.Chain(u.Stack.Base)
	if err != nil {
		return c, err
	}
	if live || u.Stack.Lower != u.Stack.Base || len(chain) >= MaxLayers {
		c, err = s.commitCopy(ctx, u, id, live, intent)
	} else {
		c, err = s.commitRename(ctx, u, id, intent)
	}
	c.Warnings = u.scan.Warnings.Lines()
	return c, err
}

// commitRename makes the upper the layer. All that takes space is made before
// anything is moved.
func (s *Store) commitRename(ctx context.Context, u *Upper, id forks.ID, intent func() error) (c forks.Changes, err error) {
	if err := s.finish(ctx, u.Stack.key); err != nil {
		return c, err
	}
	if c.List, _, err = u.changes(); err != nil || len(c.List) == 0 {
		return c, err
	}
	stage, err := s.NewStage()
	if err != nil {
		return c, err
	}
	c.Bytes, err = s.renameStage(ctx, stage, u, id, intent)
	if err = errors.Join(err, stage.Remove(ctx)); err != nil {
		return forks.Changes{}, err
	}
	return c, nil
}

func (s *Store) renameStage(ctx context.Context, stage *Stage, u *Upper, id forks.ID, intent func() error) (int64, error) {
	key := u.Stack.key
	if err := s.buildStack(stage, id, u.root, false); err != nil {
		return 0, err
	}
	bytes, err := s.complete(ctx, u, id)
	if err != nil {
		return 0, err
	}
	step.At("stack.commit.complete")
	if err := intent(); err != nil {
		return 0, err
	}
	step.At("stack.commit.intent")
	dir, _ := s.ForkDir(key)
	if err := os.Symlink(string(id), s.nextPath(key)); err != nil {
		return 0, err
	}
	if key == forks.Work { // what is in an attempt's fork is lost with the power
		if err := fsat.SyncDir(dir); err != nil {
			return 0, errors.Join(err, os.Remove(s.nextPath(key)))
		}
	}
	step.At("stack.commit.next")
	if err := s.place(s.stackPath(key), id, u.Stack.Base); err != nil {
		return 0, errors.Join(err, os.Remove(s.nextPath(key)))
	}
	step.At("stack.commit.placed")
	return bytes, s.moveOn(stage, key, id)
}

// complete makes the stack a durable layer in all but its place, and returns
// the bytes that it takes.
func (s *Store) complete(ctx context.Context, u *Upper, id forks.ID) (int64, error) {
	u.Delta.Layers = []forks.ID{id}
	record := EncodeRecord(Header{ID: id, Base: u.Stack.Base}, u.Delta)
	dir := s.stackPath(u.Stack.key)
	if err := removeWork(ctx, dir); err != nil {
		return 0, err
	}
	step.At("stack.commit.work-removed")
	if err := writeDurably(filepath.Join(dir, "record"), record); err != nil {
		return 0, err
	}
	step.At("stack.commit.record")
	if err := u.prune(); err != nil {
		return 0, err
	}
	step.At("stack.commit.pruned")
	bytes, err := u.flush()
	if err != nil {
		return 0, err
	}
	step.At("stack.commit.flushed")
	return bytes + int64(len(record)), fsat.SyncDir(dir)
}

// writeDurably writes a file, over what a commit that was cut short left.
func writeDurably(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// commitCopy stores a copy of what differs. If somebody works in the fork its
// upper stays as it is, over the layers that it had; else the fork gets a new
// one over the new layer.
func (s *Store) commitCopy(ctx context.Context, u *Upper, id forks.ID, live bool, intent func() error) (forks.Changes, error) {
	stage, err := s.NewStage()
	if err != nil {
		return forks.Changes{}, err
	}
	c, err := s.copyStage(ctx, stage, u, id, live, intent)
	return c, errors.Join(err, stage.Remove(ctx))
}

func (s *Store) copyStage(ctx context.Context, stage *Stage, u *Upper, id forks.ID, live bool, intent func() error) (c forks.Changes, err error) {
	delta, bytes, err := stage.Write(ctx, u.root, u.Delta, WriteOptions{
		ID: id, BaseID: u.Stack.Base, Base: u.base, Ours: true, Upper: true, Access: Access,
	}, &u.scan.Warnings)
	if err != nil || delta == nil {
		return c, err
	}
	u.Delta = delta
	list, whole, err := u.changes()
	if err != nil || len(list) == 0 {
		return c, err
	}
	base, err := stage.Shorten(ctx, id, u.Stack.Base, nil)
	if err != nil {
		return c, err
	}
	if live {
		err = stage.MakeForkBase(id, whole)
	} else {
		err = s.buildStack(stage, id, u.root, u.Stack.key == forks.Work)
	}
	if err != nil {
		return c, err
	}
	step.At("stack.copy.complete")
	if err := intent(); err != nil {
		return c, err
	}
	step.At("stack.copy.intent")
	if err := stage.Publish(id, base); err != nil {
		return c, err
	}
	step.At("stack.copy.placed")
	c = forks.Changes{List: list, Bytes: bytes}
	if !live {
		return c, s.replaceStack(stage, u.Stack.key)
	}
	err = stage.PlaceForkBase(s.stackPath(u.Stack.key))
	step.At("stack.copy.done")
	return c, err
}

// CheckoutStack makes the fork equal to snapshot id. It returns true if the
// tree that it replaced is still mounted somewhere, or used says that it is or
// may be: then its files stay until a Sweep finds that they are not needed any more.
func (s *Store) CheckoutStack(ctx context.Context, key forks.Key, id forks.ID, used bool) (busy bool, err error) {
	unlock, err := s.lockLayers(unix.LOCK_SH)
	if err != nil {
		return false, err
	}
	defer unlock()
	if err := s.Exists(id); err != nil {
		return false, err
	}
	stage, err := s.NewStage()
	if err != nil {
		return false, err
	}
	err = s.buildTop(stage, id, key == forks.Work)
	if err == nil {
		err = s.replaceStack(stage, key)
	}
	if err != nil {
		return false, errors.Join(err, stage.Remove(ctx))
	}
	if used || lingers(filepath.Join(stage.Path, "stack")) {
		unix.Close(stage.FD)
		return true, nil
	}
	return false, stage.Remove(ctx)
}

// replaceStack gives the fork the stack that was made in the stage; the old one
// comes there.
func (s *Store) replaceStack(stage *Stage, key forks.Key) error {
	step.At("stack.checkout.made")
	made, at := filepath.Join(stage.Path, "stack"), s.stackPath(key)
	err := unix.Renameat2(unix.AT_FDCWD, made, unix.AT_FDCWD, at, unix.RENAME_EXCHANGE)
	if err == unix.ENOENT { // a commit was cut short
		err = os.Rename(made, at)
	}
	if err != nil {
		return &os.PathError{Op: "rename to", Path: at, Err: err}
	}
	step.At("stack.checkout.placed")
	if next, err := os.Readlink(s.nextPath(key)); err == nil {
		if err := s.dropNext(key, forks.ID(next)); err != nil {
			return err
		}
	}
	if key == forks.Work {
		dir, _ := s.ForkDir(key)
		if err := fsat.SyncDir(dir); err != nil {
			return err
		}
	}
	step.At("stack.checkout.done")
	return nil
}

// Discard removes the stage, in which the directory "fork" is a fork that was
// taken away. If its upper is mounted still, that stays until it is not.
func (s *Store) Discard(ctx context.Context, stage *Stage) error {
	stack := filepath.Join(stage.Path, "fork", "stack")
	if !lingers(stack) {
		return stage.Remove(ctx)
	}
	defer unix.Close(stage.FD)
	return os.Rename(stack, filepath.Join(stage.Path, "stack"))
}
