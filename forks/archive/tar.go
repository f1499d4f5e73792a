package archive

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"strconv"
	"strings"
)

const (
	blockSize = 512
	// maxRecord bounds one PAX header or long name: far above what GNU tar
	// writes for a name or an xattr (64 KiB), and room for the map of a sparse
	// file of half a million pieces.
	maxRecord = 16 << 20
	// maxPieces bounds the data pieces of one sparse file: 64 MiB of memory.
	maxPieces = 4 << 20
)

// The types of entry. Those of POSIX first; D, K, L, M, N, S and V are GNU's,
// X is Solaris's.
const (
	typeOldFile  = 0
	typeFile     = '0'
	typeLink     = '1'
	typeSymlink  = '2'
	typeChar     = '3'
	typeBlock    = '4'
	typeDir      = '5'
	typeFifo     = '6'
	typeReserved = '7'
	typeGlobal   = 'g'
	typePax      = 'x'
	typeSunPax   = 'X'
	typeDumpDir  = 'D'
	typeLongLink = 'K'
	typeLongName = 'L'
	typeSplit    = 'M'
	typeOldNames = 'N'
	typeSparse   = 'S'
	typeLabel    = 'V'
)

// piece is a stretch of a file that holds data.
type piece struct{ off, size int64 }

// entry is one member of a tar.
type entry struct {
	// name and link are as the archive writes them.
	name, link string
	// kind is typeFile, typeLink, typeSymlink, typeChar, typeBlock, typeDir or
	// typeFifo; unknown is set for a type that POSIX says to read as a file.
	kind    byte
	unknown bool
	// mode holds permissions with suid, sgid and sticky.
	mode     uint32
	uid, gid uint32
	// sec and nsec are the modification time; nsec is never negative.
	sec, nsec    int64
	major, minor uint32
	// size is the file's length; its data are the pieces, in order.
	size   int64
	pieces []piece
	// xattrs holds ACLs too, in their binary form; badACL is the reason why
	// one of them is missing.
	xattrs map[string]string
	badACL error
}

// data is the number of bytes that the archive holds of the file.
func (e *entry) data() int64 {
	var n int64
	for _, p := range e.pieces {
		n += p.size
	}
	return n
}

// records are the fields of PAX headers.
type records struct {
	fields map[string]string
	// pairs are the offsets and sizes of sparse format 0.0, which repeats
	// two keys.
	pairs []string
}

// tarReader reads the members of a tar. Its errors are [*Error] where the
// archive is at fault.
type tarReader struct {
	in *bufio.Reader
	// left and pad are what was not yet read of the present member.
	left, pad int64
	global    map[string]string
	// last is the name of the last member, for messages.
	last  string
	begun bool
}

// next returns the next member, or io.EOF after the archive's end mark. The
// former's data is skipped.
func (t *tarReader) next() (*entry, error) {
	var local records
	var longName, longLink *string
	for {
		if err := t.skip(); err != nil {
			return nil, err
		}
		block, err := t.header()
		if err != nil {
			return nil, err
		}
		h := header(block)
		switch kind := h.kind(); kind {
		case typePax, typeSunPax, typeGlobal, typeLongName, typeLongLink:
			err = t.special(h, kind, &local, &longName, &longLink)
		case typeLabel:
			err = t.begin(h)
		default:
			return t.member(h, local, longName, longLink)
		}
		if err != nil {
			return nil, err
		}
	}
}

// special reads a member that describes the one after it.
func (t *tarReader) special(h header, kind byte, local *records, longName, longLink **string) error {
	if err := t.begin(h); err != nil {
		return err
	}
	if t.left > maxRecord {
		return t.damaged(fmt.Sprintf("has an extended header of %d bytes; %d are the most", t.left, maxRecord))
	}
	body := make([]byte, t.left)
	if err := t.read(body); err != nil {
		return err
	}
	switch kind {
	case typeLongName, typeLongLink:
		text := string(cut0(body))
		if kind == typeLongName {
			*longName = &text
		} else {
			*longLink = &text
		}
		return nil
	case typeGlobal:
		r, err := parseRecords(body)
		if err != nil {
			return t.damaged("has a global header that cannot be read: " + err.Error())
		}
		t.setGlobal(r)
		return nil
	}
	r, err := parseRecords(body)
	if err != nil {
		return t.damaged("has an extended header that cannot be read: " + err.Error())
	}
	*local = r
	return nil
}

// setGlobal takes over what a global header says of all later members. Names,
// sizes and maps of pieces cannot sensibly be the same for all.
func (t *tarReader) setGlobal(r records) {
	for key, value := range r.fields {
		switch {
		case key == "path", key == "linkpath", key == "size", strings.HasPrefix(key, "GNU.sparse."):
		case t.global == nil:
			t.global = map[string]string{key: value}
		default:
			t.global[key] = value
		}
	}
}

// member makes an entry of a header block and what was said before it.
func (t *tarReader) member(h header, local records, longName, longLink *string) (*entry, error) {
	e := &entry{name: h.name(), link: h.link(), kind: h.kind()}
	if longName != nil {
		e.name = *longName
	}
	if longLink != nil {
		e.link = *longLink
	}
	if name, ok := local.fields["path"]; ok && name != "" {
		e.name = name
	}
	if name, ok := local.fields["GNU.sparse.name"]; ok && name != "" {
		e.name = name
	}
	t.last = e.name
	if err := t.numbers(h, e); err != nil {
		return nil, err
	}
	size, err := h.number("size", 124, 136)
	if err != nil {
		return nil, t.damaged(err.Error())
	}
	for _, fields := range []map[string]string{t.global, local.fields} {
		for key, value := range fields {
			if err := e.field(key, value, &size); err != nil {
				return nil, t.damaged(fmt.Sprintf("has a field %s that cannot be read: %v", shown(key), err))
			}
		}
	}
	if size < 0 || size > math.MaxInt64-blockSize {
		return nil, t.damaged(fmt.Sprintf("has the impossible size %d", size))
	}
	return e, t.content(h, e, local, size)
}

// numbers reads the numeric fields of the block that do not concern data.
func (t *tarReader) numbers(h header, e *entry) error {
	var failed error
	get := func(field string, from, to int) int64 {
		n, err := h.number(field, from, to)
		if err != nil && failed == nil {
			failed = t.damaged(err.Error())
		}
		return n
	}
	e.mode = uint32(get("mode", 100, 108)) & 0o7777
	uid, gid := get("uid", 108, 116), get("gid", 116, 124)
	e.sec = get("mtime", 136, 148)
	if e.kind == typeChar || e.kind == typeBlock {
		e.major, e.minor = uint32(get("devmajor", 329, 337)), uint32(get("devminor", 337, 345))
	}
	if failed != nil {
		return failed
	}
	for _, id := range []struct {
		n  int64
		to *uint32
	}{{uid, &e.uid}, {gid, &e.gid}} {
		var err error
		if *id.to, err = ownerID(id.n); err != nil {
			return t.damaged(err.Error())
		}
	}
	return nil
}

// ownerID accepts what the kernel can hold; small negative numbers are how
// some systems write the top of the 32 bits.
func ownerID(n int64) (uint32, error) {
	if n < math.MinInt32 || n >= math.MaxUint32 || n == -1 {
		return 0, fmt.Errorf("has the owner id %d, which Linux cannot hold", n)
	}
	return uint32(n), nil
}

// content settles what kind of member it is and where its data goes.
func (t *tarReader) content(h header, e *entry, local records, size int64) error {
	kind := e.kind
	switch kind {
	case typeLink, typeSymlink, typeChar, typeBlock, typeFifo, typeDir:
		return nil // no data follows, whatever size says
	case typeDumpDir: // the data lists names, which are members of their own too
		e.kind = typeDir
		t.expect(size)
		return nil
	case typeSplit, typeOldNames:
		return t.damaged(fmt.Sprintf("is of GNU type %q (a part of a multi-volume archive), which cannot be unpacked", kind))
	case typeOldFile, typeFile, typeReserved, typeSparse:
	default:
		e.unknown = true
	}
	e.kind = typeFile
	if strings.HasSuffix(e.name, "/") && kind != typeSparse {
		e.kind = typeDir // so did tar before POSIX
		t.expect(size)
		return nil
	}
	t.expect(size)
	if kind == typeSparse {
		return t.oldSparse(h, e)
	}
	return t.paxSparse(e, local, size)
}

// begin takes the size of a header block as the present member's.
func (t *tarReader) begin(h header) error {
	size, err := h.number("size", 124, 136)
	if err != nil || size < 0 {
		return t.damaged("is followed by a header without a valid size")
	}
	t.expect(size)
	return nil
}

func (t *tarReader) expect(size int64) {
	t.left, t.pad = size, -size&(blockSize-1)
}

// header returns the next header block, or io.EOF at the end mark.
func (t *tarReader) header() ([]byte, error) {
	block, err := t.in.Peek(blockSize)
	switch {
	case err == io.EOF && !t.begun:
		return nil, &Error{Kind: ErrFormat, Reason: "is " + found(block) + ", not a tar"}
	case err == io.EOF && len(block) == 0:
		return nil, &Error{Kind: ErrFormat, Reason: "is cut: it ends" + t.where() + " without the end mark of a tar"}
	case err == io.EOF:
		return nil, &Error{Kind: ErrFormat, Reason: "is cut: it ends in a header" + t.where()}
	case err != nil:
		return nil, err
	}
	h := header(block)
	if h.isZero() {
		return nil, io.EOF
	}
	if !h.valid() {
		if !t.begun {
			return nil, &Error{Kind: ErrFormat, Reason: "is " + found(block) + ", not a tar"}
		}
		return nil, &Error{Kind: ErrFormat, Reason: "is damaged: what comes" + t.where() + " is not a tar header"}
	}
	t.begun = true
	kept := bytes.Clone(block)
	_, err = t.in.Discard(blockSize)
	return kept, err
}

func (t *tarReader) where() string {
	if t.last == "" {
		return " at its beginning"
	}
	return " after entry " + shown(t.last)
}

func (t *tarReader) damaged(reason string) error {
	e := &Error{Entry: t.last, Kind: ErrFormat, Reason: reason}
	if e.Entry == "" {
		e.Reason = "is damaged: it " + reason
	}
	return e
}

// peek returns the next bytes of the present member's data, at most what the
// buffer holds; advance takes them away.
func (t *tarReader) peek() ([]byte, error) {
	want := int(min(t.left, int64(t.in.Size())))
	b, err := t.in.Peek(want)
	if err == io.EOF {
		return nil, &Error{Entry: t.last, Kind: ErrFormat, Reason: "is cut: the archive ends in the middle of it"}
	}
	return b, err
}

func (t *tarReader) advance(n int) error {
	t.left -= int64(n)
	_, err := t.in.Discard(n)
	return err
}

// read fills b with data of the present member.
func (t *tarReader) read(b []byte) error {
	for len(b) > 0 {
		got, err := t.peek()
		if err != nil {
			return err
		}
		n := copy(b, got)
		if n == 0 {
			return t.damaged("holds less data than it says")
		}
		b = b[n:]
		if err := t.advance(n); err != nil {
			return err
		}
	}
	return nil
}

// skip goes to the end of the present member.
func (t *tarReader) skip() error {
	t.left, t.pad = t.left+t.pad, 0
	for t.left > 0 {
		b, err := t.peek()
		if err != nil {
			return err
		}
		if err := t.advance(len(b)); err != nil {
			return err
		}
	}
	return nil
}

// finish reads what follows the end mark, so that a checksum at the end of a
// compressed stream is verified and a writer into a pipe is not killed. It
// says whether anything but padding was there. Padding beyond maxPadding is
// not read.
func (t *tarReader) finish() (bool, error) {
	const maxPadding = 64 << 20
	garbage := false
	for n := 0; n < maxPadding; {
		b, err := t.in.Peek(blockSize)
		if len(bytes.Trim(b, "\x00")) > 0 {
			garbage = true
		}
		if err == io.EOF {
			return garbage, nil
		}
		if err != nil {
			return garbage, err
		}
		m, err := t.in.Discard(len(b))
		if err != nil {
			return garbage, err
		}
		n += m
	}
	return garbage, nil
}

// header is a header block.
type header []byte

func (h header) kind() byte { return h[156] }

func (h header) link() string { return string(cut0(h[157:257])) }

// name joins the name with the prefix that POSIX and star put elsewhere. GNU's
// own format, whose magic ends in blanks, keeps times there.
func (h header) name() string {
	name := string(cut0(h[:100]))
	var prefix []byte
	if string(h[257:263]) == "ustar\x00" {
		prefix = cut0(h[345:500])
		if string(h[508:512]) == "tar\x00" {
			prefix = cut0(h[345:476])
		}
	}
	if len(prefix) > 0 {
		return string(prefix) + "/" + name
	}
	return name
}

func (h header) isZero() bool {
	for _, c := range h {
		if c != 0 {
			return false
		}
	}
	return true
}

// valid checks the sum of the block's bytes, its own field read as blanks.
// Some old writers summed signed bytes.
func (h header) valid() bool {
	want, err := h.number("checksum", 148, 156)
	if err != nil {
		return false
	}
	var unsigned, signed int64
	for i, c := range h {
		if i >= 148 && i < 156 {
			c = ' '
		}
		unsigned += int64(c)
		signed += int64(int8(c))
	}
	return want == unsigned || want == signed
}

// number reads a field: octal digits between blanks and zero bytes, or, with
// the top bit set, a big-endian number in two's complement.
func (h header) number(field string, from, to int) (int64, error) {
	b := h[from:to]
	if b[0]&0x80 != 0 {
		n := int64(b[0] & 0x7f)
		if b[0]&0x40 != 0 {
			n |= ^int64(0x7f)
		}
		for _, c := range b[1:] {
			if n > math.MaxInt64>>8 || n < math.MinInt64>>8 {
				return 0, fmt.Errorf("has a %s that is out of range", field)
			}
			n = n<<8 | int64(c)
		}
		return n, nil
	}
	text := string(bytes.Trim(cut0(bytes.TrimLeft(b, " \x00")), " "))
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 8, 63)
	if err != nil {
		return 0, fmt.Errorf("has a %s that is not a number: %s", field, shown(text))
	}
	return int64(n), nil
}

func cut0(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// parseRecords reads the lines "LENGTH KEY=VALUE\n" of a PAX header. The last
// of several with the same key counts.
func parseRecords(b []byte) (records, error) {
	r := records{fields: map[string]string{}}
	for len(b) > 0 {
		sp := bytes.IndexByte(b[:min(len(b), 20)], ' ')
		if sp < 0 {
			if len(bytes.Trim(b, "\x00")) == 0 {
				return r, nil // some writers pad within the size
			}
			return r, errors.New("a record has no length")
		}
		n, err := strconv.ParseUint(string(b[:sp]), 10, 31)
		if err != nil || int(n) > len(b) || int(n) < sp+3 || b[n-1] != '\n' {
			return r, errors.New("a record's length is wrong")
		}
		key, value, ok := strings.Cut(string(b[sp+1:n-1]), "=")
		if !ok || key == "" {
			return r, errors.New("a record has no key")
		}
		switch key {
		case "path", "linkpath", "GNU.sparse.name":
			if strings.IndexByte(value, 0) >= 0 {
				return r, errors.New("a name holds a zero byte")
			}
		case "GNU.sparse.offset", "GNU.sparse.numbytes":
			if (key == "GNU.sparse.offset") != (len(r.pairs)%2 == 0) || len(r.pairs) >= 2*maxPieces {
				return r, errors.New("the list of a sparse file's pieces is out of order")
			}
			r.pairs = append(r.pairs, value)
		}
		r.fields[key] = value
		b = b[n:]
	}
	return r, nil
}

// field applies one PAX field. An empty value means: as if it were not there.
func (e *entry) field(key, value string, size *int64) error {
	if name, ok := xattrName(key); ok {
		return e.xattr(key, name, value)
	}
	if value == "" {
		return nil
	}
	var err error
	var n int64
	switch key {
	case "linkpath":
		e.link = value
	case "size":
		*size, err = strconv.ParseInt(value, 10, 64)
	case "uid":
		if n, err = strconv.ParseInt(value, 10, 64); err == nil {
			e.uid, err = ownerID(n)
		}
	case "gid":
		if n, err = strconv.ParseInt(value, 10, 64); err == nil {
			e.gid, err = ownerID(n)
		}
	case "mtime":
		e.sec, e.nsec, err = parseTime(value)
	case "SCHILY.acl.access", "SCHILY.acl.default":
		acl, bad := parseACL(value)
		if bad != nil {
			e.badACL = bad
			return nil
		}
		return e.xattr(key, "system.posix_acl_"+strings.TrimPrefix(key, "SCHILY.acl."), acl)
	}
	return err
}

// xattrName is the xattr that a PAX key stands for. libarchive quotes names as
// URLs do.
func xattrName(key string) (string, bool) {
	if key == "RHT.security.selinux" {
		return "security.selinux", true
	}
	if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok && name != "" {
		return name, true
	}
	if quoted, ok := strings.CutPrefix(key, "LIBARCHIVE.xattr."); ok && quoted != "" {
		if name, err := url.PathUnescape(quoted); err == nil {
			return name, true
		}
		return quoted, true
	}
	return "", false
}

func (e *entry) xattr(key, name, value string) error {
	if strings.IndexByte(name, 0) >= 0 {
		return errors.New("its name holds a zero byte")
	}
	if strings.HasPrefix(key, "LIBARCHIVE.") {
		b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(value, "=\n"))
		if err != nil {
			return err
		}
		value = string(b)
	}
	if e.xattrs == nil {
		e.xattrs = map[string]string{}
	}
	e.xattrs[name] = value
	return nil
}

// parseTime reads seconds with a decimal fraction, before 1970 too, and cuts
// what is finer than a nanosecond.
func parseTime(text string) (sec, nsec int64, err error) {
	whole, fraction, _ := strings.Cut(text, ".")
	negative := strings.HasPrefix(whole, "-")
	if whole == "-" || whole == "" {
		whole += "0"
	}
	if sec, err = strconv.ParseInt(whole, 10, 64); err != nil {
		return 0, 0, err
	}
	for _, c := range fraction {
		if c < '0' || c > '9' {
			return 0, 0, fmt.Errorf("%s is not a time", shown(text))
		}
	}
	if len(fraction) > 0 {
		digits := (fraction + "000000000")[:9]
		if nsec, err = strconv.ParseInt(digits, 10, 64); err != nil {
			return 0, 0, err
		}
	}
	if negative && nsec > 0 && sec > math.MinInt64 {
		sec, nsec = sec-1, 1_000_000_000-nsec
	}
	return sec, nsec, nil
}
