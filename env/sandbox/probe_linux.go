package sandbox

import (
	"context"
	"os"

	"github.com/agentenv/agentenv/forks"
)

// Probe tries whether the level works for this user on this machine, by
// running a command that does nothing. Its error is an [*Error].
func Probe(level Level) error {
	dir, err := os.MkdirTemp("", "agentenv-probe-")
	if err != nil {
		return &Error{What: "scratch directory", Err: err}
	}
	defer RemoveScratch(dir)
	for _, d := range []string{"tree", "scratch"} {
		if err := os.Mkdir(dir+"/"+d, 0o700); err != nil {
			return &Error{What: "scratch directory", Err: err}
		}
	}
	p, err := New(Options{}).Start(context.Background(), Command{
		Level: level,
		View: View{Tree: forks.Mount{Dir: dir + "/tree"}, At: dir + "/tree", Scratch: dir + "/scratch",
			Home: HomePrivate, HomeDir: dir + "/home"},
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

// Expected is the strongest level that the machine's settings allow this user.
// It tries nothing and costs next to nothing; whether it works [Probe] tells.
func Expected() Level {
	if mayMount() || badKnob() == "" {
		return LevelNamespaces
	}
	return LevelProcess
}
