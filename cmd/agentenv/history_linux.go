package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

func (a *App) commitCommand() *cobra.Command {
	var message string
	var empty bool
	c := &cobra.Command{
		Use:     "commit",
		Short:   "Save the work tree as a snapshot; print its id",
		Example: "  agentenv commit -m 'before the upgrade'",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.change(c.Context(), "commit", func(e *env.Env) error {
				s, created, err := e.Commit(c.Context(), message, empty)
				if err != nil {
					return err
				}
				if !created {
					a.say("nothing changed since %s", s.ID)
				}
				doc := map[string]any{"id": s.ID, "created": created}
				return a.output(doc, func() { a.print("%s", s.ID) })
			})
		},
	}
	c.Flags().StringVarP(&message, "message", "m", "", "what the snapshot is, in a line")
	c.Flags().BoolVar(&empty, "allow-empty", false, "make a snapshot though nothing changed")
	return c
}

func (a *App) checkoutCommand() *cobra.Command {
	var discard bool
	c := &cobra.Command{
		Use:   "checkout REF",
		Short: "Bring the whole work tree back to a snapshot; unsaved work is saved first",
		Long: `Make the work tree equal to a snapshot and move HEAD there. Work that no
snapshot holds is saved first, and the id to go back to is named on stderr;
--discard throws it away.`,
		Example: "  agentenv checkout HEAD~2",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			op := "checkout"
			if discard {
				op += " --discard"
			}
			return a.change(c.Context(), op, func(e *env.Env) error {
				res, err := e.Checkout(c.Context(), args[0], discard)
				if res.Saved != nil {
					a.say("unsaved work was saved as %s: `agentenv checkout %s` brings it back", *res.Saved, *res.Saved)
				}
				if err != nil {
					return err
				}
				return a.output(res, func() { a.print("%s", res.ID) })
			})
		},
	}
	c.Flags().BoolVar(&discard, "discard", false, "throw away work that no snapshot holds")
	return c
}

func (a *App) headCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "head",
		Short: "Print HEAD's id",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(e *env.Env) error {
				id := e.Head().ID
				return a.output(map[string]env.ID{"id": id}, func() { a.print("%s", id) })
			})
		},
	}
}

func (a *App) logCommand() *cobra.Command {
	var n int
	c := &cobra.Command{
		Use:   "log [flags] [REF] [-- PATH…]",
		Short: "List snapshots, newest first; with REF, it and its ancestors; with PATH, those that changed it",
		Args:  cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			refs, paths := splitPaths(c, args)
			switch {
			case !c.Flags().Changed("number"):
				n = -1 // all
			case n < 0:
				return usage("-n takes a number that is not negative", "")
			}
			if len(refs) > 1 {
				return usage("log takes one REF", "write paths after --")
			}
			return a.read(c.Context(), func(e *env.Env) error {
				list, err := selectSnapshots(c.Context(), e, refs, paths, n)
				if err != nil {
					return err
				}
				return a.output(map[string]any{"snapshots": list}, func() { a.printSnapshots(list) })
			})
		},
	}
	c.Flags().IntVarP(&n, "number", "n", 0, "at most so many (default: all)")
	return c
}

// splitPaths separates the arguments before -- from those after.
func splitPaths(c *cobra.Command, args []string) (before, after []string) {
	if i := c.ArgsLenAtDash(); i >= 0 {
		return args[:i], args[i:]
	}
	return args, nil
}

func selectSnapshots(ctx context.Context, e *env.Env, refs, paths []string, n int) ([]env.Snapshot, error) {
	list := e.Log()
	if len(refs) > 0 {
		s, err := e.Resolve(refs[0])
		if err != nil {
			return nil, err
		}
		list = e.Ancestors(s.ID)
	}
	out := []env.Snapshot{}
	for _, s := range list {
		if n >= 0 && len(out) == n {
			break
		}
		if len(paths) > 0 {
			c, err := e.Changes(ctx, s.ID)
			if err != nil {
				return nil, err
			}
			if !touches(c, paths) {
				continue
			}
		}
		out = append(out, s)
	}
	return out, nil
}

// touches says whether changes have one of paths, or something below it.
func touches(c forks.Changes, paths []string) bool {
	for _, ch := range c.List {
		for _, p := range paths {
			p = strings.TrimSuffix(strings.TrimPrefix(p, "./"), "/")
			if p == "." || ch.Path == p || strings.HasPrefix(ch.Path, p+"/") {
				return true
			}
		}
	}
	return false
}

// printSnapshots writes a line for each. Where its parent is not on the next
// line, the line names it.
func (a *App) printSnapshots(list []env.Snapshot) {
	for i, s := range list {
		marks := s.Tags
		if s.Head {
			marks = append([]string{"HEAD"}, marks...)
		}
		mark := ""
		if len(marks) > 0 {
			mark = " (" + strings.Join(marks, ", ") + ")"
		}
		if s.Parent != nil && (i+1 == len(list) || list[i+1].ID != *s.Parent) {
			mark += " ← " + string(*s.Parent)[:min(len(*s.Parent), shortID)]
		}
		a.print("%s  %s  %-10s %s  %s%s", s.ID, s.Created.Local().Format(time.DateTime), s.Kind, statsText(s.Stats), quote(s.Message), mark)
	}
}

// shortID is how many characters of an id tell it from others at a glance.
const shortID = 8

func statsText(s env.Stats) string {
	return fmt.Sprintf("+%d ~%d -%d", s.Added, s.Modified, s.Removed)
}

func (a *App) branchesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "branches",
		Short: "List the snapshots that have no child: the ends of the history",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(e *env.Env) error {
				list := e.Branches()
				return a.output(map[string]any{"snapshots": list}, func() { a.printSnapshots(list) })
			})
		},
	}
}

func (a *App) tagCommand() *cobra.Command {
	var remove bool
	c := &cobra.Command{
		Use:     "tag [-d] [NAME [REF]]",
		Short:   "Name a snapshot (HEAD by default), list the tags, or remove one",
		Example: "  agentenv tag good HEAD~1\n  agentenv tag -d good",
		Args:    cobra.MaximumNArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				if remove {
					return usage("tag -d", "say which tag")
				}
				return a.read(c.Context(), a.printTags)
			}
			if remove && len(args) > 1 {
				return usage("tag -d takes one tag", "")
			}
			return a.change(c.Context(), "tag", func(e *env.Env) error {
				err := error(nil)
				if remove {
					err = e.RemoveTag(args[0])
				} else {
					err = e.SetTag(args[0], append(args, "HEAD")[1])
				}
				if err != nil || !a.json {
					return err
				}
				return a.printTags(e)
			})
		},
	}
	c.Flags().BoolVarP(&remove, "delete", "d", false, "remove the tag; the snapshot stays")
	return c
}

func (a *App) printTags(e *env.Env) error {
	tags := e.Tags()
	return a.output(map[string]any{"tags": tags}, func() {
		for _, t := range tags {
			a.print("%s %s", t.Name, t.ID)
		}
	})
}

func (a *App) showCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "show REF[:PATH]",
		Short:   "Print a snapshot and what it changed (with -v, and the owners it keeps), or a file of it",
		Example: "  agentenv show HEAD\n  agentenv show HEAD~1:go.mod",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ref, path, isFile := strings.Cut(args[0], ":")
			return a.read(c.Context(), func(e *env.Env) error {
				s, err := e.Resolve(ref)
				if err != nil {
					return err
				}
				if isFile {
					return a.showFile(c.Context(), e, s.ID, path)
				}
				return a.showSnapshot(c.Context(), e, s)
			})
		},
	}
}

func (a *App) showSnapshot(ctx context.Context, e *env.Env, s env.Snapshot) error {
	c, err := e.Changes(ctx, s.ID)
	if err != nil {
		return err
	}
	doc := struct {
		env.Snapshot
		Changes []change `json:"changes"`
	}{s, changesDoc(c)}
	return a.output(doc, func() {
		a.print("snapshot %s", s.ID)
		if s.Parent != nil {
			a.print("parent   %s", *s.Parent)
		}
		a.print("created  %s", s.Created.Local().Format(time.DateTime))
		a.print("kind     %s", s.Kind)
		if s.Message != "" {
			a.print("message  %s", quote(s.Message))
		}
		for _, ch := range c.List {
			a.print("%s  %s%s", letter(ch.Kind), a.ownerOf(ch), quote(ch.Path))
		}
	})
}

// ownerOf is, with --verbose, the owner of a path as a snapshot keeps it: files
// that an ordinary user cannot give away have another one on the disk.
func (a *App) ownerOf(ch forks.Change) string {
	e := ch.New
	if e == nil {
		e = ch.Old
	}
	if !a.verbose || e == nil {
		return ""
	}
	return fmt.Sprintf("%d:%d  ", e.UID, e.GID)
}

func (a *App) showFile(ctx context.Context, e *env.Env, id env.ID, path string) error {
	v, err := e.View(ctx, id)
	if err != nil {
		return err
	}
	defer v.Close()
	r, err := v.Open(strings.TrimPrefix(path, "./"))
	if errors.Is(err, forks.ErrNotFound) {
		return &env.Error{Kind: env.ErrNotFound, Msg: fmt.Sprintf("no file %s in %s", quote(path), id)}
	}
	if errors.Is(err, forks.ErrUnsupported) {
		return &env.Error{Kind: env.ErrUsage, Msg: fmt.Sprintf("%s is not a regular file in %s", quote(path), id)}
	}
	if err != nil {
		return err
	}
	defer r.Close()
	return a.content(map[string]any{"id": id, "path": path}, r)
}

func (a *App) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Say what the environment is and whether its work tree differs from HEAD",
		Long: `Say what the environment is, where its work tree can be seen and whether it
differs from HEAD. With --verbose every backend is tried on the environment's
file system, to say which would work there and what mends the others.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.read(c.Context(), func(e *env.Env) error {
				s, err := e.Status(c.Context())
				if err != nil {
					return err
				}
				s.Isolation = string(sandbox.Expected())
				doc := statusReport{Status: s}
				if a.verbose {
					doc.Backends = backendChecks(e.Probes(c.Context()))
				}
				return a.output(doc, func() { a.printStatus(doc) })
			})
		},
	}
}

// statusReport is what status prints: more of it with --verbose.
type statusReport struct {
	env.Status
	Backends []check `json:"backends,omitempty"`
}

// seenAt says where the work tree can be seen.
func seenAt(s env.Status) string {
	switch {
	case s.InPlace:
		return "in place: " + s.WorkTree
	case s.WorkTreeSeen == env.SeenInside:
		return "visible inside `agentenv exec` only"
	}
	return s.WorkTreeSeen
}

// printChanged lists changed paths, as many as leave the rest of a status on
// the screen.
func (a *App) printChanged(list []forks.Change) {
	const most = 10
	for _, ch := range list[:min(len(list), most)] {
		a.print("            %s  %s", letter(ch.Kind), quote(ch.Path))
	}
	if len(list) > most {
		a.print("            and %d more", len(list)-most)
	}
}

func (a *App) printStatus(s statusReport) {
	a.print("%s environment at %s", s.Kind, s.Root)
	if s.Source != "" {
		a.print("taken from  %s", s.Source)
	}
	a.print("HEAD        %s", s.Head)
	switch {
	case s.Interrupted != "":
		a.print("work tree   an interrupted %s; the next command that writes puts it back to HEAD", s.Interrupted)
	case !s.WorkTreeMade:
		a.print("work tree   not made yet; the next command that needs it makes it")
	case s.Damaged != "":
		a.print("work tree   %s; it cannot be compared with HEAD: %s", seenAt(s.Status), s.Damaged)
	case s.Dirty:
		a.print("work tree   %s, %s changed since HEAD", seenAt(s.Status), count(s.Changes, "path"))
		a.printChanged(s.Changed)
	default:
		a.print("work tree   %s, equal to HEAD", seenAt(s.Status))
	}
	if s.WorkTreeSeen == env.SeenInside && sandbox.MayMount() && a.inside == "" {
		a.print("            not mounted now; the next exec mounts it at %s", s.WorkTree)
	}
	a.print("seen at     %s", s.MountAt)
	a.print("backend     %s", s.Backend)
	for _, c := range s.Backends {
		a.print("            %s", c)
	}
	a.print("isolation   %s", s.Isolation)
	switch {
	case s.IDs > 0:
		a.print("ids         %d", s.IDs)
	case a.verbose && s.Kind == env.Rootfs && os.Geteuid() != 0:
		a.print("ids         1: programs that change their user or a file's owner, such as apt and postgres, fail")
	}
	a.print("snapshots   %d, %s", s.Snapshots, humanBytes(s.Disk.Bytes))
}
