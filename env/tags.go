package env

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// Tag is a name for a snapshot.
type Tag struct {
	Name string `json:"name"`
	ID   ID     `json:"id"`
}

// Tags lists the tags by name.
func (e *Env) Tags() []Tag {
	out := make([]Tag, 0, len(e.meta.Tags))
	for name, id := range e.meta.Tags {
		out = append(out, Tag{name, id})
	}
	slices.SortFunc(out, func(a, b Tag) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// SetTag names the snapshot ref. A tag that is there moves.
func (e *Env) SetTag(name, ref string) error {
	if err := CheckTag(name); err != nil {
		return err
	}
	n, err := e.meta.resolve(ref)
	if err != nil {
		return err
	}
	if old, ok := e.meta.Tags[name]; ok && old != n.ID {
		e.opts.notify("the tag %s was at %s", name, old)
	}
	m := e.meta.clone()
	m.Tags[name] = n.ID
	return e.save(m)
}

// RemoveTag takes a name away; the snapshot stays.
func (e *Env) RemoveTag(name string) error {
	if _, ok := e.meta.Tags[name]; !ok {
		return &Error{Kind: ErrNotFound, Msg: fmt.Sprintf("no tag %q", name), Hint: "see `agentenv tag`"}
	}
	m := e.meta.clone()
	delete(m.Tags, name)
	return e.save(m)
}

// Deleted is a snapshot that was removed.
type Deleted struct {
	Snapshot
	// Stays is what its storage still takes on disk, in bytes, since other
	// snapshots build upon it.
	Stays int64
}

// Delete removes a snapshot from the history; its children become children of
// its parent. HEAD, a tagged snapshot, one in a fork of which a command runs and
// the last one are held.
func (e *Env) Delete(ctx context.Context, ref string) (Deleted, error) {
	n, err := e.meta.resolve(ref)
	if err != nil {
		return Deleted{}, err
	}
	d := Deleted{Snapshot: e.meta.snapshot(n)}
	store := n.store()
	why := e.heldBy(d.Snapshot)
	if why == "" {
		if why, err = e.usedBy(ctx, d.ID, store); err != nil {
			return d, err
		}
	}
	if why != "" {
		return d, &Error{Kind: ErrHeld, Msg: fmt.Sprintf("%s cannot be removed: %s", d.ID, why)}
	}
	m := e.meta.clone()
	for id := range m.Removed {
		if !exists(e.nodePath(id)) {
			delete(m.Removed, id)
		}
	}
	m.remove(d.ID)
	if err := e.recount(ctx, m, d.ID); err != nil {
		return d, err
	}
	if err := e.makingRoom(func() error { return e.save(m) }); err != nil {
		return d, err
	}
	if e.meta.stores()[store] {
		return d, nil
	}
	err = e.makingRoom(func() error { return e.driver.RemoveSnapshot(ctx, store) })
	if exists(e.nodePath(store)) {
		d.Stays = m.Removed[store]
	}
	return d, err
}

// nodePath is where every driver keeps a snapshot.
func (e *Env) nodePath(store ID) string { return filepath.Join(e.root, "nodes", string(store)) }

// usedBy says, if a command runs in a fork of the snapshot id, that it is so.
// What a dead process left of a fork is removed. It does not matter where
// another node keeps the storage.
func (e *Env) usedBy(ctx context.Context, id, store ID) (string, error) {
	if slices.ContainsFunc(e.meta.Nodes, func(n node) bool { return n.ID != id && n.store() == store }) {
		return "", nil
	}
	keys, err := e.driver.Forks(ctx)
	if err != nil {
		return "", err
	}
	for _, k := range keys {
		if k == forks.Work {
			continue
		}
		tree, err := e.driver.Tree(k)
		if isDamaged(err) || err == nil && tree.Base != store {
			continue
		}
		if err == nil && strings.HasPrefix(string(k), freeKey) {
			err = e.driver.RemoveFork(ctx, k)
			if err == nil {
				continue
			}
		}
		if err != nil && !errors.Is(err, forks.ErrInUse) {
			return "", err
		}
		return "a command runs in a fork of it", nil
	}
	return "", nil
}

// recount counts anew what the children of the removed snapshot change against
// the parent that they got. The counts are for people to read: where a snapshot
// is damaged they stay.
func (e *Env) recount(ctx context.Context, m *meta, removed ID) error {
	for i := range m.Nodes {
		n := &m.Nodes[i]
		if e.meta.find(n.ID).Parent != removed {
			continue
		}
		c, err := e.changesOf(ctx, n)
		if isDamaged(err) {
			continue
		}
		if err != nil {
			return err
		}
		n.Stats = statsOf(c)
	}
	return nil
}

func (e *Env) heldBy(s Snapshot) string {
	switch {
	case s.Head:
		return "it is HEAD"
	case len(s.Tags) > 0:
		return fmt.Sprintf("it has the tag %s (remove it with `agentenv tag -d %s`)", s.Tags[0], s.Tags[0])
	case len(e.meta.Nodes) == 1:
		return "it is the only snapshot"
	}
	return ""
}
