package env

import "github.com/agentenv/agentenv/env/sandbox"

// ProbeIsolation tries whether commands can be run at a level. It does so in
// the environment at root, where the next command removes what is left when
// this process is killed; without one, in the directory for temporary files.
func ProbeIsolation(root string, level sandbox.Level) error {
	if !Exists(root) {
		return sandbox.Probe(level)
	}
	var err error
	trial(root, func(dir string) {
		if dir == root { // nothing can be made there
			err = sandbox.Probe(level)
		} else {
			err = sandbox.ProbeIn(level, dir)
		}
	})
	return err
}
