package runner

import (
	"io"
	"os"
	"regexp"
	"sync"
)

// clashTail is how many bytes at the end of a log are searched for a port that
// was taken: what ended a program stands there, with its stack trace.
const clashTail = 16 << 10

// portTaken are the words of programs that found their port taken. Those that
// print the system's message (strerror of EADDRINUSE, whatever the language)
// are the first two; the rest are of servers with words of their own: Vite,
// Spring, Django, Flask, Docker, create-react-app, MySQL.
var portTaken = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?i)address (is )?already in use|EADDRINUSE|` +
		`port\W{1,3}\d+ (is|was) (already |currently )?(in use|being used|taken|occupied|allocated)|port is already (in use|allocated|being used)|` +
		`already (running|listening|in use) on port|another mysqld server running on port`)
})

// noWayOut are the words of programs that did not find the way out of a
// network: of the resolvers of glibc, musl, curl, Go, Node and Python, and of
// ENETUNREACH.
var noWayOut = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?i)network is unreachable|ENETUNREACH|could ?n[o']t resolve|failure in name resolution|` +
		`name or service not known|server misbehaving|EAI_AGAIN|ENOTFOUND|name does not resolve`)
})

// clash is what the reason of a failure ends with if the end of the command's
// log says that a port was taken; empty if it does not. It is for an attempt
// that failed, whose network was the host's, while others ran.
func clash(logPath string) string {
	if !endsWith(logPath, portTaken()) {
		return ""
	}
	return "; another attempt may hold the port: network: private gives each its own"
}

// cutOff is the same where the network was private, for a command that wanted to
// leave it.
func cutOff(logPath string) string {
	if !endsWith(logPath, noWayOut()) {
		return ""
	}
	return "; the network is private: nat has the way out"
}

// endsWith says whether the end of a log has what expr describes.
func endsWith(logPath string, expr *regexp.Regexp) bool {
	f, err := os.Open(logPath)
	if err != nil {
		return false
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > clashTail {
		_, _ = f.Seek(-clashTail, io.SeekEnd) // if it fails, the first bytes do
	}
	data, _ := io.ReadAll(io.LimitReader(f, clashTail)) // what can be read is enough
	return expr.Match(data)
}
