package runner

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/specs"
)

// judged lets attempts pass at the given times, by their index, and returns
// the winner's index and when the others were cancelled.
func judged(t *testing.T, at map[int]time.Duration) (winner int, cancelled time.Duration) {
	winner = -1
	synctest.Test(t, func(t *testing.T) {
		tr := &tournament{Options: Options{Plan: &specs.Plan{}, Now: time.Now}, res: &Result{}, bus: newBus("r", time.Now, nil)}
		for range 4 {
			tr.attempts = append(tr.attempts, newAttempt(tr, &specs.Candidate{Name: "c"}, 1))
		}
		tr.passes = make(chan pass, len(tr.attempts))
		start := time.Now()
		var passing sync.WaitGroup
		for i, d := range at {
			passing.Go(func() {
				time.Sleep(d)
				tr.passes <- pass{tr.attempts[i], time.Now()}
			})
		}
		go func() {
			passing.Wait()
			time.Sleep(time.Hour)
			close(tr.passes)
		}()
		tr.judge(func() { cancelled = time.Since(start) })
		time.Sleep(2 * time.Hour) // until the channel is closed
		if tr.winner != nil {
			winner = tr.winner.index
		}
	})
	return winner, cancelled
}

func TestJudge(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name string
		at   map[int]time.Duration
		want int
	}{
		{"nobody", nil, -1},
		{"one", map[int]time.Duration{2: 5 * ms}, 2},
		{"the first by the clock, not by the plan", map[int]time.Duration{0: 8 * ms, 3: 5 * ms}, 3},
		{"the same instant: by the plan", map[int]time.Duration{3: 5 * ms, 1: 5 * ms, 2: 5 * ms}, 1},
		{"within a scheduling step: by the plan", map[int]time.Duration{3: 5 * ms, 1: 5*ms + tie/2}, 1},
		{"past it: by the clock", map[int]time.Duration{3: 5 * ms, 1: 5*ms + 2*tie}, 3},
		{"later in the plan and later: no matter", map[int]time.Duration{1: 5 * ms, 2: 5*ms + tie/2}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, cancelled := judged(t, c.at)
			assert.Equal(t, got, c.want)
			if c.want >= 0 {
				assert.Assert(t, cancelled <= 5*ms+tie, "the others are cancelled at once, not after %s", cancelled)
			}
		})
	}
}
