package env_test

import (
	"os"
	"testing"

	"github.com/moby/sys/reexec"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	os.Exit(m.Run())
}
