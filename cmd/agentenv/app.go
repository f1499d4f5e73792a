package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// App is one run of the program: what it reads, writes and knows.
type App struct {
	Stdin          *os.File
	Stdout, Stderr io.Writer
	// Env is the caller's environment, K=V.
	Env []string
	Now func() time.Time

	root, backend, color string
	json, quiet, verbose bool
	// git: what is promoted in place may steer git.
	git bool
	// noticed, if set, takes what sandboxes have to say.
	noticed func(line string)
	// lost is the first error of writing data.
	lost error

	// args is the command line. In the user namespace of an environment, inside
	// is its root, and owners are those of the directory that is taken in that are
	// not seen there.
	args   []string
	inside string
	owners map[string][2]uint32
	// oneID is why a system that init makes has but one id.
	oneID error
}

// Getenv returns the value of a variable of the caller's, or "".
func (a *App) Getenv(key string) string {
	for _, kv := range slices.Backward(a.Env) {
		if v, ok := strings.CutPrefix(kv, key+"="); ok {
			return v
		}
	}
	return ""
}

// Run runs the command line args and returns the exit code.
func (a *App) Run(args []string) int {
	a.args = args
	endAtQuit()
	// What --json promises holds also where the flags cannot be parsed.
	own := args
	if i := slices.Index(args, "--"); i >= 0 {
		own = args[:i]
	}
	a.json = slices.Contains(own, "--json")
	root := a.rootCommand()
	root.SetArgs(args)
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	err := root.Execute()
	if err == nil {
		err = a.lost
	}
	if err == nil {
		return 0
	}
	var exit exitStatus
	if errors.As(err, &exit) {
		return int(exit)
	}
	f := describe(err)
	a.fail(f)
	if cmd, _, _ := root.Find(args); passesExitCode(cmd) && f.exit == exitHarness {
		return exitOwnFailure
	}
	return f.exit
}

// heeding counts who heeds signals now, and does what is to be done at QUIT.
var heeding atomic.Int32

// endAtQuit ends the program at QUIT, as TERM does, where nobody heeds it: without,
// the runtime shows every goroutine. A shell without job control has both INT and
// QUIT ignored in what it puts into the background, and of these two the runtime
// keeps only the first so.
func endAtQuit() {
	if signal.Ignored(syscall.SIGINT) {
		signal.Ignore(syscall.SIGQUIT)
		return
	}
	quit := make(chan os.Signal, 1)
	signal.Notify(quit, syscall.SIGQUIT)
	go func() {
		for range quit {
			if heeding.Load() == 0 {
				os.Exit(exitQuit)
			}
		}
	}()
}

// fail reports a failure: for people on stderr, for programs on stdout, if that can
// be written.
func (a *App) fail(f failure) {
	if a.json {
		type body struct {
			Code    string `json:"code"`
			Message string `json:"message"`
			Hint    string `json:"hint"`
		}
		if a.printJSON(map[string]body{"error": {f.code, f.message, f.hint}}) == nil {
			return
		}
	}
	fmt.Fprintln(a.Stderr, "agentenv: "+f.String())
}

// printJSON writes one document to stdout.
func (a *App) printJSON(v any) error {
	enc := json.NewEncoder(a.Stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// say tells the user something that is not data.
func (a *App) say(format string, args ...any) {
	if !a.quiet {
		fmt.Fprintf(a.Stderr, "agentenv: "+format+"\n", args...)
	}
}

// print writes a line of data. Run reports a line that could not be written.
func (a *App) print(format string, args ...any) {
	if _, err := fmt.Fprintf(a.Stdout, format+"\n", args...); err != nil && a.lost == nil {
		a.lost = err
	}
}

// output prints doc as JSON if that was asked for, else calls text.
func (a *App) output(doc any, text func()) error {
	if a.json {
		return a.printJSON(doc)
	}
	text()
	return nil
}

// content writes raw bytes to stdout; with --json they are the member content
// of doc, or content_b64 where they are not UTF-8.
func (a *App) content(doc map[string]any, r io.Reader) error {
	if !a.json {
		_, err := io.Copy(a.Stdout, r)
		return err
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	if utf8.Valid(data) {
		doc["content"] = string(data)
	} else {
		doc["content_b64"] = data
	}
	return a.printJSON(doc)
}

// count is a number with the right form of a noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// rootCommand builds the command tree.
func (a *App) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "agentenv",
		Short: "Try N ways at once, keep the one that works",
		Long: `agentenv forks a whole environment (installed packages, build outputs,
databases, .env, not only tracked files), runs candidate commands side by side,
tests each in a fork of its own, and makes the first passing tree the new HEAD,
or changes nothing. Every state is a snapshot that checkout brings back.

Exit status: 0 done; 1 the answer is no; 2 usage; 3 agentenv itself failed;
130 interrupted; 143 terminated. exec and shell pass on their command's own.`,
		Version:       versionString(),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noSuchCommand,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		msg, _, _ := strings.Cut(err.Error(), ": strconv.")
		return usage(msg, "see `"+c.CommandPath()+" --help`")
	})
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		if a.root == "" && c.Flags().Changed("root") {
			return usage("--root is empty", "name a directory, or leave it out")
		}
		_, err := a.colours(a.Stderr)
		return err
	}
	f := root.PersistentFlags()
	f.StringVar(&a.root, "root", "", "the environment's `DIR` (default: AGENTENV_ROOT; the environment taken from this directory; /agentfs; the user's default)")
	f.StringVar(&a.backend, "backend", "", "how trees are stored and forked: auto, btrfs, overlay or copy (default: AGENTENV_BACKEND, else auto)")
	f.BoolVar(&a.json, "json", false, "write exactly one JSON document to stdout")
	f.BoolVarP(&a.quiet, "quiet", "q", false, "say nothing but data and errors")
	f.BoolVarP(&a.verbose, "verbose", "v", false, "say more")
	f.StringVar(&a.color, "color", "auto", "colours: auto, always or never (NO_COLOR is obeyed)")
	root.SetHelpCommand(helpCommand())
	root.AddCommand(a.planCommand(), a.versionCommand())
	root.AddCommand(a.linuxCommands()...)
	checkArgs(root)
	return root
}

// helpCommand is cobra's, which takes a command that is not there for no error.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Say what a command does",
		RunE: func(c *cobra.Command, args []string) error {
			cmd, rest, err := c.Root().Find(args)
			if err != nil {
				return noSuchCommand(c.Root(), args)
			}
			if len(rest) > 0 {
				return noSuchCommand(cmd, rest)
			}
			return cmd.Help()
		},
	}
}

func noSuchCommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if c.SuggestionsMinimumDistance <= 0 {
		c.SuggestionsMinimumDistance = 2 // cobra's own default, which it sets for the root alone
	}
	hint := "see `" + c.CommandPath() + " --help`"
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		hint = "did you mean `" + c.CommandPath() + " " + near[0] + "`?"
	}
	name := strings.TrimPrefix(c.CommandPath()+" "+args[0], c.Root().Name()+" ")
	return usage(fmt.Sprintf("no command %q", name), hint)
}

// checkArgs makes a wrong number of arguments a usage error like any other.
func checkArgs(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			if err == nil || errors.Is(err, errUsage) {
				return err
			}
			msg := fmt.Sprintf("%s: too many arguments (%d)", c.Name(), len(args))
			if operand := firstOperand(c); len(args) == 0 && operand != "" {
				msg = c.Name() + " needs a " + operand
			}
			return usage(msg, "usage: "+c.UseLine())
		}
	}
	for _, sub := range c.Commands() {
		checkArgs(sub)
	}
}

// firstOperand is what a command's first argument is called in its usage line.
func firstOperand(c *cobra.Command) string {
	for _, word := range strings.Fields(c.Use)[1:] {
		if word[0] >= 'A' && word[0] <= 'Z' {
			name, _, _ := strings.Cut(word, "[")
			return strings.TrimRight(name, "…")
		}
	}
	return ""
}

// colours says whether to colour what goes to w.
func (a *App) colours(w any) (bool, error) {
	switch a.color {
	case "always":
		return true, nil
	case "never":
		return false, nil
	case "auto":
		return a.Getenv("NO_COLOR") == "" && a.Getenv("TERM") != "dumb" && isTerminal(w), nil
	}
	return false, usage(fmt.Sprintf("--color %q", a.color), "it is auto, always or never")
}
