//go:build linux

package envtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func itoa(n int) string { return strconv.Itoa(n) }

// testOutput: streams carry everything, block nobody and leak nothing.
func testOutput(t *testing.T, s Subject) {
	t.Run("no input", func(t *testing.T) {
		b := newBench(t, s)
		assert.Equal(t, b.sh("read x || echo end"), "end\n")
	})
	t.Run("input", func(t *testing.T) {
		b := newBench(t, s)
		write(t, b.dir+"/in", "hello\n")
		f, err := os.Open(b.dir + "/in")
		assert.NilError(t, err)
		defer f.Close()
		b.command.Stdin = f
		assert.Equal(t, b.sh("cat"), "hello\n")
	})
	t.Run("order of both streams", func(t *testing.T) {
		b := newBench(t, s)
		assert.Equal(t, b.sh("for i in 1 2 3; do echo o$i; echo e$i >&2; done"), "o1\ne1\no2\ne2\no3\ne3\n")
	})
	t.Run("long line", func(t *testing.T) {
		b := newBench(t, s)
		out := b.sh("head -c 300000 /dev/zero | tr '\\0' x; echo; echo after")
		assert.Equal(t, out, strings.Repeat("x", 300000)+"\nafter\n")
	})
	t.Run("last lines", func(t *testing.T) { testLastLines(t, s) })
	t.Run("file as stream", func(t *testing.T) {
		b := newBench(t, s)
		f, err := os.Create(b.dir + "/out")
		assert.NilError(t, err)
		defer f.Close()
		b.command.Args = []string{"sh", "-c", "echo direct"}
		b.command.Stdout, b.command.Stderr = f, nil
		p, err := s.Executor.Start(context.Background(), b.command)
		assert.NilError(t, err)
		_, err = p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, read(t, b.dir+"/out"), "direct\n")
	})
	t.Run("a held pipe", func(t *testing.T) {
		b := newBench(t, s)
		began := time.Now()
		assert.Equal(t, b.sh("sleep 60 & setsid sleep 60 & echo done"), "done\n")
		assert.Assert(t, time.Since(began) < 10*time.Second)
	})
	t.Run("a slow writer", func(t *testing.T) {
		b := newBench(t, s)
		var w slowWriter
		b.command.Args = []string{"sh", "-c", "echo first; head -c 60000 /dev/zero"}
		b.command.Stdout = &w
		p, err := s.Executor.Start(context.Background(), b.command)
		assert.NilError(t, err)
		_, err = p.Wait()
		assert.NilError(t, err)
		assert.Equal(t, w.n.Load(), int64(60006))
	})
	t.Run("a writer that fails", func(t *testing.T) {
		b := newBench(t, s)
		b.command.Args = []string{"sh", "-c", "head -c 1000000 /dev/zero; exit 4"}
		b.command.Stdout = brokenWriter{}
		p, err := s.Executor.Start(context.Background(), b.command)
		assert.NilError(t, err)
		r, err := p.Wait()
		assert.ErrorIs(t, err, errBroken)
		assert.Equal(t, r.ExitCode, 4)
	})
	t.Run("much", func(t *testing.T) { testMuchOutput(t, s) })
	t.Run("descriptors", func(t *testing.T) { testDescriptors(t, s) })
}

var errBroken = errors.New("broken writer")

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

func testLastLines(t *testing.T, s Subject) {
	rounds := 20
	if Long() {
		rounds = 500
	}
	b := newBench(t, s)
	for range rounds {
		r := b.run("sh", "-c", "seq 1 20000; exit 1")
		assert.Equal(t, r.ExitCode, 1)
		assert.Assert(t, strings.HasSuffix(r.out, "\n19999\n20000\n"), "lost the end after %d bytes", len(r.out))
	}
}

// counter counts what is written to it.
type counter struct{ n atomic.Int64 }

func (c *counter) Write(b []byte) (int, error) { c.n.Add(int64(len(b))); return len(b), nil }

// slowWriter is still busy with the first bytes when the command has ended.
type slowWriter struct{ counter }

func (w *slowWriter) Write(b []byte) (int, error) {
	time.Sleep(100 * time.Millisecond)
	return w.counter.Write(b)
}

func testMuchOutput(t *testing.T, s Subject) {
	size := int64(200 << 20)
	if Long() {
		size = 2 << 30
	}
	b := newBench(t, s)
	var n counter
	b.command.Args = []string{"sh", "-c", fmt.Sprintf("yes 0123456789abcdef | head -c %d", size)}
	b.command.Stdout, b.command.Stderr = &n, io.Discard
	before := peakMemory(t)
	p, err := s.Executor.Start(context.Background(), b.command)
	assert.NilError(t, err)
	_, err = p.Wait()
	assert.NilError(t, err)
	assert.Equal(t, n.n.Load(), size)
	grown := peakMemory(t) - before
	assert.Assert(t, grown < 32<<10, "memory grew by %d KiB", grown)
}

// peakMemory is this process's largest resident size so far, in KiB.
func peakMemory(t *testing.T) int {
	t.Helper()
	for line := range strings.Lines(read(t, "/proc/self/status")) {
		var kib int
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kib); err == nil {
			return kib
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// testDescriptors: what this process has open, inherited or not, is not the
// command's.
func testDescriptors(t *testing.T, s Subject) {
	b := newBench(t, s)
	r, w, err := os.Pipe()
	assert.NilError(t, err)
	defer r.Close()
	defer w.Close()
	leak, err := unix.Dup(int(w.Fd())) // without close-on-exec
	assert.NilError(t, err)
	defer unix.Close(leak)
	var outs [8]bytes.Buffer
	done := make(chan error)
	for i := range outs { // concurrent starts must not see each other's either
		b := newBench(t, s)
		b.command.Args = []string{"ls", "/proc/self/fd"}
		b.command.Stdout = &outs[i]
		go func() {
			p, err := s.Executor.Start(context.Background(), b.command)
			if err == nil {
				_, err = p.Wait()
			}
			done <- err
		}()
	}
	for range outs {
		assert.NilError(t, <-done)
	}
	for i := range outs { // 3 is the directory that ls reads
		assert.Equal(t, outs[i].String(), "0\n1\n2\n3\n")
	}
	assert.Equal(t, b.sh("ls /proc/$$/fd | head -3 | tr -d '\\n'"), "012")
}
