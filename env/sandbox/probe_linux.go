package sandbox

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/agentenv/agentenv/forks"
)

// probePrefix begins the names of the directories that [Probe] makes.
const probePrefix = "agentenv-probe-"

// probeLife is far longer than a probe takes: what is older than that was left
// by one that was killed.
const probeLife = time.Minute

// Probe tries whether the level works for this user on this machine, by
// running a command that does nothing. Its error is an [*Error]. What probes of
// this user left that were killed is removed.
func Probe(level Level) error {
	sweepProbes(os.TempDir())
	dir, err := os.MkdirTemp("", probePrefix)
	if err != nil {
		return newError("scratch directory", err)
	}
	defer RemoveScratch(dir)
	return ProbeIn(level, dir)
}

// ProbeIn is [Probe] in the directory dir, which is empty and the caller's to
// remove.
func ProbeIn(level Level, dir string) error {
	for _, d := range []string{"tree", "scratch"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return newError("scratch directory", err)
		}
	}
	p, err := New(Options{}).Start(context.Background(), Command{
		Level: level,
		View: View{Tree: forks.Mount{Dir: filepath.Join(dir, "tree")}, At: "/tmp/tree", Scratch: filepath.Join(dir, "scratch"),
			Home: HomePrivate, HomeDir: "/tmp/home"},
		// Whether it is there does not matter: it is looked for when all else
		// has been made.
		Args: []string{"true"},
	})
	if err != nil {
		return explain("probe", err)
	}
	_, err = p.Wait()
	return err
}

// sweepProbes removes from parent what killed probes of this user left. What
// cannot be removed does no harm, and the next probe tries again.
func sweepProbes(parent string) {
	entries, _ := os.ReadDir(parent) // what can be read is enough
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), probePrefix) || !e.IsDir() {
			continue
		}
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) < probeLife {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) == os.Geteuid() {
			_ = RemoveScratch(filepath.Join(parent, e.Name()))
		}
	}
}

// Expected is the strongest level that the machine's settings allow this user.
// It tries nothing and costs next to nothing; whether it works [Probe] tells.
func Expected() Level {
	if mayMount() || badKnob() == "" {
		return LevelNamespaces
	}
	return LevelProcess
}
