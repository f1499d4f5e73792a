package env

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
)

// unmountAfter is what is to be done when a command in a fork has ended. What is
// mounted in the work tree is its owner's.
func (e *Env) unmountAfter(key forks.Key, level sandbox.Level) func() {
	if level != sandbox.LevelProcess || key == forks.Work {
		return func() {}
	}
	return func() {
		if _, err := e.unmountFork(key); err != nil {
			e.opts.notify("%v", err)
		}
	}
}

// unmountFork takes off the host what a command without a mount namespace of its
// own mounted in its fork, and says so: it would be in the way of all that is done
// with the fork. Nothing of ours is ever mounted there, and nobody may use the
// fork any more. The error names what it cannot unmount, such as another user's.
func (e *Env) unmountFork(key forks.Key) (some bool, err error) {
	gone, err := takeOff(filepath.Join(e.root, "forks", string(key)))
	for _, m := range gone {
		e.opts.notify("%s, which a command mounted at %s in its fork, was unmounted", m.FSType, m.Mountpoint)
	}
	return len(gone) > 0, err
}

// takeOff takes off what is mounted at dir and below it, the last mount
// first, so that nothing is left for who still stands in it to see.
func takeOff(dir string) (gone []*mountinfo.Info, err error) {
	dir, err = filepath.EvalSymlinks(dir) // as the kernel names what is mounted there
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for {
		mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
		if err != nil {
			return gone, fmt.Errorf("read the mounts: %w", err)
		}
		if len(mounts) == 0 {
			return gone, nil
		}
		before := len(gone)
		for _, m := range slices.Backward(mounts) {
			if err = unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err == nil {
				gone = append(gone, m)
			}
		}
		if len(gone) == before {
			return gone, mountedError(mounts[len(mounts)-1])
		}
	}
}

func mountedError(m *mountinfo.Info) error {
	umount := "umount"
	if strings.HasPrefix(m.FSType, "fuse") {
		umount = "fusermount -u"
	}
	return &Error{Kind: ErrHeld, Msg: "a command left something mounted at " + m.Mountpoint, Hint: fmt.Sprintf("`%s %s`", umount, m.Mountpoint)}
}
