package specs

import (
	"encoding/json"
	"fmt"
	"math"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/bmatcuk/doublestar/v4"
)

// The patterns of what a plan holds; the schema has them too.
const (
	namePattern     = `^[a-z0-9][a-z0-9-]{0,63}$`
	durationPattern = `^([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))*$`
	sizePattern     = `^([0-9]+(\.[0-9]+)?) ?(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)$`
	cpusPattern     = `^[0-9]+(\.[0-9]+)?$`
	variablePattern = `^[A-Za-z_][A-Za-z0-9_]*$`
	axisPattern     = `^[A-Za-z_][A-Za-z0-9_-]*$`
)

var (
	nameRule     = lazily(namePattern)
	durationRule = lazily(durationPattern)
	sizeRule     = lazily(sizePattern)
	cpusRule     = lazily(cpusPattern)
	variableRule = lazily(variablePattern)
	axisRule     = lazily(axisPattern)
	integerRule  = lazily(`^(0|[1-9][0-9]{0,8})$`)
)

// MaxEnv is how long one variable may be, NAME=VALUE and the byte that ends it:
// the kernel's MAX_ARG_STRLEN, 32 pages of 4 KiB (include/uapi/linux/binfmts.h).
// Longer, and execve fails with E2BIG.
const MaxEnv = 131072

// leastFiles is how many open files every program may count on (POSIX's
// _POSIX_OPEN_MAX). With fewer, shells fail at their first redirection.
const leastFiles = 20

// maxDuration is the longest that a plan may ask for: a year. Longer is a typing error.
const maxDuration = 8760 * time.Hour

// CheckName says whether a tournament or a candidate may have this name: it
// becomes part of file names, reports and command lines.
func CheckName(name string) error {
	switch {
	case nameRule().MatchString(name):
		return nil
	case name == "":
		return fmt.Errorf("a name cannot be empty")
	case len(name) > 64:
		return fmt.Errorf("a name has at most 64 characters; this has %d", len(name))
	case name[0] == '-':
		return fmt.Errorf("a name cannot begin with a hyphen: %q", name)
	}
	return fmt.Errorf("a name has lower-case letters, digits and hyphens only: %q", name)
}

// NameFrom makes a name that [CheckName] accepts of a file's path: the base
// name without its extension, everything else turned into hyphens.
func NameFrom(file string) string {
	base := filepath.Base(file)
	if i := strings.LastIndexByte(base, '.'); i > 0 {
		base = base[:i]
	}
	var name strings.Builder
	for _, c := range strings.ToLower(base) {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			name.WriteRune(c)
		} else if s := name.String(); s != "" && !strings.HasSuffix(s, "-") {
			name.WriteByte('-')
		}
	}
	out := name.String()
	out = strings.TrimRight(out[:min(len(out), 64)], "-")
	if out == "" {
		return "tournament"
	}
	return out
}

// ParseDuration reads a length of time as plans and flags write it: Go's
// notation, such as 30s, 5m or 1h30m; always with a unit, more than zero, at
// most 8760h.
func ParseDuration(text string) (time.Duration, error) {
	switch {
	case strings.HasPrefix(text, "-"):
		return 0, fmt.Errorf("a duration must be more than zero: %q", text)
	case durationRule().MatchString(text):
	case regexp.MustCompile(`^[0-9.]+ ?(d|w|D|W|days?|weeks?)$`).MatchString(text):
		return 0, fmt.Errorf("the longest unit is the hour, such as 24h or 168h: %q", text)
	default:
		return 0, fmt.Errorf("durations need a unit, such as 30s or 5m: %q", text)
	}
	d, err := time.ParseDuration(text)
	switch {
	case err != nil || d > maxDuration:
		return 0, fmt.Errorf("a duration is at most 8760h (a year): %q", text)
	case d <= 0:
		return 0, fmt.Errorf("a duration must be more than zero: %q", text)
	}
	return d, nil
}

// MarshalJSON is the number of seconds.
func (d Duration) MarshalJSON() ([]byte, error) {
	return json.Marshal(time.Duration(d).Seconds())
}

// String is the duration as a plan may write it.
func (d Duration) String() string { return time.Duration(d).String() }

var units = map[string]float64{
	"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
	"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}

// parseSize reads a number of bytes.
func parseSize(text string) (int64, error) {
	m := sizeRule().FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("sizes need a unit, such as 512MiB or 2GB: %q", text)
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if n *= units[m[3]]; err != nil || n >= math.MaxInt64 {
		return 0, fmt.Errorf("a size is less than 8388608TiB: %q", text)
	}
	if n < 1 {
		return 0, fmt.Errorf("a size must be more than zero: %q", text)
	}
	return int64(n), nil
}

// leastMemory is a size, in bytes, with which every program starts that is linked
// statically: in half of it a busybox still does, in a quarter nothing (Linux 6.18).
const leastMemory = 1 << 20

// parseMemory is parseSize for a limit of memory.
func parseMemory(text string) (int64, error) {
	n, err := parseSize(text)
	if err == nil && n < leastMemory {
		return 0, fmt.Errorf("no program starts in so little memory, at least 1MiB is due: %q", text)
	}
	return n, err
}

// parseCPUs reads a number of cores.
func parseCPUs(text string) (float64, error) {
	n, err := strconv.ParseFloat(text, 64)
	if !cpusRule().MatchString(text) || err != nil || n < 0.01 || n > 1e5 {
		return 0, fmt.Errorf("a number of cores is due, such as 2 or 0.5: %q", text)
	}
	return n, nil
}

// parseInt reads a whole number of at least least.
func parseInt(text string, least int) (int, error) {
	n, err := strconv.Atoi(text)
	if len(text) > 9 && strings.Trim(text, "0123456789") == "" && text[0] != '0' {
		return 0, fmt.Errorf("a whole number of at most 999999999 is due: %q", text)
	}
	if !integerRule().MatchString(text) || err != nil || n < least {
		return 0, fmt.Errorf("a whole number of at least %d is due: %q", least, text)
	}
	return n, nil
}

// parseChoice checks that text is one of words.
func parseChoice(text string, words []string) error {
	for _, w := range words {
		if text == w {
			return nil
		}
	}
	hint := ""
	if w := nearest(text, words); w != "" {
		hint = fmt.Sprintf(" (did you mean %q?)", w)
	}
	return fmt.Errorf("%q is none of %s%s", text, strings.Join(words, ", "), hint)
}

// checkRef refuses what can be no REF, with the right way to write a directory.
func checkRef(text string) error {
	switch {
	case text == "":
		return fmt.Errorf("a snapshot's id, a tag or HEAD is due")
	case strings.HasPrefix(text, "dir:"), strings.HasPrefix(text, "tarball:"):
		form, rest, _ := strings.Cut(text, ":")
		return fmt.Errorf("write {%s: %s}, with a space after the colon", form, rest)
	case strings.HasPrefix(text, "."), strings.HasPrefix(text, "~"), strings.Contains(text, "/"):
		return fmt.Errorf("%q looks like a path; a directory is {dir: PATH}, an archive {tarball: PATH}", text)
	case text[0] == '-' || strings.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c == ':' || c == 0x7f }):
		return fmt.Errorf("%q cannot be a snapshot: an id, a tag, HEAD or HEAD~N is due", text)
	}
	return nil
}

// checkVariable checks one variable of the environment.
func checkVariable(name, value string) error {
	switch {
	case !variableRule().MatchString(name):
		return fmt.Errorf("%q cannot be a variable's name: letters, digits and _ only, no digit first", name)
	case strings.ContainsRune(value, 0):
		return fmt.Errorf("the value of %s holds a NUL byte, which no variable can", name)
	case len(name)+1+len(value)+1 > MaxEnv:
		return fmt.Errorf("%s is %d bytes long; the kernel takes at most %d for a variable with its name (MAX_ARG_STRLEN): put it into a file", name, len(name)+1+len(value), MaxEnv-1)
	}
	return nil
}

// checkCommand refuses what would run nothing, or cannot be handed to a program.
func checkCommand(text string) error {
	if strings.ContainsRune(text, 0) {
		return fmt.Errorf("a command cannot hold a NUL byte")
	}
	comment := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line != "" && line[0] != '#' {
			return nil
		}
		comment = comment || line != ""
	}
	if comment {
		return fmt.Errorf("empty command: it is only a comment")
	}
	return fmt.Errorf("empty command")
}

// parseWorkdir checks a path inside the tree.
func parseWorkdir(text string) (string, error) {
	if text == "" || path.IsAbs(text) || strings.HasPrefix(text, "~") {
		return "", fmt.Errorf("a path relative to the tree is due: %q", text)
	}
	clean := path.Clean(text)
	if clean == ".." || strings.HasPrefix(clean, "../") {
		return "", fmt.Errorf("%q leads out of the tree", text)
	}
	return clean, nil
}

// checkGlob checks a pattern for paths inside the tree.
func checkGlob(text string) error {
	if _, err := parseWorkdir(text); err != nil {
		return err
	}
	if !doublestar.ValidatePattern(text) {
		return fmt.Errorf("%q is not a valid pattern (is a bracket or brace left open?)", text)
	}
	return nil
}

// resolve makes a host path absolute: ~ is the home, else it is relative to dir.
func (o Options) resolve(text, dir string) (string, error) {
	switch {
	case text == "":
		return "", fmt.Errorf("a path is due")
	case text == "~" || strings.HasPrefix(text, "~/"):
		if o.Home == "" {
			return "", fmt.Errorf("%q: HOME is not set", text)
		}
		return filepath.Join(o.Home, text[1:]), nil
	case text[0] == '~':
		return "", fmt.Errorf("%q: only ~ and ~/ stand for a home directory, your own", text)
	case filepath.IsAbs(text):
		return filepath.Clean(text), nil
	case path.IsAbs(text): // a Linux path in a plan that is checked on Windows
		return path.Clean(text), nil
	}
	return filepath.Join(dir, text), nil
}

// ParseMount reads FROM[:TO][:ro|overlay|rw], the form of the flag --mount.
// FROM is relative to opts.Dir, `~` expands in both; TO is FROM unless given,
// and the mode is ro. A path that holds a colon needs a plan file.
func ParseMount(text string, opts Options) (Mount, error) {
	parts := strings.Split(text, ":")
	m := Mount{Mode: MountRO}
	last := parts[len(parts)-1]
	if len(parts) > 1 && parseChoice(last, choices[typeOf(m.Mode)]) == nil {
		m.Mode = MountMode(last)
		parts = parts[:len(parts)-1]
	}
	if len(parts) > 2 {
		return Mount{}, fmt.Errorf("FROM[:TO][:ro|overlay|rw] is due: %q", text)
	}
	var err error
	if m.From, err = opts.resolve(parts[0], opts.Dir); err != nil {
		return Mount{}, err
	}
	m.To = m.From
	if len(parts) == 2 {
		if m.To, err = opts.target(parts[1]); err != nil {
			return Mount{}, err
		}
	}
	return m, checkTarget(m.To)
}

// target makes a path that commands will see absolute. There is no directory
// that a relative one could be relative to.
func (o Options) target(text string) (string, error) {
	if strings.HasPrefix(text, "~") {
		return o.resolve(text, "")
	}
	if !path.IsAbs(text) && !filepath.IsAbs(text) {
		return "", fmt.Errorf("an absolute path is due: %q", text)
	}
	return path.Clean(text), nil
}

// checkTarget protects what a command's view stands on.
func checkTarget(to string) error {
	for _, dir := range []string{"/", "/proc", "/sys", "/dev"} {
		if to == dir {
			return fmt.Errorf("nothing can be mounted over %s", dir)
		}
	}
	for _, dir := range []string{"/proc/", "/sys/"} {
		if strings.HasPrefix(to, dir) {
			return fmt.Errorf("nothing can be mounted below %s: %q", strings.TrimSuffix(dir, "/"), to)
		}
	}
	return nil
}
