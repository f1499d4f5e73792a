package sandbox

import (
	"syscall"

	"github.com/moby/sys/user"
)

// setgroups says whether the command may change its groups: only where the
// map was written with the power over more than one id.
func (s *spec) setgroups() bool { return s.UID == 0 && !s.singleMap() }

// singleMap says whether the caller is the only one in the maps.
func (s *spec) singleMap() bool {
	m, err := identityMap("/proc/self/gid_map")
	return err != nil || len(m) == 1 && m[0].Size == 1
}

// outerMaps are those of the helper's namespace: root stays who he is and so do
// all others; an ordinary user becomes 0, to be able to mount.
func outerMaps(s *spec) (uids, gids []syscall.SysProcIDMap, err error) {
	if s.UID == 0 {
		return identityMaps()
	}
	one := func(id int) []syscall.SysProcIDMap {
		return []syscall.SysProcIDMap{{ContainerID: 0, HostID: id, Size: 1}}
	}
	return one(s.UID), one(s.GID), nil
}

// innerMaps are those of the command's namespace: in a workspace the caller is
// who he is outside, or git would not trust the tree; in a system of its own
// he is root.
func innerMaps(s *spec) (uids, gids []syscall.SysProcIDMap, err error) {
	if s.UID == 0 {
		return identityMaps()
	}
	uid, gid := s.UID, s.GID
	if s.View.At == "" {
		uid, gid = 0, 0
	}
	one := func(id int) []syscall.SysProcIDMap {
		return []syscall.SysProcIDMap{{ContainerID: id, HostID: 0, Size: 1}}
	}
	return one(uid), one(gid), nil
}

func identityMaps() (uids, gids []syscall.SysProcIDMap, err error) {
	if uids, err = identityMap("/proc/self/uid_map"); err != nil {
		return nil, nil, err
	}
	gids, err = identityMap("/proc/self/gid_map")
	return uids, gids, err
}

// identityMap maps every id that this namespace has to itself.
func identityMap(file string) ([]syscall.SysProcIDMap, error) {
	lines, err := user.ParseIDMapFile(file)
	if err != nil {
		return nil, err
	}
	var m []syscall.SysProcIDMap
	for _, l := range lines {
		m = append(m, syscall.SysProcIDMap{ContainerID: int(l.ID), HostID: int(l.ID), Size: int(l.Count)})
	}
	return m, nil
}
