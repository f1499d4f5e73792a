//go:build linux

package layer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/agentenv/agentenv/forks"
	"golang.org/x/sys/unix"
)

// A lookup file stands beside a large record and has the same, to be read path
// by path: a commit that changed one file in a hundred thousand reads a few of
// its blocks. It is a cache: it is made when it is first missed, and made anew
// when anything in it is wrong.
//
// It starts with a header of fixed size and a checksum for each block of what
// follows, with a checksum of their own. Then come the nodes, in breadth-first
// order, so that what is in a directory stands together and in byte order of
// the names; the numbers of those with a hard-link group; and names and extras.
const (
	lookupMagic  = "agentenvLKP1"
	lookupBlock  = 16 << 10
	lookupNode   = 56
	lookupHeader = len(lookupMagic) + 4*4 + 4
)

// lookupWorth is how large a record must be for a lookup file to pay: smaller
// ones are decoded in less than 0.1 ms.
const lookupWorth = 16 << 10

// errLookup: a lookup file is not to be believed.
type errLookup struct {
	id   forks.ID
	what string
}

func (e *errLookup) Error() string {
	return fmt.Sprintf("snapshot %s: its lookup file is unusable: %s", e.id, e.what)
}

// writeLookup makes the lookup file of the difference delta, whose record ends
// with the checksum sum.
func writeLookup(path string, delta *State, sum uint32) (err error) {
	body, nodes, links := encodeLookup(delta)
	head := []byte(lookupMagic)
	for _, n := range []uint32{sum, uint32(nodes), uint32(links), uint32(len(body) - nodes*lookupNode - links*4)} {
		head = binary.LittleEndian.AppendUint32(head, n)
	}
	for at := 0; at < len(body); at += lookupBlock {
		head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(body[at:min(at+lookupBlock, len(body))], castagnoli))
	}
	head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(head, castagnoli))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(head)
	if err == nil {
		_, err = f.Write(body)
	}
	return errors.Join(err, f.Close())
}

func encodeLookup(s *State) (body []byte, nodes, links int) {
	order := make([]uint32, 1, len(s.Nodes))
	place := make([]uint32, len(s.Nodes))
	type span struct{ first, count uint32 }
	spans := make([]span, len(s.Nodes))
	for k := 0; k < len(order); k++ {
		i := order[k]
		spans[k].first = uint32(len(order))
		for c := i + 1; c < s.Nodes[i].End; c = s.Nodes[c].End {
			place[c] = uint32(len(order))
			order = append(order, c)
			spans[k].count++
		}
	}
	body = make([]byte, 0, len(order)*(lookupNode+24))
	heap := make([]byte, 1, 24*len(order)) // offset 0 is none
	var linked []uint32
	for k, i := range order {
		n := &s.Nodes[i]
		name := uint32(len(heap))
		heap = append(heap, s.Name(i)...)
		var extra uint32
		if raw := s.rawExtra(i); len(raw) > 0 {
			extra = uint32(len(heap))
			heap = append(binary.AppendUvarint(heap, uint64(len(raw))), raw...)
		}
		if n.Link != 0 {
			linked = append(linked, uint32(k))
		}
		body = binary.LittleEndian.AppendUint64(body, uint64(n.Size))
		body = binary.LittleEndian.AppendUint64(body, uint64(n.MtimeSec))
		for _, v := range []uint32{n.MtimeNsec, n.UID, n.GID, place[n.Parent], spans[k].first, spans[k].count, name, extra, n.Link} {
			body = binary.LittleEndian.AppendUint32(body, v)
		}
		body = binary.LittleEndian.AppendUint16(body, n.Mode)
		body = append(body, n.nameLen, n.Flags&(Removed|Through|Opaque))
	}
	for _, k := range linked {
		body = binary.LittleEndian.AppendUint32(body, k)
	}
	return append(body, heap...), len(order), len(linked)
}

// lookup is an open lookup file. It is safe for use by several goroutines.
type lookup struct {
	id          forks.ID
	path        string
	start       int64 // where the blocks begin
	nodes, link uint32
	heap        uint32
	sums        []byte
	mu          sync.Mutex
	blocks      map[int][]byte
}

func (l *lookup) bad(what string) error { return &errLookup{l.id, what} }

// openLookup reads the header of the lookup file of layer id, whose record ends
// with the checksum sum.
func openLookup(path string, id forks.ID, sum uint32) (*lookup, error) {
	l := &lookup{id: id, path: path, blocks: make(map[int][]byte)}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	head := make([]byte, lookupHeader-4)
	if _, err := io.ReadFull(f, head); err != nil || string(head[:len(lookupMagic)]) != lookupMagic {
		return nil, l.bad("its header is cut short")
	}
	var words [4]uint32
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(head[len(lookupMagic)+4*i:])
	}
	l.nodes, l.link, l.heap = words[1], words[2], words[3]
	blocks := (l.size() + lookupBlock - 1) / lookupBlock
	l.start = int64(lookupHeader) + 4*blocks
	if words[0] != sum || l.nodes == 0 || l.start+l.size() != fi.Size() {
		return nil, l.bad("it is of another record, or cut short")
	}
	rest := make([]byte, 4*blocks+4)
	if _, err := io.ReadFull(f, rest); err != nil {
		return nil, l.bad("its header is cut short")
	}
	l.sums = rest[:4*blocks]
	got := crc32.Update(crc32.Checksum(head, castagnoli), castagnoli, l.sums)
	if got != binary.LittleEndian.Uint32(rest[4*blocks:]) {
		return nil, l.bad("its header's checksum is wrong")
	}
	return l, nil
}

func (l *lookup) size() int64 {
	return int64(l.nodes)*lookupNode + int64(l.link)*4 + int64(l.heap)
}

// block returns a block, read and checked at its first use.
func (l *lookup) block(i int) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.blocks[i]; b != nil {
		return b, nil
	}
	f, err := os.Open(l.path)
	if err != nil {
		return nil, l.bad(err.Error())
	}
	defer f.Close()
	at := int64(i) * lookupBlock
	b := make([]byte, min(lookupBlock, l.size()-at))
	if _, err := f.ReadAt(b, l.start+at); err != nil {
		return nil, l.bad(err.Error())
	}
	if crc32.Checksum(b, castagnoli) != binary.LittleEndian.Uint32(l.sums[4*i:]) {
		return nil, l.bad("a checksum is wrong")
	}
	l.blocks[i] = b
	return b, nil
}

// bytes returns n bytes at off.
func (l *lookup) bytes(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off+n > l.size() {
		return nil, l.bad("it points outside itself")
	}
	var whole []byte
	for n > 0 {
		b, err := l.block(int(off / lookupBlock))
		if err != nil {
			return nil, err
		}
		b = b[off%lookupBlock:]
		b = b[:min(int64(len(b)), n)]
		if whole == nil && int64(len(b)) == n {
			return b, nil
		}
		whole = append(whole, b...)
		off, n = off+int64(len(b)), n-int64(len(b))
	}
	return whole, nil
}

func (l *lookup) raw(i uint32) ([]byte, error) {
	if i >= l.nodes {
		return nil, l.bad("it points outside itself")
	}
	return l.bytes(int64(i)*lookupNode, lookupNode)
}

func (l *lookup) heapAt(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off+n > int64(l.heap) {
		return nil, l.bad("it points outside itself")
	}
	return l.bytes(int64(l.nodes)*lookupNode+int64(l.link)*4+off, n)
}

// word returns the word k after the two of eight bytes.
func word(raw []byte, k int) uint32 { return binary.LittleEndian.Uint32(raw[16+4*k:]) }

func (l *lookup) node(i uint32) (Node, error) {
	raw, err := l.raw(i)
	if err != nil {
		return Node{}, err
	}
	n := Node{
		Size: int64(binary.LittleEndian.Uint64(raw)), MtimeSec: int64(binary.LittleEndian.Uint64(raw[8:])),
		MtimeNsec: word(raw, 0), UID: word(raw, 1), GID: word(raw, 2), Parent: word(raw, 3), Link: word(raw, 8),
		Mode: binary.LittleEndian.Uint16(raw[52:]), Flags: raw[55],
	}
	if !n.IsReg() || n.Flags&Removed != 0 {
		n.Layer = NoLayer
	}
	return n, nil
}

func (l *lookup) name(i uint32) (string, error) {
	raw, err := l.raw(i)
	if err != nil {
		return "", err
	}
	b, err := l.heapAt(int64(word(raw, 6)), int64(raw[54]))
	return string(b), err
}

func (l *lookup) extra(i uint32) ([]byte, error) {
	raw, err := l.raw(i)
	if err != nil || word(raw, 7) == 0 {
		return nil, err
	}
	at := int64(word(raw, 7))
	b, err := l.heapAt(at, min(binary.MaxVarintLen64, int64(l.heap)-at))
	if err != nil {
		return nil, err
	}
	size, n := binary.Uvarint(b)
	if n <= 0 || size > uint64(l.heap) {
		return nil, l.bad("it points outside itself")
	}
	return l.heapAt(at+int64(n), int64(size))
}

// span is where what is in a directory stands.
func (l *lookup) span(dir uint32) (first, count uint32, err error) {
	raw, err := l.raw(dir)
	if err != nil {
		return 0, 0, err
	}
	first, count = word(raw, 4), word(raw, 5)
	if count > 0 && (first <= dir || uint64(first)+uint64(count) > uint64(l.nodes)) {
		return 0, 0, l.bad("it points outside itself")
	}
	return first, count, nil
}

func (l *lookup) child(dir uint32, name string) (uint32, bool, error) {
	low, count, err := l.span(dir)
	if err != nil {
		return 0, false, err
	}
	for high := low + count; low < high; {
		mid := low + (high-low)/2
		at, err := l.name(mid)
		switch {
		case err != nil:
			return 0, false, err
		case at == name:
			return mid, true, nil
		case at < name:
			low = mid + 1
		default:
			high = mid
		}
	}
	return 0, false, nil
}

func (l *lookup) children(dir uint32) ([]uint32, error) {
	first, count, err := l.span(dir)
	if err != nil {
		return nil, err
	}
	list := make([]uint32, count)
	for i := range list {
		list[i] = first + uint32(i)
	}
	return list, nil
}

func (l *lookup) links() ([]uint32, error) {
	list := make([]uint32, 0, l.link)
	for i := range int64(l.link) {
		b, err := l.bytes(int64(l.nodes)*lookupNode+4*i, 4)
		if err != nil {
			return nil, err
		}
		list = append(list, binary.LittleEndian.Uint32(b))
	}
	return list, nil
}

// table returns the difference of layer id, to be read by path.
func (s *Store) table(id forks.ID) (table, error) {
	s.mu.Lock()
	t, ok := s.tables[id]
	s.mu.Unlock()
	if ok {
		return t, nil
	}
	t, err := s.openTable(id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	if len(s.tables) >= keptTables {
		clear(s.tables)
	}
	s.tables[id] = t
	s.mu.Unlock()
	return t, nil
}

// keptTables bounds how many layers a store keeps at hand.
const keptTables = 4 * MaxLayers

func (s *Store) openTable(id forks.ID) (table, error) {
	path := filepath.Join(s.NodePath(id), "lookup")
	sum, large, err := s.recordSum(id)
	if err != nil {
		return nil, err
	}
	if large {
		if l, err := openLookup(path, id, sum); err == nil {
			return l, nil
		}
	}
	_, delta, err := s.readRecord(id)
	if err != nil {
		return nil, err
	}
	if large {
		s.saveLookup(path, delta, sum)
		if l, err := openLookup(path, id, sum); err == nil {
			return l, nil // which takes less memory
		}
	}
	return stateTable{delta}, nil
}

// recordSum returns the checksum that ends the record of layer id, and whether
// the record is large.
func (s *Store) recordSum(id forks.ID) (sum uint32, large bool, err error) {
	f, err := os.Open(filepath.Join(s.NodePath(id), "record"))
	if err != nil {
		return 0, false, ignoreIf(errors.Is(err, os.ErrNotExist), err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil || fi.Size() < lookupWorth {
		return 0, false, err
	}
	var b [4]byte
	if _, err := f.ReadAt(b[:], fi.Size()-4); err != nil {
		return 0, false, err
	}
	return binary.LittleEndian.Uint32(b[:]), true, nil
}

// saveLookup makes a lookup file where it can: it is a cache.
func (s *Store) saveLookup(path string, delta *State, sum uint32) {
	st, err := s.NewStage()
	if err != nil {
		return
	}
	tmp := filepath.Join(st.Path, "lookup")
	if writeLookup(tmp, delta, sum) == nil {
		_ = os.Rename(tmp, path)
	}
	_ = os.Remove(tmp)
	_ = os.Remove(st.Path)
	unix.Close(st.FD)
}

// reading calls fn, and once more if it met a lookup file that is not to be
// believed, which is then made anew.
func (s *Store) reading(fn func() error) error {
	err := fn()
	var bad *errLookup
	for range maxRebuilt {
		if !errors.As(err, &bad) {
			return err
		}
		_ = os.Remove(filepath.Join(s.NodePath(bad.id), "lookup"))
		s.mu.Lock()
		delete(s.tables, bad.id)
		s.mu.Unlock()
		err = fn()
	}
	return err
}

// maxRebuilt bounds how many lookup files are made anew in one operation.
const maxRebuilt = MaxLayers
