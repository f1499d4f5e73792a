package main

import (
	"fmt"
	"sync"
	"time"
)

// progressAfter is how long a copy may take before its progress is shown: what
// is over in a blink needs none.
const progressAfter = 2 * time.Second

// progress returns a function that shows on the terminal how much was copied,
// or nil off a terminal.
func (a *App) progress() func(files, bytes int64) {
	if a.quiet || a.json || !isTerminal(a.Stderr) {
		return nil
	}
	var mu sync.Mutex
	begin := a.Now()
	last := begin.Add(progressAfter)
	return func(files, bytes int64) {
		mu.Lock()
		defer mu.Unlock()
		now := a.Now()
		if now.Before(last) {
			return
		}
		last = now.Add(200 * time.Millisecond)
		fmt.Fprintf(a.Stderr, "\r\x1b[K%d files, %s\r", files, humanBytes(bytes))
	}
}

// humanBytes is a number of bytes as people read it.
func humanBytes(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/unit, 0
	for ; v >= unit && i < 4; i++ {
		v /= unit
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[i])
}
