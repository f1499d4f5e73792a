package env

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/env/subid"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/archive"
)

// InitOptions say what a new environment is made from and how. Exactly one of
// From and Tarball is set.
type InitOptions struct {
	// From is the directory to take.
	From string
	// InPlace makes From itself the work tree.
	InPlace bool
	// Tarball is the archive to take, TarballName what messages call it.
	Tarball     io.Reader
	TarballName string
	// Digest, if known, names the archive's content, so that [Env.TakeTarball]
	// knows it again.
	Digest string
	// Kind forces the kind; empty detects it.
	Kind Kind
	// MountAt is where a workspace's tree is seen; empty is where From is.
	MountAt         string
	Exclude         []string
	CrossFilesystem bool
	// NoWorkTree leaves the work tree to be made when it is needed.
	NoWorkTree bool
	// IDs, for a system, is the map of the user namespace that this process is
	// in, if it is one of package subid: the environment is of that from then on.
	IDs *subid.Map
}

// Init makes an environment at root, takes its first snapshot and returns it
// open and locked. A root left half made by a crash is made anew. On failure
// nothing is left.
func Init(ctx context.Context, root string, in InitOptions, opts Options) (_ *Env, err error) {
	if Exists(root) {
		return nil, &Error{Kind: ErrExists, Msg: "there is an environment at " + root + " already", Hint: "use another --root, or remove it with `agentenv --root " + root + " delete --all`"}
	}
	switch {
	case in.InPlace:
		if in.From, err = checkInPlace(root, in); err != nil {
			return nil, err
		}
		in.Kind = Workspace
	case in.From != "":
		if in.From, err = CheckDir(in.From); err != nil {
			return nil, err
		}
		if err := checkOutside(root, in.From); err != nil {
			return nil, err
		}
	}
	made, err := makeRoot(root)
	if err != nil {
		return nil, err
	}
	e := &Env{root: root, opts: opts}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.unmake(made))
		}
	}()
	if e.lock, err = acquire(ctx, root, "init", opts.Notify); err != nil {
		return nil, err
	}
	if Exists(root) { // another init was faster
		return nil, &Error{Kind: ErrExists, Msg: "there is an environment at " + root + " already"}
	}
	return e, e.fill(ctx, in)
}

// fill takes the first snapshot of a root that holds nothing yet.
func (e *Env) fill(ctx context.Context, in InitOptions) error {
	err := e.clearLeftovers(ctx)
	if errors.Is(err, fs.ErrPermission) && in.IDs == nil {
		return &Error{Kind: forks.ErrUnsupported, Msg: "what an init that was killed left cannot be removed", Cause: err, Hint: "agentenv --root " + e.root + " delete --all"}
	}
	if err != nil {
		return err
	}
	backend, err := e.chooseBackend(ctx)
	if err != nil {
		return err
	}
	if e.driver, err = backend.Open(ctx, e.root); err != nil {
		return err
	}
	if e.journal, err = openJournal(e.root, 0, true); err != nil {
		return err
	}
	e.meta = &meta{Version: metaPlain, Backend: backend.Name, Source: in.From, Exclude: in.Exclude, Tags: map[string]ID{}}
	if in.InPlace {
		e.meta.InPlace, e.meta.Version = true, metaInPlace
	}
	if in.IDs != nil {
		e.meta.IDs, e.meta.Version = in.IDs, metaIDs
	}
	n := node{ID: newID(), Created: time.Now(), Kind: KindInit, Source: in.From}
	if in.From != "" {
		n.Message = "taken from " + in.From
		var src forks.Source
		if src, err = e.firstSource(in); err == nil {
			_, err = e.captureInto(ctx, &n, "", src)
		}
	} else {
		n.Message, n.Digest = "taken from "+in.TarballName, in.Digest
		err = e.captureTar(ctx, &n, "", in.Tarball, in.TarballName)
	}
	if err != nil {
		return err
	}
	if err := e.decideKind(ctx, n.ID, in); err != nil {
		return err
	}
	e.meta.Head = n.ID
	if !in.NoWorkTree {
		if _, err := e.makeWork(ctx, n.ID); err != nil {
			return err
		}
	}
	e.meta.Nodes = []node{n}
	if err := e.save(e.meta); err != nil {
		return err
	}
	makeReserve(e.root)
	if in.NoWorkTree {
		return nil
	}
	if _, err := e.standWork(ctx); err != nil {
		// All is made; what cannot be mounted now the next command mounts.
		e.opts.notify("the work tree is not mounted yet: %v", err)
	}
	return nil
}

// firstSource is the directory of a first snapshot. In place, it becomes the
// work tree.
func (e *Env) firstSource(in InitOptions) (forks.Source, error) {
	if !in.InPlace {
		return forks.Source{Dir: in.From, Exclude: in.Exclude, CrossFilesystems: in.CrossFilesystem, Owners: e.opts.Owners}, nil
	}
	p := newInPlace(e.driver, e.root, e.meta, e.opts)
	e.driver = p
	return p.source, os.MkdirAll(p.dir, 0o700)
}

// captureInto stores src as snapshot n.ID and says whether anything differs
// from base.
func (e *Env) captureInto(ctx context.Context, n *node, base ID, src forks.Source) (bool, error) {
	src.Skip = append(src.Skip, e.root)
	src.Progress = e.opts.Progress
	c, err := e.driver.Capture(ctx, n.ID, base, src)
	if err != nil {
		return false, err
	}
	e.warn(c.Warnings)
	e.warnStrangers(src.Owners)
	n.Stats, n.Bytes = statsOf(c), c.Bytes
	return len(c.List) > 0, nil
}

// captureTar stores an archive's content as snapshot n.ID.
func (e *Env) captureTar(ctx context.Context, n *node, base ID, r io.Reader, name string) error {
	dir, err := e.scratch()
	if err != nil {
		return err
	}
	defer sandbox.RemoveScratch(dir)
	res, err := archive.Extract(ctx, r, dir, archive.Options{Progress: e.opts.Progress})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if res.Files == 0 {
		return &Error{Kind: ErrUsage, Msg: name + " holds no files: there is nothing to take"}
	}
	e.warn(res.Warnings)
	_, err = e.captureInto(ctx, n, base, forks.Source{Dir: dir, Owners: res.Owners})
	return err
}

// decideKind sets the kind of the environment and where its tree is seen.
func (e *Env) decideKind(ctx context.Context, id ID, in InitOptions) error {
	isRootfs, err := e.looksLikeSystem(ctx, id)
	if err != nil {
		return err
	}
	e.meta.Kind = in.Kind
	if e.meta.Kind == "" {
		e.meta.Kind = Workspace
		if isRootfs {
			e.meta.Kind = Rootfs
		}
	}
	if e.meta.Kind == Rootfs {
		if !isRootfs {
			return &Error{Kind: ErrUsage, Msg: "--kind rootfs: the tree has no executable bin/sh or usr/bin/sh, so no command could run in it"}
		}
		if in.MountAt != "" {
			return &Error{Kind: ErrUsage, Msg: "--mount-at is for workspaces: a rootfs is seen as /", Hint: "leave it out, or say --kind workspace"}
		}
		return nil
	}
	if in.IDs != nil {
		return &Error{Kind: ErrUsage, Msg: "the tree looks like a system, but bin/sh cannot be executed", Hint: "say --kind workspace if it is none"}
	}
	e.meta.MountAt = in.MountAt
	if e.meta.MountAt == "" {
		e.meta.MountAt = in.From
	}
	if e.meta.MountAt == "" {
		e.meta.MountAt = "/workspace"
	}
	e.meta.MountAt = filepath.Clean(e.meta.MountAt)
	return CheckMountAt(e.meta.MountAt)
}

// CheckMountAt says whether a workspace's tree can be seen at path.
func CheckMountAt(path string) error {
	bad := []string{"/", "/proc", "/dev", "/sys", "/run", "/tmp"}
	if !filepath.IsAbs(path) || slices.Contains(bad, path) || strings.HasPrefix(path, "/proc/") || strings.HasPrefix(path, "/dev/") || strings.HasPrefix(path, "/sys/") {
		return &Error{Kind: ErrUsage, Msg: fmt.Sprintf("a workspace cannot be seen at %q", path), Hint: "choose a directory of its own, absolute, with --mount-at"}
	}
	return nil
}

// looksLikeSystem says whether the tree has an executable bin/sh or
// usr/bin/sh, through the symlinks that distributions put there.
func (e *Env) looksLikeSystem(ctx context.Context, id ID) (bool, error) {
	v, err := e.driver.View(ctx, id)
	if err != nil {
		return false, err
	}
	defer v.Close()
	for _, p := range []string{"bin/sh", "usr/bin/sh"} {
		ent, err := lookupThrough(v, p)
		if isNotFound(err) {
			continue
		}
		if err != nil {
			return false, err
		}
		if isRegular(ent) && ent.Mode&0o111 != 0 {
			return true, nil
		}
	}
	return false, nil
}

// lookupThrough finds path in a tree of its own, following symlinks inside it.
func lookupThrough(v forks.View, path string) (forks.Entry, error) {
	const maxLinks = 40 // as the kernel's own limit
	done, rest := ".", strings.Split(path, "/")
	for links := 0; ; {
		if len(rest) == 0 {
			return v.Lookup(done)
		}
		next := filepath.Join(done, rest[0])
		if next == ".." || strings.HasPrefix(next, "../") {
			next = "."
		}
		ent, err := v.Lookup(next)
		if err != nil {
			return ent, err
		}
		rest = rest[1:]
		if !isSymlink(ent) {
			done = next
			continue
		}
		if links++; links > maxLinks {
			return ent, fmt.Errorf("%w: %s: too many symlinks", forks.ErrNotFound, path)
		}
		if strings.HasPrefix(ent.Target, "/") {
			done = "."
		}
		rest = append(slices.DeleteFunc(strings.Split(ent.Target, "/"), func(s string) bool { return s == "" || s == "." }), rest...)
	}
}

// CheckDir returns the absolute path, without symlinks, of a directory that
// can be taken, or says why it cannot.
func CheckDir(dir string) (string, error) {
	abs, err := realDir(dir)
	if err != nil {
		return "", err
	}
	d, err := os.Open(abs)
	if err != nil {
		return "", err
	}
	defer d.Close()
	if _, err := d.Readdirnames(1); errors.Is(err, io.EOF) {
		return "", &Error{Kind: ErrUsage, Msg: dir + " is empty: there is nothing to take"}
	} else if err != nil {
		return "", err
	}
	return abs, nil
}

// realDir returns the absolute path, without symlinks, of a directory.
func realDir(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return "", &Error{Kind: ErrNotFound, Msg: "no directory " + dir}
	}
	if err != nil {
		return "", err
	}
	st, err := os.Stat(abs)
	if err != nil {
		return "", err
	}
	if !st.IsDir() {
		return "", &Error{Kind: ErrUsage, Msg: dir + " is not a directory", Hint: "for an archive use --tarball"}
	}
	return abs, nil
}

// checkOutside refuses a root that would be part of the tree it keeps. A whole
// system is the exception: it has no outside, and its root is left out.
func checkOutside(root, dir string) error {
	if dir == "/" {
		return nil
	}
	real := root
	for p := root; ; p = filepath.Dir(p) {
		if r, err := filepath.EvalSymlinks(p); err == nil {
			real = filepath.Join(r, strings.TrimPrefix(root, p))
			break
		}
		if p == filepath.Dir(p) {
			break
		}
	}
	if real == dir || strings.HasPrefix(real, dir+"/") {
		return &Error{Kind: ErrUsage, Msg: fmt.Sprintf("the root %s is inside %s, the tree that would be taken", root, dir), Hint: "choose a root outside it with --root"}
	}
	return nil
}

// The types of st_mode, as every Unix has them.
const (
	modeType    = 0o170000
	modeRegular = 0o100000
	modeDir     = 0o040000
	modeSymlink = 0o120000
)

func isRegular(e forks.Entry) bool { return e.Mode&modeType == modeRegular }
func isSymlink(e forks.Entry) bool { return e.Mode&modeType == modeSymlink }

func isDirectory(e forks.Entry) bool { return e.Mode&modeType == modeDir }
