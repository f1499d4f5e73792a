package runner

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

// newLines returns a splitter with a clock of its own, and what it emitted.
func newLines(now *time.Time) (*lines, *[]string, *int64) {
	var got []string
	var dropped int64
	l := &lines{now: func() time.Time { return *now }, emit: func(s string, n int64) {
		got = append(got, s)
		dropped += n
	}}
	return l, &got, &dropped
}

func TestLines(t *testing.T) {
	long := strings.Repeat("x", 300000)
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"a\nb\n", "a|b"},
		{"a\n\nb", "a||b"},
		{"progress 1\rprogress 2\r\n", "progress 2"},
		{"progress 1\rprogress 2\r\r", "progress 2"},
		{"a\r\nb\r\n\r\n", "a|b|"},
		{long + "\nafter\n", long[:lineMax] + "…|after"},
		{long, long[:lineMax] + "…"},
		{long + "\rlast", "last"},
		{"x" + strings.Repeat("é", lineMax), "x" + strings.Repeat("é", (lineMax-1)/2) + "…"},
	} {
		for _, step := range []int{1, 7, 4096, len(c.in) + 1} {
			now := time.Now()
			l, got, _ := newLines(&now)
			for in := c.in; in != ""; {
				n := min(step, len(in))
				l.write([]byte(in[:n]))
				in = in[n:]
			}
			l.flush()
			assert.Equal(t, strings.Join(*got, "|"), c.want, "in steps of %d", step)
		}
	}
}

// Whatever is written in whatever pieces at whatever pace: every line is emitted
// or counted, in order, and never more than lineRate in a second.
func TestLinesAreEmittedOrCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(0, 0)
		l, got, dropped := newLines(&now)
		total, perSecond := 0, 0
		for range rapid.IntRange(1, 20).Draw(t, "writes") {
			var b strings.Builder
			for range rapid.IntRange(0, 3*lineRate/2).Draw(t, "lines") {
				fmt.Fprintf(&b, "%d\n", total)
				total++
			}
			text := b.String()
			cut := rapid.IntRange(0, len(text)).Draw(t, "cut")
			before := len(*got)
			l.write([]byte(text[:cut]))
			l.write([]byte(text[cut:]))
			perSecond += len(*got) - before
			if perSecond > lineRate {
				t.Fatalf("%d lines in a second", perSecond)
			}
			if rapid.Bool().Draw(t, "wait") {
				now, perSecond = now.Add(time.Second), 0
			}
		}
		now = now.Add(time.Second)
		l.flush()
		seen := len(*got)
		if *dropped > 0 && (*got)[seen-1] == "" {
			seen-- // the last says only how many were dropped
		}
		if seen+int(*dropped) != total {
			t.Fatalf("%d emitted and %d dropped of %d", seen, *dropped, total)
		}
		last := -1
		for _, s := range (*got)[:seen] {
			var n int
			if _, err := fmt.Sscan(s, &n); err != nil || n <= last {
				t.Fatalf("%q after %d", s, last)
			}
			last = n
		}
	})
}

// A reader that takes nothing for a while misses lines, learns how many, and
// gets everything else.
func TestSlowReader(t *testing.T) {
	open := make(chan struct{})
	var got []Event
	b := newBus("r", time.Now, []Sink{func(e Event) {
		<-open
		got = append(got, e)
	}})
	const lines = 3 * queuedLines
	for range lines {
		b.send(Event{Type: EventOutput, Candidate: "a", Line: "x"})
		b.send(Event{Type: EventRunning, Candidate: "b"})
	}
	b.send(Event{Type: EventStatus, Candidate: "a"})
	b.send(Event{Type: EventEnded})
	close(open)
	b.close()
	var seen, running int
	var dropped int64
	for _, e := range got {
		dropped += e.Dropped
		switch {
		case e.Type == EventRunning:
			running++
		case e.Type == EventOutput && e.Line != "":
			seen++
		case e.Type == EventStatus:
			assert.Equal(t, int64(seen)+dropped, int64(lines), "told before the verdict")
		}
	}
	assert.Equal(t, running, lines)
	assert.Assert(t, seen >= queuedLines && dropped > 0, "%d seen, %d dropped", seen, dropped)
	assert.Equal(t, got[len(got)-1].Type, EventEnded)
}
