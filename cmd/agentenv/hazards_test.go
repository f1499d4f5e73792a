package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

// TestHazardsNameTests: docs/hazards.md promises that a test proves each line,
// so the tests that it names are there.
func TestHazardsNameTests(t *testing.T) {
	top := filepath.Join("..", "..")
	doc, err := os.ReadFile(filepath.Join(top, "docs", "hazards.md"))
	assert.NilError(t, err)
	out, err := exec.Command("go", "list", "-f", "{{.Name}} {{.Dir}}", "../../...").Output()
	assert.NilError(t, err)
	sources := make(map[string]string) // a package's tests, by its name
	for line := range strings.Lines(string(out)) {
		name, dir, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "main" {
			name = filepath.Base(dir)
		}
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		assert.NilError(t, err)
		for _, f := range files {
			b, err := os.ReadFile(f)
			assert.NilError(t, err)
			sources[name] += string(b)
		}
	}
	named := regexp.MustCompile(`\b(suite/|[a-z]+\.Test)([A-Z]\w*)`).FindAllStringSubmatch(string(doc), -1)
	assert.Assert(t, len(named) > 40, "%d tests are named", len(named))
	for _, n := range named {
		pkg, want := strings.TrimSuffix(n[1], ".Test"), "func Test"+n[2]+"("
		if n[1] == "suite/" {
			pkg, want = "forkstest", `{"`+n[2]+`", test`
		}
		assert.Check(t, strings.Contains(sources[pkg], want), "%s is not there", n[0])
	}
}
