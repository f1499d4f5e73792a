package specs

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// Error is one thing that is wrong with a plan.
type Error struct {
	// File is the plan's path as it was given. Line and Col count from 1; Col
	// counts characters. For a plan's flag, File is empty and both are 0.
	File string
	Line int
	Col  int
	// Flag names the flag or argument that is wrong, such as --timeout.
	Flag string
	Msg  string
}

// Error is the place, a colon and the message, on one line.
func (e *Error) Error() string {
	if e.Flag != "" {
		return e.Flag + ": " + e.Msg
	}
	return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Col, e.Msg)
}

// Errors is everything that is wrong with a plan, in the order of the file.
// Every error of [Parse], [Load], [FromFlags] and [Plan.Override] that is about
// the plan's content is an *Errors.
type Errors struct {
	List []*Error
}

// Error is one line for each error.
func (e *Errors) Error() string {
	lines := make([]string, len(e.List))
	for i, one := range e.List {
		lines[i] = one.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap gives errors.Is and errors.As every single error.
func (e *Errors) Unwrap() []error {
	list := make([]error, len(e.List))
	for i, one := range e.List {
		list[i] = one
	}
	return list
}

// place is where in a plan something stands, or the flag that gave it.
type place struct {
	line, col int
	flag      string
}

func (p place) String() string {
	if p.flag != "" {
		return p.flag
	}
	return fmt.Sprintf("line %d", p.line)
}

// maxErrors is how many errors of one plan are listed.
const maxErrors = 1000

// report collects errors.
type report struct {
	file  string
	list  []*Error
	wrong map[place]bool
}

// full says that looking for more errors is of no use.
func (r *report) full() bool { return len(r.list) >= maxErrors }

func (r *report) errorf(at place, format string, args ...any) {
	if r.full() {
		return
	}
	if r.wrong == nil {
		r.wrong = map[place]bool{}
	}
	r.wrong[at] = true
	msg := printable(fmt.Sprintf(format, args...))
	r.list = append(r.list, &Error{
		File: r.file, Line: at.line, Col: at.col, Flag: at.flag,
		Msg: msg,
	})
}

// maxMessage is how many bytes of a message are kept: a value that is quoted
// in it may be a whole script.
const maxMessage = 600

// printable makes a message one line of a bearable length, in which no
// character of a plan does anything to a terminal.
func printable(msg string) string {
	if len(msg) > maxMessage {
		msg = strings.ToValidUTF8(msg[:maxMessage], "") + "…"
	}
	var out strings.Builder
	for _, c := range msg {
		if unicode.IsPrint(c) {
			out.WriteRune(c)
		} else {
			fmt.Fprintf(&out, "\\u%04x", c)
		}
	}
	return out.String()
}

// add reports err at a place.
func (r *report) add(at place, err error) {
	if err != nil {
		r.errorf(at, "%s", err)
	}
}

// err is nil, or what was collected: sorted, and each error once, since a value
// that is used through several aliases is wrong in one place only.
func (r *report) err() error {
	if len(r.list) == 0 {
		return nil
	}
	slices.SortStableFunc(r.list, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col))
	})
	seen := map[Error]bool{}
	list := slices.DeleteFunc(slices.Clone(r.list), func(e *Error) bool {
		again := seen[*e]
		seen[*e] = true
		return again
	})
	if r.full() {
		more := *list[len(list)-1]
		more.Msg = fmt.Sprintf("there are more errors than the %d that are listed", len(list))
		list = append(list, &more)
	}
	return &Errors{List: list}
}
