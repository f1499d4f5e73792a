package sandbox

import (
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// bufferSize is what one stream of a running command keeps in memory, in
// bytes.
const bufferSize = 32 << 10

// streams are a command's descriptors 0 to 2 and what feeds our writers from
// them.
type streams struct {
	child  [3]*os.File
	opened []*os.File // those of child that are ours to close
	pumps  []*pump
}

// newStreams opens what a command's streams need.
func newStreams(c Command) (*streams, error) {
	s := &streams{}
	var err error
	if s.child[0] = c.Stdin; c.Stdin == nil {
		s.child[0], err = s.null(os.O_RDONLY)
	}
	if err == nil {
		s.child[1], err = s.output(c.Stdout)
	}
	if err == nil && c.Stderr != nil && same(c.Stderr, c.Stdout) {
		s.child[2] = s.child[1] // one pipe, so that the order of lines holds
	} else if err == nil {
		s.child[2], err = s.output(c.Stderr)
	}
	if err != nil {
		s.release()
		s.abandon()
		return nil, err
	}
	for _, p := range s.pumps {
		p.wait.Go(p.run)
	}
	return s, nil
}

// same compares two writers whose types may not be comparable.
func same(a, b io.Writer) (eq bool) {
	defer func() { _ = recover() }()
	return a == b
}

func (s *streams) null(flag int) (*os.File, error) {
	f, err := os.OpenFile(os.DevNull, flag, 0)
	s.opened = append(s.opened, f)
	return f, err
}

func (s *streams) output(w io.Writer) (*os.File, error) {
	switch w := w.(type) {
	case nil:
		return s.null(os.O_WRONLY)
	case *os.File:
		return w, nil
	}
	r, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s.opened = append(s.opened, in)
	s.pumps = append(s.pumps, &pump{from: r, to: w})
	return in, nil
}

// release closes our copies of the command's ends.
func (s *streams) release() {
	if s == nil {
		return
	}
	for _, f := range s.opened {
		f.Close()
	}
	s.opened = nil
}

// abandon ends the pumps of a command that never started.
func (s *streams) abandon() {
	if s == nil {
		return
	}
	for _, p := range s.pumps {
		p.from.Close()
		p.wait.Wait()
	}
}

// finish returns when all that dead processes wrote has reached the writers.
func (s *streams) finish() error {
	var errs []error
	for _, p := range s.pumps {
		p.from.SetReadDeadline(time.Now())
		p.wait.Wait()
		p.from.Close()
		errs = append(errs, p.err)
	}
	return errors.Join(errs...)
}

// pump copies from a pipe to a writer.
type pump struct {
	from *os.File
	to   io.Writer
	wait sync.WaitGroup
	err  error // of the writer; the rest is read and dropped, so that nobody blocks
}

func (p *pump) run() {
	buf := make([]byte, bufferSize)
	for {
		n, err := p.from.Read(buf)
		p.write(buf[:n])
		if errors.Is(err, os.ErrDeadlineExceeded) {
			p.drain(buf)
			return
		}
		if err != nil {
			return
		}
	}
}

func (p *pump) write(b []byte) {
	if len(b) > 0 && p.err == nil {
		_, p.err = p.to.Write(b)
	}
}

// maxDrain bounds, in bytes, what drain takes beyond what was there when it began.
const maxDrain = 1 << 20

// drain takes what is there now, and does not wait for an end: somebody outside
// may have been given a descriptor of it, and write on.
func (p *pump) drain(buf []byte) {
	p.from.SetReadDeadline(time.Time{})
	raw, err := p.from.SyscallConn()
	if err != nil {
		return
	}
	inside := func() (n int) {
		raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // FIONREAD elsewhere
		return n
	}
	left := inside()
	for most := max(left, maxDrain); err == nil && left > 0 && most > 0; {
		n := 0
		raw.Read(func(fd uintptr) bool {
			n, err = unix.Read(int(fd), buf[:min(left, len(buf))])
			return true
		})
		if err == unix.EINTR {
			err = nil
			continue
		}
		if n <= 0 {
			return
		}
		p.write(buf[:n])
		most -= n
		if left -= n; left == 0 {
			left = inside() // a terminal gives its output away in portions
		}
	}
}
