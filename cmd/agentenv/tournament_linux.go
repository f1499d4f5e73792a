package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/runner"
	"github.com/agentenv/agentenv/runner/report"
	"github.com/agentenv/agentenv/specs"
)

// laterFlags are promised and not there yet: given, they are refused rather
// than ignored.
var laterFlags = []string{"select", "confirm", "protect", "pass-env", "keep", "no-cache", "junit", "sarif", "summary", "patch"}

type tournamentFlags struct {
	file, test, events string
	plain, git         bool
}

func (a *App) tournamentCommand() *cobra.Command {
	var x tournamentFlags
	c := &cobra.Command{
		Use:   "tournament (-f PLAN | --test CMD [flags] -- CMD1 CMD2…)",
		Short: "Run candidates side by side in forks, test each, and keep the first that passes",
		Long: `Fork the base once per candidate, run the candidates side by side, freeze each
tree, and run the test in a fork of the frozen tree. The first attempt whose
test passes becomes HEAD; the others are ended and removed. Without a winner
nothing changes.

With no environment here and no base, the base is the enclosing git work tree.

Exit status: 0 a winner was found; 1 no candidate passed; 2 an invalid plan or
command line; 3 agentenv itself failed; 130 interrupted; 143 terminated.`,
		Example: "  agentenv tournament -f plan.yaml\n  agentenv tournament --test 'go test ./...' -- 'git apply a.diff' 'git apply b.diff'",
		Args:    cobra.ArbitraryArgs,
		RunE:    func(c *cobra.Command, args []string) error { return a.tournament(c, x, args) },
	}
	f := c.Flags()
	f.StringVarP(&x.file, "file", "f", "", "the `PLAN`")
	f.StringVar(&x.test, "test", "", "the test, a shell command `CMD`, where there is no plan")
	f.String("base", "", "what candidates start from: a `REF` or dir:PATH (default: HEAD)")
	f.String("parallel", "", "how many attempts run at once, `N` (default: CPUs)")
	f.String("timeout", "", "bound each candidate, from the start of its command, to `TIME`, such as 90s or 1h30m")
	f.String("total-timeout", "", "bound the whole tournament to `TIME`")
	f.String("test-timeout", "", "bound each test to `TIME`")
	f.String("grace", "", "the `TIME` between TERM and KILL (default: 5s)")
	f.Bool("promote", true, "make the winner HEAD; --promote=false keeps it as a snapshot only")
	f.Bool("apply", false, "apply the winner to the directory the base was taken from")
	f.BoolVar(&x.git, "git", false, "in place: promote a winner also if it changed hooks, config or info of a .git")
	f.StringVar(&x.events, "events", "", "write what happens to `FILE`, one JSON object a line")
	f.BoolVar(&x.plain, "plain", false, "write plain lines, also on a terminal")
	addWorldFlags(f)
	for _, name := range laterFlags {
		f.String(name, "", "not supported yet")
		f.Lookup(name).NoOptDefVal = "true"
		f.Lookup(name).Hidden = true
	}
	return c
}

func (a *App) tournament(c *cobra.Command, x tournamentFlags, args []string) error {
	for _, name := range laterFlags {
		if c.Flags().Changed(name) {
			return usage("not supported yet: --"+name, "")
		}
	}
	if dash := c.ArgsLenAtDash(); len(args) > 0 && dash != 0 {
		return usage(fmt.Sprintf("%q stands where no argument is due", args[0]), "candidates come after --, and flags take their value after =, as in --promote=false")
	}
	plan, err := a.tournamentPlan(c, x, args)
	if err != nil {
		return err
	}
	if err := checkMounts(plan.Mounts); err != nil {
		return err
	}
	if plan.Apply && plan.Base.Tarball != "" {
		return usage("apply: the base is an archive, so there is no directory to apply to", "leave apply out, and apply with `agentenv apply --to DIR`")
	}
	root, err := a.tournamentRoot(plan)
	if err == nil {
		err = a.enterToTake(root, plan.Base.Dir)
	}
	if err != nil {
		return err
	}
	// Another process that does the work has ended by now. These probes take time.
	ctx, hurry, stop := interruptible(context.Background())
	defer stop()
	if err := env.ProbeIsolation(root, sandbox.Level(plan.Isolation)); err != nil {
		return explain(root, cause(ctx, err))
	}
	if err := runner.Check(plan); err != nil {
		return cause(ctx, err)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	sinks, closeSinks, err := a.eventSinks(x)
	if err != nil {
		return err
	}
	a.git = x.git
	defer a.watchWorkDir()()
	e, base, saved, err := a.tournamentBase(ctx, root, plan)
	if err != nil {
		return errors.Join(cause(ctx, err), closeSinks())
	}
	return errors.Join(a.runTournament(ctx, e, plan, base, saved, hurry, sinks), e.Close(), closeSinks())
}

// tournamentPlan reads the plan file, or makes a plan of the command line.
func (a *App) tournamentPlan(c *cobra.Command, x tournamentFlags, args []string) (*specs.Plan, error) {
	flags := specs.Flags{Test: x.test, Commands: args, Given: givenFlags(c.Flags())}
	if x.file == "" {
		if x.test == "" && len(args) == 0 {
			return nil, usage("say what to run", "either -f PLAN, or --test CMD -- CMD1 CMD2…")
		}
		return specs.FromFlags(flags, a.specOptions())
	}
	if err := keepPlan(x.file); err != nil {
		return nil, err
	}
	p, err := a.loadPlan(x.file)
	if err != nil {
		return nil, err
	}
	return p, p.Override(flags, a.specOptions())
}

// tournamentBase opens the environment at root, or makes it, and finds the snapshot
// that the candidates start from. Work that no snapshot holds is saved.
func (a *App) tournamentBase(ctx context.Context, root string, plan *specs.Plan) (*env.Env, env.Snapshot, *env.ID, error) {
	none := env.Snapshot{}
	if !env.Exists(root) && plan.Base.Ref == "" {
		e, err := a.initForBase(ctx, root, plan.Base)
		if err != nil {
			return nil, none, nil, explain(root, err)
		}
		return e, e.Head(), nil, nil
	}
	e, err := env.Lock(ctx, root, "tournament", a.envOptions())
	if err != nil {
		return nil, none, nil, explain(root, err)
	}
	base, saved, err := a.takeBase(ctx, e, plan)
	if err != nil {
		return nil, none, nil, explain(root, errors.Join(err, e.Close()))
	}
	return e, base, saved, nil
}

// takeBase saves unsaved work and resolves or captures the plan's base.
func (a *App) takeBase(ctx context.Context, e *env.Env, plan *specs.Plan) (env.Snapshot, *env.ID, error) {
	if plan.Isolation == specs.Process && e.Kind() == env.Rootfs {
		return env.Snapshot{}, nil, usage("isolation: process is for workspaces", "a rootfs needs namespaces")
	}
	why := "before the tournament"
	if plan.Name != "tournament" { // what one without a plan is called
		why += " " + plan.Name
	}
	work, err := e.SaveWork(ctx, why)
	if err != nil {
		return env.Snapshot{}, nil, err
	}
	var saved *env.ID
	if work != nil {
		saved = &work.ID
		a.say("unsaved work was saved as %s", work.ID)
	}
	var base env.Snapshot
	switch b := plan.Base; {
	case b.Dir != "":
		base, err = e.TakeDir(ctx, b.Dir)
	case b.Tarball != "":
		base, err = e.TakeTarball(ctx, b.Tarball)
	default:
		base, err = e.Resolve(b.Ref)
	}
	if err == nil && plan.Apply {
		err = e.CheckApply(base.ID)
	}
	if err == nil && !plan.BaseGiven && plan.Base.Ref != "" {
		err = a.warnIfStale(ctx, e)
	}
	return base, saved, err
}

// warnIfStale says so if the directory that the environment was taken from is
// no longer what it was: who expects it to be the base would wonder.
func (a *App) warnIfStale(ctx context.Context, e *env.Env) error {
	changed, err := e.SourceChanged(ctx)
	if err != nil || !changed {
		return err
	}
	a.say("the base is HEAD; %s changed since it was taken: --base dir:%s starts from what is there now", e.Source(), e.Source())
	return nil
}

// checkMounts refuses mounts of what is not there, before anything runs.
func checkMounts(mounts []specs.Mount) error {
	for _, m := range mounts {
		if _, err := os.Stat(m.From); err != nil {
			return usage(fmt.Sprintf("cannot mount %s at %s: %v", m.From, m.To, errors.Unwrap(err)), "")
		}
	}
	return nil
}

// tournamentRoot finds the environment that a plan is about. A plan without a
// base and without an environment is about the git work tree around here.
func (a *App) tournamentRoot(plan *specs.Plan) (string, error) {
	root, named, err := env.NamedRoot(a.root, a.Getenv)
	if err != nil {
		return "", err
	}
	if plan.Base.Ref != "" {
		top, ok := gitTop()
		if !ok || plan.BaseGiven {
			return a.enterRoot() // opening it says so if there is none
		}
		root, meant, err := a.lookForRoot()
		if err != nil || env.Exists(root) && (meant || a.isTakenAround(root)) {
			return root, err
		}
		// A default environment is about something else.
		plan.Base = specs.Base{Dir: top}
	}
	if named {
		return root, nil
	}
	path := plan.Base.Dir
	if path == "" {
		return env.RootFor(plan.Base.Tarball, env.Workspace, a.Getenv)
	}
	dir, err := env.CheckDir(path)
	if err != nil {
		return "", err
	}
	return env.RootFor(dir, env.Workspace, a.Getenv)
}

// isTakenAround says whether the default environment at root was taken from the
// present directory or one above it. The whole system counts as elsewhere.
func (a *App) isTakenAround(root string) bool {
	e, err := env.Open(context.Background(), root, a.envOptions())
	if err != nil {
		return false
	}
	defer e.Close()
	dir, err := workDir()
	return err == nil && e.Source() != "" && e.Source() != "/" && isBelow(e.Source(), dir)
}

// isBelow says whether path is top or lies below it.
func isBelow(top, path string) bool {
	rel, err := filepath.Rel(top, path)
	return err == nil && filepath.IsLocal(rel)
}

// initForBase makes the environment of a base that has none yet.
func (a *App) initForBase(ctx context.Context, root string, base specs.Base) (*env.Env, error) {
	in := env.InitOptions{From: base.Dir, NoWorkTree: true}
	if err := a.initInside(root, &in, base.Tarball); err != nil {
		return nil, err
	}
	if base.Tarball != "" {
		f, digest, err := env.OpenTarball(base.Tarball)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in.Tarball, in.TarballName, in.Digest = f, base.Tarball, digest
	}
	e, err := env.Init(ctx, root, in, a.envOptions())
	if err == nil {
		a.say("made a %s environment of %s at %s", e.Kind(), base.Dir+base.Tarball, root)
		a.sayIDs(e)
	}
	return e, err
}

// gitTop is the top of the git work tree around the present directory.
func gitTop() (string, bool) {
	dir, err := workDir()
	if err != nil {
		return "", false
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(filepath.Join(dir, ".git")); err == nil {
			return dir, true
		}
		if dir == filepath.Dir(dir) {
			return "", false
		}
	}
}

// runTournament runs the plan and tells how it went.
func (a *App) runTournament(ctx context.Context, e *env.Env, plan *specs.Plan, base env.Snapshot, saved *env.ID, hurry <-chan struct{}, sinks []runner.Sink) error {
	res, err := runner.Run(ctx, runner.Options{
		Env: e, Plan: plan, Base: base, Saved: saved, Caller: a.Env, HomeDir: a.Getenv("HOME"), Sinks: sinks, Hurry: hurry,
		Explain: func(err error) string { return describe(explain(e.Root(), err)).String() },
		Notices: a.divert,
	})
	if res == nil {
		return explain(e.Root(), cause(ctx, err))
	}
	if err != nil && ctx.Err() == nil {
		// The document says it too, but whoever reads the text must not miss it.
		a.say("%s", describe(explain(e.Root(), err)))
	}
	if perr := a.printResult(res, !a.quiet); perr != nil {
		return perr
	}
	if code := a.tournamentExit(ctx, res, err); code != 0 {
		return exitStatus(code)
	}
	switch {
	case plan.Apply && res.Promoted:
		return a.applyWinner(ctx, e, res)
	case res.Promoted && e.Kind() == env.Workspace && e.CheckApply(res.Head) == nil:
		dir := plan.Base.Dir
		if dir == "" {
			dir = e.Source()
		}
		how := "agentenv apply"
		if wd, err := workDir(); err != nil || !isBelow(dir, wd) {
			how = "cd " + shellWord(dir) + " && " + how
		}
		a.say("to bring it into %s: `%s`", dir, how)
	}
	return nil
}

// plainWord is what a shell takes as it stands.
const plainWord = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+,:@%"

// shellWord makes one word of a path for a shell.
func shellWord(s string) string {
	if strings.Trim(s, plainWord) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// tournamentExit maps what a run came to to the exit codes of CONTRACT §3.
func (a *App) tournamentExit(ctx context.Context, res *runner.Result, err error) int {
	switch {
	case err != nil && ctx.Err() != nil:
		return describe(context.Cause(ctx)).exit
	case errors.Is(err, env.ErrConflict):
		return exitNo
	case err != nil || res.Status == runner.RunFailed:
		return exitHarness
	case res.Winner == nil:
		return exitNo
	}
	return 0
}

// applyWinner brings the winner to the directory that the base was taken from.
// stdout has the result already, so what happens is told on stderr.
func (a *App) applyWinner(ctx context.Context, e *env.Env, res *runner.Result) error {
	doc, err := a.applyTo(ctx, e, string(res.Head), env.ApplyOptions{})
	if err != nil {
		return err
	}
	for _, p := range doc.Conflicts {
		a.say("conflict: %s changed there as well", quote(p))
	}
	if len(doc.Conflicts) > 0 {
		a.say("the winner is HEAD and was not applied: nothing was written")
		return exitStatus(exitNo)
	}
	a.say("applied: %s changed", count(len(doc.Applied), "path"))
	return nil
}

// eventSinks are the readers of a run's events: the text that says what goes
// on, and the file of --events.
func (a *App) eventSinks(x tournamentFlags) ([]runner.Sink, func() error, error) {
	var sinks []runner.Sink
	done := func() error { return nil }
	if x.events != "" {
		f, err := os.Create(x.events)
		if err != nil {
			return nil, nil, usage("--events: "+err.Error(), "name a file that can be written; its directory must exist")
		}
		stream := report.NewStream(f)
		sinks, done = append(sinks, stream.Event), func() error { return errors.Join(stream.Err(), f.Close()) }
	}
	if !a.quiet {
		opts, err := a.reportOptions(a.Stderr)
		if err != nil {
			return nil, nil, err
		}
		sinks = append(sinks, report.NewText(a.Stderr, opts).Event)
	}
	return sinks, done, nil
}
