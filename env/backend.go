package env

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// ProbeBackends tries every driver there is in the directory dir, which
// exists, in the order in which they are chosen, and leaves nothing there. It
// may be the root of an environment.
func ProbeBackends(ctx context.Context, dir string, backends []forks.Backend) []forks.Probe {
	probes := make([]forks.Probe, len(backends))
	for i, b := range backends {
		probes[i] = probe(ctx, dir, b)
	}
	return probes
}

// probe tries one driver.
func probe(ctx context.Context, dir string, b forks.Backend) (p forks.Probe) {
	if !Exists(dir) {
		return b.Probe(ctx, dir)
	}
	trial(dir, func(at string) { p = rename(b.Probe(ctx, at), at, dir) })
	return p
}

// rename makes p speak of dir instead of the directory at where it was tried,
// which means nothing to the user.
func rename(p forks.Probe, at, dir string) forks.Probe {
	p.Detail, p.Fix = strings.ReplaceAll(p.Detail, at, dir), strings.ReplaceAll(p.Fix, at, dir)
	return p
}

// trialMark begins the name of a scratch directory in which drivers are tried.
// Whoever tries them holds a flock on it.
const trialMark = "trial-"

// trialTries is how often a directory for trials is made: another process's
// sweep may take one before it is locked.
const trialTries = 10

// trial calls fn with a directory for trials in root, which is taken away again.
// Where none can be made, root itself shows why not.
func trial(root string, fn func(dir string)) {
	parent := filepath.Join(root, scratchName)
	_ = os.Mkdir(parent, 0o700)
	for range trialTries {
		dir, err := os.MkdirTemp(parent, trialMark)
		if err != nil {
			break
		}
		if lock := flockDir(dir); lock != nil {
			defer lock.Close()                                // after the removal, or a sweep would meet it
			defer func() { _ = sandbox.RemoveScratch(dir) }() // sweepScratch tries again
			fn(dir)
			return
		}
	}
	fn(root)
}

// flockDir opens a directory and locks it; it returns nil if it is locked, or
// gone. Who removes it holds the lock until it is gone.
func flockDir(dir string) *os.File {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	var st unix.Stat_t
	if unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil || unix.Fstat(int(d.Fd()), &st) != nil || st.Nlink == 0 {
		_ = d.Close() // only read
		return nil
	}
	return d
}

// Probes tries every driver there is on this environment's file system.
func (e *Env) Probes(ctx context.Context) []forks.Probe {
	return ProbeBackends(ctx, e.root, e.opts.Backends)
}

// chooseBackend finds the driver of a new environment, and says so if a better
// one would work had the user done something for it.
func (e *Env) chooseBackend(ctx context.Context) (forks.Backend, error) {
	name, err := e.opts.backend()
	if err != nil {
		return forks.Backend{}, err
	}
	var backend forks.Backend
	var probes []forks.Probe
	trial(e.root, func(dir string) {
		backend, probes, err = forks.Choose(ctx, e.opts.Backends, name, dir)
		for i := range probes {
			probes[i] = rename(probes[i], dir, e.root)
		}
	})
	if err != nil && len(probes) > 0 {
		err = noBackend(e.root, probes)
	}
	e.probes = probes
	return backend, err
}

// noBackend says why none of those that were tried works.
func noBackend(root string, probes []forks.Probe) error {
	err := &Error{Kind: forks.ErrUnsupported, Msg: "no backend works at " + root}
	if len(probes) == 1 {
		err.Msg = fmt.Sprintf("the %s backend does not work at %s", probes[0].Name, root)
	}
	sep := ": "
	for _, p := range probes {
		err.Msg += sep + p.Detail
		sep = "; "
		if err.Hint == "" {
			err.Hint = p.Fix
		}
	}
	if err.Hint == "" {
		err.Hint = "choose another root with --root, or another --backend"
	}
	return err
}

// Backend is the name of this environment's driver.
func (e *Env) Backend() string { return e.meta.Backend }

// Features says what this environment's driver can do.
func (e *Env) Features() forks.Features { return e.driver.Features() }

// Refused are the drivers that are better than the one that [Init] chose and
// do not work here.
func (e *Env) Refused() []forks.Probe {
	return slices.DeleteFunc(slices.Clone(e.probes), func(p forks.Probe) bool { return p.OK })
}

// explainTree replaces err, which says that a tree could not be opened or
// mounted, by why this environment's driver does not work here, if that is so.
func (e *Env) explainTree(ctx context.Context, err error) error {
	var s *sandbox.Error
	if err == nil || errors.As(err, &s) && s.What != "tree" {
		return err
	}
	return explainBackend(ctx, e.opts.Backends, e.meta.Backend, e.root, err)
}

// saysItAll says whether err is one that any backend would have had: the file
// system is full or read-only, or no more files can be opened.
func saysItAll(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EMFILE, unix.ENFILE},
		func(errno error) bool { return errors.Is(err, errno) })
}

func explainBackend(ctx context.Context, backends []forks.Backend, name, root string, err error) error {
	i := slices.IndexFunc(backends, func(b forks.Backend) bool { return b.Name == name })
	if i < 0 || ctx.Err() != nil || saysItAll(err) {
		return err
	}
	p := probe(ctx, root, backends[i])
	if p.OK {
		return err
	}
	return &Error{
		Kind:  forks.ErrUnsupported,
		Msg:   fmt.Sprintf("the environment at %s was made with --backend %s, which does not work here now (%s)", root, name, p.Detail),
		Cause: err, Hint: p.Fix,
	}
}
