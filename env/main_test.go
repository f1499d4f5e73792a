package env_test

import (
	"os"
	"testing"

	"github.com/agentenv/agentenv/forks/all"
	"github.com/agentenv/agentenv/forks/forkstest"
)

func TestMain(m *testing.M) { os.Exit(forkstest.Main(m, all.Backends()[0])) }
