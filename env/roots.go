package env

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentenv/agentenv/forks"
)

// systemRoot is the root that whoever may write to / has by default.
const systemRoot = "/agentfs"

// dataHome is the directory that holds the roots an ordinary user has, or ""
// where neither XDG_DATA_HOME nor HOME says where that is.
func dataHome(getenv func(string) string) string {
	// The specification says that relative paths are to be ignored.
	if d := getenv("XDG_DATA_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "agentenv")
	}
	if h := getenv("HOME"); filepath.IsAbs(h) {
		return filepath.Join(h, ".local", "share", "agentenv")
	}
	return ""
}

// FindRoot returns the root of the environment that a command is about: the
// one named by flag, by AGENTENV_ROOT, the one taken from dir or its nearest
// ancestor, /agentfs, or the default of this user (CONTRACT §1). It may hold
// no environment. meant says that the user named it or stands in what it was
// taken from.
func FindRoot(flag string, getenv func(string) string, dir string) (root string, meant bool, err error) {
	if root, ok, err := NamedRoot(flag, getenv); ok || err != nil {
		return root, true, err
	}
	for d := dir; filepath.IsAbs(d); d = filepath.Dir(d) {
		if root := RootOf(d, getenv); root != "" && takenFrom(root, d) {
			return root, true, nil
		}
		if d == filepath.Dir(d) {
			break
		}
	}
	if Exists(systemRoot) || mayMake(systemRoot) {
		return systemRoot, false, nil
	}
	root, err = DefaultRoot(getenv)
	return root, false, err
}

// NamedRoot returns the root that the user named by flag or AGENTENV_ROOT.
func NamedRoot(flag string, getenv func(string) string) (string, bool, error) {
	root := flag
	if root == "" {
		root = getenv("AGENTENV_ROOT")
	}
	if root == "" {
		return "", false, nil
	}
	abs, err := filepath.Abs(root)
	return abs, true, err
}

// DefaultRoot is the root of an environment that belongs to no directory.
func DefaultRoot(getenv func(string) string) (string, error) {
	if mayMake(systemRoot) {
		return systemRoot, nil
	}
	home := dataHome(getenv)
	if home == "" {
		return "", &Error{Kind: ErrUsage, Msg: "neither HOME nor XDG_DATA_HOME says where environments are kept", Hint: "name a root with --root or AGENTENV_ROOT"}
	}
	return filepath.Join(home, "default"), nil
}

// RootOf is the root of the environment that was or would be taken from dir,
// an absolute path without symlinks. Its name begins with the directory's, for
// people, and ends with a hash of the path, so that it is found without
// looking at any other.
func RootOf(dir string, getenv func(string) string) string {
	home := dataHome(getenv)
	if home == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(dir))
	name := strings.Map(func(r rune) rune {
		if r == '-' || r == '_' || r == '.' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '-'
	}, filepath.Base(dir))
	return filepath.Join(home, name[:min(len(name), 40)]+"-"+hex.EncodeToString(sum[:6]))
}

// takenFrom says whether root holds an environment taken from dir.
func takenFrom(root, dir string) bool {
	m, err := readMeta(root)
	if err != nil {
		// One that is damaged must be reported, not passed over.
		return !errors.Is(err, ErrNotFound)
	}
	return m.Source == dir
}

// Exists says whether there is an environment at root.
func Exists(root string) bool {
	_, err := os.Lstat(filepath.Join(root, metaName))
	return err == nil
}

// mayMake says whether the caller could make the directory root.
func mayMake(root string) bool {
	for dir := root; ; dir = filepath.Dir(dir) {
		if st, err := os.Stat(dir); err == nil {
			return st.IsDir() && writable(dir)
		}
		if dir == filepath.Dir(dir) {
			return false
		}
	}
}

func isNotFound(err error) bool { return errors.Is(err, forks.ErrNotFound) }

// RootFor is the root that an environment taken from dir gets when the user
// names none: one of its own for a workspace, the default for a system.
func RootFor(dir string, kind Kind, getenv func(string) string) (string, error) {
	if kind == Rootfs || kind == "" && hasShell(dir) {
		return DefaultRoot(getenv)
	}
	if root := RootOf(dir, getenv); root != "" {
		return root, nil
	}
	return DefaultRoot(getenv)
}

// hasShell says whether the directory looks like a whole system. It only
// chooses a place; what the tree is decides the snapshot.
func hasShell(dir string) bool {
	r, err := os.OpenRoot(dir)
	if err != nil {
		return false
	}
	defer r.Close()
	for _, p := range []string{"bin/sh", "usr/bin/sh"} {
		if _, err := r.Lstat(p); err == nil {
			return true
		}
	}
	return false
}
