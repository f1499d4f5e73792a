package sandbox

// Options are what all commands of a [Sandbox] have in common.
type Options struct {
	// Notice is told what a user should know though nothing failed, such as a
	// part of the home that is read-only: one line each, the same line once.
	// It may be called from several goroutines. Nil drops them.
	Notice func(line string)
}
