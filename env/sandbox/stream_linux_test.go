package sandbox

import (
	"bytes"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

// gate is a writer that takes nothing until it is opened.
type gate struct {
	open chan struct{}
	bytes.Buffer
}

func (g *gate) Write(b []byte) (int, error) {
	<-g.open
	return g.Buffer.Write(b)
}

// All that was in a pipe when the command ended is taken, also of a pipe that it
// made larger, while somebody outside holds it and writes on.
func TestAllOfAPipeIsTaken(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	s, err := newStreams(Command{Stdout: g})
	assert.NilError(t, err)
	in := s.child[1]
	for _, size := range []int{4 << 20, 1 << 20} { // the first is for root
		if _, err = unix.FcntlInt(in.Fd(), unix.F_SETPIPE_SZ, size); err == nil {
			break
		}
	}
	size, err := unix.FcntlInt(in.Fd(), unix.F_GETPIPE_SZ, 0)
	assert.NilError(t, err)
	text := bytes.Repeat([]byte("0123456789abcde\n"), size/16)
	_, err = in.Write(text)
	assert.NilError(t, err)
	fd, err := unix.Dup(int(in.Fd()))
	assert.NilError(t, err)
	outside := os.NewFile(uintptr(fd), "outside")
	defer outside.Close()
	go func() {
		for err := error(nil); err == nil; time.Sleep(time.Millisecond) {
			_, err = outside.WriteString("outside\n")
		}
	}()
	s.release()
	time.AfterFunc(100*time.Millisecond, func() { close(g.open) })
	start := time.Now()
	assert.NilError(t, s.finish())
	assert.Assert(t, time.Since(start) < 5*time.Second)
	assert.Assert(t, bytes.HasPrefix(g.Bytes(), text), "%d bytes of %d", g.Len(), len(text))
}
