package main

import (
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

const module = "github.com/agentenv/agentenv/"

// house is the table of who may not import whom. A rule holds for a package
// and all below it; "ours" stands for every package of this module but those
// of the rule itself.
var house = []struct {
	room  string
	never []string
}{
	{"specs", []string{"ours", "os/exec", "github.com/spf13/cobra"}},
	{"forks", []string{module + "specs", module + "env", module + "runner", module + "cmd", "gopkg.in/yaml.v3", "github.com/spf13/cobra"}},
	{"forks/diff", []string{module + "forks/btrfs", module + "forks/overlay", module + "forks/copytree", module + "forks/all"}},
	{"forks/archive", []string{module + "forks/btrfs", module + "forks/overlay", module + "forks/copytree", module + "forks/all"}},
	{"forks/btrfs", []string{module + "forks/overlay", module + "forks/copytree"}},
	{"forks/overlay", []string{module + "forks/btrfs", module + "forks/copytree"}},
	{"forks/copytree", []string{module + "forks/btrfs", module + "forks/overlay"}},
	{"env", []string{module + "runner", module + "specs", module + "cmd", "net/http", "github.com/spf13/cobra"}},
	{"env/subid", []string{"ours"}},
	{"runner", []string{module + "cmd", module + "forks/btrfs", module + "forks/overlay", module + "forks/copytree", module + "forks/all", "net/http", "github.com/spf13/cobra"}},
	{"runner/report", []string{module + "env", module + "forks"}},
	{"cmd/internal/daemon", []string{"github.com/spf13/cobra", module + "cmd/internal/mcp"}},
	{"cmd/internal/mcp", []string{"github.com/spf13/cobra", module + "cmd/internal/daemon"}},
}

// yamlIn is the one package that may import a YAML library, and how many of
// its files do.
const yamlIn = module + "specs"

type pkg struct {
	ImportPath string
	GoFiles    []string
	Imports    []string
}

// packages lists this module's packages, for each system that it builds on.
func packages(t *testing.T, goos string) []pkg {
	cmd := exec.Command("go", "list", "-json=ImportPath,GoFiles,Imports", module+"...")
	cmd.Env = append(cmd.Environ(), "GOOS="+goos, "CGO_ENABLED=0")
	out, err := cmd.Output()
	assert.NilError(t, err)
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return pkgs
		} else {
			assert.NilError(t, err)
		}
		pkgs = append(pkgs, p)
	}
}

func TestNoImportBreaksTheHouse(t *testing.T) {
	for _, goos := range []string{"linux", "darwin", "windows"} {
		pkgs := packages(t, goos)
		assert.Assert(t, len(pkgs) > 10, "only %d packages found", len(pkgs))
		for _, p := range pkgs {
			for _, imp := range p.Imports {
				if why := forbidden(p.ImportPath, imp); why != "" {
					t.Errorf("%s: %s imports %s: %s", goos, p.ImportPath, imp, why)
				}
			}
		}
	}
}

// forbidden says why importer must not import imp, or "".
func forbidden(importer, imp string) string {
	if strings.HasPrefix(imp, "gopkg.in/yaml") && importer != yamlIn {
		return "YAML belongs in specs"
	}
	for _, rule := range house {
		room := module + rule.room
		if !below(importer, room) {
			continue
		}
		for _, never := range rule.never {
			if never == "ours" && strings.HasPrefix(imp, module) && !below(imp, room) || below(imp, never) {
				return rule.room + " never imports " + never
			}
		}
	}
	return ""
}

func below(path, room string) bool { return path == room || strings.HasPrefix(path, room+"/") }

// TestTheHouseRulesBite proves that the rules above refuse what they name.
func TestTheHouseRulesBite(t *testing.T) {
	for _, c := range [][2]string{
		{"specs", module + "env"},
		{"specs", "os/exec"},
		{"forks/internal/layer", module + "specs"},
		{"forks/copytree", module + "forks/overlay"},
		{"env/sandbox", module + "runner"},
		{"runner/report", module + "env/sandbox"},
		{"env/subid", module + "env/sandbox"},
		{"env", "gopkg.in/yaml.v3"},
	} {
		assert.Assert(t, forbidden(module+c[0], c[1]) != "", "%s may import %s", c[0], c[1])
	}
	assert.Equal(t, forbidden(module+"env", module+"forks"), "")
	assert.Equal(t, forbidden(module+"specs", "encoding/json"), "")
}
