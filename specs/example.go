package specs

import (
	_ "embed"
	"slices"
)

//go:embed example.yaml
var example []byte

// Example is a commented plan for newcomers; it is valid as it stands.
func Example() []byte { return slices.Clone(example) }
