//go:build !linux

package overlay

import (
	"context"
	"fmt"
	"runtime"

	"github.com/agentenv/agentenv/forks"
)

// Name is the word users write for this driver.
const Name = "overlay"

// Backend returns the driver, which works on Linux only.
func Backend() forks.Backend {
	why := "needs Linux, this is " + runtime.GOOS
	return forks.Backend{
		Name: Name,
		Probe: func(context.Context, string) forks.Probe {
			return forks.Probe{Name: Name, Detail: why, Lost: "forks and checkouts in constant time", Fix: "run agentenv on Linux or in a Linux virtual machine"}
		},
		Open: func(_ context.Context, dir string) (forks.Driver, error) {
			return nil, &forks.Error{Op: "open", ID: dir, Driver: Name, Err: fmt.Errorf("%w: %s", forks.ErrUnsupported, why)}
		},
	}
}
