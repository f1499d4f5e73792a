//go:build !linux || !cgo || no_btrfs

package btrfs

import (
	"context"
	"fmt"
	"runtime"

	"github.com/agentenv/agentenv/forks"
)

// Backend returns the driver, which this program was built without.
func Backend() forks.Backend {
	why, fix := "this agentenv was built without cgo, or with the tag no_btrfs",
		"build it with a C compiler and Linux's headers (gcc, libc6-dev): CGO_ENABLED=1 go install github.com/agentenv/agentenv/cmd/agentenv@latest"
	if runtime.GOOS != "linux" {
		why, fix = "needs Linux, this is "+runtime.GOOS, "run agentenv on Linux or in a Linux virtual machine"
	}
	return forks.Backend{
		Name: Name,
		Probe: func(context.Context, string) forks.Probe {
			return forks.Probe{Name: Name, Detail: why, Lost: lost, Fix: fix}
		},
		Open: func(_ context.Context, dir string) (forks.Driver, error) {
			return nil, &forks.Error{Op: "open", ID: dir, Driver: Name, Err: fmt.Errorf("%w: %s: %s", forks.ErrUnsupported, why, fix)}
		},
	}
}
