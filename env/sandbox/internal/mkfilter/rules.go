//go:build linux

package main

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// verdict is what becomes of a call: it is allowed (0), or fails with errno, or
// that depends on the low word of an argument. The kernel takes no more than
// that of any argument which a rule is about.
type verdict struct {
	errno unix.Errno
	arg   int
	byArg []span // nil: errno says it
}

// span is what holds from a number up to the next span's.
type span struct {
	from uint32
	verdict
}

// spans puts together what holds for every number: base, except for some.
func spans(base verdict, some map[uint32]verdict) []span {
	list := []span{{0, base}}
	add := func(from uint32, v verdict) {
		last := &list[len(list)-1]
		switch {
		case last.from == from:
			last.verdict = v
		case !reflect.DeepEqual(last.verdict, v):
			list = append(list, span{from, v})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(some)) {
		add(n, some[n])
		if n < math.MaxUint32 {
			add(n+1, base)
		}
	}
	// Where one number follows another, base was put between them for nothing.
	return slices.CompactFunc(list, func(a, b span) bool { return reflect.DeepEqual(a.verdict, b.verdict) })
}

// rules are the verdicts on calls, by their names, that hold on a machine: those
// of the profile and ours. What has none is denied.
func rules(arch string) (map[string]verdict, error) {
	found := map[string]verdict{}
	values := map[string]map[uint32]verdict{} // of those that depend on an argument
	for _, s := range seccomp.DefaultProfile().Syscalls {
		if !holds(s, arch) {
			continue
		}
		v, args, err := read(s)
		if err != nil {
			return nil, fmt.Errorf("%v: %w", s.Names, err)
		}
		for _, name := range s.Names {
			if args != nil {
				if values[name] == nil {
					values[name] = map[uint32]verdict{}
				}
				maps.Copy(values[name], args)
				v.byArg = spans(verdict{errno: unix.EPERM}, values[name])
			}
			found[name] = v
		}
	}
	for _, name := range allowedToo {
		found[name] = verdict{}
	}
	for _, n := range personalities {
		values["personality"][n] = verdict{}
	}
	found["personality"] = verdict{arg: 0, byArg: spans(verdict{errno: unix.EPERM}, values["personality"])}
	denied := map[uint32]verdict{}
	for _, n := range deniedIoctls {
		denied[n] = verdict{errno: unix.EPERM}
	}
	found["ioctl"] = verdict{arg: 1, byArg: spans(verdict{}, denied)}
	return found, nil
}

// holds says whether a rule of the profile is for a process with
// [heldCapability]. A rule may also ask for a kernel of some age; every one is
// older than what a sandbox needs.
func holds(s *seccomp.Syscall, arch string) bool {
	held := func(caps []string) bool { return slices.Contains(caps, heldCapability) }
	if in := s.Includes; in != nil {
		if len(in.Arches) > 0 && !slices.Contains(in.Arches, arch) || len(in.Caps) > 0 && !held(in.Caps) {
			return false
		}
	}
	out := s.Excludes
	return out == nil || !slices.Contains(out.Arches, arch) && !held(out.Caps)
}

// read understands one rule of the profile: its verdict, and, if that depends
// on an argument, the values for which the call is allowed.
func read(s *seccomp.Syscall) (verdict, map[uint32]verdict, error) {
	switch {
	case s.Action == specs.ActErrno && s.ErrnoRet != nil && len(s.Args) == 0:
		return verdict{errno: unix.Errno(*s.ErrnoRet)}, nil, nil
	case s.Action != specs.ActAllow:
		return verdict{}, nil, fmt.Errorf("action %s", s.Action)
	case len(s.Args) == 0:
		return verdict{}, nil, nil
	case len(s.Args) > 1:
		return verdict{}, nil, fmt.Errorf("%d conditions at once", len(s.Args))
	}
	arg := s.Args[0]
	v := verdict{errno: unix.EPERM, arg: int(arg.Index)}
	values := map[uint32]verdict{}
	switch arg.Op {
	case specs.OpEqualTo:
		values[uint32(arg.Value)] = verdict{}
	case specs.OpLessThan: // families of sockets: few
		for n := range uint32(arg.Value) {
			values[n] = verdict{}
		}
	case specs.OpMaskedEqual: // namespaces, which we allow
	default:
		return verdict{}, nil, fmt.Errorf("condition %s", arg.Op)
	}
	return v, values, nil
}

// byNumber is what holds for the numbers of an ABI's calls. A call that is newer
// than the profile does not exist, so that programs fall back on older ones, and
// so do numbers that no call has.
func byNumber(a abi, named map[string]verdict, numbers map[string]uint32) []span {
	newest := uint32(0)
	for name := range named {
		if !slices.Contains(allowedToo, name) && a.more[name] == 0 {
			newest = max(newest, numbers[name])
		}
	}
	some := map[uint32]verdict{}
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		n := numbers[name]
		v, ok := named[name]
		_, known := some[n] // under another name, which the profile has
		switch {
		case ok:
			some[n] = v
		case n <= newest && !known:
			some[n] = verdict{errno: unix.EPERM}
		}
	}
	return spans(verdict{errno: unix.ENOSYS}, some)
}

// denied lists the calls of an ABI that fail whatever their arguments are.
func denied(named map[string]verdict, numbers map[string]uint32) []string {
	var list []string
	for name := range numbers {
		if v, ok := named[name]; !ok || v.errno != 0 && v.byArg == nil {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}
