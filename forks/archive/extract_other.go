//go:build !linux

package archive

import (
	"context"
	"errors"
	"io"
)

// Extract needs Linux: elsewhere it returns an error that is
// [errors.ErrUnsupported].
func Extract(_ context.Context, _ io.Reader, _ string, _ Options) (Result, error) {
	return Result{}, &Error{Reason: "cannot be unpacked on this system: that needs Linux", Err: errors.ErrUnsupported}
}
