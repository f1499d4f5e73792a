//go:build linux

package fsat

import (
	"context"
	"runtime"
	"sync"
)

// Workers is how many goroutines walk a tree: file system calls of one
// directory do not overlap, and more than the processors gains little.
func Workers() int { return min(runtime.GOMAXPROCS(0), 16) }

// helpAt is how many tasks must wait before another goroutine helps: to wake
// one costs more than a few small files do.
const helpAt = 4

// Run does the tasks first and those that tasks push, the last first, on up to
// n goroutines, until none is left or one fails. Tasks that are not done any
// more are given to drop.
func Run[T any](ctx context.Context, n int, first []T, do func(worker int, t T, push func(T)) error, drop func(T)) error {
	p := &pool[T]{stack: first, n: n, started: 1}
	p.cond.L = &p.mu
	p.help = func(w int) { p.wg.Go(func() { p.work(ctx, w, do) }) }
	p.work(ctx, 0, do)
	p.wg.Wait()
	for _, t := range p.stack {
		drop(t)
	}
	return p.err
}

type pool[T any] struct {
	wg   sync.WaitGroup
	help func(worker int)

	mu      sync.Mutex
	cond    sync.Cond
	stack   []T
	n       int
	started int
	busy    int
	err     error
}

func (p *pool[T]) push(t T) {
	p.mu.Lock()
	p.stack = append(p.stack, t)
	p.callHelp()
	p.mu.Unlock()
	p.cond.Signal()
}

// callHelp starts another worker if there is enough to do. The lock is held.
func (p *pool[T]) callHelp() {
	if p.started < p.n && len(p.stack) >= helpAt {
		p.started++
		p.help(p.started - 1)
	}
}

func (p *pool[T]) work(ctx context.Context, w int, do func(int, T, func(T)) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		for len(p.stack) == 0 && p.busy > 0 && p.err == nil {
			p.cond.Wait()
		}
		if len(p.stack) == 0 || p.err != nil {
			p.cond.Broadcast()
			return
		}
		if err := context.Cause(ctx); err != nil {
			p.err = err
			continue
		}
		t := p.stack[len(p.stack)-1]
		p.stack = p.stack[:len(p.stack)-1]
		p.busy++
		p.callHelp()
		p.mu.Unlock()
		err := do(w, t, p.push)
		p.mu.Lock()
		p.busy--
		if err != nil && p.err == nil {
			p.err = err
		}
	}
}
