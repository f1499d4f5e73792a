package specs

import (
	"regexp"
	"sync"
)

// lazily returns a regular expression that is compiled when it is first used.
// Most commands read no plan, and every start of the program would pay for
// compiling these.
func lazily(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}
