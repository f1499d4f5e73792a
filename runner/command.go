package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/specs"
)

// argMax is the longest argument, or environment string, that Linux gives a
// program, in bytes with the final NUL (MAX_ARG_STRLEN: 32 pages of 4 KiB).
const argMax = 128 << 10

// inside is where commands see files that the runner hands them.
const inside = "/run/agentenv"

// command is a candidate's or a test's command, and what it runs in.
type command struct {
	fork *env.Fork
	// run is text for the plan's shell; or script is a file to run.
	run, script string
	// stdin is a file; empty is an empty input.
	stdin string
	// name is what files that the command is handed are called.
	name    string
	workdir string
	network specs.Network
	timeout time.Duration
	env     []string
	// log is the path of its log.
	log     string
	started func()
	line    func(line string, dropped int64)
}

// check refuses what could never run, before anything is started.
func check(o Options) error {
	p := o.Plan
	if p.Isolation == specs.Process && o.Env.Kind() == env.Rootfs {
		return &env.Error{Kind: env.ErrUsage, Msg: "isolation: process cannot run a rootfs, whose commands need the tree as /", Hint: "use isolation: namespaces"}
	}
	if err := Check(p); err != nil {
		return err
	}
	if err := checkVariables("the plan", p.Env); err != nil {
		return err
	}
	for i := range p.Candidates {
		c := &p.Candidates[i]
		err := checkVariables("candidate "+c.Name, c.Env)
		for _, file := range []string{c.Script, c.Stdin} {
			if err == nil && file != "" {
				err = checkFile(c.Name, file)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkVariables refuses a variable that Linux does not pass on.
func checkVariables(whose string, vars map[string]string) error {
	for k, v := range vars {
		if n := len(k) + len("=") + len(v) + 1; n > argMax {
			return &env.Error{Kind: env.ErrUsage, Msg: fmt.Sprintf("%s: the variable %s takes %d bytes and Linux passes at most %d", whose, k, n, argMax), Hint: "put the value into a file of the tree"}
		}
	}
	return nil
}

// checkFile refuses what is no regular file: opening a FIFO would wait.
func checkFile(candidate, path string) error {
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &env.Error{Kind: env.ErrNotFound, Msg: fmt.Sprintf("candidate %s: no file %s", candidate, path)}
	case err != nil:
		return fmt.Errorf("candidate %s: %w", candidate, err)
	case !st.Mode().IsRegular():
		return &env.Error{Kind: env.ErrUsage, Msg: fmt.Sprintf("candidate %s: %s is not a regular file", candidate, path)}
	}
	return nil
}

// passed are the variables of the caller that commands see; LC_* besides.
var passed = []string{"PATH", "HOME", "USER", "LANG", "TERM", "TZ"}

// environ is the environment of a candidate's command or of its test.
func (t *tournament) environ(own map[string]string, candidate string, attempt int) []string {
	caller := slices.DeleteFunc(slices.Clone(t.Caller), func(kv string) bool {
		k, _, _ := strings.Cut(kv, "=")
		return !slices.Contains(passed, k) && !strings.HasPrefix(k, "LC_")
	})
	vars := make(map[string]string)
	for _, kv := range t.Env.Environ(caller) {
		k, v, _ := strings.Cut(kv, "=")
		vars[k] = v
	}
	maps.Copy(vars, t.Plan.Env)
	maps.Copy(vars, own)
	vars["AGENTENV"] = "1"
	vars["AGENTENV_RUN"] = t.res.Run
	vars["AGENTENV_BASE"] = string(t.Base.ID)
	vars["AGENTENV_CANDIDATE"] = candidate
	vars["AGENTENV_ATTEMPT"] = strconv.Itoa(attempt)
	out := make([]string, 0, len(vars))
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		out = append(out, k+"="+vars[k])
	}
	return out
}

// testCommand is the plan's test, to be run in fork.
func (t *tournament) testCommand(fork *env.Fork, candidate string, attempt int) command {
	return command{
		fork: fork, run: t.Plan.Test.Run, name: "test", timeout: time.Duration(t.Plan.Test.Timeout),
		network: t.Plan.Test.Network,
		env:     t.environ(nil, candidate, attempt),
		started: func() {}, line: func(string, int64) {},
	}
}

// run runs a command until everything it started is gone. The error is the
// harness's.
func (t *tournament) run(ctx context.Context, c command) (ending, error) {
	r, err := t.prepare(c)
	if err != nil {
		return ending{}, err
	}
	if c.stdin != "" {
		if r.Stdin, err = os.Open(c.stdin); err != nil {
			return ending{}, err
		}
		defer r.Stdin.Close()
	}
	log, err := sandbox.NewLog(c.log, sandbox.DefaultLogLimit)
	if err != nil {
		return ending{}, err
	}
	// A command may print before its start is known here; that it runs is told
	// first all the same.
	c.started = sync.OnceFunc(c.started)
	line := func(s string, dropped int64) {
		c.started()
		c.line(s, dropped)
	}
	out := &tee{log: log, lines: &lines{emit: line, now: t.Now}}
	r.Stdout, r.Stderr = out, out
	end, err := t.watch(ctx, c, r)
	end.full = !end.ok() && end.Limit == "" && !hasRoom(t.Env.Root())
	if lerr := errors.Join(out.flush(), log.Close()); lerr != nil {
		t.warn("%s is not complete: %v", c.log, bare(lerr))
	}
	if err == nil && end.cannotRun() {
		end.lastLine = lastLine(c.log)
	}
	return end, err
}

// watch starts the command and stops it when its time is up or ctx is done.
func (t *tournament) watch(ctx context.Context, c command, r env.Run) (ending, error) {
	if err := context.Cause(ctx); err != nil {
		return ending{}, err
	}
	// Cancelling must not skip the grace, so the process has a context of its
	// own.
	p, err := c.fork.Start(context.WithoutCancel(ctx), r)
	if err != nil {
		return ending{}, err
	}
	c.started()
	ended := make(chan struct{})
	stopped := make(chan error, 1)
	go func() { stopped <- t.guard(ctx, p, c.timeout, ended) }()
	res, err := p.Wait()
	close(ended)
	return ending{Result: res, stopped: <-stopped}, err
}

// guard stops p when its time is up or ctx is done, and returns why; nil if it
// ended by itself.
func (t *tournament) guard(ctx context.Context, p sandbox.Process, timeout time.Duration, ended <-chan struct{}) (cause error) {
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-ended:
		return nil
	case <-expired:
		cause = errExpired
	case <-ctx.Done():
		cause = context.Cause(ctx)
	}
	p.Stop(time.Duration(t.Plan.Grace))
	select {
	case <-ended:
	case <-t.Hurry:
		p.Stop(0)
		<-ended
	}
	return cause
}

// prepare makes of c what the environment runs.
func (t *tournament) prepare(c command) (env.Run, error) {
	r := env.Run{
		Level: level(t.Plan), Home: sandbox.Home(t.Plan.Home), HomeDir: t.HomeDir,
		Env: c.env, Dir: c.workdir, Network: sandbox.Network(c.network), Limits: limits(t.Plan),
	}
	if r.Dir == "" {
		r.Dir = t.Plan.Workdir
	}
	for _, m := range t.Plan.Mounts {
		r.Binds = append(r.Binds, sandbox.Bind{From: m.From, To: m.To, Mode: sandbox.Mode(m.Mode)})
	}
	switch {
	case c.script != "":
		text, err := os.ReadFile(c.script)
		if err != nil {
			return r, err
		}
		at, err := t.hand(&r, c.name+extension(c.script), text, 0o500)
		r.Args = []string{at}
		return r, err
	case len(c.run)+1 > argMax:
		// Too long for an argument: the shell reads it from a file instead.
		at, err := t.hand(&r, c.name+".run", []byte(c.run), 0o400)
		r.Args = append(slices.Clone(t.Plan.Shell), ". "+quote(at))
		return r, err
	}
	r.Args = append(slices.Clone(t.Plan.Shell), c.run)
	return r, nil
}

// extension is that of a script's name, which some interpreters go by.
func extension(path string) string {
	const most = 16
	if ext := filepath.Ext(path); len(ext) <= most {
		return ext
	}
	return ""
}

// hand puts a file into the run's folder, lets the command see it, and returns
// where.
func (t *tournament) hand(r *env.Run, name string, text []byte, mode os.FileMode) (string, error) {
	path, err := t.folder.put(name, text, mode)
	if err != nil || r.Level == sandbox.LevelProcess {
		return path, err
	}
	at := inside + "/" + name
	r.Binds = append(r.Binds, sandbox.Bind{From: path, To: at, Mode: sandbox.ReadOnly})
	return at, nil
}

// quote makes one word of s for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// signalName is a signal's name, such as SIGSEGV.
func signalName(s syscall.Signal) string {
	if name := unix.SignalName(s); name != "" {
		return name
	}
	return fmt.Sprintf("signal %d", int(s)) // a real-time signal has no name
}

// lastLine is the last line of a log that says something, for a reason of one
// line: at most 200 bytes, without control characters.
func lastLine(path string) string {
	const most = 200
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > 2*most {
		_, _ = f.Seek(-2*most, io.SeekEnd) // if it fails, the first lines do
	}
	data, _ := io.ReadAll(io.LimitReader(f, 2*most)) // what can be read is enough
	text := strings.TrimSpace(strings.ToValidUTF8(string(data), "?"))
	text = text[strings.LastIndexByte(text, '\n')+1:]
	text = strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return -1
		}
		return r
	}, text)
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}
