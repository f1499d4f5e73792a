package archive

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"os/user"
	"slices"
	"strconv"
	"strings"
)

// The tags of POSIX ACL entries and the version of their binary form, from
// linux/posix_acl.h and linux/posix_acl_xattr.h.
const (
	aclVersion  = 2
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
	aclNoID     = ^uint32(0)
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

// parseACL turns the text of a SCHILY.acl record into the value of the xattr
// system.posix_acl_access or _default. Entries stand apart by commas or lines;
// a fourth field, which star writes, is the numeric id of the name. Names
// without it are looked up on this machine, as GNU tar does.
func parseACL(text string) (string, error) {
	var list []aclEntry
	for _, part := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == '\n' }) {
		part, _, _ = strings.Cut(part, "#")
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		e, err := parseACLEntry(part)
		if err != nil {
			return "", err
		}
		list = append(list, e)
	}
	slices.SortFunc(list, func(a, b aclEntry) int { return cmp.Or(cmp.Compare(a.tag, b.tag), cmp.Compare(a.id, b.id)) })
	b := binary.LittleEndian.AppendUint32(nil, aclVersion)
	for _, e := range list {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return string(b), nil
}

func parseACLEntry(part string) (aclEntry, error) {
	fields := strings.Split(part, ":")
	if len(fields) == 2 { // "mask:rwx" and "other:rwx" in old texts
		fields = []string{fields[0], "", fields[1]}
	}
	if len(fields) < 3 || len(fields) > 4 {
		return aclEntry{}, fmt.Errorf("ACL entry %q is not TAG:NAME:PERMISSIONS", part)
	}
	e := aclEntry{id: aclNoID}
	for i, c := range fields[2] {
		if i >= 3 || c != '-' && c != rune("rwx"[i]) {
			return e, fmt.Errorf("ACL entry %q has no permissions like r-x", part)
		}
		if c != '-' {
			e.perm |= 4 >> i
		}
	}
	named := fields[1] != ""
	switch tag := fields[0]; {
	case (tag == "user" || tag == "u") && named:
		e.tag = aclUser
	case tag == "user" || tag == "u":
		e.tag = aclUserObj
	case (tag == "group" || tag == "g") && named:
		e.tag = aclGroup
	case tag == "group" || tag == "g":
		e.tag = aclGroupObj
	case tag == "mask" || tag == "m":
		e.tag = aclMask
	case tag == "other" || tag == "o":
		e.tag = aclOther
	default:
		return e, fmt.Errorf("ACL entry %q has an unknown tag", part)
	}
	if e.tag != aclUser && e.tag != aclGroup {
		return e, nil
	}
	id := fields[1]
	if len(fields) == 4 {
		id = fields[3]
	}
	var err error
	e.id, err = aclID(e.tag, id)
	return e, err
}

// aclID is the number of a user or group given by number or name.
func aclID(tag uint16, name string) (uint32, error) {
	if n, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(n), nil
	}
	var id string
	if tag == aclUser {
		u, err := user.Lookup(name)
		if err != nil {
			return 0, err
		}
		id = u.Uid
	} else {
		g, err := user.LookupGroup(name)
		if err != nil {
			return 0, err
		}
		id = g.Gid
	}
	n, err := strconv.ParseUint(id, 10, 32)
	return uint32(n), err
}
