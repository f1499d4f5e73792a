package specs

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Flags is what a command line says of a plan.
type Flags struct {
	// Test and Commands are the plan that has no file: --test and what stands
	// after --, each a candidate.
	Test     string
	Commands []string
	// Given has every other flag that was given: its values, in their order, by
	// its name without hyphens. The names are those of [FlagNames].
	Given map[string][]string
}

// setters read each flag that overrides a plan. The flags mount and env may
// be given more than once; of the others the last counts.
var setters = map[string]func(o *override, value string) error{
	"base":          (*override).base,
	"parallel":      func(o *override, v string) (err error) { o.p.Parallel, err = parseInt(v, 1); return },
	"timeout":       (*override).timeout,
	"total-timeout": func(o *override, v string) error { return o.duration(&o.p.Timeout, v) },
	"test-timeout":  func(o *override, v string) error { return o.duration(&o.p.Test.Timeout, v) },
	"grace":         func(o *override, v string) error { return o.duration(&o.p.Grace, v) },
	"promote":       (*override).promote,
	"apply":         (*override).apply,
	"isolation":     func(o *override, v string) error { return setChoice(o, "isolation", &o.p.Isolation, v) },
	"network":       (*override).network,
	"home":          func(o *override, v string) error { return setChoice(o, "home", &o.p.Home, v) },
	"mount":         (*override).mount,
	"env":           (*override).env,
}

// FlagNames are the flags that [FromFlags] and [Plan.Override] know, sorted.
func FlagNames() []string { return slices.Sorted(maps.Keys(setters)) }

// FromFlags makes a plan without a file: one test, and each command a
// candidate, c1, c2 and so on. Paths are relative to opts.Dir. The error is an
// *[Errors] whose errors name the flag.
func FromFlags(f Flags, opts Options) (*Plan, error) {
	if err := opts.fill(); err != nil {
		return nil, err
	}
	p := &Plan{Name: "tournament", Dir: opts.Dir, Test: Test{Run: f.Test}}
	b := &binder{report: &report{}, opts: opts, given: map[string]place{"test.run": {flag: "--test"}}}
	b.add(place{flag: "--test"}, checkCommand(f.Test))
	if len(f.Commands) == 0 {
		b.errorf(place{flag: "candidates"}, "at least one command is due after --")
	}
	for i, command := range f.Commands {
		p.Candidates = append(p.Candidates, Candidate{Run: command})
		at := place{flag: "candidate " + defaultName(i)}
		b.given[fmt.Sprintf("candidates[%d].run", i)] = at
		b.add(at, checkCommand(command))
	}
	b.checkExpressions(p)
	p.fill(opts)
	p.override(b.report, f.Given, opts)
	if err := b.err(); err != nil {
		return nil, err
	}
	return p, nil
}

// Override lets flags win over what a plan file says. The plan is unchanged if
// there is an error, which is an *[Errors] whose errors name the flag.
func (p *Plan) Override(f Flags, opts Options) error {
	if err := opts.fill(); err != nil {
		return err
	}
	r := &report{}
	if f.Test != "" {
		r.errorf(place{flag: "--test"}, "the plan file has the test: give one or the other")
	}
	if len(f.Commands) > 0 {
		r.errorf(place{flag: "candidates"}, "the plan file has the candidates: nothing is due after --")
	}
	q := p.clone()
	q.override(r, f.Given, opts)
	if err := r.err(); err != nil {
		return err
	}
	*p = *q
	return nil
}

// clone copies what flags may change.
func (p *Plan) clone() *Plan {
	q := *p
	q.Env = maps.Clone(p.Env)
	q.Mounts = slices.Clone(p.Mounts)
	q.Candidates = slices.Clone(p.Candidates)
	for i := range q.Candidates {
		q.Candidates[i].Env = maps.Clone(p.Candidates[i].Env)
	}
	if p.Setup != nil {
		setup := *p.Setup
		setup.Env = maps.Clone(setup.Env)
		q.Setup = &setup
	}
	return &q
}

// override is the flags' way into a plan.
type override struct {
	p    *Plan
	opts Options
	// mounted are the targets of this command line's own mounts.
	mounted map[string]bool
}

func (p *Plan) override(r *report, given map[string][]string, opts Options) {
	o := &override{p: p, opts: opts, mounted: map[string]bool{}}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		at := place{flag: "--" + name}
		set, ok := setters[name]
		if !ok {
			r.errorf(at, "unknown flag of a plan")
			continue
		}
		for _, value := range given[name] {
			r.add(at, set(o, value))
		}
	}
	key := p.beyondProcess()
	for _, name := range []string{"isolation", "home", "mount", "network"} {
		if key != "" && len(given[name]) > 0 && len(r.list) == 0 {
			r.errorf(place{flag: "--" + name}, "isolation: process cannot give what %s asks for", key)
		}
	}
}

func (o *override) duration(d *Duration, value string) error {
	x, err := ParseDuration(value)
	*d = Duration(x)
	return err
}

// supported refuses a value whose behaviour does not exist yet.
func (o *override) supported(path, value string) error {
	if o.opts.allowUnsupported || supported(path, value) {
		return nil
	}
	return fmt.Errorf("%q is not supported yet, only %s so far", value, strings.Join(notYet[path], ", "))
}

// setChoice sets a key that has a few words.
func setChoice[T ~string](o *override, path string, field *T, value string) error {
	if err := parseChoice(value, choices[typeOf(*field)]); err != nil {
		return err
	}
	*field = T(value)
	return o.supported(path, value)
}

func (o *override) base(value string) error {
	o.p.BaseGiven = true
	if dir, ok := strings.CutPrefix(value, "dir:"); ok {
		path, err := o.opts.resolve(dir, o.opts.Dir)
		o.p.Base = Base{Dir: path}
		return err
	}
	o.p.Base = Base{Ref: value}
	if strings.HasPrefix(value, ".") || strings.HasPrefix(value, "~") || strings.Contains(value, "/") {
		return fmt.Errorf("%q looks like a path; a directory is dir:PATH", value)
	}
	return checkRef(value)
}

// timeout bounds each candidate.
func (o *override) timeout(value string) error {
	d, err := ParseDuration(value)
	for i := range o.p.Candidates {
		o.p.Candidates[i].Timeout = Duration(d)
	}
	return err
}

func (o *override) promote(value string) error {
	if err := setChoice(o, "promote", &o.p.Promote, value); err != nil {
		return err
	}
	switch {
	case o.p.Promote == PromoteBest && o.p.Select != All:
		return fmt.Errorf("best goes with select: all only")
	case o.p.Promote == PromoteTrue && o.p.Select == All:
		return fmt.Errorf("with select: all, false or best is due")
	}
	return nil
}

func (o *override) apply(value string) error {
	o.p.Apply = value == "true"
	return parseChoice(value, []string{"true", "false"})
}

// network changes the plan's own, and what has taken its default from there.
func (o *override) network(value string) error {
	was := o.p.Network
	if err := setChoice(o, "network", &o.p.Network, value); err != nil {
		return err
	}
	fields := []*Network{&o.p.Test.Network}
	if o.p.Setup != nil {
		fields = append(fields, &o.p.Setup.Network)
	}
	for i := range o.p.Candidates {
		fields = append(fields, &o.p.Candidates[i].Network)
	}
	for _, n := range fields {
		if *n == was {
			*n = o.p.Network
		}
	}
	return nil
}

// mount adds a mount; the plan's own at the same target gives way to it.
func (o *override) mount(value string) error {
	m, err := ParseMount(value, o.opts)
	if err != nil {
		return err
	}
	if o.mounted[m.To] {
		return fmt.Errorf("%s is mounted at twice", m.To)
	}
	o.mounted[m.To] = true
	same := func(other Mount) bool { return other.To == m.To }
	o.p.Mounts = append(slices.DeleteFunc(o.p.Mounts, same), m)
	return nil
}

// env sets a variable for every command, those that set it themselves included.
func (o *override) env(text string) error {
	name, value, err := ParseEnv(text)
	if err != nil {
		return err
	}
	if o.p.Env == nil {
		o.p.Env = map[string]string{}
	}
	o.p.Env[name] = value
	own := []map[string]string{}
	if o.p.Setup != nil {
		own = append(own, o.p.Setup.Env)
	}
	for _, c := range o.p.Candidates {
		own = append(own, c.Env)
	}
	for _, env := range own {
		if _, ok := env[name]; ok {
			env[name] = value
		}
	}
	return nil
}

// ParseEnv reads NAME=VALUE, the form of the flag --env.
func ParseEnv(text string) (name, value string, err error) {
	name, value, ok := strings.Cut(text, "=")
	if !ok {
		return "", "", fmt.Errorf("NAME=VALUE is due: %q", text)
	}
	return name, value, checkVariable(name, value)
}
