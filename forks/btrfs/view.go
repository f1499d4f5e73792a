//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"golang.org/x/sys/unix"
)

func (d *driver) View(_ context.Context, id forks.ID) (v forks.View, err error) {
	defer wrap("view", id, &err)
	if err := d.store.Exists(id); err != nil {
		return nil, err
	}
	s, err := d.side(id)
	if err != nil {
		return nil, err
	}
	return &view{id: id, side: s}, nil
}

// view reads a snapshot's subvolume.
type view struct {
	id forks.ID
	mu sync.Mutex // for side
	*side
	closed bool
}

func (v *view) Close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.closed {
		v.close()
	}
	v.closed = true
	return nil
}

func (v *view) fail(err error) error { return fmt.Errorf("snapshot %s: %w", v.id, err) }

func (v *view) Lookup(path string) (forks.Entry, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	dir, f, err := v.lookup(path)
	if dir >= 0 {
		defer unix.Close(dir)
	}
	if err != nil {
		return forks.Entry{}, v.fail(err)
	}
	if f == nil {
		return forks.Entry{}, fmt.Errorf("%s: %w", path, forks.ErrNotFound)
	}
	e, err := v.entry(dir, f, path)
	if err != nil {
		return forks.Entry{}, v.fail(err)
	}
	if e == nil {
		return forks.Entry{}, fmt.Errorf("%s: %w", path, forks.ErrNotFound)
	}
	return *e, nil
}

// Walk uses a side of its own: fn may ask the view meanwhile.
func (v *view) Walk(fn func(forks.Entry) error) error {
	root, err := unix.FcntlInt(uintptr(v.root), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return err
	}
	s := &side{root: root, record: v.record, frozen: true}
	defer s.close()
	if err := s.walk(func(_ int, _ *found, e *forks.Entry) error { return fn(*e) }); err != nil {
		return err
	}
	if err := s.alive(); err != nil {
		return v.fail(err)
	}
	return nil
}

func (v *view) Open(path string) (io.ReadSeekCloser, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	dir, f, err := v.lookup(path)
	if dir >= 0 {
		defer unix.Close(dir)
	}
	switch {
	case err != nil:
		return nil, v.fail(err)
	case f == nil:
		return nil, fmt.Errorf("%s: %w", path, forks.ErrNotFound)
	case !f.isReg():
		return nil, fmt.Errorf("%s: %w: not a regular file", path, forks.ErrUnsupported)
	}
	fd, err := trees.Open(dir, f.name, unix.O_RDONLY)
	if err != nil {
		return nil, v.fail(&os.PathError{Op: "open", Path: path, Err: err})
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Diff costs what the changes cost where both snapshots come from one that is
// still there, and this user may search; otherwise both trees are walked.
func (d *driver) Diff(ctx context.Context, a, b forks.ID) (c forks.Changes, err error) {
	defer wrap("diff", a+".."+b, &err)
	d.needing.RLock()
	defer d.needing.RUnlock()
	for _, id := range []forks.ID{a, b} {
		if err := d.store.Exists(id); err != nil {
			return c, fmt.Errorf("snapshot %s: %w", id, err)
		}
	}
	c.List, err = d.diff(ctx, a, b)
	return c, err
}

func (d *driver) diff(ctx context.Context, a, b forks.ID) ([]forks.Change, error) {
	if a == b {
		return nil, nil
	}
	x, err := d.side(a)
	if err != nil {
		return nil, err
	}
	defer x.close()
	y, err := d.side(b)
	if err != nil {
		return nil, err
	}
	defer y.close()
	since := d.common(a, b)
	list, _, err := compare(ctx, x, y, since, true)
	return list, err
}

// common finds the nearest snapshot that both come from; nil if there is none
// that is still there.
func (d *driver) common(a, b forks.ID) *info {
	above := make(map[forks.ID]bool)
	for id := a; id != ""; {
		i, err := d.readInfo(id)
		if err != nil {
			break
		}
		above[id] = true
		id = i.Base
	}
	for id := b; id != ""; {
		if above[id] {
			i, err := d.since(id)
			if err != nil {
				return nil
			}
			return &i
		}
		i, err := d.readInfo(id)
		if err != nil {
			break
		}
		id = i.Base
	}
	return nil
}

func (d *driver) Apply(ctx context.Context, from, to forks.ID, dir string, o forks.ApplyOptions) (r forks.ApplyResult, err error) {
	defer wrap("apply", to, &err)
	c, err := d.Diff(ctx, from, to)
	if err != nil {
		return r, err
	}
	var states [2]*layer.State
	for i, id := range []forks.ID{from, to} {
		if states[i], err = d.state(id); err != nil {
			return r, err
		}
	}
	return d.store.ApplyStates(ctx, states[0], states[1], c.List, dir, o)
}

// state describes snapshot id as package layer does.
func (d *driver) state(id forks.ID) (*layer.State, error) {
	s, err := d.side(id)
	if err != nil {
		return nil, err
	}
	defer s.close()
	return s.state(id)
}
