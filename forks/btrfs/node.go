//go:build linux && cgo && !no_btrfs

package btrfs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/internal/fsat"
	"golang.org/x/sys/unix"
)

// format is the version of the files "info" and "record" of a snapshot.
const format = 1

// info is what is kept beside a snapshot's subvolume, as the text of a symlink:
// unlike a file it is durable with the transaction that makes the snapshot.
type info struct {
	// Base is the snapshot that this one was made of.
	Base forks.ID
	// Sealed is a time, in ns since 1970, before which a ctime in the snapshot
	// says that nothing of the inode was changed while the snapshot was made.
	Sealed int64
	// Generation is the last transaction that the snapshot has something of:
	// what comes of it later was changed by later ones. 0 stands for the one
	// that made the subvolume. That which changed it last is not asked, since a
	// balance does, and each snapshot of it.
	Generation uint64
}

// record is what the disk cannot hold for an ordinary user. It is kept by
// inode, since those are the same in all snapshots that come from this one.
type record struct {
	Version int
	Inodes  []inodeRecord
	Devices []deviceRecord
}

// inodeRecord is an owner, and attributes, that could not be set. It stands as
// long as the disk says what it said then.
type inodeRecord struct {
	Ino              uint64
	Birth            int64 // ns since 1970: an inode number may be used again
	UID, GID         uint32
	DiskUID, DiskGID uint32
	Xattrs           []xattr `json:",omitempty"`
}

// deviceRecord is a device node that could not be made.
type deviceRecord struct {
	Dir       uint64 // the inode of its directory
	Name      []byte
	Mode      uint32
	Rdev      uint64
	UID, GID  uint32
	MtimeSec  int64
	MtimeNsec uint32
	Xattrs    []xattr `json:",omitempty"`
}

// xattr is a [fsat.Xattr] of any bytes.
type xattr struct{ Name, Value []byte }

func toRecord(list []fsat.Xattr) []xattr {
	var x []xattr
	for _, a := range list {
		x = append(x, xattr{[]byte(a.Name), []byte(a.Value)})
	}
	return x
}

// recorded is a record, made to be asked.
type recorded struct {
	inodes  map[uint64]inodeRecord
	devices map[uint64]map[string]deviceRecord
}

func newRecorded() *recorded {
	return &recorded{inodes: make(map[uint64]inodeRecord), devices: make(map[uint64]map[string]deviceRecord)}
}

func (o *recorded) addDevice(d deviceRecord) {
	if o.devices[d.Dir] == nil {
		o.devices[d.Dir] = make(map[string]deviceRecord)
	}
	o.devices[d.Dir][string(d.Name)] = d
}

// devicesIn lists the names that the record has in a directory.
func (o *recorded) devicesIn(dir uint64) map[string]deviceRecord {
	if o == nil {
		return nil
	}
	return o.devices[dir]
}

func (o *recorded) inode(ino uint64) (inodeRecord, bool) {
	if o == nil {
		return inodeRecord{}, false
	}
	r, ok := o.inodes[ino]
	return r, ok
}

func (o *recorded) empty() bool { return o == nil || len(o.inodes) == 0 && len(o.devices) == 0 }

// encode returns the record in the order of inodes.
func (o *recorded) encode() ([]byte, error) {
	r := record{Version: format}
	for _, ino := range slices.Sorted(maps.Keys(o.inodes)) {
		r.Inodes = append(r.Inodes, o.inodes[ino])
	}
	for _, dir := range slices.Sorted(maps.Keys(o.devices)) {
		for _, name := range slices.Sorted(maps.Keys(o.devices[dir])) {
			r.Devices = append(r.Devices, o.devices[dir][name])
		}
	}
	return json.Marshal(r)
}

// readInfo reads what is kept beside snapshot id.
func (d *driver) readInfo(id forks.ID) (info, error) {
	text, err := os.Readlink(filepath.Join(d.store.NodePath(id), "info"))
	if errors.Is(err, fs.ErrNotExist) {
		if err = d.store.Exists(id); err == nil {
			err = fmt.Errorf("%w: its info is missing", forks.ErrDamaged)
		}
	}
	var i info
	if err == nil {
		i, err = parseInfo(text)
	}
	if err != nil {
		return i, fmt.Errorf("snapshot %s: %w", id, err)
	}
	return i, nil
}

// String is the text of the symlink: version, base, time and transaction.
func (i info) String() string {
	return fmt.Sprintf("%d:%s:%d:%d", format, i.Base, i.Sealed, i.Generation)
}

func parseInfo(text string) (i info, err error) {
	part := strings.Split(text, ":")
	if v, err := strconv.Atoi(part[0]); err == nil && v > format {
		return i, errNewer
	}
	if len(part) == 4 {
		i.Base = forks.ID(part[1])
		i.Sealed, err = strconv.ParseInt(part[2], 10, 64)
		if err == nil {
			i.Generation, err = strconv.ParseUint(part[3], 10, 64)
		}
	}
	if len(part) != 4 || err != nil || i.Base != "" && i.Base.Check() != nil {
		return i, fmt.Errorf("%w: its info is unreadable", forks.ErrDamaged)
	}
	return i, nil
}

// since returns what a search for later changes has to know of snapshot id.
func (d *driver) since(id forks.ID) (info, error) {
	i, err := d.readInfo(id)
	if err != nil || i.Generation != 0 {
		return i, err
	}
	fd, err := d.openSnapshot(id)
	if err != nil {
		return i, err
	}
	defer unix.Close(fd)
	s, err := subvolInfo(fd)
	i.Generation = s.made
	return i, err
}

var errNewer = fmt.Errorf("%w: written by a newer agentenv; use that one", forks.ErrUnsupported)

// readRecord reads the record of snapshot id; nil if it has none.
func (d *driver) readRecord(id forks.ID) (*recorded, error) {
	var r record
	err := readJSON(filepath.Join(d.store.NodePath(id), "record"), &r)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil && r.Version > format {
		err = errNewer
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	o := newRecorded()
	for _, i := range r.Inodes {
		o.inodes[i.Ino] = i
	}
	for _, dev := range r.Devices {
		o.addDevice(dev)
	}
	return o, nil
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: its %s is unreadable: %w", forks.ErrDamaged, filepath.Base(path), err)
	}
	return nil
}

// writeDurable makes a file with the given bytes.
func writeDurable(path string, b []byte) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	if _, err := f.Write(b); err != nil {
		return err
	}
	return f.Sync()
}

// forkBase returns the base of a fork. While it is about to change, the link
// names the base before and the one to come: BASE+NEXT in a commit, after which
// NEXT is there, and BASE:UUID:NEXT in a checkout, after which the tree is the
// subvolume UUID.
func (d *driver) forkBase(key forks.Key) (forks.ID, error) {
	if err := key.Check(); err != nil {
		return "", fmt.Errorf("%w: %w", forks.ErrNotFound, err)
	}
	dir, name := d.store.ForkDir(key)
	base, err := os.Readlink(filepath.Join(dir, "base"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", forks.ErrNotFound
	}
	if err != nil {
		return "", err
	}
	if before, next, ok := strings.Cut(base, "+"); ok {
		base = before
		if _, err := os.Lstat(d.store.NodePath(forks.ID(next))); err == nil {
			base = next
		}
	}
	if before, coming, ok := strings.Cut(base, ":"); ok {
		base = before
		uuid, next, _ := strings.Cut(coming, ":")
		is, err := d.treeUUID(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		if is == uuid {
			base = next
		}
	}
	id := forks.ID(base)
	if id.Check() != nil {
		return "", fmt.Errorf("%w: the fork's base is unreadable", forks.ErrDamaged)
	}
	return id, nil
}

func (d *driver) treeUUID(path string) (string, error) {
	fd, err := openTree(path)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	s, err := subvolInfo(fd)
	return fmt.Sprintf("%x", s.uuid), err
}

// setForkBase replaces a fork's base link by way of a name beside it.
func setForkBase(dir, text string) error {
	tmp := filepath.Join(dir, "base.new")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(text, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, "base"))
}

// openTree opens a subvolume's root, whatever its mode.
func openTree(path string) (int, error) {
	dir, err := unix.Open(filepath.Dir(path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(dir)
	fd, err := trees.OpenDir(dir, filepath.Base(path))
	if errors.Is(err, fsat.ErrMountPoint) {
		err = fmt.Errorf("%w: unmount it first", err)
	}
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// trees is how the store's own trees are read.
var trees = fsat.Access{Chmod: true}
