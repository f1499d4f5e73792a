//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"slices"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
)

// note remembers, in a walk, a name of a file that has several.
func (c *comparison) note(i int, f *found, path string) {
	if f.isReg() && f.st.Nlink > 1 && c.changed == nil {
		l := &c.links[i]
		l.names[f.st.Ino] = append(l.names[f.st.Ino], path)
	}
}

// touch remembers that the names of a file that has several may be others.
func (c *comparison) touch(i int, f *found) {
	if f.isReg() && f.st.Nlink > 1 {
		c.links[i].touched[f.st.Ino] = true
	}
}

// linked lists the paths whose file is the same, or equal, and whose group of
// names is another one. A group is known by the first of its names.
func (c *comparison) linked() error {
	seen := make(map[string]bool)
	for i := range c.links {
		for ino := range c.links[i].touched {
			names, err := c.names(i, ino)
			if err != nil {
				return err
			}
			for _, path := range names {
				seen[path] = true
			}
		}
	}
	for path := range seen {
		if c.listed[path] {
			continue
		}
		if err := c.linkedPath(path); err != nil {
			return err
		}
	}
	return nil
}

func (c *comparison) linkedPath(path string) error {
	da, fa, err := c.a.lookup(path)
	if err != nil || fa == nil {
		return closing(da, err)
	}
	defer unix.Close(da)
	db, fb, err := c.b.lookup(path)
	if err != nil || fb == nil {
		return closing(db, err)
	}
	defer unix.Close(db)
	if !fa.isReg() || !fb.isReg() || fb.st.Dev != c.dev {
		return nil
	}
	first, err := c.first(0, fa, path)
	if err != nil {
		return err
	}
	second, err := c.first(1, fb, path)
	if err != nil || first == second {
		return err
	}
	ea, err := c.a.entry(da, fa, path)
	if err != nil || ea == nil {
		return err
	}
	eb, err := c.b.entry(db, fb, path)
	if err != nil || eb == nil {
		return err
	}
	c.put(forks.Modified, path, ea, eb)
	return nil
}

func closing(fd int, err error) error {
	if fd >= 0 {
		unix.Close(fd)
	}
	return err
}

// first returns the name that a file's group is known by.
func (c *comparison) first(i int, f *found, path string) (string, error) {
	if f.st.Nlink < 2 {
		return path, nil
	}
	names, err := c.names(i, f.st.Ino)
	if err != nil || len(names) == 0 {
		return path, err
	}
	return slices.MinFunc(names, inWalk), nil
}

// inWalk orders paths as a walk comes by them: what is below a directory comes
// before what stands beside it.
func inWalk(a, b string) int {
	return strings.Compare(strings.ReplaceAll(a, "/", "\x00"), strings.ReplaceAll(b, "/", "\x00"))
}

// names returns all names of an inode of one side.
func (c *comparison) names(i int, ino uint64) ([]string, error) {
	l := &c.links[i]
	if names, ok := l.names[ino]; ok || c.changed == nil {
		return names, nil
	}
	root := c.a.root
	if i == 1 {
		root = c.b.root
	}
	names, err := paths(root, ino)
	l.names[ino] = names
	return names, err
}

// paths searches for all paths of an inode.
func paths(root int, ino uint64) ([]string, error) {
	if ino == rootDir {
		return []string{"."}, nil
	}
	refs, err := refs(root, ino)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, r := range refs {
		dirs, err := paths(root, r.dir)
		if err != nil {
			return nil, err
		}
		for _, d := range dirs {
			all = append(all, join(d, r.name))
		}
	}
	return all, nil
}
