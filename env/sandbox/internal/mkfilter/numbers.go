//go:build linux

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// calls maps the names of the system calls of an ABI to their numbers, as
// golang.org/x/sys has them.
func calls(a abi) (map[string]uint32, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	name := filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_"+a.name+".go")
	file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	found := map[string]uint32{}
	maps.Copy(found, a.more)
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		number, perr := strconv.ParseUint(v.Values[0].(*ast.BasicLit).Value, 0, 32)
		if perr != nil {
			err = perr
		}
		found[strings.ToLower(strings.TrimPrefix(v.Names[0].Name, "SYS_"))] = uint32(number)
		return true
	})
	return found, err
}
