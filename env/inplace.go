package env

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks"
)

// inPlaceName is the directory below the root of an environment in place that
// holds what is known of its work tree.
const inPlaceName = "inplace"

// inPlace is a driver whose work tree is no fork but a directory of the user's
// own: it is compared with snapshots, captured, and made equal to them. All
// other forks are the driver's.
//
// What must hold: nothing in the directory changes but by Checkout. The state
// file says which snapshot the directory was last equal to, and before Checkout
// changes anything that this is so no more.
type inPlace struct {
	forks.Driver
	source forks.Source
	// dir is the directory below the root.
	dir string
	// held is the snapshot that the directory was just seen to be equal to, or
	// "": Checkout leaves alone what is not in it.
	held ID
	opts Options
}

// newInPlace wraps the driver of the environment at root.
func newInPlace(d forks.Driver, root string, m *meta, opts Options) *inPlace {
	dir := filepath.Join(root, inPlaceName)
	p := &inPlace{Driver: d, dir: dir, opts: opts}
	p.source = forks.Source{Dir: m.Source, Exclude: m.Exclude, Skip: []string{root}, Index: filepath.Join(dir, "index")}
	return p
}

// Divert sends what the user should know to fn, until back is called.
func (e *Env) Divert(fn func(line string)) (back func()) {
	set := func(fn func(string)) {
		e.opts.Notify = fn
		if p, ok := e.driver.(*inPlace); ok {
			p.opts.Notify = fn
		}
	}
	was := e.opts.Notify
	set(fn)
	return func() { set(was) }
}

// placeState is what the state file says of the directory.
type placeState struct {
	Base ID `json:"base"`
	// Unsettled: a Checkout was begun and not completed.
	Unsettled bool `json:"unsettled,omitempty"`
	// Inode and Born tell the directory from one that takes its place. The
	// device would not: some have another number after each start.
	Inode uint64 `json:"inode,omitempty"`
	Born  int64  `json:"born,omitempty"` // in ns since 1970
}

func (p *inPlace) statePath() string { return filepath.Join(p.dir, "state.json") }

// state reads the state file. One that is not there or cannot be read says
// nothing: the directory is then compared with HEAD.
func (p *inPlace) state() (placeState, error) {
	var s placeState
	data, err := os.ReadFile(p.statePath())
	if errors.Is(err, fs.ErrNotExist) || err == nil && (json.Unmarshal(data, &s) != nil || s.Base == "") {
		return s, &forks.Error{Op: "open", ID: p.source.Dir, Driver: p.Name(), Err: forks.ErrNotFound}
	}
	return s, err
}

func (p *inPlace) setState(s placeState) error {
	inode, born, err := identify(p.source.Dir)
	switch {
	case err == nil:
		s.Inode, s.Born = inode, born
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("note the state of %s: %w", p.source.Dir, err)
	}
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return err
	}
	if err := renameio.WriteFile(p.statePath(), data, 0o600); err != nil {
		return fmt.Errorf("note the state of %s: %w", p.source.Dir, err)
	}
	return syncDir(p.dir)
}

// Features says that the work tree is not one to be mounted.
func (p *inPlace) Features() forks.Features {
	f := p.Driver.Features()
	f.Mounted = false
	return f
}

// identify returns what tells a directory from any other that was or will be at
// its path: the inode and, where the file system knows it, when it was made.
func identify(dir string) (inode uint64, born int64, err error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		return 0, 0, &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Mask&unix.STATX_BTIME != 0 {
		born = time.Unix(st.Btime.Sec, int64(st.Btime.Nsec)).UnixNano()
	}
	return st.Ino, born, nil
}

// check refuses a directory that is not there.
func (p *inPlace) check() error {
	st, err := os.Lstat(p.source.Dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &Error{Kind: ErrUsage, Msg: p.source.Dir + ", whose environment this is, is not there", Hint: "move it back, or run `agentenv init --adopt " + filepath.Dir(p.dir) + "` where it is now"}
	case err != nil:
		return err
	case !st.IsDir():
		return &Error{Kind: ErrUsage, Msg: p.source.Dir + ", whose environment this is, is not a directory any more", Hint: "put it back, or run `agentenv init --adopt " + filepath.Dir(p.dir) + "` where it is now"}
	}
	return nil
}

// Tree returns the directory as the fork [forks.Work]. One that was put in the
// place of the one that is known is not that fork: what was begun with the other
// is not to be finished with it.
func (p *inPlace) Tree(key forks.Key) (forks.Tree, error) {
	if key != forks.Work {
		return p.Driver.Tree(key)
	}
	s, err := p.state()
	if err != nil {
		return forks.Tree{}, err
	}
	inode, born, err := identify(p.source.Dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && s.Inode != 0 && (inode != s.Inode || born != s.Born) {
		err = &forks.Error{Op: "open", ID: p.source.Dir, Driver: p.Name(), Err: forks.ErrNotFound}
	}
	if err != nil {
		return forks.Tree{}, err
	}
	return p.tree(s), nil
}

func (p *inPlace) tree(s placeState) forks.Tree {
	return forks.Tree{Key: forks.Work, Base: s.Base, Interrupted: s.Unsettled, Mount: forks.Mount{Dir: p.source.Dir}}
}

// Fork takes the directory as it is for a work tree that builds upon base.
func (p *inPlace) Fork(ctx context.Context, key forks.Key, base forks.ID, o forks.ForkOptions) (forks.Tree, error) {
	if key != forks.Work {
		return p.Driver.Fork(ctx, key, base, o)
	}
	if err := p.check(); err != nil {
		return forks.Tree{}, err
	}
	s := placeState{Base: base}
	return p.tree(s), p.setState(s)
}

// RemoveFork forgets the work tree; the directory stays.
func (p *inPlace) RemoveFork(ctx context.Context, key forks.Key) error {
	if key != forks.Work {
		return p.Driver.RemoveFork(ctx, key)
	}
	if err := os.Remove(p.statePath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Attach and Detach have nothing to do: the directory stands where it is.
func (p *inPlace) Attach(ctx context.Context, key forks.Key) (forks.Tree, error) {
	if key != forks.Work {
		return p.Driver.Attach(ctx, key)
	}
	return p.Tree(key)
}

// Detach is like Attach.
func (p *inPlace) Detach(ctx context.Context, key forks.Key) error {
	if key != forks.Work {
		return p.Driver.Detach(ctx, key)
	}
	return nil
}

// useWait is how long Use waits for processes that are just ending.
const useWait = 2 * time.Second

// Use locks a file for as long as processes work in the tree: what they inherit
// is the same open file, and so the same lock.
func (p *inPlace) Use(ctx context.Context, key forks.Key) (*os.File, func(), error) {
	if key != forks.Work {
		return p.Driver.Use(ctx, key)
	}
	f, err := os.OpenFile(filepath.Join(p.dir, "use"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, err
	}
	for begun := time.Now(); ; time.Sleep(lockRetry) {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, func() { _ = f.Close() }, nil
		}
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = forks.ErrInUse
		}
		if err != forks.ErrInUse || time.Since(begun) > useWait || ctx.Err() != nil {
			return nil, nil, errors.Join(&forks.Error{Op: "use", ID: p.source.Dir, Driver: p.Name(), Err: err}, f.Close())
		}
	}
}

// Status compares the directory with its base.
func (p *inPlace) Status(ctx context.Context, key forks.Key) (forks.Changes, error) {
	if key != forks.Work {
		return p.Driver.Status(ctx, key)
	}
	s, err := p.state()
	if err != nil {
		return forks.Changes{}, err
	}
	return p.Compare(ctx, s.Base, p.source)
}

// Commit captures the directory, if it differs from its base.
func (p *inPlace) Commit(ctx context.Context, key forks.Key, id forks.ID, intent func() error) (forks.Changes, error) {
	if key != forks.Work {
		return p.Driver.Commit(ctx, key, id, intent)
	}
	p.held = ""
	s, err := p.state()
	if err != nil {
		return forks.Changes{}, err
	}
	c, err := p.Compare(ctx, s.Base, p.source)
	if err != nil {
		return forks.Changes{}, err
	}
	if len(c.List) == 0 {
		p.held = s.Base
		return forks.Changes{}, nil // what is left out was named when it was first
	}
	c, err = p.Capture(ctx, id, s.Base, p.source)
	if err != nil {
		return c, err
	}
	if len(c.List) == 0 { // it was put back meanwhile
		return forks.Changes{Warnings: c.Warnings}, p.RemoveSnapshot(ctx, id)
	}
	step("inplace.commit.captured")
	if intent != nil {
		if err := intent(); err != nil {
			return c, err
		}
	}
	step("inplace.commit.intended")
	p.held = id
	err = p.setState(placeState{Base: id, Unsettled: s.Unsettled})
	step("inplace.commit.settled")
	return c, err
}

// Checkout makes the directory equal to snapshot id. What is in no snapshot is
// lost only if no Commit came just before.
func (p *inPlace) Checkout(ctx context.Context, key forks.Key, id forks.ID) error {
	if key != forks.Work {
		return p.Driver.Checkout(ctx, key, id)
	}
	source := p.source
	source.Held, p.held = p.held, ""
	if err := p.check(); err != nil {
		return errors.Join(err, forks.ErrUntouched)
	}
	was, err := p.state()
	if err != nil {
		return err
	}
	if err := p.setState(placeState{Base: was.Base, Unsettled: true}); err != nil {
		return err
	}
	step("inplace.checkout.unsettled")
	c, err := p.Replace(ctx, id, source)
	for _, l := range c.Warnings {
		p.opts.notify("%s", l)
	}
	if errors.Is(err, forks.ErrUntouched) {
		return errors.Join(err, p.setState(was))
	}
	if err != nil {
		return err
	}
	step("inplace.checkout.replaced")
	return p.setState(placeState{Base: id})
}

// Sweep also removes what a crash left of the files that are being written.
func (p *inPlace) Sweep(ctx context.Context) (int64, error) {
	for _, pattern := range []string{".state.json*", "index.new", "index.[0-9]*"} {
		left, err := filepath.Glob(filepath.Join(p.dir, pattern))
		if err != nil {
			return 0, err
		}
		for _, path := range left {
			if err := os.Remove(path); err != nil {
				return 0, err
			}
		}
	}
	return p.Driver.Sweep(ctx)
}

// checkInPlace says whether dir can be a work tree in place whose snapshots lie
// at root, and returns its path without symlinks.
func checkInPlace(root string, in InitOptions) (string, error) {
	dir, err := realDir(in.From)
	if err != nil {
		return "", err
	}
	refuse := func(msg, hint string) (string, error) {
		return "", &Error{Kind: ErrUsage, Msg: msg, Hint: hint}
	}
	home, _ := filepath.EvalSymlinks(os.Getenv("HOME"))
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		real = root
	}
	switch {
	case in.Kind == Rootfs:
		return refuse("--kind rootfs: what is in place is a workspace", "take a system with `agentenv init --from "+dir+"`")
	case in.MountAt != "" && filepath.Clean(in.MountAt) != dir:
		return refuse("--mount-at: what is in place is seen where it is, at "+dir, "leave it out")
	case in.CrossFilesystem:
		return refuse("--cross-filesystems: in place, what is on other file systems is left alone", "leave it out")
	case dir == "/":
		return refuse("/ cannot be in place: it is the running system", "choose a directory such as a repository, or take it with `agentenv init --from /`")
	case dir == home:
		return refuse(dir+" is the home: programs that run write there all the time", "choose a directory in it, such as a repository")
	case dir == real || strings.HasPrefix(dir, real+"/"):
		return refuse(fmt.Sprintf("%s is in the root %s, where agentenv keeps its own", dir, root), "choose another root with --root")
	}
	return dir, nil
}

// gitPrograms are the names in a .git that can make git run commands or look
// elsewhere.
var gitPrograms = []string{"hooks", "config", "config.worktree", "info", "commondir", "gitdir"}

// steersGit says whether a change can make git run commands: in the hooks,
// config or info of a .git, also a submodule's, or of a .git that is a file.
func steersGit(c forks.Change) bool {
	rest, ok := inGit(c.Path)
	if !ok {
		return false
	}
	elems := strings.Split(rest, "/")
	switch elems[0] {
	case "":
		return c.Kind == forks.Type || c.Old != nil && !isDirectory(*c.Old) || c.New != nil && !isDirectory(*c.New)
	case "objects":
		return len(elems) > 1 && elems[1] == "info"
	case "modules", "worktrees":
	default:
		elems = elems[:1]
	}
	for _, e := range elems {
		switch {
		case e == "refs" || e == "logs": // what follows is the name of a branch
			return false
		case slices.Contains(gitPrograms, e):
			return true
		}
	}
	return false
}

// checkSteering refuses to promote a winner in place that could make git run
// commands, unless that was asked for.
func (e *Env) checkSteering(ctx context.Context, winner ID) error {
	if e.opts.Git {
		return nil
	}
	c, err := e.Diff(ctx, e.meta.Head, winner)
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(c.List, steersGit); i >= 0 {
		return &Error{
			Kind: ErrConflict, Msg: fmt.Sprintf("the winner, %s, changed %s, which can make git run commands: nothing was promoted", winner, c.List[i].Path),
			Hint: fmt.Sprintf("look at it with `agentenv show %s`; `agentenv checkout %s` makes it HEAD now, and --git does so at once", winner, winner),
		}
	}
	return nil
}
