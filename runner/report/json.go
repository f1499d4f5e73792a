package report

import (
	"encoding/json"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/agentenv/agentenv/runner"
)

// JSON writes a result as one document, as result.json has it.
func JSON(w io.Writer, r *runner.Result) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// Stream writes events as one JSON object a line. After the first failure it
// writes nothing more, so that what is there stays readable.
type Stream struct {
	e   *json.Encoder
	err atomic.Pointer[error]
}

// NewStream writes to w.
func NewStream(w io.Writer) *Stream {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return &Stream{e: e}
}

// Event is a [runner.Sink].
func (s *Stream) Event(e runner.Event) {
	if s.err.Load() != nil {
		return
	}
	if err := s.e.Encode(e); err != nil {
		s.err.Store(&err)
	}
}

// Err is the first failure.
func (s *Stream) Err() error {
	err := s.err.Load()
	if err == nil {
		return nil
	}
	return fmt.Errorf("write the events: %w", *err)
}
