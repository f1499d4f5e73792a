package env

import (
	"context"
	"fmt"
	"slices"
	"strings"
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

// Delete removes a snapshot from the history; its children become children of
// its parent. HEAD, a tagged snapshot and the last one are held.
func (e *Env) Delete(ctx context.Context, ref string) (Snapshot, error) {
	n, err := e.meta.resolve(ref)
	if err != nil {
		return Snapshot{}, err
	}
	s := e.meta.snapshot(n)
	if why := e.heldBy(s); why != "" {
		return s, &Error{Kind: ErrHeld, Msg: fmt.Sprintf("%s cannot be removed: %s", s.ID, why)}
	}
	store := n.store()
	m := e.meta.clone()
	m.remove(s.ID)
	if err := e.recount(ctx, m, s.ID); err != nil {
		return s, err
	}
	if err := e.save(m); err != nil {
		return s, err
	}
	if e.meta.stores()[store] {
		return s, nil
	}
	return s, e.driver.RemoveSnapshot(ctx, store)
}

// recount counts anew what the children of the removed snapshot change against
// the parent that they got.
func (e *Env) recount(ctx context.Context, m *meta, removed ID) error {
	for i := range m.Nodes {
		n := &m.Nodes[i]
		if e.meta.find(n.ID).Parent != removed {
			continue
		}
		c, err := e.changesOf(ctx, n)
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
