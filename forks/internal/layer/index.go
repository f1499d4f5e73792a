//go:build linux

package layer

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"unsafe"

	"github.com/agentenv/agentenv/forks"
)

// An index is a state as it lies in memory: a header of nine 8-byte words, the
// nodes, the heap, and the ids of the base and the layers. Words and nodes have
// the machine's byte order; another machine's index has another first word.
const (
	indexMagic = 0x31786469766e6761 // "agnvidx1"; changed whenever Node changes
	indexWords = 9
)

// SaveIndex writes state, the index of a tree whose base is base, to path.
func SaveIndex(path string, base forks.ID, s *State) (err error) {
	names := appendString(nil, string(base))
	for _, l := range s.Layers {
		names = appendString(names, string(l))
	}
	nodes := nodeBytes(s.Nodes)
	sum := crc32.Checksum(nodes, castagnoli)
	sum = crc32.Update(sum, castagnoli, s.heap)
	sum = crc32.Update(sum, castagnoli, names)
	head := [indexWords]uint64{indexMagic, uint64(unsafe.Sizeof(Node{})), uint64(len(s.Nodes)),
		uint64(len(s.heap)), uint64(len(names)), uint64(sum)}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	for _, b := range [][]byte{wordBytes(head[:]), nodes, s.heap, names} {
		if _, err := f.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// LoadIndex reads an index and the base that it belongs to. Any error means
// that there is none to be believed.
func LoadIndex(path string) (forks.ID, *State, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return "", nil, err
	}
	words := make([]uint64, (fi.Size()+7)/8) // aligned as nodes must be
	b := wordBytes(words)[:fi.Size()]
	if _, err := io.ReadFull(f, b); err != nil {
		return "", nil, err
	}
	if len(words) < indexWords || words[0] != indexMagic || words[1] != uint64(unsafe.Sizeof(Node{})) {
		return "", nil, fmt.Errorf("%s: another program's or machine's index", path)
	}
	return parseIndex(b, words)
}

func parseIndex(b []byte, words []uint64) (forks.ID, *State, error) {
	count, heap, names := words[2], words[3], words[4]
	const start = indexWords * 8
	room := uint64(len(b) - start)
	if count == 0 || count > room/uint64(unsafe.Sizeof(Node{})) || heap > room || names > room ||
		count*uint64(unsafe.Sizeof(Node{}))+heap+names != room ||
		uint64(crc32.Checksum(b[start:], castagnoli)) != words[5] {
		return "", nil, damaged("the index's checksum is wrong")
	}
	nodesEnd := start + count*uint64(unsafe.Sizeof(Node{}))
	s := &State{
		Nodes: unsafe.Slice((*Node)(unsafe.Pointer(&b[start])), count),
		heap:  b[nodesEnd : nodesEnd+heap : nodesEnd+heap],
	}
	r := reader{buf: b[nodesEnd+heap:]}
	base := forks.ID(r.string())
	for r.at < len(r.buf) && r.err == nil {
		s.Layers = append(s.Layers, forks.ID(r.string()))
	}
	return base, s, r.err
}

func nodeBytes(n []Node) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(n))), len(n)*int(unsafe.Sizeof(Node{})))
}

func wordBytes(w []uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), len(w)*8)
}

// headerSize is enough of a record for [DecodeHeader].
const headerSize = len(magic) + 2 + 2*(2+128) + binary.MaxVarintLen64 + 4
