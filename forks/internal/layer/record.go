//go:build linux

package layer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"syscall"

	"github.com/agentenv/agentenv/forks"
)

// Version is the format of the records that this program writes.
const Version = 1

// magic starts every record; the two bytes after it are the version.
const magic = "agentenvREC\n"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrNewer: a record was written by a newer program. It wraps
// [forks.ErrUnsupported].
var ErrNewer = fmt.Errorf("%w: written by a newer agentenv; use that one", forks.ErrUnsupported)

// Header starts a record.
type Header struct {
	// ID and Base are the snapshot and what it was stored against.
	ID, Base forks.ID
}

// EncodeRecord returns the record of the difference delta.
//
// After the header, which has a checksum of its own, stands one item a node:
// how many levels up from the last one, flags, name, and unless the path is
// removed or only passed through its mode, owner, size, mtime, link group and
// extra. All numbers are varints. A CRC-32C of everything ends it.
func EncodeRecord(h Header, delta *State) []byte {
	b := make([]byte, 0, 256+40*len(delta.Nodes))
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint16(b, Version)
	b = appendString(b, string(h.ID))
	b = appendString(b, string(h.Base))
	b = binary.AppendUvarint(b, uint64(len(delta.Nodes)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	depth := make([]int, len(delta.Nodes))
	last := -1
	for i := range delta.Nodes {
		n := &delta.Nodes[i]
		if i > 0 {
			depth[i] = depth[n.Parent] + 1
		}
		b = binary.AppendUvarint(b, uint64(last+1-depth[i]))
		last = depth[i]
		b = append(b, n.Flags&(Removed|Through|Opaque), n.nameLen)
		b = append(b, delta.Name(uint32(i))...)
		if n.Flags&(Removed|Through) == 0 {
			b = appendMeta(b, n, delta.rawExtra(uint32(i)))
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func appendMeta(b []byte, n *Node, extra []byte) []byte {
	b = binary.AppendUvarint(b, uint64(n.Mode))
	b = binary.AppendUvarint(b, uint64(n.UID))
	b = binary.AppendUvarint(b, uint64(n.GID))
	b = binary.AppendUvarint(b, uint64(n.Size))
	b = binary.AppendVarint(b, n.MtimeSec)
	b = binary.AppendUvarint(b, uint64(n.MtimeNsec))
	b = binary.AppendUvarint(b, uint64(n.Link))
	b = binary.AppendUvarint(b, uint64(len(extra)))
	return append(b, extra...)
}

// DecodeHeader reads the header at the start of a record; b need not hold more.
func DecodeHeader(b []byte) (Header, error) {
	h, _, _, err := decodeHeader(b)
	return h, err
}

func decodeHeader(b []byte) (h Header, nodes, size int, err error) {
	if len(b) < len(magic)+2 || string(b[:len(magic)]) != magic {
		return h, 0, 0, damaged("this is no record")
	}
	r := reader{buf: b, at: len(magic)}
	if v := r.uint16(); v > Version {
		return h, 0, 0, fmt.Errorf("record of format %d, this program knows %d: %w", v, Version, ErrNewer)
	}
	h.ID, h.Base = forks.ID(r.string()), forks.ID(r.string())
	count := r.uvarint()
	sum := crc32.Checksum(b[:r.at], castagnoli)
	if r.uint32() != sum || r.err != nil || count > math.MaxUint32 {
		return h, 0, 0, damaged("the header's checksum is wrong")
	}
	return h, int(count), r.at, nil
}

// DecodeRecord is the reverse of [EncodeRecord]. The state keeps b, which must
// not change afterwards.
func DecodeRecord(b []byte) (Header, *State, error) {
	h, count, at, err := decodeHeader(b)
	if err != nil {
		return h, nil, err
	}
	if err := checkSum(b, at); err != nil {
		return h, nil, err
	}
	body := b[:len(b)-4]
	if count > len(body) {
		return h, nil, damaged("the record's count is wrong")
	}
	s := &State{Nodes: make([]Node, count), heap: body, Layers: []forks.ID{h.ID}}
	r := reader{buf: body, at: at}
	if err := s.decodeNodes(&r); err != nil {
		return h, nil, err
	}
	return h, s, nil
}

// checkSum checks that the record b, whose header ends at at, is as it was
// written.
func checkSum(b []byte, at int) error {
	if len(b) < at+4 || uint64(len(b)) > math.MaxUint32 {
		return damaged("the record is cut short")
	}
	body := b[:len(b)-4]
	if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(b[len(body):]) {
		return damaged("the record's checksum is wrong")
	}
	return nil
}

func (s *State) decodeNodes(r *reader) error {
	var path []uint32 // the indices of the last node and the directories above it
	for i := range s.Nodes {
		n := &s.Nodes[i]
		up := r.uvarint()
		if r.err != nil || up > uint64(len(path)) || (i > 0) != (int(up) < len(path)) {
			return damaged("the record's tree is malformed")
		}
		path = path[:len(path)-int(up)]
		if i > 0 {
			n.Parent = path[len(path)-1]
			if !s.Nodes[n.Parent].IsDir() {
				return damaged("the record has something below a file")
			}
		}
		path = append(path, uint32(i))
		n.Flags, n.nameLen = r.byte(), r.byte()
		n.name = uint32(r.at)
		r.skip(int(n.nameLen))
		switch {
		case n.Flags&Removed != 0:
			n.Layer = NoLayer
		case n.Flags&Through != 0:
			n.Mode = syscall.S_IFDIR
			n.Layer = NoLayer
		default:
			r.meta(n)
		}
		if r.err != nil || (n.nameLen == 0) != (i == 0) {
			return damaged("the record is malformed")
		}
	}
	if r.at != len(r.buf) {
		return damaged("the record has something after its end")
	}
	s.setEnds()
	return nil
}

func (r *reader) meta(n *Node) {
	n.Mode = uint16(r.uvarint())
	n.UID, n.GID = uint32(r.uvarint()), uint32(r.uvarint())
	n.Size = int64(r.uvarint())
	n.MtimeSec, n.MtimeNsec = r.varint(), uint32(r.uvarint())
	n.Link = uint32(r.uvarint())
	at := r.at
	size := r.uvarint()
	if size > 0 {
		n.extra = uint32(at)
		r.skip(int(min(size, math.MaxInt32)))
	}
	if !n.IsReg() {
		n.Layer = NoLayer
	}
}

func damaged(what string) error { return fmt.Errorf("%w: %s", forks.ErrDamaged, what) }

// reader takes values from the front of a buffer; after an error they are 0.
type reader struct {
	buf []byte
	at  int
	err error
}

var errShort = errors.New("short")

func (r *reader) skip(n int) {
	if r.err != nil || n < 0 || n > len(r.buf)-r.at {
		r.err = errShort
		return
	}
	r.at += n
}

func (r *reader) byte() byte {
	if r.err != nil || r.at >= len(r.buf) {
		r.err = errShort
		return 0
	}
	r.at++
	return r.buf[r.at-1]
}

func (r *reader) uint16() uint16 {
	if r.skip(2); r.err != nil {
		return 0
	}
	return binary.LittleEndian.Uint16(r.buf[r.at-2:])
}

func (r *reader) uint32() uint32 {
	if r.skip(4); r.err != nil {
		return 0
	}
	return binary.LittleEndian.Uint32(r.buf[r.at-4:])
}

func (r *reader) uvarint() uint64 {
	if r.err != nil {
		return 0
	}
	if r.at < len(r.buf) && r.buf[r.at] < 0x80 {
		r.at++
		return uint64(r.buf[r.at-1])
	}
	v, n := binary.Uvarint(r.buf[r.at:])
	if n <= 0 {
		r.err = errShort
		return 0
	}
	r.at += n
	return v
}

func (r *reader) varint() int64 {
	u := r.uvarint()
	v := int64(u >> 1)
	if u&1 != 0 {
		v = ^v
	}
	return v
}

func (r *reader) string() string {
	size := r.uvarint()
	at := r.at
	r.skip(int(min(size, math.MaxInt32)))
	if r.err != nil {
		return ""
	}
	return string(r.buf[at:r.at])
}
