package env

import (
	"fmt"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// namedMost is how many paths a notice names.
const namedMost = 3

// warnPrivileged tells of programs among changes that now have, in the directory
// dir of the host, the rights of their owner, of their group or of capabilities.
// In the store nobody else can reach such a file; in dir everybody may.
func (e *Env) warnPrivileged(dir string, changes []forks.Change) {
	var list []string
	for _, ch := range changes {
		if ch.New != nil && isPrivileged(*ch.New) && (ch.Old == nil || !isPrivileged(*ch.Old)) {
			list = append(list, fmt.Sprintf("%q", ch.Path))
		}
	}
	more := ""
	if n := len(list) - namedMost; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
		list = list[:namedMost]
	}
	if len(list) > 0 {
		e.opts.notify("setuid, setgid or file capabilities, which count on the host too, are new in %s: %s%s", dir, strings.Join(list, ", "), more)
	}
}

// isPrivileged says whether who executes a file gets rights by it.
func isPrivileged(en forks.Entry) bool {
	const setuid, setgid, groupExec, anyExec = 0o4000, 0o2000, 0o010, 0o111
	if !isRegular(en) || en.Mode&anyExec == 0 {
		return false
	}
	_, capable := en.Xattrs["security.capability"]
	return capable || en.Mode&setuid != 0 || en.Mode&(setgid|groupExec) == setgid|groupExec
}
