package env

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// ApplyOptions say how [Env.Apply] works.
type ApplyOptions struct {
	// To is the directory to write to; empty is the one that was captured.
	To string
	// Check only looks for conflicts.
	Check bool
	// Git brings objects, refs, index and logs of a .git as well, never its
	// hooks, config or info.
	Git bool
}

// applied says what was last applied to a directory, completely.
type applied struct {
	ID ID `json:"id"`
	// Git: also of its .git.
	Git bool `json:"git,omitempty"`
}

// Apply brings what ref changed since it was captured into the directory that
// it was captured from. With a conflict nothing is written. What an earlier
// Apply brought there is no conflict: on the same line of history only what
// changed since then is brought.
func (e *Env) Apply(ctx context.Context, ref string, opts ApplyOptions) (forks.ApplyResult, error) {
	n, err := e.meta.resolve(ref)
	if err != nil {
		return forks.ApplyResult{}, err
	}
	base := e.meta.takenFrom(n.ID)
	if e.meta.InPlace && opts.To == "" {
		return forks.ApplyResult{}, e.applyInPlace()
	}
	if base == nil {
		if opts.To == "" {
			return forks.ApplyResult{}, notTaken(n.ID)
		}
		base = e.meta.first(n.ID)
	}
	to := opts.To
	if to == "" {
		to = base.Source
	}
	if to, err = realDir(to); err != nil {
		return forks.ApplyResult{}, err
	}
	o := forks.ApplyOptions{Check: opts.Check, Skip: skipGit(opts.Git)}
	var res forks.ApplyResult
	from := base
	if last := e.lastApplied(base, n, opts); last != nil {
		from = last
	}
	res, err = e.driver.Apply(ctx, from.store(), n.store(), to, o)
	if from != base && (err == nil && len(res.Conflicts) > 0 || isDamaged(err)) {
		// What was applied may have been taken back there.
		if again, aerr := e.driver.Apply(ctx, base.store(), n.store(), to, o); aerr == nil && (err != nil || len(again.Conflicts) == 0) {
			res, err = again, nil
		}
	}
	if err == nil && len(res.Applied) > 0 && len(res.Conflicts) == 0 && !opts.Check {
		e.warnApplied(ctx, base.ID, n.ID, to, res.Applied)
	}
	if err == nil && len(res.Conflicts) == 0 && opts.To == "" && !opts.Check {
		e.noteApplied(ctx, base.Source, applied{n.ID, opts.Git})
	}
	return res, err
}

// warnApplied is [Env.warnPrivileged] for the paths that were applied to a
// directory.
func (e *Env) warnApplied(ctx context.Context, from, id ID, to string, paths []string) {
	c, err := e.Diff(ctx, from, id)
	if err != nil {
		e.opts.notify("what was applied could not be looked at for setuid programs: %v", err)
		return
	}
	applied := make(map[string]bool, len(paths))
	for _, p := range paths {
		applied[p] = true
	}
	e.warnPrivileged(to, slices.DeleteFunc(c.List, func(ch forks.Change) bool { return !applied[ch.Path] }))
}

// lastApplied returns what was last applied to the directory that base was
// captured from, if n can be applied after it; otherwise nil.
func (e *Env) lastApplied(base, n *node, opts ApplyOptions) *node {
	was, ok := e.meta.Applied[base.Source]
	last := e.meta.find(was.ID)
	if !ok || last == nil || last == n || opts.To != "" || opts.Git && !was.Git {
		return nil
	}
	if e.meta.takenFrom(last.ID) != base || !e.meta.buildsUpon(n, last) && !e.meta.buildsUpon(last, n) {
		return nil
	}
	return last
}

// noteApplied remembers what was applied to dir. What was written there stands
// whether it can be remembered or not.
func (e *Env) noteApplied(ctx context.Context, dir string, a applied) {
	if e.meta.Applied[dir] == a {
		return
	}
	err := e.underLock(ctx, "apply", func(l *Env) error {
		m := l.meta.clone()
		if m.Applied == nil {
			m.Applied = map[string]applied{}
		}
		m.Applied[dir] = a
		return l.save(m)
	})
	if err != nil {
		e.opts.notify("what was applied could not be noted, so that the next apply may find conflicts with it: %v", err)
	}
}

// underLock calls fn with the environment open for changing: e itself, if it
// is.
func (e *Env) underLock(ctx context.Context, op string, fn func(l *Env) error) error {
	if e.lock != nil {
		return fn(e)
	}
	l, err := Lock(ctx, e.root, op, e.opts)
	if err != nil {
		return err
	}
	return errors.Join(fn(l), l.Close())
}

// CheckApply says whether what builds upon the snapshot id can be applied to
// the directory that it was captured from.
func (e *Env) CheckApply(id ID) error {
	if e.meta.InPlace {
		return e.applyInPlace()
	}
	if e.meta.takenFrom(id) == nil {
		return notTaken(id)
	}
	return nil
}

func (e *Env) applyInPlace() error {
	return &Error{Kind: ErrUsage, Msg: e.meta.Source + " is itself the work tree: there is nothing to apply", Hint: "`agentenv checkout REF` makes it what REF is"}
}

func notTaken(id ID) error {
	return &Error{Kind: ErrUsage, Msg: fmt.Sprintf("no snapshot that %s builds upon was taken from a directory", id), Hint: "say where to apply it with `agentenv apply --to DIR`"}
}

// broughtGit is what --git brings of a .git: all that makes git run commands,
// or look elsewhere for its settings, is not in it.
var broughtGit = []string{"objects", "refs", "packed-refs", "HEAD", "index", "logs"}

// skipGit says which paths stay as they are: all of every .git, or all but
// what broughtGit has.
func skipGit(bring bool) func(string) bool {
	return func(path string) bool {
		rest, ok := inGit(path)
		if !ok {
			return false
		}
		top, below, _ := strings.Cut(rest, "/")
		info := top == "objects" && (below == "info" || strings.HasPrefix(below, "info/"))
		return !bring || info || !slices.Contains(broughtGit, top)
	}
}

// inGit returns what follows the first .git element of a path, and whether
// there is one.
func inGit(path string) (rest string, ok bool) {
	_, rest, ok = strings.Cut("/"+path+"/", "/.git/")
	return strings.TrimSuffix(rest, "/"), ok
}
