// Command agentenv tries several ways to change a whole environment at once
// and keeps the one that works; see README.md.
package main

import (
	"os"
	"time"

	"github.com/moby/sys/reexec"
)

func main() {
	if reexec.Init() {
		return // this process was a helper of another agentenv
	}
	app := &App{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Env: os.Environ(), Now: time.Now}
	os.Exit(app.Run(os.Args[1:]))
}
