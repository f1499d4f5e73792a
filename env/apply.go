package env

import (
	"context"
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

// Apply brings what ref changed since it was captured into the directory that
// it was captured from. With a conflict nothing is written.
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
	return e.driver.Apply(ctx, base.store(), n.store(), to, forks.ApplyOptions{Check: opts.Check, Skip: skipGit(opts.Git)})
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
