//go:build linux

package driver

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// A trial of overlays costs milliseconds, more than a fork does. That it went
// well is kept in the store, for as long as the same kernel runs and for who
// has the same rights. It is a cache.

// triedName is its file's name in nodes/, where no snapshot is called so.
const triedName = ".overlays"

// rights says in whose place a trial holds: on this boot of the kernel, in these
// namespaces, with these capabilities, and with this setting of what keeps users
// from mounting. It is empty where that cannot be told.
func rights() []byte {
	var b bytes.Buffer
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil
	}
	fmt.Fprintf(&b, "uid %d boot %s", os.Geteuid(), boot)
	for _, ns := range []string{"user", "mnt"} {
		text, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return nil
		}
		fmt.Fprintln(&b, text)
	}
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return nil
	}
	for line := range bytes.Lines(status) {
		for _, field := range []string{"CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:", "Seccomp_filters:"} {
			if bytes.HasPrefix(line, []byte(field)) {
				b.Write(line)
			}
		}
	}
	for _, name := range []string{"user/max_user_namespaces", "user/max_mnt_namespaces", "kernel/unprivileged_userns_clone", "kernel/apparmor_restrict_unprivileged_userns"} {
		value, _ := os.ReadFile("/proc/sys/" + name) // many kernels lack some of them
		fmt.Fprintf(&b, "%s %s\n", name, bytes.TrimSpace(value))
	}
	return b.Bytes()
}

// tried says whether a trial on this store went well for who has these rights.
func (d *driver) tried(rights []byte) bool {
	known, err := os.ReadFile(filepath.Join(d.store.Dir, "nodes", triedName))
	return err == nil && len(rights) > 0 && bytes.Equal(known, rights)
}

// keepTried keeps that it did, where it can.
func (d *driver) keepTried(rights []byte) {
	st, err := d.store.NewStage()
	if err != nil {
		return
	}
	defer func() { _ = st.Remove(context.Background()) }()
	tmp := filepath.Join(st.Path, "tried")
	if os.WriteFile(tmp, rights, 0o600) == nil {
		_ = os.Rename(tmp, filepath.Join(d.store.Dir, "nodes", triedName))
	}
}
