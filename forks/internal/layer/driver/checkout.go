//go:build linux

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"github.com/agentenv/agentenv/forks/internal/layer"
	"golang.org/x/sys/unix"
)

// checkoutPlain makes a plain tree equal to snapshot id.
func (d *driver) checkoutPlain(ctx context.Context, key forks.Key, id forks.ID) error {
	f, err := d.scan(ctx, key, false)
	if errors.Is(err, forks.ErrDamaged) {
		f, err = d.scanAnew(ctx, key, id)
	}
	if err != nil {
		return err
	}
	defer f.close()
	present := f.index
	if f.scan.Delta != nil {
		if present, err = layer.Merge(f.index, f.scan.Delta, true); err != nil {
			return err
		}
	}
	target, err := d.store.State(id)
	if err != nil {
		return err
	}
	c := &checkout{plain: f, present: present, target: target.Clone(), set: fsat.NewSetter()}
	c.plan()
	if err := c.check(); err != nil {
		return err
	}
	st, err := d.store.NewStage()
	if err != nil {
		return err
	}
	err = c.run(ctx, st, id, key == forks.Work)
	return errors.Join(err, st.Remove(ctx))
}

// checkout makes the tree, which is now present, equal to target.
type checkout struct {
	plain           *plain
	present, target *layer.State
	set             fsat.Setter
	warn            layer.Warnings
	groups          [2]map[uint32]string

	top    *dirPlan
	tops   []uint32 // the nodes of target that are made new
	placed map[uint32]unix.Stat_t
	aside  *fsat.Dir // what was made new, by node, and then what it replaced
	old    int
}

// dirPlan is what there is to do in a directory that is in both states.
type dirPlan struct {
	name   string
	node   uint32 // of target
	differ bool   // its own metadata
	steps  []action
	subs   []*dirPlan
}

// action replaces, makes or removes one name.
type action struct {
	name   string
	node   uint32 // of target, unless it is removed
	remove bool
	swap   bool   // a directory is on either side: the two change places
	was    uint32 // of present; 0 if there is nothing that could have changed
	isDir  bool   // what is made
}

// plan finds out what differs.
func (c *checkout) plan() {
	c.groups = [2]map[uint32]string{groupNames(c.present), groupNames(c.target)}
	c.top = &dirPlan{name: "."}
	c.planDir(c.top, 0)
}

// groupNames maps each hard-link group to its names.
func groupNames(s *layer.State) map[uint32]string {
	names := make(map[uint32]string)
	for i := range s.Nodes {
		if l := s.Nodes[i].Link; l != 0 {
			names[l] += s.Path(uint32(i)) + "\x00"
		}
	}
	return names
}

func (c *checkout) planDir(p *dirPlan, present uint32) {
	p.differ = !layer.SameMeta(c.present, present, c.target, p.node)
	c.target.Nodes[p.node].KeepIdentity(&c.present.Nodes[present])
	a, aend := present+1, c.present.Nodes[present].End
	b, bend := p.node+1, c.target.Nodes[p.node].End
	for a < aend || b < bend {
		switch {
		case b >= bend || a < aend && c.present.Name(a) < c.target.Name(b):
			if c.present.Nodes[a].Flags&layer.Absent == 0 {
				p.steps = append(p.steps, action{name: c.present.Name(a), remove: true, was: a})
			}
			a = c.present.Nodes[a].End
		case a >= aend || c.target.Name(b) < c.present.Name(a):
			c.planNew(p, 0, b)
			b = c.target.Nodes[b].End
		default:
			c.planBoth(p, a, b)
			a, b = c.present.Nodes[a].End, c.target.Nodes[b].End
		}
	}
}

// planNew plans to make b where a is; a is 0 where nothing is.
func (c *checkout) planNew(p *dirPlan, a, b uint32) {
	isDir := c.target.Nodes[b].IsDir()
	wasDir := a != 0 && c.present.Nodes[a].IsDir()
	p.steps = append(p.steps, action{name: c.target.Name(b), node: b, swap: wasDir || isDir, isDir: isDir, was: a})
	c.tops = append(c.tops, b)
}

func (c *checkout) planBoth(p *dirPlan, a, b uint32) {
	x, y := &c.present.Nodes[a], &c.target.Nodes[b]
	switch {
	case x.IsDir() && y.IsDir():
		sub := &dirPlan{name: c.target.Name(b), node: b}
		c.planDir(sub, a)
		if sub.differ || len(sub.steps) > 0 || len(sub.subs) > 0 {
			p.subs = append(p.subs, sub)
		}
	case c.same(a, b):
		y.KeepIdentity(x)
	default:
		c.planNew(p, a, b)
	}
}

// same says whether a path that is no directory can stay as it is.
func (c *checkout) same(a, b uint32) bool {
	x, y := &c.present.Nodes[a], &c.target.Nodes[b]
	if !layer.SameMeta(c.present, a, c.target, b) {
		return false
	}
	if x.IsReg() && y.Size > 0 && c.present.LayerOf(a) != c.target.LayerOf(b) {
		return false
	}
	if x.IsReg() && y.Size == 0 && c.present.LayerOf(a) == "" {
		return false // its attributes were not read
	}
	return c.groups[0][x.Link] == c.groups[1][y.Link]
}

// check refuses, before anything changes, what cannot be done.
func (c *checkout) check() error {
	if err := c.checkMounts(c.top, "."); err != nil {
		return err
	}
	if os.Geteuid() == 0 {
		return nil // who clears the flags
	}
	return c.checkLocked(c.top, c.plain.root, ".")
}

func (c *checkout) checkMounts(p *dirPlan, path string) error {
	for _, m := range c.plain.scan.Mounts {
		for _, s := range p.steps {
			at := relative(path, s.name)
			if at == m || strings.HasPrefix(m, at+"/") || strings.HasPrefix(at, m+"/") {
				return fmt.Errorf("%s: is a mount point, and what is there must change: unmount it first", m)
			}
		}
		if p.differ && path == m {
			return fmt.Errorf("%s: is a mount point, and the directory must change: unmount it first", m)
		}
	}
	for _, sub := range p.subs {
		if err := c.checkMounts(sub, relative(path, sub.name)); err != nil {
			return err
		}
	}
	return nil
}

func relative(dir, name string) string {
	if dir == "." {
		return name
	}
	return dir + "/" + name
}

// checkLocked refuses immutable and append-only paths that must change.
func (c *checkout) checkLocked(p *dirPlan, fd int, path string) error {
	if (p.differ || len(p.steps) > 0) && fsat.Locked(fd, "") {
		return lockedError(path)
	}
	for _, s := range p.steps {
		if fsat.Locked(fd, s.name) {
			return lockedError(relative(path, s.name))
		}
	}
	for _, sub := range p.subs {
		at := relative(path, sub.name)
		next, err := layer.Access.OpenDir(fd, sub.name)
		if err != nil {
			return &os.PathError{Op: "open", Path: at, Err: err}
		}
		err = c.checkLocked(sub, next, at)
		unix.Close(next)
		if err != nil {
			return err
		}
	}
	return nil
}

func lockedError(path string) error {
	return fmt.Errorf("%s: is immutable or append-only, and only root can change that: chattr -i -a it", path)
}

// run makes what is new, then marks the fork as unsettled, and changes it.
func (c *checkout) run(ctx context.Context, st *layer.Stage, id forks.ID, durable bool) (err error) {
	if c.aside, err = st.Mkdir("new"); err != nil {
		return err
	}
	defer c.aside.Release()
	if err := c.make(ctx, st); err != nil {
		return err
	}
	if durable && len(c.tops) > 0 {
		if err := unix.Syncfs(c.aside.FD); err != nil {
			return &os.PathError{Op: "syncfs", Path: st.Path, Err: err}
		}
	}
	if err := st.SetForkBase(c.plain.dir, c.plain.base, false); err != nil {
		return err
	}
	c.placed = make(map[uint32]unix.Stat_t)
	root, err := c.openRoot()
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if err := c.dir(ctx, c.top, root, root, "."); err != nil {
		return err
	}
	c.evenLinks()
	c.target.MarkRacy(time.Now())
	if err := st.SaveForkIndex(c.plain.dir, id, c.target); err != nil {
		return err
	}
	return st.SetForkBase(c.plain.dir, id, true)
}

// make restores everything that is new, in the stage.
func (c *checkout) make(ctx context.Context, st *layer.Stage) error {
	r, err := st.NewRestorer(c.target, &c.warn)
	if err != nil {
		return err
	}
	defer r.Close()
	var tops []layer.Top
	for _, node := range c.tops {
		c.aside.Hold(1)
		tops = append(tops, layer.Top{Dir: c.aside, Name: asideName(node), Node: node, Bare: true})
	}
	if err := r.Run(ctx, tops); err != nil {
		return err
	}
	return r.Settle()
}

func asideName(node uint32) string { return strconv.FormatUint(uint64(node), 16) }

// openRoot opens the tree so that it can be changed.
func (c *checkout) openRoot() (int, error) {
	return fsat.OpenWritable(c.plain.root, ".")
}

// dir does what is planned for a directory, which is name in the open parent
// and itself open as fd.
func (c *checkout) dir(ctx context.Context, p *dirPlan, parent, fd int, path string) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	for _, s := range p.steps {
		if err := c.step(ctx, fd, s); err != nil {
			return &os.PathError{Op: "restore", Path: relative(path, s.name), Err: err}
		}
	}
	for _, sub := range p.subs {
		at := relative(path, sub.name)
		next, err := fsat.OpenWritable(fd, sub.name)
		if err != nil {
			return &os.PathError{Op: "open", Path: at, Err: err}
		}
		err = c.dir(ctx, sub, fd, next, at)
		unix.Close(next)
		if err != nil {
			return err
		}
	}
	return c.settle(parent, fd, p.name, p.node, path)
}

// settle gives a directory its metadata and takes its identity.
func (c *checkout) settle(parent, fd int, name string, node uint32, path string) error {
	meta := c.target.Meta(node)
	var st unix.Stat_t
	err := unlocking(parent, name, func() error { return c.set.FD(fd, &meta, &st) })
	if err != nil {
		return &os.PathError{Op: "restore", Path: path, Err: err}
	}
	c.target.Nodes[node].SetIdentity(&st)
	return nil
}

// unlocking does fn again, without the flags that forbid it, if it is refused.
func unlocking(dir int, name string, fn func() error) error {
	err := fn()
	if errors.Is(err, unix.EPERM) && os.Geteuid() == 0 && fsat.UnlockAt(dir, name) == nil {
		err = fn()
	}
	return err
}

// errEdited: someone wrote to a path between the look at it and its change.
var errEdited = errors.New("it was changed by someone else meanwhile")

// unedited refuses a file that is not what it was when the tree was read: its
// new content is in no snapshot.
func (c *checkout) unedited(fd int, s action) error {
	if s.was == 0 || c.present.Nodes[s.was].IsDir() {
		return nil
	}
	var st unix.Stat_t
	err := unix.Fstatat(fd, s.name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil
	}
	if err == nil && !c.present.Nodes[s.was].Unwritten(&st) {
		err = errEdited
	}
	return err
}

func (c *checkout) step(ctx context.Context, fd int, s action) error {
	if err := c.unedited(fd, s); err != nil {
		return err
	}
	if s.remove {
		return c.putAside(fd, s.name)
	}
	if c.target.Nodes[s.node].Flags&layer.Absent != 0 {
		return c.putAside(fd, s.name) // it could not be made
	}
	from := asideName(s.node)
	if s.swap {
		if err := c.swap(fd, from, s.name); err != nil {
			return err
		}
	} else {
		err := unlocking(fd, s.name, func() error { return putIn(c.aside.FD, from, fd, s) })
		if err == unix.EISDIR || err == unix.ENOTEMPTY {
			err = c.swap(fd, from, s.name) // it became a directory meanwhile
		}
		if err != nil {
			return err
		}
	}
	return c.take(fd, s)
}

// putIn puts a file in place; where nothing was, nothing may have come.
func putIn(from int, name string, fd int, s action) error {
	if s.was == 0 {
		err := unix.Renameat2(from, name, fd, s.name, unix.RENAME_NOREPLACE)
		if err == unix.EEXIST {
			return errEdited
		}
		if err != unix.EINVAL { // a file system that does not know the flag
			return err
		}
	}
	return unix.Renameat(from, name, fd, s.name)
}

// swap lets what is new and what is old change places, so that at no moment
// neither is there.
func (c *checkout) swap(fd int, from, name string) error {
	if err := c.movable(fd, name); err != nil {
		return err
	}
	err := unlocking(fd, name, func() error {
		return unix.Renameat2(c.aside.FD, from, fd, name, unix.RENAME_EXCHANGE)
	})
	if err == unix.ENOENT {
		return unix.Renameat(c.aside.FD, from, fd, name)
	}
	return err
}

// movable gives a directory the mode that the kernel wants of one that gets
// another parent.
func (c *checkout) movable(fd int, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT || err == nil && (c.set.Root() || st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Mode&0o200 != 0) {
		return nil
	}
	if err != nil {
		return err
	}
	dir, err := fsat.OpenWritable(fd, name)
	if err != nil {
		return err
	}
	unix.Close(dir)
	return nil
}

// putAside moves what is to go out of the tree; it is removed in the end.
func (c *checkout) putAside(fd int, name string) error {
	if err := c.movable(fd, name); err != nil {
		return err
	}
	c.old++
	to := "old" + strconv.Itoa(c.old)
	err := unlocking(fd, name, func() error { return unix.Renameat(fd, name, c.aside.FD, to) })
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// take notes the identity of what was put into the tree. A directory's own
// metadata was left for now.
func (c *checkout) take(fd int, s action) error {
	if s.isDir {
		dir, err := fsat.OpenWritable(fd, s.name)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		return c.settle(fd, dir, s.name, s.node, s.name)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(fd, s.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	c.target.Nodes[s.node].SetIdentity(&st)
	if link := c.target.Nodes[s.node].Link; link != 0 {
		c.placed[link] = st
	}
	return nil
}

// evenLinks gives all names of a file the identity that it had when the last
// of them was put in place: each rename changes the ctime of the file.
func (c *checkout) evenLinks() {
	if len(c.placed) == 0 {
		return
	}
	for i := range c.target.Nodes {
		n := &c.target.Nodes[i]
		if st, ok := c.placed[n.Link]; ok && n.Link != 0 {
			n.SetIdentity(&st)
		}
	}
}
