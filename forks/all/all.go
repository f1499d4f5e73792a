// Package all is the list of the drivers, in the order in which they are
// tried. It is a list, not a registry: what is not named here does not exist.
package all

import (
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/btrfs"
	"github.com/agentenv/agentenv/forks/copytree"
	"github.com/agentenv/agentenv/forks/overlay"
)

// Backends returns the drivers, the best first.
func Backends() []forks.Backend {
	return []forks.Backend{btrfs.Backend(), overlay.Backend(), copytree.Backend()}
}
