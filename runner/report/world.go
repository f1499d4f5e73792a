package report

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/agentenv/agentenv/runner"
	"github.com/agentenv/agentenv/specs"
)

// world is what is in force, in a line.
func world(isolation string, networks []string, l *specs.Limits) string {
	var parts []string
	if isolation != "" {
		parts = append(parts, "isolation: "+clean(isolation))
	}
	if len(networks) > 0 {
		parts = append(parts, "network: "+clean(strings.Join(networks, ", ")))
	}
	return strings.Join(append(parts, "limits: "+limits(l)), "; ")
}

// networksOf are those of a result's commands, each once; none are known of
// results of before they were noted.
func networksOf(r *runner.Result) []string {
	list := []string{r.Network}
	for _, a := range r.Attempts {
		list = append(list, a.Network)
		if a.Test != nil {
			list = append(list, a.Test.Network)
		}
	}
	var out []string
	for _, n := range list {
		if n != "" && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

func limits(l *specs.Limits) string {
	var parts []string
	add := func(set bool, text string) {
		if set {
			parts = append(parts, text)
		}
	}
	if l != nil {
		cpus := strconv.FormatFloat(l.CPUs, 'f', -1, 64) + " CPUs"
		if l.CPUs == 1 {
			cpus = "1 CPU"
		}
		add(l.CPUs > 0, cpus)
		add(l.Memory > 0, size(l.Memory)+" of memory")
		add(l.PIDs > 0, processes(l.PIDs))
		add(l.Disk > 0, size(l.Disk)+" of disk")
		add(l.NoFile > 0, count(l.NoFile, "open file"))
	}
	if parts == nil {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// size writes a number of bytes in the largest unit in which it is exact, or
// nearly.
func size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	x, i := float64(n), 0
	for i < len(units)-1 && x >= 1024 {
		x, i = x/1024, i+1
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", x), ".0") + units[i]
}
