package env

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// idBytes is the length of an id in bytes: 64 random bits keep a history of
// ten thousand snapshots free of a clash with near certainty, and an id short
// enough to be read aloud.
const idBytes = 8

// minPrefix is the shortest prefix of an id that is a REF (CONTRACT §1).
const minPrefix = 4

func newID() ID {
	b := make([]byte, idBytes)
	rand.Read(b) // never fails: crypto/rand ends the program instead
	return ID(hex.EncodeToString(b))
}

// looksLikeID says whether s could be an id or a prefix of one.
func looksLikeID(s string) bool {
	return len(s) >= minPrefix && strings.Trim(s, "0123456789abcdef") == ""
}

// tagMax is the longest name of a tag, in bytes.
const tagMax = 128

func isTagName(s string) bool {
	return len(s) <= tagMax && s[0] != '.' && !strings.ContainsFunc(s, func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("_.-", r)
	})
}

// CheckTag says whether name may be a tag: it cannot look like an id or a
// prefix of one, HEAD, a path or a flag.
func CheckTag(name string) error {
	why := ""
	switch {
	case name == "":
		why = "it is empty"
	case looksLikeID(strings.ToLower(name)):
		why = "it looks like a snapshot's id"
	case strings.EqualFold(name, "HEAD"):
		why = "HEAD is taken"
	case strings.HasPrefix(name, "-"):
		why = "it looks like a flag"
	case !isTagName(name):
		why = "use letters, digits, '_', '.' and '-', at most 128, not beginning with '.' or '-'"
	}
	if why == "" {
		return nil
	}
	return &Error{Kind: ErrUsage, Msg: fmt.Sprintf("%q cannot be a tag: %s", name, why)}
}

// resolve finds the node that ref names.
func (m *meta) resolve(ref string) (*node, error) {
	if n, ok := headOffset(ref); ok {
		return m.ancestor(n, ref)
	}
	if id, ok := m.Tags[ref]; ok {
		if n := m.find(id); n != nil {
			return n, nil
		}
	}
	if !looksLikeID(ref) {
		return nil, &Error{Kind: ErrNotFound, Msg: fmt.Sprintf("no snapshot or tag %q", ref), Hint: "a REF is an id, a prefix of at least 4 characters, a tag, HEAD or HEAD~N; see `agentenv log`"}
	}
	var found []*node
	for i := range m.Nodes {
		n := &m.Nodes[i]
		if string(n.ID) == ref {
			return n, nil
		}
		if strings.HasPrefix(string(n.ID), ref) {
			found = append(found, n)
		}
	}
	switch len(found) {
	case 0:
		return nil, &Error{Kind: ErrNotFound, Msg: fmt.Sprintf("no snapshot %q", ref), Hint: "see `agentenv log`"}
	case 1:
		return found[0], nil
	}
	var ids []string
	for _, n := range found[:min(len(found), 5)] {
		ids = append(ids, string(n.ID))
	}
	return nil, &Error{Kind: ErrAmbiguous, Msg: fmt.Sprintf("%q is the beginning of %d ids: %s", ref, len(found), strings.Join(ids, ", "))}
}

// headOffset reads HEAD and HEAD~N.
func headOffset(ref string) (n int, ok bool) {
	if ref == "HEAD" || ref == "HEAD~" {
		return len(ref) - len("HEAD"), true
	}
	rest, found := strings.CutPrefix(ref, "HEAD~")
	if !found {
		return 0, false
	}
	n, err := strconv.Atoi(rest)
	return n, err == nil && n >= 0
}

// ancestor walks n parents up from HEAD.
func (m *meta) ancestor(n int, ref string) (*node, error) {
	at := m.find(m.Head)
	for i := range n {
		up := m.find(at.Parent)
		if up == nil {
			return nil, &Error{Kind: ErrNotFound, Msg: fmt.Sprintf("no snapshot %q: HEAD has %d ancestors", ref, i)}
		}
		at = up
	}
	return at, nil
}
