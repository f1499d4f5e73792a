package archive

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// oldSparse reads the pieces that GNU's own format keeps in the header and in
// blocks after it.
func (t *tarReader) oldSparse(h header, e *entry) error {
	var err error
	if e.size, err = h.number("real size", 483, 495); err != nil {
		return t.damaged(err.Error())
	}
	stored := t.left
	table, more := h[386:386+4*24], h[482]
	for {
		for ; len(table) >= 24; table = table[24:] {
			if table[0] == 0 && table[12] == 0 {
				break
			}
			var p piece
			row := header(table)
			if p.off, err = row.number("sparse offset", 0, 12); err != nil {
				return t.damaged(err.Error())
			}
			if p.size, err = row.number("sparse size", 12, 24); err != nil {
				return t.damaged(err.Error())
			}
			if e.pieces = append(e.pieces, p); len(e.pieces) > maxPieces {
				return t.damaged("is sparse in too many pieces")
			}
		}
		if more == 0 {
			return t.checkPieces(e, stored)
		}
		block := make([]byte, blockSize)
		if _, err := io.ReadFull(t.in, block); err == io.EOF || err == io.ErrUnexpectedEOF {
			return &Error{Entry: e.name, Kind: ErrFormat, Reason: "is cut: the archive ends in the middle of it"}
		} else if err != nil {
			return err
		}
		table, more = block[:21*24], block[504]
	}
}

// paxSparse reads the pieces that GNU tar keeps in PAX headers, in one of
// three versions, or takes a plain file as one piece.
func (t *tarReader) paxSparse(e *entry, local records, size int64) error {
	get := func(key string) string { return local.fields["GNU.sparse."+key] }
	major, minor := get("major"), get("minor")
	var texts []string
	var err error
	switch {
	case major == "1" && minor == "0":
		if texts, err = t.inlineMap(); err != nil {
			return err
		}
	case major != "" && major != "0":
		return t.damaged(fmt.Sprintf("is sparse in the unknown format %s.%s", shown(major), shown(minor)))
	case get("map") != "":
		texts = strings.Split(get("map"), ",")
	case len(local.pairs) > 0 || get("numblocks") != "":
		texts = local.pairs
	default:
		e.size = size
		if size > 0 {
			e.pieces = []piece{{0, size}}
		}
		return nil
	}
	length := get("realsize")
	if length == "" {
		length = get("size")
	}
	if e.size, err = strconv.ParseInt(length, 10, 64); err != nil {
		return t.damaged("is sparse without a valid length")
	}
	if len(texts)%2 != 0 || len(texts) > 2*maxPieces {
		return t.damaged("is sparse with a list of pieces that cannot be read")
	}
	for ; len(texts) > 0; texts = texts[2:] {
		off, err1 := strconv.ParseInt(texts[0], 10, 64)
		n, err2 := strconv.ParseInt(texts[1], 10, 64)
		if err1 != nil || err2 != nil {
			return t.damaged("is sparse with a list of pieces that cannot be read")
		}
		e.pieces = append(e.pieces, piece{off, n})
	}
	return t.checkPieces(e, t.left)
}

// inlineMap reads the list of pieces that format 1.0 puts before the data: the
// number of pairs and the pairs, a decimal a line, padded to a block.
func (t *tarReader) inlineMap() ([]string, error) {
	var texts []string
	want := 1
	var line []byte
	for len(texts) < want {
		var block [blockSize]byte
		if t.left < blockSize {
			return nil, t.damaged("is sparse with a list of pieces that is cut")
		}
		if err := t.read(block[:]); err != nil {
			return nil, err
		}
		for rest := block[:]; len(texts) < want; {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				line = append(line, rest...)
				break
			}
			texts = append(texts, string(append(line, rest[:i]...)))
			line, rest = line[:0], rest[i+1:]
			if len(texts) > 1 {
				continue
			}
			n, err := strconv.Atoi(texts[0])
			if err != nil || n < 0 || n > maxPieces {
				return nil, t.damaged("is sparse in an impossible number of pieces")
			}
			want = 1 + 2*n
		}
		if len(line) > 20 {
			return nil, t.damaged("is sparse with a list of pieces that cannot be read")
		}
	}
	return texts[1:], nil
}

// checkPieces makes sure that pieces are in order, lie in the file, and are
// what the archive holds of it.
func (t *tarReader) checkPieces(e *entry, stored int64) error {
	var end, sum int64
	for _, p := range e.pieces {
		if p.off < end || p.size < 0 || p.off > e.size || p.size > e.size-p.off {
			return t.damaged("is sparse with pieces that overlap or lie outside it")
		}
		end = p.off + p.size
		sum += p.size
	}
	if e.size < 0 || sum != stored {
		return t.damaged(fmt.Sprintf("is sparse with pieces of %d bytes, but %d are stored", sum, stored))
	}
	return nil
}
