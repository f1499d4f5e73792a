package main

import (
	"context"
	"encoding/base64"
	"os"
	"slices"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
)

func (a *App) applyCommand() *cobra.Command {
	var opts env.ApplyOptions
	c := &cobra.Command{
		Use:   "apply [REF]",
		Short: "Bring what a snapshot (HEAD) changed into the directory it was taken from",
		Long: `Bring what REF changed since it was taken into the directory it was taken from.
Where that changed too, nothing is written, the conflicts are listed, and the
exit status is 1. .git is left alone; --git brings new objects and refs, never
hooks, config or info; the index and the logs come with them. Submodules' own
repositories (.git/modules) are left alone.`,
		Example: "  agentenv apply --check && agentenv apply",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ref := append(args, "HEAD")[0]
			if st, err := os.Stat(opts.To); err == nil && !st.IsDir() {
				return usage("--to "+opts.To+" is not a directory", "name the directory to apply to")
			}
			return a.read(c.Context(), func(e *env.Env) error { return a.apply(c.Context(), e, ref, opts) })
		},
	}
	c.Flags().StringVar(&opts.To, "to", "", "apply to `DIR` instead")
	c.Flags().BoolVar(&opts.Check, "check", false, "only look for conflicts")
	c.Flags().BoolVar(&opts.Git, "git", false, "bring git objects, refs, index and logs as well")
	return c
}

// applyDoc is the answer of apply in the form of CONTRACT §5.
type applyDoc struct {
	Applied   []string `json:"applied"`
	Conflicts []string `json:"conflicts"`
	// The same in base64, where a name is not valid UTF-8.
	AppliedB64   []string `json:"applied_b64,omitempty"`
	ConflictsB64 []string `json:"conflicts_b64,omitempty"`
}

// inBase64 encodes the names if one of them is not valid UTF-8.
func inBase64(names []string) []string {
	if !slices.ContainsFunc(names, func(s string) bool { return !utf8.ValidString(s) }) {
		return nil
	}
	var out []string
	for _, n := range names {
		out = append(out, base64.StdEncoding.EncodeToString([]byte(n)))
	}
	return out
}

func (a *App) apply(ctx context.Context, e *env.Env, ref string, opts env.ApplyOptions) error {
	doc, err := a.applyTo(ctx, e, ref, opts)
	if err != nil {
		return err
	}
	if err := a.output(doc, func() { a.printApply(doc, opts.Check) }); err != nil {
		return err
	}
	if len(doc.Conflicts) > 0 {
		return exitStatus(exitNo)
	}
	return nil
}

func (a *App) applyTo(ctx context.Context, e *env.Env, ref string, opts env.ApplyOptions) (applyDoc, error) {
	res, err := e.Apply(ctx, ref, opts)
	if err != nil {
		return applyDoc{}, err
	}
	for _, w := range res.Warnings {
		a.say("%s", w)
	}
	return applyDoc{
		Applied: append([]string{}, res.Applied...), Conflicts: append([]string{}, res.Conflicts...),
		AppliedB64: inBase64(res.Applied), ConflictsB64: inBase64(res.Conflicts),
	}, nil
}

func (a *App) printApply(doc applyDoc, check bool) {
	for _, p := range doc.Conflicts {
		a.print("conflict %s", quote(p))
	}
	if len(doc.Conflicts) > 0 {
		a.say("%s changed there as well, so nothing was written: undo or move those changes, or apply elsewhere with --to DIR", count(len(doc.Conflicts), "path"))
		return
	}
	verb := "applied"
	if check {
		verb = "would apply"
	}
	for _, p := range doc.Applied {
		a.print("%s %s", verb, quote(p))
	}
	if len(doc.Applied) == 0 {
		a.say("nothing to apply")
	}
}
