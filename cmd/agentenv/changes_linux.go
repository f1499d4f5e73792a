package main

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agentenv/agentenv/forks"
)

// change is a changed path in the form of CONTRACT §5.
type change struct {
	Path    string   `json:"path"`
	PathB64 string   `json:"path_b64,omitempty"`
	Change  string   `json:"change"`
	Mode    *modes   `json:"mode,omitempty"`
	Size    *lengths `json:"size,omitempty"`
}

type modes struct {
	From string `json:"from"`
	To   string `json:"to"`
}

type lengths struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

func changesDoc(c forks.Changes) []change {
	out := make([]change, 0, len(c.List))
	for _, ch := range c.List {
		d := change{Path: strings.ToValidUTF8(ch.Path, "\uFFFD"), Change: string(ch.Kind)}
		if d.Path != ch.Path {
			d.PathB64 = base64.StdEncoding.EncodeToString([]byte(ch.Path))
		}
		if ch.Old != nil && ch.New != nil {
			if ch.Old.Mode != ch.New.Mode {
				d.Mode = &modes{octal(ch.Old.Mode), octal(ch.New.Mode)}
			}
			if ch.Old.Size != ch.New.Size {
				d.Size = &lengths{ch.Old.Size, ch.New.Size}
			}
		}
		out = append(out, d)
	}
	return out
}

// octal is st_mode as git and stat write it.
func octal(mode uint32) string { return fmt.Sprintf("%06o", mode) }

func letter(k forks.ChangeKind) string {
	switch k {
	case forks.Added:
		return "A"
	case forks.Removed:
		return "D"
	case forks.Type:
		return "T"
	default:
		return "M"
	}
}

// quote returns s as it is if a terminal shows it as it is, else quoted.
func quote(s string) string {
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return s
	}
	return strconv.Quote(s)
}
