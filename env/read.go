package env

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// A reader holds no lock, so another process may be changing the work tree while
// it looks. It looks again until it saw one state, for this long: a commit or
// checkout takes less.
const (
	readerWait  = 5 * time.Second
	readerRetry = 10 * time.Millisecond
)

// Stale says whether the history was replaced since e read it.
func (e *Env) Stale() bool {
	st, err := os.Stat(filepath.Join(e.root, metaName))
	was := e.meta.file
	return err != nil || was != nil && (!os.SameFile(st, was) || !st.ModTime().Equal(was.ModTime()))
}

// reload reads the state anew, for a reader.
func (e *Env) reload(ctx context.Context) error {
	m, err := readMeta(e.root)
	if err != nil {
		return err
	}
	pending, _, err := readPending(e.root)
	if err != nil {
		return err
	}
	e.meta, e.interrupted = m, nil
	e.preview(ctx, pending)
	return nil
}

// steady calls look, which reads the work tree, until nobody changed history or
// tree meanwhile.
func (e *Env) steady(ctx context.Context, look func() (forks.Changes, error)) (forks.Changes, error) {
	for end := time.Now().Add(readerWait); ; {
		c, err := look()
		if e.lock != nil || e.interrupted != nil || errors.Is(err, ErrDamaged) || e.atRest() {
			return c, err
		}
		if time.Now().After(end) {
			return forks.Changes{}, &Error{Kind: ErrBusy, Msg: "the work tree of " + e.root + " is being changed all the time", Hint: "try again"}
		}
		select {
		case <-ctx.Done():
			return c, context.Cause(ctx)
		case <-time.After(readerRetry):
		}
		if err := e.reload(ctx); err != nil {
			return c, err
		}
	}
}

// atRest says whether the work tree belongs to the history that was read, and
// that is still the newest.
func (e *Env) atRest() bool {
	tree, err := e.workTree()
	if err != nil {
		return isNotFound(err) && !e.Stale()
	}
	return !misaligned(e.meta, tree) && !e.Stale()
}
