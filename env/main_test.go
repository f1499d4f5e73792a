package env_test

import (
	"flag"
	"os"
	"testing"

	"github.com/moby/sys/reexec"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	flag.Parse()
	// Each sequence of the property test makes real trees: a few in every
	// run, the library's own number in a long one.
	if os.Getenv("AGENTENV_TEST_LONG") == "" {
		flag.Set("rapid.checks", "12")
	}
	os.Exit(m.Run())
}
