package overlay

import (
	"context"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/layer/driver"
)

// Name is the word users write for this driver.
const Name = "overlay"

// Backend returns the driver.
func Backend() forks.Backend { return forks.Backend{Name: Name, Probe: probe, Open: open} }

func open(_ context.Context, dir string) (forks.Driver, error) {
	return driver.Open(dir, driver.Options{Name: Name, Mounted: true})
}
