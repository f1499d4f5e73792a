package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
)

func (a *App) initCommand() *cobra.Command {
	var in env.InitOptions
	var kind, tarball string
	c := &cobra.Command{
		Use:   "init (--from DIR | --tarball FILE|-)",
		Short: "Make an environment from a directory or an archive; print the first snapshot's id",
		Long: `Make an environment whose first snapshot is a directory or an archive.

A tree with an executable bin/sh is a rootfs: commands run with it as /. Any
other is a workspace: commands see it at the path it was taken from, over the
host's system, read-only. DIR is never modified. Other file systems below it
are left out, unless --cross-filesystems is given.`,
		Example: "  agentenv init --from .\n  debootstrap --variant=minbase bookworm sys && agentenv init --from sys\n  agentenv init --tarball rootfs.tar.zst",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			in.Kind = env.Kind(kind)
			return a.initEnv(in, tarball)
		},
	}
	f := c.Flags()
	f.StringVar(&in.From, "from", "", "take the directory `DIR`; it may be /")
	f.StringVar(&tarball, "tarball", "", "take a tar, plain or compressed with gzip, zstd or xz, from `FILE`; - is stdin")
	f.StringArrayVar(&in.Exclude, "exclude", nil, "leave out what matches the glob `PATTERN`; without a slash it matches at any depth")
	f.StringVar(&kind, "kind", "", "rootfs or workspace (default: what the tree looks like)")
	f.StringVar(&in.MountAt, "mount-at", "", "where a workspace's tree is seen by commands (default: where it was taken from)")
	f.BoolVar(&in.CrossFilesystem, "cross-filesystems", false, "take in what other file systems hold below DIR")
	return c
}

func (a *App) initEnv(in env.InitOptions, tarball string) error {
	if (in.From == "") == (tarball == "") {
		return usage("say what to take", "either --from DIR or --tarball FILE")
	}
	if in.Kind != "" && in.Kind != env.Rootfs && in.Kind != env.Workspace {
		return usage(fmt.Sprintf("--kind %q", in.Kind), "it is rootfs or workspace")
	}
	root, err := a.initRoot(in)
	if err != nil {
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
	a.say("%s environment at %s, %s", e.Kind(), root, count(s.Stats.Added, "path"))
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
