package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentenv/agentenv/env"
)

func (a *App) initCommand() *cobra.Command {
	var in env.InitOptions
	var kind, tarball, adopt string
	c := &cobra.Command{
		Use:   "init (--from DIR | --tarball FILE|- | --in-place [DIR] | --adopt ROOT)",
		Short: "Make an environment from a directory or an archive; print the first snapshot's id",
		Long: `Make an environment whose first snapshot is a directory or an archive.

A tree with an executable bin/sh is a rootfs: commands run with it as /. Any
other is a workspace: commands see it at the path it was taken from, over the
host's system, read-only. DIR is never modified. Other file systems below it
are left out, unless --cross-filesystems is given.

With --in-place, DIR (by default the present directory) is itself the work tree:
editors, agents and you see the same files. Snapshots and forks lie in the root.
checkout and promotion change DIR file by file; what is excluded, and what is on
other file systems, is left alone.

What is excluded is in no snapshot and so in no fork: candidates and tests do not
see it. Exclude what they can do without, such as logs, not node_modules.

With --adopt ROOT, run in a directory that was moved, the environment at ROOT,
which was taken from it or has it for its work tree, is made one of it again.`,
		Example: "  agentenv init --from .\n  agentenv init --in-place --exclude '*.log'\n  debootstrap --variant=minbase bookworm sys && agentenv init --from sys\n  agentenv init --tarball rootfs.tar.zst",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("adopt") {
				return a.adopt(c, adopt, args)
			}
			in.Kind = env.Kind(kind)
			if err := placeOf(&in, tarball, args); err != nil {
				return err
			}
			return a.initEnv(in, tarball)
		},
	}
	f := c.Flags()
	f.StringVar(&in.From, "from", "", "take the directory `DIR`; it may be /")
	f.StringVar(&tarball, "tarball", "", "take a tar, plain or compressed with gzip, zstd or xz, from `FILE`; - is stdin")
	f.BoolVar(&in.InPlace, "in-place", false, "DIR becomes a workspace whose work tree it is")
	f.StringArrayVar(&in.Exclude, "exclude", nil, "leave out what matches the glob `PATTERN`; without a slash it matches at any depth. Forks do not have it")
	f.StringVar(&kind, "kind", "", "rootfs or workspace (default: what the tree looks like)")
	f.StringVar(&in.MountAt, "mount-at", "", "where a workspace's tree is seen by commands (default: where it was taken from)")
	f.BoolVar(&in.CrossFilesystem, "cross-filesystems", false, "take in what other file systems hold below DIR")
	f.StringVar(&adopt, "adopt", "", "the present directory was moved: it is what the environment at `ROOT` was taken from")
	return c
}

// adopt makes an environment one of the present directory, which was moved.
func (a *App) adopt(c *cobra.Command, root string, args []string) error {
	alone := len(args) == 0 && a.root == ""
	c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) { alone = alone && (!f.Changed || f.Name == "adopt") })
	if !alone || root == "" {
		return usage("--adopt goes alone, with a root", "run `agentenv init --adopt ROOT` in the directory that was moved")
	}
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	dir, err := workDir()
	if err != nil {
		return err
	}
	to, err := env.Adopt(c.Context(), root, dir, a.Getenv, a.envOptions())
	if err != nil {
		return explain(root, err)
	}
	a.say("the environment at %s is of %s now", to, dir)
	if to != env.RootOf(dir, a.Getenv) {
		a.say("it is not found from there: name it with --root or AGENTENV_ROOT")
	}
	a.root = to
	return a.read(c.Context(), func(e *env.Env) error {
		id := e.Head().ID
		return a.output(map[string]env.ID{"id": id}, func() { a.print("%s", id) })
	})
}

// placeOf takes the argument of --in-place.
func placeOf(in *env.InitOptions, tarball string, args []string) error {
	if !in.InPlace {
		if len(args) > 0 {
			return usage(fmt.Sprintf("%q stands where no argument is due", args[0]), "say --from DIR, --tarball FILE or --in-place [DIR]")
		}
		return nil
	}
	if in.From != "" || tarball != "" {
		return usage("--in-place together with --from or --tarball", "--in-place takes its directory as an argument: agentenv init --in-place DIR")
	}
	in.From = "."
	if len(args) > 0 {
		in.From = args[0]
	}
	return nil
}

func (a *App) initEnv(in env.InitOptions, tarball string) error {
	if (in.From == "") == (tarball == "") {
		return usage("say what to take", "either --from DIR or --tarball FILE, or --in-place [DIR]")
	}
	if in.Kind != "" && in.Kind != env.Rootfs && in.Kind != env.Workspace {
		return usage(fmt.Sprintf("--kind %q", in.Kind), "it is rootfs or workspace")
	}
	root, err := a.initRoot(in)
	if err != nil {
		return err
	}
	if err := a.initInside(root, &in, tarball); err != nil {
		return err
	}
	ctx, _, stop := interruptible(context.Background())
	defer stop()
	if tarball != "" {
		r, name, err := a.openTarball(tarball)
		if err != nil {
			return err
		}
		defer r.Close()
		in.Tarball, in.TarballName = r, name
	}
	e, err := env.Init(ctx, root, in, a.envOptions())
	if err != nil {
		return explain(root, cause(ctx, err))
	}
	defer e.Close()
	s := e.Head()
	a.sayBackend(e)
	a.say("%s environment at %s, %s", e.Kind(), root, count(s.Stats.Added, "path"))
	if e.InPlace() {
		a.say("%s is its work tree", e.WorkTree())
	}
	a.sayIDs(e)
	doc := map[string]env.ID{"id": s.ID}
	return a.output(doc, func() { a.print("%s", s.ID) })
}

// initRoot is where init makes an environment.
func (a *App) initRoot(in env.InitOptions) (string, error) {
	root, named, err := env.NamedRoot(a.root, a.Getenv)
	if named || err != nil {
		return root, err
	}
	if in.From == "" {
		return env.DefaultRoot(a.Getenv)
	}
	if in.InPlace {
		dir, err := filepath.EvalSymlinks(in.From)
		if err == nil {
			dir, err = filepath.Abs(dir)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return "", &env.Error{Kind: env.ErrNotFound, Msg: "no directory " + in.From}
		}
		if err != nil {
			return "", err
		}
		return env.RootFor(dir, env.Workspace, a.Getenv)
	}
	dir, err := env.CheckDir(in.From)
	if err != nil {
		return "", err
	}
	return env.RootFor(dir, in.Kind, a.Getenv)
}

func (a *App) openTarball(name string) (io.ReadCloser, string, error) {
	if name == "-" {
		return io.NopCloser(a.Stdin), "stdin", nil
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		return nil, "", err
	}
	f, err := os.Open(abs)
	if os.IsNotExist(err) {
		return nil, "", &env.Error{Kind: env.ErrNotFound, Msg: "no file " + name}
	}
	return f, abs, err
}

// cause replaces the error of an operation that was cancelled by the reason.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil && err != nil {
		return context.Cause(ctx)
	}
	return err
}
