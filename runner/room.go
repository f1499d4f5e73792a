package runner

import (
	"fmt"
	"os"

	"github.com/moby/sys/userns"
	"golang.org/x/sys/unix"
)

// With less than leastRoom bytes or leastFiles inodes a file system counts as full.
// A little of both is free again when a command has ended: what its sandbox took.
const (
	leastRoom  = 1 << 20
	leastFiles = 64
)

// hasRoom says whether there is room for what commands of this user write on the
// file system of a path; if the kernel cannot say, there is.
func hasRoom(path string) bool {
	var st unix.Statfs_t
	if unix.Statfs(path, &st) != nil || st.Blocks == 0 {
		return true
	}
	return freeBlocks(st)*st.Bsize >= leastRoom && (st.Files == 0 || st.Ffree >= leastFiles)
}

// freeBlocks is how many blocks this user may still write. What an ext4 keeps for
// root is root's, but for what it keeps for itself: a 50th, and at most 4096
// (ext4_calculate_resv_clusters of the kernel's fs/ext4/super.c).
func freeBlocks(st unix.Statfs_t) int64 {
	if st.Type == unix.EXT4_SUPER_MAGIC && os.Geteuid() == 0 && !userns.RunningInUserNS() {
		return max(0, int64(st.Bfree)-min(int64(st.Blocks)/50, 4096))
	}
	return int64(st.Bavail)
}

// noRoom is the verdict on a command that failed on a full disk, which is no
// answer: with room it might have succeeded.
func (a *attempt) noRoom(reason string) verdict {
	return verdict{Error, a.t.Explain(fmt.Errorf("%s: %w", reason, unix.ENOSPC))}
}
