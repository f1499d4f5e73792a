package sandbox

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"time"
)

// A log's times are in a file of their own: a head that says where the log was
// cut, and records of a place and a time, both in the order of what was
// written. A record is made when a line begins in what is written, at most once
// a millisecond, and, past the first timesBurst, at most once every timesEvery
// bytes: so the records of either half of a log are bounded, and as many are
// kept of the first and of the last.
const (
	timesSuffix = ".times"
	timesMagic  = "agentenv times 1"
	timesHead   = len(timesMagic) + 3*8
	timesRecord = 2 * 8
	timesBurst  = 4096
	timesEvery  = 64
)

// cut says where a log was put together of its two ends: what the log holds
// from tail on was written at place from, and what stands between head and tail
// was not written at all. All are in bytes.
type cut struct{ head, tail, from int64 }

// timesWriter keeps the times of a log. It never makes the log fail: its first
// error is kept for close.
type timesWriter struct {
	ends
	now   func() time.Time
	fresh bool // the next byte begins a line
	ms    int64
	at    int64
	room  int64 // in bytes of the log: a record takes timesEvery
	err   error
}

// newTimesWriter makes the file beside a log whose halves are of half bytes.
func newTimesWriter(log string, half int64) (*timesWriter, error) {
	f, err := createLog(log + timesSuffix)
	if err != nil {
		return nil, err
	}
	// Until the log is closed it is one piece from its beginning on.
	_, err = f.Write(header(cut{1 << 62, 1 << 62, 1 << 62}))
	if err != nil {
		f.Close()
		return nil, err
	}
	records := timesBurst + half/timesEvery
	return &timesWriter{
		ends: ends{file: f, half: records * timesRecord},
		now:  time.Now, fresh: true, room: timesBurst * timesEvery,
	}, nil
}

func header(c cut) []byte {
	b := []byte(timesMagic)
	for _, n := range []int64{c.head, c.tail, c.from} {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	return b
}

// note records that b is written now, at place at.
func (t *timesWriter) note(at int64, b []byte) {
	if len(b) == 0 {
		return
	}
	begins := t.fresh || bytes.IndexByte(b[:len(b)-1], '\n') >= 0
	t.fresh = b[len(b)-1] == '\n'
	ms := t.now().UnixMilli()
	t.room = min(t.room+at-t.at, timesBurst*timesEvery)
	t.at = at
	if !begins || ms == t.ms || t.room < timesEvery || t.err != nil {
		return
	}
	t.ms = ms
	t.room -= timesEvery
	var r [timesRecord]byte
	binary.LittleEndian.PutUint64(r[:], uint64(at))
	binary.LittleEndian.PutUint64(r[8:], uint64(ms))
	_, t.err = t.write(r[:])
}

func (t *timesWriter) close(c cut) error {
	if t.err == nil && t.ring != nil {
		t.err = t.append(t.end())
	}
	if t.err == nil {
		_, t.err = t.file.WriteAt(header(c), 0)
	}
	if err := errors.Join(t.err, t.ends.close()); err != nil {
		return fmt.Errorf("write the times of the log: %w", err)
	}
	return nil
}

// Times say when the lines of a [Log] were written.
type Times struct {
	cut     cut
	records []byte
}

// ReadTimes reads the times of the log at path. It fails with [fs.ErrNotExist]
// if there are none: of a log of an older version, for instance.
func ReadTimes(path string) (*Times, error) {
	f, err := os.Open(path + timesSuffix)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const most = 64 << 20 // far more than a log of any use has
	data, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return nil, err
	}
	if len(data) < timesHead || string(data[:len(timesMagic)]) != timesMagic {
		return nil, fmt.Errorf("%s: these are no times of a log", path+timesSuffix)
	}
	n := func(i int) int64 { return int64(binary.LittleEndian.Uint64(data[len(timesMagic)+8*i:])) }
	return &Times{cut: cut{n(0), n(1), n(2)}, records: data[timesHead:]}, nil
}

// At is when the line that begins at an offset of the log's file was written,
// to the millisecond; the zero time if that is not known. Of lines that came in
// very small pieces, very many, it may be the time of one shortly before.
func (t *Times) At(offset int64) time.Time {
	place := offset
	if offset >= t.cut.tail {
		place = t.cut.from + offset - t.cut.tail
	}
	field := func(i, k int) int64 { return int64(binary.LittleEndian.Uint64(t.records[i*timesRecord+8*k:])) }
	i := sort.Search(len(t.records)/timesRecord, func(i int) bool { return field(i, 0) > place }) - 1
	if i < 0 {
		return time.Time{}
	}
	return time.UnixMilli(field(i, 1))
}
