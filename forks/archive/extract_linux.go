package archive

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxEntries keeps an archive of nothing but names from filling memory: a
	// hundred times a large system.
	maxEntries = 50_000_000
	// maxName bounds an entry's path in bytes, and with it the depth of what a
	// single entry can make.
	maxName = 64 << 10
	// progressEvery is the least time between two calls of Options.Progress.
	progressEvery = 100 * time.Millisecond
)

// Extract unpacks the tar r into the empty directory dir, which is the
// caller's own, with mode 0700, and which nobody else writes to meanwhile. r
// may be compressed with gzip, zstd, xz or bzip2; what it is is told by its
// first bytes.
//
// An archive that is refused gives an [*Error]. What dir then holds is of no
// use and is the caller's to remove. Extract returns when ctx is done; a read
// of r that is then waiting is left behind.
func Extract(ctx context.Context, r io.Reader, dir string, opts Options) (Result, error) {
	root, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return Result{}, fmt.Errorf("open %s to unpack into: %w", dir, err)
	}
	defer unix.Close(root)
	// Stops the reading goroutine when an error ends this call.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	x := &extractor{
		ctx: ctx, root: root, opts: opts, parent: -1,
		dirs: map[string]*entry{".": implied}, later: map[string]*delayed{},
		tar: tarReader{in: bufio.NewReaderSize(newStream(ctx, r), 1<<20)},
	}
	defer x.leave()
	if err := x.prepare(dir); err != nil {
		return Result{}, err
	}
	if err := x.run(); err != nil {
		return Result{}, err
	}
	x.result.Warnings = x.warn.lines()
	if opts.Progress != nil {
		opts.Progress(x.result.Files, x.result.Bytes)
	}
	return x.result, nil
}

// implied is what a directory that no entry describes gets.
var implied = &entry{kind: typeDir, mode: 0o755}

// delayed is a hard link whose target had not come yet. An empty file holds
// its place, so that whatever replaces the name finds and forgets it.
type delayed struct{ path, name, target string }

type extractor struct {
	ctx  context.Context
	root int
	opts Options
	tar  tarReader

	// parent is an open descriptor of the directory parentPath, in which the
	// last entry was made; -1 for none. The next entry mostly is there too.
	parent     int
	parentPath string

	// dirs describes the directories made so far. Their metadata is set at
	// the end: until then all can be written to, and nothing inherits from them.
	dirs  map[string]*entry
	later map[string]*delayed
	order []*delayed

	made       int64 // entries and implied directories
	left       int64 // bytes that may still be written
	leftIs     string
	result     Result
	warn       warnings
	lastReport time.Time
}

// prepare makes sure that dir is empty and hands down nothing (a default ACL,
// its group) to what is made in it, and finds out how much may be written.
func (x *extractor) prepare(dir string) error {
	switch names, err := readNames(x.root); {
	case err != nil:
		return fmt.Errorf("list %s: %w", dir, err)
	case len(names) > 0:
		return fmt.Errorf("unpack into %s: %w", dir, unix.ENOTEMPTY)
	}
	for _, name := range []string{"system.posix_acl_default", "system.posix_acl_access"} {
		if err := unix.Fremovexattr(x.root, name); err != nil && err != unix.ENODATA && err != unix.EOPNOTSUPP {
			return fmt.Errorf("remove %s from %s: %w", name, dir, err)
		}
	}
	if err := unix.Fchmod(x.root, 0o700); err != nil {
		return fmt.Errorf("set the mode of %s: %w", dir, err)
	}
	x.left, x.leftIs = x.opts.MaxSize, "allowed"
	if x.left > 0 {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(x.root, &fs); err != nil {
		return fmt.Errorf("find the free space of %s: %w", dir, err)
	}
	x.left, x.leftIs = math.MaxInt64, "free"
	// A tmpfs without a limit says that it has no blocks at all.
	if size := uint64(fs.Bsize); fs.Blocks > 0 && fs.Bavail < math.MaxInt64/size {
		x.left = int64(fs.Bavail * size)
	}
	return nil
}

func (x *extractor) run() error {
	for {
		if err := x.ctx.Err(); err != nil {
			return context.Cause(x.ctx)
		}
		e, err := x.tar.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if err := x.entry(e); err != nil {
			return err
		}
		x.progress()
	}
	garbage, err := x.tar.finish()
	if err != nil {
		return err
	}
	if garbage {
		x.warn.add("what follows the end mark of the archive was ignored", "")
	}
	if err := x.linkDelayed(); err != nil {
		return err
	}
	return x.finishDirs()
}

func (x *extractor) progress() {
	if x.opts.Progress == nil {
		return
	}
	if now := time.Now(); now.Sub(x.lastReport) >= progressEvery {
		x.lastReport = now
		x.opts.Progress(x.result.Files, x.result.Bytes)
	}
}

// entry makes one entry.
func (x *extractor) entry(e *entry) error {
	path, err := clean(e.name, e.name)
	if err != nil {
		return err
	}
	if e.unknown {
		x.warn.add("entries of an unknown type were unpacked as files", e.name)
	}
	if e.badACL != nil {
		x.warn.add("ACLs that name unknown users or groups, or cannot be read, were left out", e.name)
	}
	if path == "." {
		return x.rootEntry(e)
	}
	if err := x.count(e.name); err != nil {
		return err
	}
	parent, base, err := x.enter(path, e.name, true)
	if err != nil {
		return err
	}
	made, err := x.make(parent, base, path, e)
	if err != nil {
		return err
	}
	if made {
		x.result.Files++
	}
	return nil
}

// rootEntry takes the description of the tree's own root.
func (x *extractor) rootEntry(e *entry) error {
	switch {
	case e.name == "":
		x.warn.add("entries without a name were left out", "")
		return nil
	case e.kind != typeDir:
		return &Error{Entry: e.name, Kind: ErrUnsafe, Reason: "would replace the tree's root, which must be a directory"}
	}
	x.dirs["."] = e
	x.result.Files++
	return nil
}

func (x *extractor) count(name string) error {
	if x.made++; x.made > maxEntries {
		return &Error{Entry: name, Kind: ErrTooLarge, Reason: fmt.Sprintf("is one too many: %d is the most", maxEntries)}
	}
	return nil
}

// clean turns a name into a path relative to the root, "." for the root
// itself, and refuses what leads out of it.
func clean(name, entry string) (string, error) {
	refuse := func(why string) (string, error) {
		return "", &Error{Entry: entry, Kind: ErrUnsafe, Reason: "is refused: " + why}
	}
	of := "its name"
	if name != entry {
		of = "the link's target " + shown(name)
	}
	switch {
	case strings.HasPrefix(name, "/"):
		return refuse(of + " is absolute")
	case len(name) > maxName:
		return refuse(fmt.Sprintf("%s is longer than %d bytes", of, maxName))
	}
	parts := strings.Split(name, "/")
	kept := parts[:0]
	for _, part := range parts {
		switch part {
		case "", ".":
		case "..":
			return refuse(of + " holds \"..\"")
		default:
			kept = append(kept, part)
		}
	}
	if len(kept) == 0 {
		return ".", nil
	}
	return strings.Join(kept, "/"), nil
}

// make makes e as base in parent. It says false for what was left out with a
// warning.
func (x *extractor) make(parent int, base, path string, e *entry) (bool, error) {
	switch e.kind {
	case typeDir:
		return true, x.makeDir(parent, base, path, e)
	case typeLink:
		return true, x.makeLink(path, e)
	case typeFile:
		return true, x.makeFile(parent, base, path, e)
	}
	var mknod func() error
	switch dev := unix.Mkdev(e.major, e.minor); e.kind {
	case typeSymlink:
		if e.link == "" {
			return false, &Error{Entry: e.name, Kind: ErrFormat, Reason: "is a symlink without a target"}
		}
		mknod = func() error { return unix.Symlinkat(e.link, parent, base) }
	case typeFifo:
		mknod = func() error { return unix.Mknodat(parent, base, unix.S_IFIFO|0o600, 0) }
	case typeChar:
		if dev == 0 {
			return false, &Error{Entry: e.name, Kind: ErrUnsafe,
				Reason: "is refused: a character device 0:0 is a mark that overlay file systems use for deleted files"}
		}
		mknod = func() error { return unix.Mknodat(parent, base, unix.S_IFCHR|0o600, int(dev)) }
	default:
		mknod = func() error { return unix.Mknodat(parent, base, unix.S_IFBLK|0o600, int(dev)) }
	}
	err := x.replacing(parent, base, path, mknod)
	if err == unix.EPERM && (e.kind == typeChar || e.kind == typeBlock) {
		x.warn.add("device nodes were left out: making them needs root", e.name)
		return false, nil
	}
	if err != nil {
		return false, failed(e.name, "cannot be made", err)
	}
	return true, x.describeAt(parent, base, path, e)
}

// failed is the error of a system call about an entry.
func failed(name, what string, err error) error {
	if err == unix.ENAMETOOLONG {
		what += " (no part of a name can be longer than 255 bytes)"
	}
	return &Error{Entry: name, Reason: what, Err: err}
}

// replacing calls create, which must fail with EEXIST if base is there, after
// which base is removed and create called again.
func (x *extractor) replacing(parent int, base, path string, create func() error) error {
	err := ignoringEINTR(create)
	if err != unix.EEXIST {
		return err
	}
	if err := x.remove(parent, base, path); err != nil {
		return err
	}
	return ignoringEINTR(create)
}

func ignoringEINTR(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// remove takes away what base holds, all that is below it, and what was
// remembered of that.
func (x *extractor) remove(parent int, base, path string) error {
	if path == x.parentPath || strings.HasPrefix(x.parentPath, path+"/") {
		x.leave()
	}
	delete(x.dirs, path)
	delete(x.later, path)
	delete(x.result.Owners, path)
	err := unix.Unlinkat(parent, base, 0)
	if err != unix.EISDIR {
		return err
	}
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	names, err := readNames(fd)
	if err != nil {
		unix.Close(fd)
		return err
	}
	for _, n := range names {
		if err := x.remove(fd, n, path+"/"+n); err != nil {
			unix.Close(fd)
			return err
		}
	}
	unix.Close(fd)
	return unix.Unlinkat(parent, base, unix.AT_REMOVEDIR)
}

func readNames(fd int) ([]string, error) {
	var names []string
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err != nil || n <= 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

func (x *extractor) makeDir(parent int, base, path string, e *entry) error {
	if _, ok := x.dirs[path]; !ok {
		err := x.replacing(parent, base, path, func() error { return unix.Mkdirat(parent, base, 0o700) })
		if err != nil {
			return failed(e.name, "cannot be made", err)
		}
	}
	x.dirs[path] = e
	return nil
}

func (x *extractor) makeFile(parent int, base, path string, e *entry) error {
	if n := e.data(); n > x.left {
		return &Error{Entry: e.name, Kind: ErrTooLarge,
			Reason: fmt.Sprintf("holds %d bytes, but only %d more are %s", n, x.left, x.leftIs)}
	}
	fd := -1
	err := x.replacing(parent, base, path, func() (err error) {
		fd, err = unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return failed(e.name, "cannot be made", err)
	}
	err = x.write(fd, e)
	if err == nil {
		err = x.describe(fd, path, e)
	}
	if closed := unix.Close(fd); err == nil && closed != nil {
		err = failed(e.name, "cannot be written", closed)
	}
	return err
}

// write writes the data of e and leaves the rest of its length a hole.
func (x *extractor) write(fd int, e *entry) error {
	var end int64
	for _, p := range e.pieces {
		end = p.off + p.size
		if err := x.writePiece(fd, e, p); err != nil {
			return err
		}
	}
	if end < e.size {
		if err := unix.Ftruncate(fd, e.size); err != nil {
			return failed(e.name, fmt.Sprintf("cannot be made %d bytes long", e.size), err)
		}
	}
	return nil
}

func (x *extractor) writePiece(fd int, e *entry, p piece) error {
	for p.size > 0 {
		b, err := x.tar.peek()
		if err != nil {
			return err
		}
		b = b[:min(int64(len(b)), p.size)]
		n, err := unix.Pwrite(fd, b, p.off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return failed(e.name, "cannot be written", err)
		}
		if err := x.tar.advance(n); err != nil {
			return err
		}
		p.off, p.size = p.off+int64(n), p.size-int64(n)
		x.left -= int64(n)
		x.result.Bytes += int64(n)
		x.progress()
	}
	return nil
}

// makeLink makes a hard link, or holds its place when its target is not there
// or is such a place itself.
func (x *extractor) makeLink(path string, e *entry) error {
	target, err := x.linkTarget(e)
	if err != nil {
		return err
	}
	if target == path {
		if _, ok := x.later[path]; ok {
			return nil
		}
	}
	if _, ok := x.later[target]; !ok {
		done, err := x.link(target, path, e.name)
		if done || err != nil {
			return err
		}
	}
	parent, base, err := x.enter(path, e.name, true)
	if err != nil {
		return err
	}
	fd := -1
	err = x.replacing(parent, base, path, func() (err error) {
		fd, err = unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return failed(e.name, "cannot be made", err)
	}
	unix.Close(fd)
	d := &delayed{path: path, name: e.name, target: target}
	x.later[path] = d
	x.order = append(x.order, d)
	return nil
}

func (x *extractor) linkTarget(e *entry) (string, error) {
	target, err := clean(e.link, e.name)
	if err == nil && target == "." {
		err = &Error{Entry: e.name, Kind: ErrFormat, Reason: "is a hard link to the tree's root"}
	}
	return target, err
}

// link makes path a hard link to what target holds; false if it holds nothing.
func (x *extractor) link(target, path, name string) (bool, error) {
	from, fromBase, err := x.enter(target, name, false)
	if err == unix.ENOENT {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	err = unix.Fstatat(from, fromBase, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == unix.ENOENT:
		return false, nil
	case err != nil:
		return false, failed(name, "is a hard link to "+shown(target)+", which cannot be looked at", err)
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return false, &Error{Entry: name, Kind: ErrFormat, Reason: "is a hard link to " + shown(target) + ", which is a directory"}
	case target == path:
		return true, nil
	}
	// enter below may close this descriptor.
	if from, err = unix.FcntlInt(uintptr(from), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return false, failed(name, "cannot be linked", err)
	}
	defer unix.Close(from)
	parent, base, err := x.enter(path, name, true)
	if err != nil {
		return false, err
	}
	err = x.replacing(parent, base, path, func() error { return unix.Linkat(from, fromBase, parent, base, 0) })
	if err != nil {
		return false, failed(name, "cannot be linked to "+shown(target), err)
	}
	if owner, ok := x.result.Owners[target]; ok {
		x.result.Owners[path] = owner
	}
	return true, nil
}

// linkDelayed makes the hard links whose targets came later.
func (x *extractor) linkDelayed() error {
	for _, d := range x.order {
		if x.later[d.path] != d {
			continue // replaced since
		}
		target := d.target
		for range len(x.later) {
			next, ok := x.later[target]
			if !ok {
				break
			}
			target = next.target
		}
		d.target = target
		missing := &Error{Entry: d.name, Kind: ErrFormat, Reason: "is a hard link to " + shown(target) + ", which is not in the archive"}
		if _, ok := x.later[target]; ok {
			return missing // a ring of links
		}
		done, err := x.link(target, d.path, d.name)
		if err != nil {
			return err
		}
		if !done {
			return missing
		}
	}
	return nil
}

// enter opens the directory that holds path and returns it with the path's
// last part. It stays open until the next call. Missing parents are made if
// create is set; otherwise a parent that is missing or no directory gives
// ENOENT. A symlink among them is refused.
func (x *extractor) enter(path, name string, create bool) (int, string, error) {
	dir, base := ".", path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		dir, base = path[:i], path[i+1:]
	}
	if dir == "." {
		return x.root, base, nil
	}
	if x.parent >= 0 && dir == x.parentPath {
		return x.parent, base, nil
	}
	at, done := x.root, 0
	if x.parent >= 0 && strings.HasPrefix(dir, x.parentPath+"/") {
		at, done = x.parent, len(x.parentPath)+1
		x.parent, x.parentPath = -1, "" // at is ours now
	}
	x.leave()
	for done < len(dir) {
		end := len(dir)
		if i := strings.IndexByte(dir[done:], '/'); i >= 0 {
			end = done + i
		}
		next, err := x.step(at, dir[done:end], dir[:end], name, create)
		if at != x.root {
			unix.Close(at)
		}
		if err != nil {
			return -1, "", err
		}
		at, done = next, end+1
	}
	x.parent, x.parentPath = at, dir
	return at, base, nil
}

// leave closes the directory kept open between entries.
func (x *extractor) leave() {
	if x.parent >= 0 {
		unix.Close(x.parent)
	}
	x.parent, x.parentPath = -1, ""
}

// step opens the directory base, one level down, whose path is path.
func (x *extractor) step(at int, base, path, name string, create bool) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(at, base, flags, 0)
	if err == nil || err != unix.ENOENT && err != unix.ENOTDIR {
		if err != nil {
			err = failed(name, "cannot be reached", err)
		}
		return fd, err
	}
	if err == unix.ENOTDIR {
		var st unix.Stat_t
		if err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return -1, failed(name, "cannot be reached", err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			return -1, &Error{Entry: name, Kind: ErrUnsafe, Reason: "is refused: it leads through the symlink " + shown(path)}
		}
	}
	if !create {
		return -1, unix.ENOENT
	}
	if err := x.count(name); err != nil {
		return -1, err
	}
	if err == unix.ENOTDIR {
		x.warn.add("files were replaced by directories, since later entries lie below them", path)
		if err := x.remove(at, base, path); err != nil {
			return -1, failed(name, "cannot be made", err)
		}
	}
	if err := unix.Mkdirat(at, base, 0o700); err != nil {
		return -1, failed(name, "cannot be made", err)
	}
	x.dirs[path] = implied
	if fd, err = unix.Openat(at, base, flags, 0); err != nil {
		return -1, failed(name, "cannot be reached", err)
	}
	return fd, nil
}

// finishDirs gives the directories their metadata, those below first, since a
// mode may bar the way to what is below it.
func (x *extractor) finishDirs() error {
	paths := make([]string, 0, len(x.dirs))
	for path := range x.dirs {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	for _, path := range slices.Backward(paths) {
		if path != "." {
			if err := x.finishDir(path); err != nil {
				return err
			}
		}
	}
	x.leave()
	return x.describe(x.root, ".", x.dirs["."])
}

func (x *extractor) finishDir(path string) error {
	if err := x.ctx.Err(); err != nil {
		return context.Cause(x.ctx)
	}
	parent, base, err := x.enter(path, path, false)
	if err != nil {
		return failed(path, "cannot be reached", err)
	}
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return failed(path, "cannot be opened", err)
	}
	defer unix.Close(fd)
	return x.describe(fd, path, x.dirs[path])
}
