package subid

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"

	"github.com/moby/sys/user"
)

// Range maps Size ids from Outside on to those from Inside on.
type Range struct {
	Inside  int64 `json:"inside"`
	Outside int64 `json:"outside"`
	Size    int64 `json:"size"`
}

// Map is what a user namespace maps, in the order of the ids inside.
type Map struct {
	UIDs []Range `json:"uids"`
	GIDs []Range `json:"gids"`
}

// Equal says whether both map the same.
func (m Map) Equal(o Map) bool { return slices.Equal(m.UIDs, o.UIDs) && slices.Equal(m.GIDs, o.GIDs) }

// Size is how many user ids there are inside.
func (m Map) Size() int64 { return total(m.UIDs) }

func total(ranges []Range) int64 {
	var n int64
	for _, r := range ranges {
		n += r.Size
	}
	return n
}

// Inside translates an id from outside; ok is false if it is not mapped.
func Inside(ranges []Range, id int64) (inside int64, ok bool) {
	for _, r := range ranges {
		if id >= r.Outside && id-r.Outside < r.Size {
			return r.Inside + id - r.Outside, true
		}
	}
	return 0, false
}

// Has says whether there is such an id inside.
func Has(ranges []Range, id uint32) bool {
	return slices.ContainsFunc(ranges, func(r Range) bool { return int64(id) >= r.Inside && int64(id)-r.Inside < r.Size })
}

// Error says why this user has no range of ids, and what mends it.
type Error struct{ Msg, Fix string }

func (e *Error) Error() string {
	if e.Fix == "" {
		return e.Msg
	}
	return e.Msg + ": " + e.Fix
}

const (
	// needed is how many ids a system takes: those up to nobody's, 65534.
	needed = 65535
	// maxRanges is what the kernel takes in one map (UID_GID_MAP_MAX_EXTENTS),
	// less the one for the caller.
	maxRanges = 340 - 1
	// firstFree is where login.defs(5) lets ranges begin by default.
	firstFree = 100_000
	// usual is the size of the range that useradd gives.
	usual = 65536
)

// kind is one of the two kinds of ids.
type kind struct {
	what, file, helper, add string
	own                     func() int
}

var (
	uids = kind{"user", "/etc/subuid", "newuidmap", "--add-subuids", os.Geteuid}
	gids = kind{"group", "/etc/subgid", "newgidmap", "--add-subgids", os.Getegid}
)

// Mine is the map of all ids that the caller has. The error, if there are too
// few or what maps them is not installed, is an [*Error].
func Mine() (Map, error) {
	if err := haveHelpers(); err != nil {
		return Map{}, err
	}
	uid, err := uids.mine()
	if err != nil {
		return Map{}, err
	}
	gid, err := gids.mine()
	return Map{uid, gid}, err
}

func haveHelpers() error {
	for _, k := range []kind{uids, gids} {
		if _, err := k.program(); err != nil {
			return &Error{Msg: k.helper + " is not installed", Fix: "sudo apt-get install uidmap (elsewhere the package is shadow-utils or shadow)"}
		}
	}
	return nil
}

// programDirs are where helpers are looked for: in PATH and where they usually are.
var programDirs = []string{"", "/usr/bin/", "/usr/sbin/", "/sbin/"}

// program is the path of the helper, also where PATH does not have it.
func (k kind) program() (path string, err error) {
	for _, dir := range programDirs {
		if path, err = exec.LookPath(dir + k.helper); err == nil {
			break
		}
	}
	return path, err
}

// caller is how the files name the caller.
func caller() string {
	if u, err := user.LookupUid(os.Geteuid()); err == nil {
		return u.Name
	}
	return strconv.Itoa(os.Geteuid())
}

// granted lists the caller's ranges, and where the first comes that no user has.
func (k kind) granted() (own []user.SubID, free int64, err error) {
	name, uid := caller(), strconv.Itoa(os.Geteuid())
	all, err := user.ParseSubIDFileFilter(k.file, nil)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, 0, &Error{Msg: fmt.Sprintf("%s cannot be read: %v", k.file, err)}
	}
	free = firstFree
	for _, s := range all {
		free = max(free, s.SubID+s.Count)
		if s.Name == name || s.Name == uid {
			own = append(own, s)
		}
	}
	return own, free, nil
}

// mine maps the caller to 0 and his ranges to what follows. A range that
// overlaps what is mapped already is left out: the kernel takes no such map.
func (k kind) mine() ([]Range, error) {
	own, free, err := k.granted()
	if err != nil {
		return nil, err
	}
	m := []Range{{Inside: 0, Outside: int64(k.own()), Size: 1}}
	for _, s := range own {
		overlaps := func(r Range) bool { return s.SubID < r.Outside+r.Size && r.Outside < s.SubID+s.Count }
		if s.Count <= 0 || len(m) > maxRanges || slices.ContainsFunc(m, overlaps) {
			continue
		}
		m = append(m, Range{Inside: total(m), Outside: s.SubID, Size: s.Count})
	}
	if n := total(m) - 1; n < needed {
		has := "no ids"
		if n > 0 {
			has = fmt.Sprintf("only %d ids", n)
		}
		return nil, &Error{
			Msg: fmt.Sprintf("%s gives %s %s", k.file, caller(), has),
			Fix: fmt.Sprintf("sudo usermod --add-subuids %d-%d --add-subgids %d-%d %s", free, free+usual-1, free, free+usual-1, caller()),
		}
	}
	return m, nil
}

// Check says whether the caller can still have the map m, which was his once.
// The error is an [*Error].
func (m Map) Check() error {
	if err := haveHelpers(); err != nil {
		return err
	}
	if err := uids.check(m.UIDs); err != nil {
		return err
	}
	return gids.check(m.GIDs)
}

func (k kind) check(m []Range) error {
	if len(m) == 0 || m[0].Size != 1 {
		return &Error{Msg: fmt.Sprintf("a map of %s ids without the user himself", k.what)}
	}
	if id := int64(k.own()); id != m[0].Outside {
		return &Error{
			Msg: fmt.Sprintf("it is of the %s with id %d, and this is %d", k.what, m[0].Outside, id),
			Fix: fmt.Sprintf("run agentenv as that %s", k.what),
		}
	}
	own, _, err := k.granted()
	if err != nil {
		return err
	}
	for _, r := range m[1:] {
		if !slices.ContainsFunc(own, func(s user.SubID) bool { return s.SubID <= r.Outside && r.Outside+r.Size <= s.SubID+s.Count }) {
			last := r.Outside + r.Size - 1
			return &Error{
				Msg: fmt.Sprintf("%s does not give %s the ids %d-%d any more, which its files have", k.file, caller(), r.Outside, last),
				Fix: fmt.Sprintf("sudo usermod %s %d-%d %s", k.add, r.Outside, last, caller()),
			}
		}
	}
	return nil
}

// Current is the map of the user namespace that this process is in.
func Current() (Map, error) {
	u, err := readMap("/proc/self/uid_map")
	if err != nil {
		return Map{}, err
	}
	g, err := readMap("/proc/self/gid_map")
	return Map{u, g}, err
}

func readMap(file string) ([]Range, error) {
	lines, err := user.ParseIDMapFile(file)
	if err != nil {
		return nil, err
	}
	var m []Range
	for _, l := range lines {
		m = append(m, Range{Inside: l.ID, Outside: l.ParentID, Size: l.Count})
	}
	return m, nil
}
