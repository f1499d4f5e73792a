package main

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/subid"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/archive"
)

// insideName is this program in the user namespace of an environment that has a
// range of ids: its arguments are the root, the descriptor of a file or nothing,
// and those of the command line, with which it does what it does otherwise.
const insideName = "agentenv-inside"

func init() {
	subid.Register(insideName, func() {
		app := &App{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Env: os.Environ(), Now: time.Now,
			inside: os.Args[1]}
		if fd, err := strconv.Atoi(os.Args[2]); err == nil {
			app.owners, err = readOwners(os.NewFile(uintptr(fd), "owners"))
			if err != nil {
				app.fail(describe(err))
				os.Exit(exitHarness)
			}
		}
		os.Exit(app.Run(os.Args[3:]))
	})
}

// enter does the command in the user namespace that the environment at root is
// of. It returns nil where that is none, or this one; else the command is done,
// and the error is its exit status.
func (a *App) enter(root string) error { return a.enterToTake(root, "") }

// enterToTake is enter for a command that takes the directory dir in.
func (a *App) enterToTake(root, dir string) error {
	if a.inside != "" {
		if a.inside != root {
			return fmt.Errorf("the environment is at %s and was at %s a moment ago: try again", root, a.inside)
		}
		return nil
	}
	m, err := env.IDs(root)
	if m == nil || err != nil {
		return nil // who opens it says what is wrong
	}
	if err := m.Check(); err != nil {
		return rangeError(root, err)
	}
	if dir == "" {
		return rangeError(root, a.runInside(*m, root, nil))
	}
	foreign, err := foreignOwners(root, dir, false, *m)
	if err != nil {
		return err
	}
	defer foreign.Close()
	return rangeError(root, a.runInside(*m, root, foreign))
}

// enterDamaged is enter for an environment that is to be removed, of whose
// history nothing may be left: with all the ids that the caller has.
func (a *App) enterDamaged(root string) error {
	if _, err := env.IDs(root); err != nil && a.inside == "" && os.Geteuid() != 0 {
		if m, err := subid.Mine(); err == nil {
			return rangeError(root, a.runInside(m, root, nil))
		}
	}
	return a.enter(root)
}

// runInside runs the command line anew and ends with its exit status.
func (a *App) runInside(m subid.Map, root string, foreign *os.File) error {
	args := []string{insideName, root, ""}
	if foreign != nil {
		args[2] = strconv.Itoa(subid.ExtraFD)
	}
	heeding.Add(1) // QUIT is passed on
	defer heeding.Add(-1)
	code, err := subid.Run(m, a.Stdin, foreign, append(args, a.args...)...)
	if err != nil {
		return err
	}
	return exitStatus(code)
}

// rangeError says why the environment at root cannot be opened.
func rangeError(root string, err error) error {
	var e *subid.Error
	if !errors.As(err, &e) {
		return err
	}
	return &env.Error{Kind: forks.ErrUnsupported, Msg: fmt.Sprintf("the files of the environment at %s have a range of ids: %s", root, e.Msg), Hint: e.Fix}
}

// initInside makes a system with all the ids that the caller has, and ends with
// the exit status. It returns nil if that is not called for, or not possible:
// why not is then in a.oneID.
func (a *App) initInside(root string, in *env.InitOptions, tarball string) error {
	if a.inside != "" {
		here, err := subid.Current()
		in.IDs = &here
		return errors.Join(err, a.enter(root))
	}
	if os.Geteuid() == 0 || in.InPlace || in.Kind == env.Workspace || env.Exists(root) {
		return nil
	}
	m, err := subid.Mine()
	if err != nil {
		a.oneID = err
		return nil
	}
	is := in.Kind == env.Rootfs
	switch {
	case is:
	case in.From != "":
		is = env.LooksLikeSystem(in.From)
	default:
		if is, err = a.isSystem(tarball); err != nil {
			return err
		}
	}
	if !is {
		a.oneID = &subid.Error{Msg: "it was not known to be a system before it was taken in", Fix: "say --kind rootfs"}
		return nil
	}
	foreign, err := foreignOwners(root, in.From, in.CrossFilesystem, m)
	if err != nil {
		return err
	}
	defer foreign.Close()
	err = a.runInside(m, root, foreign)
	var exit exitStatus
	var killed *subid.Killed
	if errors.As(err, &exit) || errors.As(err, &killed) {
		return err
	}
	a.oneID = err
	return nil
}

// isSystem says whether an archive looks like a system; what it is tells only
// what was unpacked. Standard input can be read again afterwards.
func (a *App) isSystem(tarball string) (bool, error) {
	if tarball == "-" {
		if err := a.rewindable(); err != nil {
			return false, err
		}
		return holdsShell(a.Stdin)
	}
	f, err := os.Open(tarball)
	if err != nil {
		return false, nil // who opens it next says why
	}
	defer f.Close()
	return holdsShell(f)
}

// holdsShell looks into an archive and goes back to where it was. One that can be
// read only once, such as a named pipe, is not looked into.
func holdsShell(f *os.File) (bool, error) {
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return false, nil
	}
	is := archive.Holds(f, "bin/sh", "usr/bin/sh")
	_, err = f.Seek(at, io.SeekStart)
	return is, err
}

// rewindable puts a copy in the place of a standard input that can be read only
// once.
func (a *App) rewindable() error {
	if _, err := a.Stdin.Seek(0, io.SeekCurrent); err == nil {
		return nil
	}
	f, err := vanishing("agentenv-stdin-")
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, a.Stdin); err != nil {
		return fmt.Errorf("keep the archive: %w", err)
	}
	_, err = f.Seek(0, io.SeekStart)
	a.Stdin = f
	return err
}

// vanishing makes a file that goes when it is closed.
func vanishing(prefix string) (*os.File, error) {
	f, err := os.CreateTemp("", prefix)
	if err != nil {
		return nil, env.NoTemp(err)
	}
	return f, os.Remove(f.Name())
}

// foreignOwners writes down who owns what in the directory dir, if there is one,
// of those that are not in the map m: inside nobody sees who they are.
func foreignOwners(root, dir string, cross bool, m subid.Map) (*os.File, error) {
	owners := map[string][2]uint32{}
	if dir != "" {
		dir, err := env.CheckDir(dir)
		if err == nil {
			err = filepath.WalkDir(dir, noteForeign(owners, root, dir, cross, m))
		}
		if err != nil {
			return nil, err
		}
	}
	f, err := vanishing("agentenv-owners-")
	if err != nil {
		return nil, err
	}
	err = gob.NewEncoder(f).Encode(owners) // names need not be UTF-8
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	return f, err
}

// noteForeign goes where a capture of dir goes. What cannot be read is told then.
func noteForeign(owners map[string][2]uint32, root, dir string, cross bool, m subid.Map) fs.WalkDirFunc {
	var device uint64
	return func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		st := info.Sys().(*syscall.Stat_t)
		if path == dir {
			device = st.Dev
		}
		if d.IsDir() && (path == root || st.Dev != device && !cross) {
			return fs.SkipDir
		}
		if owner, foreign := ownerInside(st, m); foreign {
			rel, err := filepath.Rel(dir, path)
			if err != nil {
				return err
			}
			owners[rel] = owner
		}
		return nil
	}
}

// ownerInside is the owner of a file as it is to be inside: where it is not
// mapped, the same.
func ownerInside(st *syscall.Stat_t, m subid.Map) (owner [2]uint32, foreign bool) {
	uid, knownUID := subid.Inside(m.UIDs, int64(st.Uid))
	gid, knownGID := subid.Inside(m.GIDs, int64(st.Gid))
	owner = [2]uint32{uint32(uid), uint32(gid)}
	if !knownUID {
		owner[0] = st.Uid
	}
	if !knownGID {
		owner[1] = st.Gid
	}
	return owner, !knownUID || !knownGID
}

func readOwners(f *os.File) (owners map[string][2]uint32, err error) {
	defer f.Close()
	err = gob.NewDecoder(f).Decode(&owners)
	return owners, err
}

// keepPlan puts a copy in the place of a plan that comes through a pipe, such as
// that of `-f <(…)`: who enters a user namespace reads it again.
func keepPlan(path string) error {
	fd, ok := strings.CutPrefix(path, "/dev/fd/")
	if path == "/dev/stdin" {
		fd, ok = "0", true
	}
	n, err := strconv.Atoi(fd)
	if !ok || err != nil {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil // who reads the plan says why
	}
	defer f.Close()
	if _, err := f.Seek(0, io.SeekCurrent); err == nil {
		return nil
	}
	kept, err := vanishing("agentenv-plan-")
	if err != nil {
		return err
	}
	defer kept.Close()
	if _, err := io.Copy(kept, f); err != nil {
		return fmt.Errorf("read the plan: %w", err)
	}
	return os.NewSyscallError("dup3", unix.Dup3(int(kept.Fd()), n, 0))
}

// sayIDs tells what does not work in a system that has one id.
func (a *App) sayIDs(e *env.Env) {
	if a.oneID == nil || e.Kind() != env.Rootfs {
		return
	}
	a.say("all in it is one user's: programs that change their user or a file's owner, such as apt and postgres, fail; to mend it (%v), then `agentenv --root %s delete --all` and init anew", a.oneID, e.Root())
}
