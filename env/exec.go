package env

import (
	"context"
	"strings"

	"github.com/agentenv/agentenv/env/sandbox"
)

// messageMax bounds a command line that becomes a snapshot's message, in
// bytes: enough to know it again in a log.
const messageMax = 200

// ExecResult says what a command in the work tree came to.
type ExecResult struct {
	sandbox.Result
	// Head is HEAD afterwards; Created says whether it is a new snapshot.
	Head    Snapshot
	Created bool
}

// Exec saves what the work tree holds and no snapshot does, runs a command in
// it, and saves what that changed, unless noCommit is true. started is given
// the process, so that signals can be passed on.
func (e *Env) Exec(ctx context.Context, r Run, noCommit bool, started func(sandbox.Process)) (ExecResult, error) {
	tree, err := e.ensureWork(ctx)
	if err != nil {
		return ExecResult{}, err
	}
	saved, err := e.SaveWork(ctx, "before "+messageOf(r.Args))
	if err != nil {
		return ExecResult{}, err
	}
	if saved != nil {
		e.opts.notify("changes made since HEAD were saved as %s", saved.ID)
	}
	p, err := e.start(ctx, tree, r)
	if err != nil {
		return ExecResult{}, err
	}
	started(p)
	res := ExecResult{}
	if res.Result, err = p.Wait(); err != nil {
		return res, err
	}
	if !noCommit {
		// What the command did is kept, however it ended.
		s, err := e.commitHead(context.WithoutCancel(ctx), messageOf(r.Args), KindExec)
		if err != nil {
			return res, err
		}
		res.Created = s != nil
	}
	res.Head = e.Head()
	return res, nil
}

// messageOf is a command as one line of bounded length.
func messageOf(args []string) string {
	s := strings.Join(strings.Fields(strings.Join(args, " ")), " ")
	if len(s) > messageMax {
		s = strings.ToValidUTF8(s[:messageMax], "") + "…"
	}
	return s
}
