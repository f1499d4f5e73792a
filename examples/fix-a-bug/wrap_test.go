package main

import (
	"reflect"
	"strings"
	"testing"
)

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  []string
	}{
		{"a bb ccc", 20, []string{"a bb ccc"}},
		{"a bb ccc", 4, []string{"a bb", "ccc"}},
		{"aaa bbb ccc", 6, []string{"aaa", "bbb", "ccc"}},
		{"abcdefgh ij", 5, []string{"abcde", "fgh", "ij"}},
		{"", 5, nil},
	} {
		if got := Wrap(strings.Fields(c.text), c.width); !reflect.DeepEqual(got, c.want) {
			t.Errorf("Wrap(%q, %d) = %q, want %q", c.text, c.width, got, c.want)
		}
	}
}
