package forks

import (
	"context"
	"fmt"
	"strings"
)

// Auto is the name that stands for the first driver that works here.
const Auto = "auto"

// Backend is a driver that can be opened: its name, whether it works on a
// file system, and how to open it.
type Backend struct {
	Name string
	// Probe tries the driver in the directory dir, which exists, and leaves
	// nothing there.
	Probe func(ctx context.Context, dir string) Probe
	// Open opens the store whose root is dir, an absolute path.
	Open func(ctx context.Context, dir string) (Driver, error)
}

// Probe says whether a driver was found to work, and why not.
type Probe struct {
	Name string
	OK   bool
	// Detail is one line: what was found, or what is missing.
	Detail string
	// Lost is what a user has to do without when the driver does not work.
	Lost string
	// Fix is the command or step that makes it work; empty if there is none.
	Fix string
}

// Choose probes the backends in order on dir and returns the first that works;
// with a name other than [Auto], that one or an error. The probes made are
// returned in any case.
func Choose(ctx context.Context, backends []Backend, name, dir string) (Backend, []Probe, error) {
	var probes []Probe
	var why []string
	for _, b := range backends {
		if name != Auto && name != b.Name {
			continue
		}
		p := b.Probe(ctx, dir)
		probes = append(probes, p)
		if p.OK {
			return b, probes, nil
		}
		why = append(why, fmt.Sprintf("%s: %s", p.Name, p.Detail))
	}
	if len(probes) == 0 {
		return Backend{}, nil, &Error{Op: "choose", ID: name, Err: fmt.Errorf("%w: no such backend", ErrUnsupported)}
	}
	return Backend{}, probes, &Error{Op: "choose", ID: dir, Err: fmt.Errorf("%w: %s", ErrUnsupported, strings.Join(why, "; "))}
}
