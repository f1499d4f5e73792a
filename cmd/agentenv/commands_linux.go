package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/forks/archive"
)

var linuxKinds = []kind{
	{sandbox.ErrSandbox, "isolation", exitHarness}, // whatever errno lies below it
	{env.ErrUsage, "usage", exitUsage},
	{env.ErrNotFound, "not_found", exitUsage},
	{env.ErrAmbiguous, "ambiguous", exitUsage},
	{env.ErrExists, "exists", exitUsage},
	{env.ErrConflict, "conflict", exitNo},
	{env.ErrHeld, "busy", exitUsage},
	{archive.ErrFormat, "usage", exitUsage},
	{archive.ErrUnsafe, "usage", exitUsage},
	{archive.ErrTooLarge, "usage", exitUsage},
	{env.ErrBusy, "busy", exitHarness},
	{env.ErrDamaged, "damaged", exitHarness},
	{forks.ErrUnfinished, "conflict", exitUsage},
	{forks.ErrInUse, "busy", exitHarness},
	{forks.ErrUnsupported, "permission", exitHarness},
	{forks.ErrDamaged, "damaged", exitHarness},
	{forks.ErrNotFound, "damaged", exitHarness}, // the history lists what the store does not have
}

func linuxHint(err error) string {
	var e *env.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	var s *sandbox.Error
	if errors.As(err, &s) {
		return s.Fix
	}
	return ""
}

// linuxCommands are the commands that need Linux.
func (a *App) linuxCommands() []*cobra.Command {
	commands := []*cobra.Command{
		a.initCommand(), a.execCommand(), a.shellCommand(), a.commitCommand(), a.checkoutCommand(), a.logCommand(), a.headCommand(),
		a.tagCommand(), a.branchesCommand(), a.showCommand(), a.statusCommand(), a.deleteCommand(), a.applyCommand(),
		a.tournamentCommand(), a.runsCommand(), a.umountCommand(), a.doctorCommand(),
	}
	for _, c := range commands {
		c.PreRunE = func(*cobra.Command, []string) error { return checkProcesses(runsCommands[c.Name()]) }
	}
	return commands
}

// runsCommands are the commands that run others.
var runsCommands = map[string]bool{"exec": true, "shell": true, "tournament": true, "doctor": true}

// How many more processes and threads this program needs at least, and with a
// command in a sandbox: counted from runs with a low limit. One that it does not
// get, the runtime takes for the end of the world.
const (
	ownThreads     = 6
	commandThreads = 12
)

// checkProcesses refuses to begin where processes would be refused.
func checkProcesses(command bool) error {
	need := ownThreads
	if command {
		need = commandThreads
	}
	left, limit, limited := sandbox.ProcessesLeft()
	if !limited || left >= need {
		return nil
	}
	return &hintedError{
		fmt.Errorf("this user may have %d processes and threads, and %d are there: %d free ones are needed", limit, limit-left, need),
		fmt.Sprintf("raise the limit with `ulimit -u %d`, or as root if it is the hard one", limit-left+4*need),
	}
}

// envOptions are what every environment is opened with.
func (a *App) envOptions() env.Options {
	backend := a.backend
	if backend == "" {
		backend = a.Getenv("AGENTENV_BACKEND")
	}
	return env.Options{
		Backends: all.Backends(),
		Backend:  backend,
		Executor: sandbox.New(sandbox.Options{Notice: func(line string) { a.notice(line) }}),
		Notify:   func(line string) { a.say("%s", line) },
		Progress: a.progress(),
		Git:      a.git,
		Owners:   a.owners,
	}
}

// notice passes on what a sandbox has to say.
func (a *App) notice(line string) {
	if a.noticed != nil {
		a.noticed(line)
		return
	}
	a.say("%s", line)
}

// divert sends what sandboxes have to say to fn, until back is called.
func (a *App) divert(fn func(line string)) (back func()) {
	a.noticed = fn
	return func() { a.noticed = nil }
}

// lookForRoot returns the root that the command line, the environment and the
// present directory point to; meant is false for a default.
func (a *App) lookForRoot() (root string, meant bool, err error) {
	dir, err := workDir()
	if err != nil {
		if root, named, nerr := env.NamedRoot(a.root, a.Getenv); named {
			return root, true, nerr
		}
		return "", false, err
	}
	return env.FindRoot(a.root, a.Getenv, dir)
}

// findRoot is lookForRoot, which tells the user of a default.
func (a *App) findRoot() (string, error) {
	root, meant, err := a.lookForRoot()
	if err == nil {
		a.sayDefault(root, meant)
	}
	return root, err
}

func (a *App) sayDefault(root string, meant bool) {
	if !meant && env.Exists(root) {
		a.say("using the environment at %s: none was taken from this directory", root)
	}
}

// enterRoot is findRoot for what opens the environment.
func (a *App) enterRoot() (string, error) {
	root, meant, err := a.lookForRoot()
	if err == nil {
		err = a.enter(root)
	}
	if err == nil {
		a.sayDefault(root, meant)
	}
	return root, err
}

// workDir is the present directory without symlinks, which is how roots
// remember what they were taken from.
func workDir() (string, error) {
	dir, err := os.Getwd()
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return "", usage("the present directory was removed", "`cd` to another, or again to its path if it was made anew")
	}
	if err != nil {
		return "", fmt.Errorf("find the present directory: %w", err)
	}
	return dir, nil
}

// watchWorkDir returns a function that tells the user if the present directory
// was removed since.
func (a *App) watchWorkDir() func() {
	_, before := workDir()
	return func() {
		if _, err := workDir(); before == nil && errors.Is(err, errUsage) {
			a.say("the present directory was removed: `cd` to another, or again to its path if it was made anew")
		}
	}
}

// read opens the environment for reading and calls fn.
func (a *App) read(ctx context.Context, fn func(*env.Env) error) error {
	root, err := a.enterRoot()
	if err != nil {
		return err
	}
	for {
		e, err := env.Open(ctx, root, a.envOptions())
		if err != nil {
			return explain(root, err)
		}
		err = errors.Join(fn(e), e.Close())
		// What it was about to read may just have been removed.
		if !errors.Is(err, forks.ErrNotFound) || !e.Stale() {
			return explain(root, err)
		}
	}
}

// change opens the environment for changing it and calls fn.
func (a *App) change(ctx context.Context, op string, fn func(*env.Env) error) error {
	root, err := a.enterRoot()
	if err != nil {
		return err
	}
	defer a.watchWorkDir()()
	e, err := env.Lock(ctx, root, op, a.envOptions())
	if err != nil {
		return explain(root, err)
	}
	return explain(root, errors.Join(fn(e), e.Close()))
}

// interruptible returns a context that ends with the cause when the program is
// interrupted, terminated or hung up on, and a channel that is closed when that
// happens a second time: the user does not want to wait.
func interruptible(ctx context.Context) (context.Context, <-chan struct{}, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	ch := make(chan os.Signal, 2)
	hurry, done := make(chan struct{}), make(chan struct{})
	heed := []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT}
	signal.Notify(ch, slices.DeleteFunc(heed, signal.Ignored)...) // what was ignored, as by nohup, stays so; TERM never is
	heeding.Add(1)
	go func() {
		for n := 1; ; n++ {
			select {
			case sig := <-ch:
				stopAt(sig, cancel)
				if n == 2 {
					close(hurry)
					return
				}
			case <-done:
				return
			}
		}
	}()
	return ctx, hurry, func() {
		signal.Stop(ch)
		heeding.Add(-1)
		close(done)
		cancel(nil)
	}
}

// isTerminal says whether w is a terminal.
func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
