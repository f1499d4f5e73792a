package specs

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
)

// Options are what a plan's defaults and paths depend on.
type Options struct {
	// CPUs is the default of parallel; 0 is the number that the Go runtime sees.
	CPUs int
	// Home is what `~` stands for. Empty refuses `~`.
	Home string
	// Dir is the current directory, absolute; empty asks the system. Paths of
	// flags are relative to it, and so is a plan's own path.
	Dir string

	// allowUnsupported accepts the keys of notYet, for tests of their grammar.
	allowUnsupported bool
}

// Load reads the plan in a file. A file that cannot be read gives the error of
// the file system, a plan that is wrong an *[Errors].
func Load(path string, opts Options) (*Plan, error) {
	file := path
	if !filepath.IsAbs(path) {
		file = filepath.Join(opts.Dir, path)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read plan: %w", err)
	}
	defer f.Close()
	// One byte more than is allowed tells a file that is too large from one that just fits.
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read plan: %w", err)
	}
	return Parse(path, data, opts)
}

// Parse reads a plan; file is its path, for messages, for the default name and
// for the paths in it, which are relative to its folder. The plan comes with
// every default filled in. The error is an *[Errors] that has all that is wrong.
func Parse(file string, data []byte, opts Options) (*Plan, error) {
	if err := opts.fill(); err != nil {
		return nil, err
	}
	p := &Plan{File: file, Dir: filepath.Dir(file)}
	if !filepath.IsAbs(p.Dir) {
		p.Dir = filepath.Join(opts.Dir, p.Dir)
	}
	r := &report{file: file}
	root, src := decode(r, data)
	if root == nil {
		return nil, r.err()
	}
	b := &binder{report: r, src: src, opts: opts, dir: p.Dir, given: map[string]place{}, meant: map[string]bool{}}
	if root.kind != mapping {
		b.errorf(root.at, "a plan is a mapping with keys such as candidates and test, not %s", mistaken(root))
		return nil, r.err()
	}
	b.object(spot{node: root}, reflect.ValueOf(p).Elem())
	b.check(p)
	if err := r.err(); err != nil {
		return nil, err
	}
	_, p.BaseGiven = b.given["base"]
	p.fill(opts)
	return p, nil
}

func (o *Options) fill() error {
	if o.CPUs < 1 {
		o.CPUs = runtime.NumCPU()
	}
	if o.Dir == "" {
		dir, err := os.Getwd()
		if err != nil {
			return fmt.Errorf("find the current directory: %w", err)
		}
		o.Dir = dir
	}
	return nil
}

// first fills in a default.
func first[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// fill gives every key that the plan leaves out its default.
func (p *Plan) fill(opts Options) {
	if p.Name == "" {
		p.Name = NameFrom(p.File)
	}
	first(&p.Base, Base{Ref: "HEAD"})
	first(&p.Workdir, ".")
	if p.Shell == nil {
		p.Shell = []string{"sh", "-e", "-c"}
	}
	first(&p.Select, FirstPass)
	first(&p.Parallel, opts.CPUs)
	first(&p.Grace, Duration(defaultGrace))
	first(&p.Home, HomeOverlay)
	first(&p.Network, NetworkHost)
	first(&p.Isolation, Namespaces)
	first(&p.Keep, KeepWinner)
	if p.Promote == "" {
		p.Promote = PromoteTrue
		if p.Select == All {
			p.Promote = PromoteFalse
		}
	}
	p.PassEnv = append([]string{}, p.PassEnv...)
	p.Artifacts = append([]string{}, p.Artifacts...)
	p.Env = filled(p.Env)
	if p.Setup != nil {
		first(&p.Setup.Network, p.Network)
		p.Setup.Env = filled(p.Setup.Env)
	}
	for i := range p.Candidates {
		c := &p.Candidates[i]
		first(&c.Name, defaultName(i))
		first(&c.Repeat, 1)
		first(&c.Workdir, p.Workdir)
		first(&c.Network, p.Network)
		c.Env = filled(c.Env)
	}
	first(&p.Test.Network, p.Network)
	first(&p.Test.OnTamper, TamperReject)
	first(&p.Test.OnBase, BaseWarn)
	p.Test.Protect = append([]string{}, p.Test.Protect...)
	if p.Score != nil {
		first(&p.Score.Goal, Max)
	}
	if p.Limits != nil {
		first(&p.Limits.Enforce, Strict)
	}
	p.Mounts = append([]Mount{}, p.Mounts...)
	for i := range p.Mounts {
		first(&p.Mounts[i].To, p.Mounts[i].From)
		first(&p.Mounts[i].Mode, MountRO)
	}
}

// filled is the map, or an empty one, so that JSON has {} and not null.
func filled(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// defaultName is the name of the candidate at an index that has none.
func defaultName(i int) string { return fmt.Sprintf("c%d", i+1) }

// check finds what is wrong between keys. It runs before the defaults are
// filled in, on a plan that may lack what was wrong by itself.
func (b *binder) check(p *Plan) {
	if at, ok := b.given["base"]; ok {
		b.checkBase(at, p.Base)
	}
	if at, ok := b.given["candidates"]; ok && len(p.Candidates) == 0 && !b.wrongAt(at) {
		b.errorf(at, "candidates: at least one is due")
	}
	if p.Promote == PromoteBest && p.Select != All {
		b.errorf(b.given["promote"], "promote: best goes with select: all only")
	}
	if p.Promote == PromoteTrue && p.Select == All {
		b.errorf(b.given["promote"], "promote: with select: all, false or best is due")
	}
	if p.Select == BestScore && p.Score == nil {
		b.errorf(b.given["select"], "select: best-score needs the key score")
	}
	if key := p.beyondProcess(); key != "" {
		b.errorf(b.given[key], "%s: isolation: process cannot give this", key)
	}
	b.checkCandidates(p)
	b.checkMounts(p)
	b.checkExpressions(p)
}

// beyondProcess is the key that asks for a view of the system of one's own,
// where the plan says isolation: process, which has none; or "".
func (p *Plan) beyondProcess() string {
	switch {
	case p.Isolation != Process:
		return ""
	case p.Home == HomePrivate:
		return "home"
	case len(p.Mounts) > 0:
		return "mounts"
	}
	return p.ownNetwork()
}

// ownNetwork is the first key that asks for a network of the commands' own, or
// "".
func (p *Plan) ownNetwork() string {
	if p.Network.own() {
		return "network"
	}
	for i := range p.Candidates {
		if p.Candidates[i].Network.own() {
			return fmt.Sprintf("candidates[%d].network", i)
		}
	}
	switch {
	case p.Test.Network.own():
		return "test.network"
	case p.Setup != nil && p.Setup.Network.own():
		return "setup.network"
	}
	return ""
}

// own says whether n is a network of a command's own.
func (n Network) own() bool { return n == NetworkPrivate || n == NetworkNAT }

// wrongAt says whether something has been reported at a place.
func (b *binder) wrongAt(at place) bool { return b.report.wrong[at] }

func (b *binder) checkBase(at place, base Base) {
	n := 0
	for _, path := range []string{"base.ref", "base.dir", "base.tarball"} {
		if _, ok := b.given[path]; ok {
			n++
		}
	}
	if n != 1 && !b.wrongAt(at) && !b.meant["base.dir"] && !b.meant["base.tarball"] {
		b.errorf(at, "base: exactly one of dir and tarball is due, or a snapshot as plain text")
	}
}

func (b *binder) checkCandidates(p *Plan) {
	names := map[string]place{}
	for i := range p.Candidates {
		c := &p.Candidates[i]
		path := fmt.Sprintf("candidates[%d]", i)
		at := b.given[path]
		_, run := b.given[path+".run"]
		_, script := b.given[path+".script"]
		if run == script && !b.wrongAt(at) && !b.meant[path+".run"] && !b.meant[path+".script"] {
			b.errorf(at, "a candidate has either run or script")
		}
		name := c.Name
		if where, ok := b.given[path+".name"]; ok {
			at = where
		} else {
			name = defaultName(i)
		}
		if other, ok := names[name]; ok && name != "" {
			b.errorf(at, "the name %q is taken by the candidate at %s", name, other)
		} else {
			names[name] = at
		}
		b.checkMatrix(c, path)
	}
}

// checkMatrix checks that exclude and include speak of the matrix's keys.
func (b *binder) checkMatrix(c *Candidate, path string) {
	for key, list := range map[string][]map[string]string{"exclude": c.Exclude, "include": c.Include} {
		at, ok := b.given[path+"."+key]
		if ok && c.Matrix == nil {
			b.errorf(at, "%s: there is no matrix", key)
			continue
		}
		for i, one := range list {
			item := fmt.Sprintf("%s.%s[%d]", path, key, i)
			for _, axis := range slices.Sorted(maps.Keys(one)) {
				if c.Matrix[axis] == nil {
					b.errorf(b.given[item+"."+axis], "%s: the matrix has no key %q", key, axis)
				}
			}
			for _, axis := range slices.Sorted(maps.Keys(c.Matrix)) {
				if _, ok := one[axis]; !ok && key == "include" {
					b.errorf(b.given[item], "include: the key %q of the matrix is missing", axis)
				}
			}
		}
	}
}

func (b *binder) checkMounts(p *Plan) {
	targets := map[string]place{}
	for i, m := range p.Mounts {
		path := fmt.Sprintf("mounts[%d]", i)
		at := b.given[path]
		if _, ok := b.given[path+".to"]; !ok && m.From != "" {
			m.To = m.From
			b.add(at, checkTarget(m.To))
		}
		if other, ok := targets[m.To]; ok && m.To != "" {
			b.errorf(at, "mounts: %s is mounted at already (%s)", m.To, other)
		}
		targets[m.To] = at
	}
}

// checkExpressions checks every ${{ }}, now that each matrix is known.
func (b *binder) checkExpressions(p *Plan) {
	one := func(path, key, text string, axes map[string]bool) {
		b.expressions(b.given[path], key, text, axes)
	}
	env := func(path string, vars map[string]string, axes map[string]bool) {
		for _, name := range slices.Sorted(maps.Keys(vars)) {
			one(path+".env."+name, "env."+name, vars[name], axes)
		}
	}
	// The plan's own path is empty, so its env is found without a leading dot.
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		one("env."+name, "env."+name, p.Env[name], nil)
	}
	one("test.run", "run", p.Test.Run, nil)
	if p.Setup != nil {
		one("setup.run", "run", p.Setup.Run, nil)
		env("setup", p.Setup.Env, nil)
	}
	if p.Score != nil {
		one("score.run", "run", p.Score.Run, nil)
	}
	for i, c := range p.Candidates {
		axes := map[string]bool{}
		for axis := range c.Matrix {
			axes[axis] = true
		}
		path := fmt.Sprintf("candidates[%d]", i)
		one(path+".name", "name", c.Name, axes)
		one(path+".run", "run", c.Run, axes)
		env(path, c.Env, axes)
	}
}
