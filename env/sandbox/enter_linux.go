package sandbox

import (
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// attachTo adds the cgroup's directories to the descriptors of a helper, and says
// so in its spec. They come in order: the unified one, then those of v1.
func (g *cgroup) attachTo(files []*os.File, sp *spec) []*os.File {
	if g == nil {
		return files
	}
	for _, d := range g.dirs {
		fd := controlFD + len(files)
		if d.v2 {
			sp.Cgroup = fd
		} else {
			sp.Tasks = append(sp.Tasks, fd)
		}
		files = append(files, d.File)
	}
	return files
}

// inCgroup runs start, which starts the command with attr, so that the command is
// born in its cgroups. The unified hierarchy lets a parent say so. For those of v1
// the thread that forks, and no other of the helper's, goes there, and comes back.
func (s *spec) inCgroup(attr *syscall.SysProcAttr, start func() (int, error)) (int, error) {
	if s.Cgroup != 0 {
		attr.UseCgroupFD, attr.CgroupFD = true, s.Cgroup
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, dir := range s.Tasks {
		if err := moveThread(dir, "tasks"); err != nil {
			return 0, &Error{What: "limits", Err: err}
		}
		// From a cgroup that has no room for us there is a way back too.
		defer moveThread(dir, "../tasks")
	}
	return start()
}

// moveThread moves the calling thread to the cgroup of v1 whose list it is.
func moveThread(dir int, list string) error {
	fd, err := unix.Openat(dir, list, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Write(fd, []byte("0"))
		unix.Close(fd)
	}
	if err != nil {
		return &os.PathError{Op: "enter cgroup", Path: list, Err: err}
	}
	return nil
}
