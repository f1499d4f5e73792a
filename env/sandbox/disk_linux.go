package sandbox

import (
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// diskWatch measures the disk space that a command takes, and ends the command
// when that is more than its limit. What counts are the blocks, in its tree and in
// its scratch directory, that are there and were not at its start; a file with
// several names once.
//
// Between two looks a command can write more than the limit: what its disk takes in
// diskTick at most, and in the time of a walk through its files; and, if it ignores
// TERM, a quarter of the limit more. Files that are deleted while they are open are not seen, nor is what
// lies in directories that this user may not read; what is shared with other files
// (reflinks) counts as if it were not. What a command writes elsewhere (a bind, the
// real home) does not count.
type diskWatch struct {
	limit int64
	roots []diskRoot
	stop  chan struct{}
	took  time.Duration // the last walk
	once  sync.Once
	ended sync.WaitGroup
	full  bool // known when ended is
}

// diskRoot is a directory whose growth counts.
type diskRoot struct {
	dir    string
	before int64 // bytes
	free   uint64
}

const (
	// diskTick is how often the file system is asked for its free space, which
	// takes microseconds, and diskTickLeast how often when it fills so fast that
	// the limit is near.
	diskTick      = 50 * time.Millisecond
	diskTickLeast = 5 * time.Millisecond
	// diskShare is how many times longer than a walk takes the pause after it is:
	// walks take at most 5 % of one CPU. One walk between is allowed when the file
	// system lost so much space that the limit may be exceeded.
	diskShare = 19
	// diskPause is the longest pause after a walk that was quick, also when the
	// file system seems to fill no more: others may free what the command takes.
	diskPause = time.Second
	// diskGrace is how long the command has after TERM. It has less if the file
	// system goes on to lose space, by a diskExcess of the limit.
	diskGrace  = 200 * time.Millisecond
	diskExcess = 0.25
	// diskQuick is what a walk may take so that there is one more when the command
	// has ended, and diskLastLook how long that may take.
	diskQuick    = 2 * time.Millisecond
	diskLastLook = 20 * time.Millisecond
)

// newDiskWatch takes the measure of what is there before the command starts; nil if
// the command has no limit.
func newDiskWatch(c Command) *diskWatch {
	if c.Limits.Disk <= 0 {
		return nil
	}
	w := &diskWatch{limit: c.Limits.Disk, stop: make(chan struct{})}
	tree := c.View.Tree.Dir
	if o := c.View.Tree.Overlay; o != nil {
		tree = filepath.Join(o.Dir, o.Upper)
	}
	w.roots = append(w.roots, diskRoot{dir: tree})
	if c.Level == LevelNamespaces {
		w.roots = append(w.roots, diskRoot{dir: c.View.Scratch})
	}
	began := time.Now()
	for i := range w.roots {
		w.roots[i].before, _ = walkBlocks(w.roots[i].dir, func() bool { return false })
	}
	w.took = time.Since(began)
	w.space()
	return w
}

// watch looks until the command ends, or has taken too much: then it is told to stop
// by the function.
func (w *diskWatch) watch(stop func(grace time.Duration)) {
	if w == nil {
		return
	}
	w.ended.Add(1)
	go func() {
		defer w.ended.Done()
		if w.full = w.fills(); !w.full {
			return
		}
		stop(diskGrace)
		w.space()
		for w.waits(diskTickLeast) {
			if w.lost() > int64(diskExcess*float64(w.limit)) {
				stop(0)
				return
			}
		}
	}()
}

// waits says, after a pause, whether the command goes on; at its end at once.
func (w *diskWatch) waits(pause time.Duration) bool {
	select {
	case <-w.stop:
		return false
	case <-time.After(pause):
		return true
	}
}

// fills says whether the command took too much; false when it has ended.
func (w *diskWatch) fills() bool {
	last, early := time.Now(), false
	left, lost := w.limit, int64(0)
	pause := diskTickLeast
	for w.waits(pause) {
		was := lost
		lost = w.lost()
		pause = nextTick(pause, lost-was, left-lost)
		cheap := time.Since(last) >= diskShare*w.took
		due := cheap && time.Since(last) >= diskPause
		if !due && (lost <= left || early && !cheap) {
			continue
		}
		early = !cheap
		w.space()
		last, lost = time.Now(), 0
		if left = w.limit - w.used(w.stopped); left < 0 {
			return true
		}
		w.took = time.Since(last)
	}
	return (w.took < diskQuick || w.lost() > left) && w.lastLook()
}

// nextTick is half the time in which the space that is left is filled, if it goes
// on as in the pause before, within bounds.
func nextTick(pause time.Duration, filled, left int64) time.Duration {
	next := 2 * pause
	if filled > 0 {
		next = time.Duration(float64(pause) * float64(left) / float64(filled) / 2)
	}
	return min(max(next, diskTickLeast), diskTick)
}

// lastLook walks once more when the command has ended, if that is quick.
func (w *diskWatch) lastLook() bool {
	end := time.Now().Add(diskLastLook)
	return w.used(func() bool { return time.Now().After(end) }) > w.limit
}

// space notes the free space of the file systems.
func (w *diskWatch) space() {
	for i := range w.roots {
		w.roots[i].free = freeSpace(w.roots[i].dir)
	}
}

// lost is how many bytes the file systems lost since space.
func (w *diskWatch) lost() int64 {
	var most int64
	for _, r := range w.roots {
		most = max(most, int64(r.free)-int64(freeSpace(r.dir)))
	}
	return most
}

func freeSpace(dir string) uint64 {
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) != nil {
		return 0
	}
	return fs.Bfree * uint64(fs.Frsize)
}

// used is how many bytes the command takes; nothing if the walk was given up.
func (w *diskWatch) used(giveUp func() bool) int64 {
	var sum int64
	for _, r := range w.roots {
		n, whole := walkBlocks(r.dir, giveUp)
		if !whole {
			return 0
		}
		sum += max(0, n-r.before)
	}
	return sum
}

// finish ends the watch and says whether the command took too much. What it started
// is dead by then. It may be called again.
func (w *diskWatch) finish() bool {
	if w == nil {
		return false
	}
	w.once.Do(func() { close(w.stop) })
	w.ended.Wait()
	return w.full
}

// stopped says whether the command has ended meanwhile.
func (w *diskWatch) stopped() bool {
	select {
	case <-w.stop:
		return true
	default:
		return false
	}
}

// diskDepth bounds how deep a walk goes: it holds a descriptor for each level.
const diskDepth = 256

// walkBlocks adds up the bytes of the blocks of all that is below dir. It follows
// no link and enters no mount; what cannot be read counts as nothing. It is not
// whole if it was given up, for which it asks in each directory.
func walkBlocks(dir string, giveUp func() bool) (bytes int64, whole bool) {
	top, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, true
	}
	w := diskWalk{giveUp: giveUp, linked: map[[2]uint64]bool{}}
	w.below(top, diskDepth)
	return w.sum, !w.cut
}

type diskWalk struct {
	giveUp func() bool
	cut    bool
	sum    int64
	linked map[[2]uint64]bool // device and inode of files with several names
}

// below adds what is below the open directory, which it closes.
func (w *diskWalk) below(fd, depth int) {
	dir := os.NewFile(uintptr(fd), "directory")
	defer dir.Close()
	for {
		if w.cut = w.cut || w.giveUp(); w.cut {
			return
		}
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			if w.add(fd, name) && depth > 0 {
				w.enter(fd, name, depth-1)
			}
		}
		if err != nil { // the end, or the directory is gone
			return
		}
	}
}

// add counts a name, and says whether it is a directory.
func (w *diskWalk) add(at int, name string) bool {
	var st unix.Stat_t
	if unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return false
	}
	dir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if key := [2]uint64{st.Dev, st.Ino}; st.Nlink > 1 && !dir {
		if w.linked[key] {
			return false
		}
		w.linked[key] = true
	}
	w.sum += st.Blocks * 512 // stat's unit, whatever the file system
	return dir
}

func (w *diskWalk) enter(at int, name string, depth int) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat2(at, name, &unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS})
	if err == nil {
		w.below(fd, depth)
	}
}
