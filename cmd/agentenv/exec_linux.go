package main

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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
}

// addWorldFlags adds the flags that say what a command sees of the host.
func addWorldFlags(f *pflag.FlagSet) {
	f.String("isolation", "", "the least `LEVEL` that is acceptable: namespaces or process (default: namespaces)")
	f.String("network", "", "`KIND` of network: host, the only one so far")
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
		Short: "Run a command in the work tree; if it changed files, a snapshot follows",
		Long: `Run a command in the environment, in the present directory where that lies in
the tree. Its output is untouched and its exit code is passed on (128+N after
signal N); 127 not found, 126 not executable, 124 timed out, 125 agentenv
itself failed. If files changed, one automatic snapshot follows.`,
		Example: "  agentenv exec -- make test\n  agentenv exec --timeout 10m -- sh -c 'apt-get update && apt-get install -y jq'",
		Args:    cobra.MinimumNArgs(1),
		RunE:    func(c *cobra.Command, args []string) error { return a.exec(c.Flags(), x, args) },
	}
	c.Flags().SetInterspersed(false)
	c.Flags().StringVar(&x.workdir, "workdir", "", "run in `DIR`, relative to the tree or absolute as the command sees it")
	c.Flags().StringVar(&x.timeout, "timeout", "", "end the command after `TIME`, such as 90s or 1h30m")
	c.Flags().BoolVar(&x.noCommit, "no-commit", false, "make no snapshot of what the command changed")
	addWorldFlags(c.Flags())
	return c
}

func (a *App) exec(flags *pflag.FlagSet, x execFlags, args []string) error {
	world := &specs.Plan{Isolation: specs.Namespaces, Home: specs.HomeOverlay}
	if err := world.Override(specs.Flags{Given: givenFlags(flags)}, a.specOptions()); err != nil {
		return err
	}
	if err := checkMounts(world.Mounts); err != nil {
		return err
	}
	var timeout time.Duration
	if x.timeout != "" {
		var err error
		if timeout, err = specs.ParseDuration(x.timeout); err != nil {
			return usage("--timeout: "+err.Error(), "")
		}
	}
	return a.change(context.Background(), "exec", func(e *env.Env) error {
		run, err := a.execRun(e, world, x.workdir, args)
		if err != nil {
			return err
		}
		return a.runExec(e, run, timeout, x.noCommit)
	})
}

// execRun puts together what exec runs and what it sees.
func (a *App) execRun(e *env.Env, w *specs.Plan, workdir string, args []string) (env.Run, error) {
	r := env.Run{
		Level: sandbox.Level(w.Isolation), Home: sandbox.Home(w.Home), HomeDir: a.Getenv("HOME"),
		Args: args, Env: e.Environ(execEnviron(a.Env, w.Env)), Dir: workdir,
		Stdin: a.Stdin, Stdout: a.Stdout, Stderr: a.Stderr,
	}
	for _, m := range w.Mounts {
		r.Binds = append(r.Binds, sandbox.Bind{From: m.From, To: m.To, Mode: sandbox.Mode(m.Mode)})
	}
	if a.json {
		r.Stdout = a.Stderr
	}
	if workdir == "" {
		r.Dir = dirInTree(e)
	}
	if r.Level == sandbox.LevelProcess {
		if e.Kind() == env.Rootfs {
			return r, usage("--isolation process is for workspaces", "a rootfs needs namespaces")
		}
		r.Env = append(r.Env, "AGENTENV_TREE="+e.WorkTree())
	}
	return r, nil
}

// dirInTree is the present directory relative to the tree that was taken, or
// "" where it lies elsewhere.
func dirInTree(e *env.Env) string {
	if e.Source() == "" || e.Kind() == env.Rootfs {
		return ""
	}
	wd, err := workDir()
	if err != nil {
		return ""
	}
	rel, err := filepath.Rel(e.Source(), wd)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return ""
	}
	return rel
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

// runExec runs it, passes signals on, and ends with its exit code.
func (a *App) runExec(e *env.Env, run env.Run, timeout time.Duration, noCommit bool) error {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH)
	defer signal.Stop(signals)
	ended := make(chan struct{})
	timedOut := make(chan struct{})
	watch := func(p sandbox.Process) {
		var expired <-chan time.Time
		if timeout > 0 {
			expired = time.After(timeout)
		}
		for {
			select {
			case sig := <-signals:
				_ = p.Signal(sig.(syscall.Signal)) // one that has just ended needs none
			case <-expired:
				close(timedOut)
				p.Stop(execGrace)
			case <-ended:
				return
			}
		}
	}
	res, err := e.Exec(context.Background(), run, noCommit, func(p sandbox.Process) { go watch(p) })
	close(ended)
	if err != nil {
		return err
	}
	code := res.ExitCode
	select {
	case <-timedOut:
		code = exitTimeout
		a.say("the command did not end within %s", timeout)
	default:
	}
	if res.NotStarted {
		a.say("%s", res.Reason)
	}
	return a.execDone(res, code)
}

func (a *App) execDone(res env.ExecResult, code int) error {
	if res.Created {
		s := res.Head.Stats
		a.say("saved as %s (%s)", res.Head.ID, statsText(s))
	}
	if a.json {
		doc := map[string]any{"id": res.Head.ID, "created": res.Created, "exit_code": code}
		if err := a.printJSON(doc); err != nil {
			return err
		}
	}
	if code == 0 {
		return nil
	}
	return exitStatus(code)
}
