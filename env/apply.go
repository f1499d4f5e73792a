package env

import (
	"context"
	"fmt"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// ApplyOptions say how [Env.Apply] works.
type ApplyOptions struct {
	// To is the directory to write to; empty is the one that was captured.
	To string
	// Check only looks for conflicts.
	Check bool
	// Git brings new objects and refs of a .git as well, never its hooks,
	// config or info.
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
	if base == nil {
		if opts.To == "" {
			return forks.ApplyResult{}, &Error{Kind: ErrUsage, Msg: fmt.Sprintf("%s was not taken from a directory", n.ID), Hint: "say where to apply it with --to DIR"}
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

// skipGit says which paths stay as they are: all of every .git, or of it only
// what makes git run commands or changes what it does.
func skipGit(bring bool) func(string) bool {
	return func(path string) bool {
		_, rest, inGit := cutGit(path)
		if !inGit {
			return false
		}
		if !bring {
			return true
		}
		top, _, _ := strings.Cut(rest, "/")
		return top == "hooks" || top == "info" || strings.HasPrefix(top, "config") || top == "modules" && gitModuleConfig(rest)
	}
}

// cutGit splits a path at its first .git element.
func cutGit(path string) (before, after string, found bool) {
	if path == ".git" {
		return "", "", true
	}
	if rest, ok := strings.CutPrefix(path, ".git/"); ok {
		return "", rest, true
	}
	before, after, found = strings.Cut(path, "/.git/")
	if !found {
		before, found = strings.CutSuffix(path, "/.git")
	}
	return before, after, found
}

// gitModuleConfig says whether a path below .git/modules is a submodule's
// hooks, config or info.
func gitModuleConfig(path string) bool {
	for _, part := range strings.Split(path, "/") {
		if part == "hooks" || part == "info" || strings.HasPrefix(part, "config") {
			return true
		}
	}
	return false
}
