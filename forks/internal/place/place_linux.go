// Package place makes a directory that is not of a store equal to a snapshot.
package place

import (
	"context"

	"github.com/agentenv/agentenv/forks"
)

// Reader is what of a [forks.Driver] is needed here.
type Reader interface {
	Compare(ctx context.Context, base forks.ID, src forks.Source) (forks.Changes, error)
	View(ctx context.Context, id forks.ID) (forks.View, error)
}

// Replace makes src.Dir equal to snapshot id; see [forks.Driver].
func Replace(_ context.Context, _ Reader, _ forks.ID, _ forks.Source) (forks.Changes, error) {
	return forks.Changes{}, forks.ErrUnsupported
}
