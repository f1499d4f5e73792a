package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/reexec"
	"golang.org/x/sys/unix"

	"github.com/agentenv/agentenv/forks"
)

// probePrefix begins the names of the directories that [Probe] makes.
const probePrefix = "agentenv-probe-"

// probeLife is far longer than a probe takes: what is older than that was left
// by one that was killed.
const probeLife = time.Minute

// Probe tries whether the level works for this user on this machine, by
// running a command that does nothing. Its error is an [*Error]. What probes of
// this user left that were killed is removed.
func Probe(level Level) error {
	sweepProbes(os.TempDir())
	dir, err := os.MkdirTemp("", probePrefix)
	if err != nil {
		return newError("scratch directory", err)
	}
	defer RemoveScratch(dir)
	return ProbeIn(level, dir)
}

// ProbeIn is [Probe] in the directory dir, which is empty and the caller's to
// remove.
func ProbeIn(level Level, dir string) error {
	for _, d := range []string{"tree", "scratch"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return newError("scratch directory", err)
		}
	}
	p, err := New(Options{}).Start(context.Background(), Command{
		Level: level,
		View: View{Tree: forks.Mount{Dir: filepath.Join(dir, "tree")}, At: "/tmp/tree", Scratch: filepath.Join(dir, "scratch"),
			Home: HomePrivate, HomeDir: "/tmp/home"},
		// Whether it is there does not matter: it is looked for when all else
		// has been made.
		Args: []string{"true"},
	})
	if err != nil {
		return explain("probe", err)
	}
	_, err = p.Wait()
	return err
}

// sweepProbes removes from parent what killed probes of this user left. What
// cannot be removed does no harm, and the next probe tries again.
func sweepProbes(parent string) {
	entries, _ := os.ReadDir(parent) // what can be read is enough
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), probePrefix) || !e.IsDir() {
			continue
		}
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) < probeLife {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) == os.Geteuid() {
			_ = RemoveScratch(filepath.Join(parent, e.Name()))
		}
	}
}

// Expected is the strongest level that the machine's settings allow this user.
// It tries nothing and costs next to nothing; whether it works [Probe] tells.
func Expected() Level {
	if mayMount() || badKnob() == "" {
		return LevelNamespaces
	}
	return LevelProcess
}

// Part is one of the things that sandboxes are made of.
type Part string

// The parts that [ProbePart] tries.
const (
	PartUserNamespace    Part = "user namespace"
	PartMounts           Part = "mounts"
	PartOverlay          Part = "overlay"
	PartPIDNamespace     Part = "PID namespace"
	PartNetworkNamespace Part = "network namespace"
	PartFilter           Part = "seccomp filter"
	PartTerminal         Part = "terminal"
)

const partName = "agentenv-part"

// ProbePart tries one part alone, as sandboxes of this user would have it. An
// overlay is made of directories in dir, which is empty and the caller's to
// remove. Its error is an [*Error].
func ProbePart(part Part, dir string) error {
	if part == PartTerminal {
		p, err := openPair("/dev/ptmx", 0)
		p.close()
		return partError(part, err)
	}
	s := newSpec(Command{Level: LevelNamespaces})
	s.UserNS = s.UserNS || part == PartUserNamespace
	attr, err := helperAttr(LevelNamespaces, s)
	if err != nil {
		return partError(part, err)
	}
	attr.Cloneflags &= syscall.CLONE_NEWUSER
	attr.Cloneflags |= partFlags[part]
	cmd := reexec.Command(partName, string(part), dir)
	var said strings.Builder
	cmd.Dir, cmd.Stdout, cmd.SysProcAttr = "/", &said, attr
	if err := start(cmd); err != nil {
		return newError("namespaces", fmt.Errorf("start of a process for the %s: %w", part, errnoOf(err)))
	}
	if err := cmd.Wait(); err == nil {
		return nil
	}
	m, err := readMessage(strings.NewReader(said.String()))
	if err != nil {
		return partError(part, errors.New("the process that tried it was killed"))
	}
	m.next() // sayFailed
	e := parseFailed(m)
	return explain(e.What, e)
}

// partFlags are the namespaces that a part needs beside that of the user.
var partFlags = map[Part]uintptr{
	PartMounts:           syscall.CLONE_NEWNS,
	PartOverlay:          syscall.CLONE_NEWNS,
	PartPIDNamespace:     syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
	PartNetworkNamespace: syscall.CLONE_NEWNET,
}

func partError(part Part, err error) error {
	if err == nil {
		return nil
	}
	return newError(string(part), err)
}

// tryPart is what the process does that ProbePart starts.
func tryPart() {
	part, dir := Part(os.Args[1]), os.Args[2]
	if err := makePart(part, dir); err != nil {
		_ = failed(partError(part, err)).writeTo(os.Stdout)
		syscall.Exit(1)
	}
	syscall.Exit(0)
}

func makePart(part Part, dir string) (err error) {
	switch part {
	case PartUserNamespace: // with a power in it, which AppArmor may take away
		err = os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWUTS))
	case PartMounts:
		_, err = newFS("tmpfs", attrData)
	case PartOverlay:
		for _, d := range []string{"lower", "upper", "work"} {
			if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
				return err
			}
		}
		m := forks.Mount{Dir: dir, Overlay: &forks.Overlay{Dir: dir, Lower: []string{"lower"}, Upper: "upper", Work: "work"}}
		_, err = m.Open()
	case PartPIDNamespace:
		_, err = newFS("proc", attrProc)
	case PartNetworkNamespace:
		err = raiseNetwork()
	case PartFilter:
		confine(func(line string) { err = errors.New(line) })
	}
	return err
}
