package specs

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// FuzzParse: no input makes the parser panic or take long, and every error has
// a place in the file and is one line.
func FuzzParse(f *testing.F) {
	f.Add(Example())
	f.Add(readFile(f, "testdata/full.yaml"))
	for _, c := range commandTraps {
		f.Add([]byte("candidates:\n  - " + c.yaml + "\ntest: true\n"))
		f.Add([]byte("candidates: [a]\ntest:\n  run: " + c.yaml + "\n"))
	}
	for _, c := range mistakes {
		f.Add([]byte(c.plan))
	}
	f.Add([]byte(bomb(9, 9)))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, all := range []bool{false, true} {
			start := time.Now()
			p, err := Parse("p.yaml", data, Options{Dir: "/plans", Home: "/home/u", CPUs: 2, allowUnsupported: all})
			if d := time.Since(start); d > 2*time.Second {
				t.Errorf("took %s for %d bytes", d, len(data))
			}
			if (p == nil) == (err == nil) {
				t.Fatalf("plan %v, error %v", p, err)
			}
			if err == nil {
				checkInvariants(t, p)
				continue
			}
			checkPlaces(t, err, strings.Count(string(data), "\n")+1)
		}
	})
}

func checkPlaces(t *testing.T, err error, lines int) {
	t.Helper()
	var list *Errors
	if !errors.As(err, &list) || len(list.List) == 0 {
		t.Fatalf("not an *Errors: %v", err)
	}
	last := &Error{}
	for _, e := range list.List {
		if e.Line < 1 || e.Line > lines || e.Col < 1 || e.File != "p.yaml" || e.Msg == "" {
			t.Errorf("no place: %#v (%d lines)", e, lines)
		}
		if strings.ContainsAny(e.Error(), "\n\r") {
			t.Errorf("more than one line: %q", e.Error())
		}
		if e.Line < last.Line || e.Line == last.Line && e.Col < last.Col {
			t.Errorf("out of order: %v after %v", e, last)
		}
		last = e
	}
}

// checkInvariants are what a runner may rely on.
func checkInvariants(t *testing.T, p *Plan) {
	t.Helper()
	if CheckName(p.Name) != nil || len(p.Candidates) == 0 || p.Parallel < 1 || p.Grace <= 0 {
		t.Errorf("invalid: %+v", p)
	}
	if checkCommand(p.Test.Run) != nil || len(p.Shell) == 0 || p.Promote == "" {
		t.Errorf("invalid: %+v", p)
	}
	for _, c := range p.Candidates {
		if (c.Run == "") == (c.Script == "") || c.Name == "" || c.Repeat < 1 || c.Workdir == "" || c.Network == "" {
			t.Errorf("invalid: %+v", c)
		}
	}
	for _, m := range p.Mounts {
		if m.From == "" || m.To == "" || m.Mode == "" || checkTarget(m.To) != nil {
			t.Errorf("invalid: %+v", m)
		}
	}
	if _, err := p.JSON(); err != nil {
		t.Error(err)
	}
}
