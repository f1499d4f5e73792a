package env

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// reserveName is a file below the root that takes room for nothing but to be
// given up when there is none: to remove something, the history has to be
// written anew, and on a full file system nothing could be removed any more.
const reserveName = "agentenv.reserve"

const (
	// reserveSize is the size of the reserve in bytes: several times what a
	// history of some thousand snapshots and the driver's marks take.
	reserveSize = 1 << 20
	// reservePlenty is how many bytes must be free for a reserve to be made.
	reservePlenty = 16 << 20
)

// roomOps are the operations, as [Lock] is told them, that make room.
var roomOps = []string{"delete", "checkout --discard"}

// makeReserve makes the reserve if it is missing and there is plenty of room.
// It is a precaution: what cannot be made now, a later command makes.
func makeReserve(root string) {
	path := filepath.Join(root, reserveName)
	if exists(path) {
		return
	}
	var st syscall.Statfs_t
	if syscall.Statfs(root, &st) != nil || int64(st.Bavail)*int64(st.Bsize) < reservePlenty {
		return
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	err = syscall.Fallocate(int(f.Fd()), 0, 0, reserveSize)
	if errors.Join(err, f.Close()) != nil {
		_ = os.Remove(path) // half a reserve helps nobody
	}
}

// giveUpReserve removes the reserve and says whether there was one. What it
// took is free when it returns.
func giveUpReserve(root string) bool {
	if os.Remove(filepath.Join(root, reserveName)) != nil {
		return false
	}
	_ = syncDir(root) // some file systems give room back only then
	return true
}

// isNoRoom says whether an error is that there is no room.
func isNoRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// makingRoom calls fn, which makes room, and once more with the reserve given
// up if there was no room for it. fn can be repeated.
func (e *Env) makingRoom(fn func() error) error {
	err := fn()
	if isNoRoom(err) && giveUpReserve(e.root) {
		return fn()
	}
	return err
}
