package env

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentenv/agentenv/forks"
)

// Umount takes the work tree's mount off the host and says whether there was
// one. The next command that needs the tree mounts it again.
func (e *Env) Umount(ctx context.Context) (bool, error) {
	tree, err := e.driver.Tree(forks.Work)
	if isNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if !e.driver.Features().Mounted || tree.Mount.Overlay != nil {
		return false, nil
	}
	// The driver would let go of the mount and leave them in it.
	if users := usersOf(tree.Mount.Dir); len(users) > 0 {
		return false, heldError(tree.Mount.Dir, users)
	}
	err = e.driver.Detach(ctx, forks.Work)
	return err == nil, err
}

func heldError(dir string, users []string) error {
	by := strings.Join(users[:min(len(users), maxUsers)], ", ")
	if more := len(users) - maxUsers; more > 0 {
		by += fmt.Sprintf(" and %d more", more)
	}
	return &Error{Kind: ErrHeld, Msg: "the work tree " + dir + " is in use by " + by, Hint: "end what uses it, or `cd` out of it, and try again"}
}

// maxUsers is how many processes an error names.
const maxUsers = 8

// usersOf names the processes that have their working directory, their root,
// their program or an open file in what is mounted at dir: in words such as
// "bash (pid 123)".
func usersOf(dir string) []string {
	var st syscall.Stat_t
	if syscall.Stat(dir, &st) != nil {
		return nil
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	var names []string
	for _, p := range procs {
		pid, err := strconv.Atoi(filepath.Base(p))
		if err != nil || pid == os.Getpid() || !usesDevice(p, uint64(st.Dev)) {
			continue
		}
		comm, _ := os.ReadFile(p + "/comm") // it may be gone by now
		names = append(names, fmt.Sprintf("%s (pid %d)", strings.TrimSpace(string(comm)), pid))
	}
	return names
}

// usesDevice says whether the process whose directory in /proc is proc has
// something of the file system dev.
func usesDevice(proc string, dev uint64) bool {
	links := []string{proc + "/cwd", proc + "/root", proc + "/exe"}
	if fds, err := filepath.Glob(proc + "/fd/*"); err == nil {
		links = append(links, fds...)
	}
	for _, l := range links {
		var st syscall.Stat_t
		if syscall.Stat(l, &st) == nil && uint64(st.Dev) == dev {
			return true
		}
	}
	return false
}
