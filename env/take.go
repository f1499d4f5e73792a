package env

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// TakeDir captures the directory dir exactly, deletions too, as a child of the
// last snapshot taken from it (of HEAD, if there is none), and returns that
// snapshot; unchanged, the last one. HEAD and the work tree stay.
func (e *Env) TakeDir(ctx context.Context, dir string) (Snapshot, error) {
	dir, err := CheckDir(dir)
	if err != nil {
		return Snapshot{}, err
	}
	if err := checkOutside(e.root, dir); err != nil {
		return Snapshot{}, err
	}
	parent := e.meta.Head
	last := e.meta.lastFrom(dir)
	if last != nil {
		parent = last.ID
	}
	n := node{ID: newID(), Parent: parent, Created: time.Now(), Kind: KindSync, Source: dir, Message: "taken from " + dir}
	changed, err := e.captureInto(ctx, &n, e.meta.store(parent), forks.Source{Dir: dir, Exclude: e.excludeFor(dir), Owners: e.opts.Owners})
	if err != nil {
		return Snapshot{}, err
	}
	m := e.meta.clone()
	delete(m.Applied, dir) // what builds upon the snapshot changes what is there now
	if changed || last == nil {
		m.Nodes = append(m.Nodes, n)
		return e.meta.snapshot(&n), e.save(m)
	}
	if err := e.driver.RemoveSnapshot(ctx, n.ID); err != nil || len(m.Applied) == len(e.meta.Applied) {
		return e.meta.snapshot(last), err
	}
	return e.meta.snapshot(last), e.save(m)
}

// SourceChanged says whether the directory that a workspace was taken from is
// neither what was last captured of it nor what HEAD or the last snapshot
// applied to it is. One that is gone has not changed.
func (e *Env) SourceChanged(ctx context.Context) (bool, error) {
	last := e.meta.lastFrom(e.meta.Source)
	if e.meta.InPlace || e.meta.Source == "" || last == nil || e.meta.Kind != Workspace {
		return false, nil
	}
	if _, err := realDir(e.meta.Source); err != nil {
		return false, nil
	}
	src := forks.Source{Dir: e.meta.Source, Exclude: e.meta.Exclude, Skip: []string{e.root}}
	known := []ID{last.store(), e.meta.store(e.meta.Head)}
	if n := e.meta.find(e.meta.Applied[e.meta.Source].ID); n != nil {
		known = append(known, n.store())
	}
	for _, id := range known {
		c, err := e.driver.Compare(ctx, id, src)
		if err != nil {
			return false, err
		}
		if !slices.ContainsFunc(c.List, func(ch forks.Change) bool { return !onlyDirTime(ch) }) {
			return false, nil
		}
	}
	return true, nil
}

// excludeFor returns the patterns that dir was first taken with.
func (e *Env) excludeFor(dir string) []string {
	if dir == e.meta.Source {
		return e.meta.Exclude
	}
	return nil
}

// TakeTarball takes in an archive as a child of the first snapshot and returns
// that snapshot; one that was taken in before is not taken again.
func (e *Env) TakeTarball(ctx context.Context, file string) (Snapshot, error) {
	f, digest, err := OpenTarball(file)
	if err != nil {
		return Snapshot{}, err
	}
	defer f.Close()
	for i := range e.meta.Nodes {
		if e.meta.Nodes[i].Digest == digest {
			return e.meta.snapshot(&e.meta.Nodes[i]), nil
		}
	}
	n := node{ID: newID(), Parent: e.meta.Head, Created: time.Now(), Kind: KindSync, Digest: digest, Message: "taken from " + file}
	if err := e.captureTar(ctx, &n, e.meta.store(n.Parent), f, file); err != nil {
		return Snapshot{}, err
	}
	return e.listTaken(n)
}

func (e *Env) listTaken(n node) (Snapshot, error) {
	if err := e.list(n, false); err != nil {
		return Snapshot{}, err
	}
	return e.meta.snapshot(&n), nil
}

// OpenTarball opens an archive at its beginning and returns a digest of its
// content.
func OpenTarball(file string) (*os.File, string, error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", &Error{Kind: ErrNotFound, Msg: "no file " + file}
	}
	if err != nil {
		return nil, "", err
	}
	h := sha256.New()
	_, err = io.Copy(h, f)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("read %s: %w", file, err), f.Close())
	}
	return f, hex.EncodeToString(h.Sum(nil)), nil
}
