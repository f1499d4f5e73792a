package sandbox

import (
	"io"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	resolvConf = "/etc/resolv.conf"
	hostsFile  = "/etc/hosts"
)

// resolver gives the command a resolv.conf: the host's or, for a network of its
// own, that which works there. It lies in our own /run where the link leads
// there, else over the file. A workspace sees the host's /etc anyway.
func (w *world) resolver() error {
	content, err := os.ReadFile(resolvConf)
	if err != nil {
		return nil // the host has none either
	}
	if w.spec.ownNetwork() {
		content = []byte(resolverFor(w.spec.Network, strings.Join(os.Args[1:], ""))) // see natInit.start
	}
	if fd, err := w.root.open(resolvConf); err == nil {
		defer unix.Close(fd)
		if w.spec.ownNetwork() {
			return w.replace(resolvConf, content)
		}
		if w.spec.View.At != "" {
			return nil
		}
		mnt, err := cloneTree(unix.AT_FDCWD, resolvConf, attrSealed)
		if err != nil {
			return err
		}
		defer unix.Close(mnt)
		return w.root.mount(mnt, resolvConf, false)
	}
	if at, ok := w.linkTarget(resolvConf); ok && strings.HasPrefix(at, "/run/") {
		return w.root.write(at, content)
	}
	if w.spec.View.At == "" && w.spec.Network != NetworkPrivate {
		w.lacking = append(w.lacking, resolvConf+" (to resolve names)")
	}
	return nil
}

// hosts sees to it that localhost is a name in a network of the command's own,
// where there is nobody to ask.
func (w *world) hosts() error {
	if !w.spec.ownNetwork() {
		return nil
	}
	fd, err := w.root.open(hostsFile)
	if err != nil {
		w.lacking = append(w.lacking, hostsFile+" (for the name localhost)")
		return nil
	}
	defer unix.Close(fd)
	content, ok := readRegular(fd)
	if !ok || namesLocalhost(content) {
		return nil
	}
	return w.replace(hostsFile, append(content, "\n127.0.0.1\tlocalhost\n::1\tlocalhost\n"...))
}

// namesLocalhost says whether a hosts file knows localhost.
func namesLocalhost(hosts []byte) bool {
	for line := range strings.Lines(string(hosts)) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		for i := 1; i < len(fields); i++ {
			if strings.EqualFold(fields[i], "localhost") {
				return true
			}
		}
	}
	return false
}

// maxHosts is the size in bytes up to which a hosts file is looked at; those that
// block advertising have a few MB.
const maxHosts = 16 << 20

// readRegular reads the file that the O_PATH descriptor fd refers to. Of what is
// no regular file, cannot be read or is too large it says so.
func readRegular(fd int) ([]byte, bool) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxHosts {
		return nil, false
	}
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return nil, false
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxHosts))
	return content, err == nil
}

// replace lets the command see, read-only, content in the place of the file p.
func (w *world) replace(p string, content []byte) error {
	w.made++
	name := strconv.Itoa(w.made)
	fd, err := unix.Openat(w.scratch, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return &os.PathError{Op: "create", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(content)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	mnt, err := cloneTree(w.scratch, name, attrSealed)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	return w.root.mount(mnt, p, false)
}

// linkTarget reads the link p of the new root; /var/run is another name of
// /run everywhere.
func (w *world) linkTarget(p string) (string, bool) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(w.root.fd, strings.TrimPrefix(p, "/"), buf)
	if err != nil {
		return "", false
	}
	to := string(buf[:n])
	if !path.IsAbs(to) {
		to = path.Join(path.Dir(p), to)
	}
	to = path.Clean(to)
	if rest, ok := strings.CutPrefix(to, "/var/run/"); ok {
		to = "/run/" + rest
	}
	return to, true
}

// write makes the file p, which lies on a mount of ours.
func (r *root) write(p string, content []byte) error {
	at, err := r.ensure(p, false)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	return os.WriteFile("/proc/self/fd/"+strconv.Itoa(at), content, 0o644)
}
