package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

// exitTimeout is the code of a command that timed out, as of timeout(1).
const exitTimeout = 124

// execGrace passes between TERM and KILL of a command that timed out; it is
// the plan's default.
const execGrace = 5 * time.Second

type execFlags struct {
	workdir, timeout string
	noCommit         bool
	// fork is the REF to fork; empty is the work tree itself.
	fork string
	keep bool
	// tty gives the command a terminal of its own.
	tty bool
}

// optionalRef is the value of a flag that may stand alone. Its type is what makes
// the help write --fork[=HEAD].
type optionalRef string

func (r *optionalRef) String() string     { return string(*r) }
func (r *optionalRef) Set(s string) error { *r = optionalRef(s); return nil }
func (r *optionalRef) Type() string       { return "bool" }

// addWorldFlags adds the flags that say what a command sees of the host.
func addWorldFlags(f *pflag.FlagSet) {
	f.String("isolation", "", "the least `LEVEL` that is acceptable: namespaces or process (default: namespaces)")
	f.String("network", "", "`KIND` of network: host, private (a loopback of its own) or nat (that and the way out) (default: host)")
	f.String("home", "", "`KIND` of home in a workspace: overlay, private or host (default: overlay)")
	f.StringArray("mount", nil, "bring in a host path: `FROM[:TO][:ro|overlay|rw]`")
	f.StringArray("env", nil, "add to the environment: `K=V`")
}

// givenFlags returns the flags given on the command line that say something
// of a plan.
func givenFlags(f *pflag.FlagSet) map[string][]string {
	given := map[string][]string{}
	f.Visit(func(fl *pflag.Flag) {
		if !slices.Contains(specs.FlagNames(), fl.Name) {
			return
		}
		if list, ok := fl.Value.(pflag.SliceValue); ok {
			given[fl.Name] = list.GetSlice()
		} else {
			given[fl.Name] = []string{fl.Value.String()}
		}
	})
	return given
}

func (a *App) execCommand() *cobra.Command {
	var x execFlags
	c := &cobra.Command{
		Use:   "exec [flags] -- CMD…",
		Short: "Run a command in the work tree, or in a throw-away fork; if it changed files, a snapshot follows",
		Long: `Run a command in the environment, in the present directory where that lies in
the tree. Its output is untouched and its exit code is passed on (128+N after
signal N); 127 not found, 126 not executable, 124 timed out, 125 agentenv
itself failed. If files changed, one automatic snapshot follows.

Signals are passed on. 5 s after TERM, or after the terminal has hung up, a
command that has not ended is killed. In the background of a terminal it has no
input.

With --fork the command runs in a fork of a snapshot that is thrown away
afterwards: the work tree is neither read nor changed (changes that no snapshot
holds are not in the fork), no lock is taken, and any number may run at once.
--keep makes a snapshot of what the command left, a child of REF; HEAD stays.

With -t the command has a terminal of its own, as editors and shells need it. Its
output, errors too, then comes on stdout.`,
		Example: "  agentenv exec -- make test\n  agentenv exec --timeout 10m -- sh -c 'apt-get update && apt-get install -y jq'\n" +
			"  agentenv exec --fork -- make test\n  agentenv exec --fork=HEAD~2 --keep -- ./agent.sh",
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := x.check(c.Flags(), args); err != nil {
				return err
			}
			if x.tty && !isTerminal(a.Stdin) {
				return usage("-t: the input is not a terminal", "leave -t out to run without one")
			}
			return a.exec(c.Flags(), x, args)
		},
	}
	c.Flags().SetInterspersed(false)
	x.add(c.Flags())
	c.Flags().StringVar(&x.timeout, "timeout", "", "end the command after `TIME`, such as 90s or 1h30m")
	c.Flags().BoolVarP(&x.tty, "tty", "t", false, "give the command a terminal of its own")
	return c
}

// add adds the flags that exec and shell have in common.
func (x *execFlags) add(f *pflag.FlagSet) {
	f.StringVar(&x.workdir, "workdir", "", "run in `DIR`, relative to the tree or absolute as the command sees it")
	f.BoolVar(&x.noCommit, "no-commit", false, "make no snapshot of what the command changed")
	f.Var((*optionalRef)(&x.fork), "fork", "run in a throw-away fork of a snapshot: HEAD, or another with --fork=REF")
	f.Lookup("fork").NoOptDefVal = "HEAD"
	f.BoolVar(&x.keep, "keep", false, "with --fork: keep the result as a snapshot and print its id on stderr")
	addWorldFlags(f)
}

// check refuses flags that make no sense together.
func (x execFlags) check(flags *pflag.FlagSet, args []string) error {
	forked := flags.Changed("fork")
	switch {
	case x.keep && !forked:
		return usage("--keep goes with --fork", "what exec changes in the work tree is kept anyway")
	case x.noCommit && forked:
		return usage("--no-commit goes with the work tree, not with --fork", "without --keep nothing of a fork is kept")
	case forked && x.fork == "":
		return usage("--fork= names no snapshot", "write --fork=REF, or --fork alone for HEAD")
	case forked && len(args) > 1 && args[1] == "--":
		return usage(fmt.Sprintf("%q stands where the command begins", args[0]), "a REF follows an equals sign: --fork="+args[0])
	}
	return nil
}

func (a *App) exec(flags *pflag.FlagSet, x execFlags, args []string) error {
	world := &specs.Plan{Isolation: specs.Namespaces, Home: specs.HomeOverlay}
	if err := world.Override(specs.Flags{Given: givenFlags(flags)}, a.specOptions()); err != nil {
		return err
	}
	if err := checkMounts(world.Mounts); err != nil {
		return err
	}
	if err := sandbox.CheckNetwork(sandbox.Level(world.Isolation), sandbox.Network(world.Network)); err != nil {
		return err
	}
	if a.verbose && sandbox.Network(world.Network) == sandbox.NetworkNAT {
		if tool, err := sandbox.NATTool(); err == nil {
			a.say("network nat goes by %s", tool)
		}
	}
	var timeout time.Duration
	if x.timeout != "" {
		var err error
		if timeout, err = specs.ParseDuration(x.timeout); err != nil {
			return usage("--timeout: "+err.Error(), "")
		}
	}
	if err := a.settleInput(x.tty); err != nil {
		return err
	}
	run := func(e *env.Env) error {
		run, err := a.execRun(e, world, x, args)
		if err != nil {
			return err
		}
		w := &watcher{timeout: timeout, say: a.say, ownTerminal: x.tty, inside: a.inside != "", files: []any{a.Stdin, a.Stdout, a.Stderr}}
		if x.fork != "" {
			return a.runFork(e, run, x, w)
		}
		return a.runExec(e, run, x, w)
	}
	if x.fork != "" {
		return a.withoutLock(context.Background(), run)
	}
	return a.change(context.Background(), "exec", run)
}

// settleInput takes the input away from who runs in the background of its
// terminal: the command, which is in a session of its own, would not be stopped
// when it reads but get what the user types for others. Who is to have the terminal
// itself is stopped until it is in the foreground.
func (a *App) settleInput(tty bool) error {
	fd := int(a.Stdin.Fd())
	if tty {
		_ = unix.IoctlSetInt(fd, unix.TCSBRK, 1) // tcdrain(3), by which the kernel stops us
		return nil
	}
	group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	if err != nil || group == unix.Getpgrp() {
		return nil // it is no terminal, not ours, or ours alone
	}
	a.say("in the background of its terminal the command has no input")
	a.Stdin, err = os.Open(os.DevNull)
	return err
}

// withoutLock opens the environment as it is and calls fn, once: what fn does
// is not to be repeated.
func (a *App) withoutLock(ctx context.Context, fn func(*env.Env) error) error {
	root, err := a.enterRoot()
	if err != nil {
		return err
	}
	e, err := env.Open(ctx, root, a.envOptions())
	if err != nil {
		return explain(root, err)
	}
	return explain(root, errors.Join(fn(e), e.Close()))
}

// execRun puts together what exec runs, a shell if that is nothing, and what it
// sees.
func (a *App) execRun(e *env.Env, w *specs.Plan, x execFlags, args []string) (env.Run, error) {
	r := env.Run{
		Level: sandbox.Level(w.Isolation), Home: sandbox.Home(w.Home), HomeDir: a.Getenv("HOME"),
		Args: args, Env: e.Environ(execEnviron(a.Env, w.Env)), Dir: x.workdir, Network: sandbox.Network(w.Network),
		Stdin: a.Stdin, Stdout: a.Stdout, Stderr: a.Stderr,
	}
	for _, m := range w.Mounts {
		r.Binds = append(r.Binds, sandbox.Bind{From: m.From, To: m.To, Mode: sandbox.Mode(m.Mode)})
	}
	if a.json {
		r.Stdout = a.Stderr
	}
	if x.tty {
		r.Terminal = a.Stdin
	}
	if len(args) == 0 {
		r.Args, r.Message = shellArgs(e.Kind()), "shell"
	}
	if x.workdir == "" {
		r.Dir = dirInTree(e)
	}
	if r.Level == sandbox.LevelProcess && e.Kind() == env.Rootfs {
		return r, usage("--isolation process is for workspaces", "a rootfs needs namespaces")
	}
	return r, nil
}

// dirInTree is the present directory relative to the tree that was taken, or to
// the work tree, or "" where it lies elsewhere.
func dirInTree(e *env.Env) string {
	wd, err := workDir()
	if err != nil {
		return ""
	}
	tops := []string{e.WorkTree()}
	if e.Source() != "" && e.Kind() == env.Workspace {
		tops = append(tops, e.Source())
	}
	for _, top := range tops {
		if isBelow(top, wd) {
			rel, _ := filepath.Rel(top, wd) // isBelow asked already
			return rel
		}
	}
	return ""
}

// runnerFiles are the variables through which a CI runner takes orders; no
// command gets them.
var runnerFiles = []string{"GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STATE", "GITHUB_STEP_SUMMARY"}

func execEnviron(caller []string, add map[string]string) []string {
	out := slices.DeleteFunc(slices.Clone(caller), func(kv string) bool {
		k, _, _ := strings.Cut(kv, "=")
		_, replaced := add[k]
		return replaced || slices.Contains(runnerFiles, k) || strings.HasPrefix(k, "AGENTENV_")
	})
	for k, v := range add {
		out = append(out, k+"="+v)
	}
	return out
}

// checkDir says so if a command was not run because its directory is not there.
func checkDir(res sandbox.Result) error {
	if !res.NoDir {
		return nil
	}
	return &env.Error{Kind: env.ErrNotFound, Msg: res.Reason, Hint: "choose a directory of the tree with --workdir"}
}

// runExec runs it in the work tree and ends with its exit code.
func (a *App) runExec(e *env.Env, run env.Run, x execFlags, w *watcher) error {
	ctx := w.begin()
	res, err := e.Exec(ctx, run, x.noCommit, w.watch)
	w.end()
	if err == nil {
		err = checkDir(res.Result)
	}
	if err != nil {
		return cause(ctx, err)
	}
	if res.Created {
		a.say("saved as %s (%s)", res.Head.ID, statsText(res.Head.Stats))
	}
	code := w.code(res.Result)
	return a.execDone(code, map[string]any{"id": res.Head.ID, "created": res.Created, "exit_code": code})
}

// runFork runs it in a fork and ends with its exit code.
func (a *App) runFork(e *env.Env, run env.Run, x execFlags, w *watcher) error {
	ctx := w.begin()
	res, err := e.ExecFork(ctx, x.fork, run, x.keep, w.watch)
	w.end()
	if err == nil {
		err = checkDir(res.Result)
	}
	if err != nil {
		return cause(ctx, err)
	}
	doc := map[string]any{"id": nil, "base": res.Base.ID, "created": res.Created}
	if k := res.Kept; k != nil {
		doc["id"] = k.ID
		switch {
		case a.quiet: // the id is data
			fmt.Fprintln(a.Stderr, k.ID)
		case res.Created:
			a.say("kept as %s (%s)", k.ID, statsText(k.Stats))
		default:
			a.say("nothing changed: the result is %s", k.ID)
		}
	}
	code := w.code(res.Result)
	doc["exit_code"] = code
	return a.execDone(code, doc)
}

func (a *App) execDone(code int, doc map[string]any) error {
	if a.json {
		if err := a.printJSON(doc); err != nil {
			return err
		}
	}
	if code == 0 {
		return nil
	}
	return exitStatus(code)
}
