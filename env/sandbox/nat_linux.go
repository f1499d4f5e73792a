package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/sys/userns"
	"golang.org/x/sys/unix"
)

// The ways out of a network of a command's own, best first.
const (
	natPasta = "pasta"
	natSlirp = "slirp4netns"
	natVeth  = "veth and nftables"
)

// natTool is the way out that this machine has.
type natTool struct {
	name string
	// path is the program's; for natVeth that of ip.
	path string
	// nft is for natVeth.
	nft string
}

// NATTool says by what commands with [NetworkNAT] reach the network here: the
// name of a program, or of the kernel's own means. Its error is an [*Error] that
// says what to install. It costs next to nothing.
func NATTool() (string, error) {
	t, err := findNAT()
	return t.name, err
}

// Files that say what this machine can do.
const (
	tunDevice   = "/dev/net/tun"
	ipv4Forward = "/proc/sys/net/ipv4/ip_forward"
)

func findNAT() (natTool, error) {
	why := errors.New("nat needs the program pasta or slirp4netns, and neither is installed")
	fix := "run: sudo apt install passt (or slirp4netns), or use --network private, which has no way out"
	for _, name := range []string{natPasta, natSlirp} {
		path := lookTool(name)
		if path == "" {
			continue
		}
		err := unix.Access(tunDevice, unix.R_OK|unix.W_OK)
		if err == nil {
			return natTool{name: name, path: path}, nil
		}
		why = &os.PathError{Op: name + " needs to open", Path: tunDevice, Err: err}
		fix = "run: sudo modprobe tun, or give the container --device /dev/net/tun; or use --network private, which has no way out"
		break
	}
	if !mayMount() || userns.RunningInUserNS() {
		return natTool{}, &Error{What: "network", Err: why, Fix: fix}
	}
	veth := natTool{name: natVeth, path: lookTool("ip"), nft: lookTool("nft")}
	if veth.path == "" || veth.nft == "" {
		return natTool{}, &Error{What: "network", Err: why, Fix: fix}
	}
	// The setting is of the whole machine: it is not ours to change.
	if on, err := os.ReadFile(ipv4Forward); err != nil || strings.TrimSpace(string(on)) != "1" {
		return natTool{}, &Error{What: "network", Err: why, Fix: fix + "; root can also let the kernel do it: sysctl net.ipv4.ip_forward=1"}
	}
	return veth, nil
}

// lookTool finds a program, also where an ordinary PATH does not look; empty if
// there is none.
func lookTool(name string) string {
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err != nil {
			path, err = exec.LookPath(dir + "/" + name)
		}
	}
	if err != nil {
		return ""
	}
	return path
}

// natName is the process around the init of a command with [NetworkNAT].
const natName = "agentenv-nat"

// wrap puts that process around the init that cmd is. It hands on the streams and
// descriptors; scratch is a directory for a mount point.
func (t natTool) wrap(cmd *exec.Cmd, scratch string) {
	if t.name == "" {
		return
	}
	extra := len(cmd.ExtraFiles) - 1 // the socket is the first
	cmd.Args = []string{natName, t.name, t.path, t.nft, scratch, strconv.Itoa(extra)}
	// The init's own namespaces are made by it.
	cmd.SysProcAttr.Cloneflags &^= helperNamespaces | unix.CLONE_NEWNET
	cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNS | unix.CLONE_NEWPID
}

// planNetwork chooses the way out of the command's network, and what it resolves
// names by.
func planNetwork(s *spec) (natTool, error) {
	var t natTool
	if s.Network == NetworkNAT {
		var err error
		if t, err = findNAT(); err != nil {
			return t, err
		}
	}
	if s.ownNetwork() {
		s.Resolver = resolverFor(s.Network, t.name)
	}
	return t, nil
}

// The addresses where a command finds the host's resolver: pasta's is one that
// nobody has (RFC 3927), slirp's is fixed (slirp4netns(1)).
const (
	pastaDNS = "169.254.1.1"
	slirpDNS = "10.0.2.3"
)

// noResolver is for a command that reaches nobody. Most libraries fail at once,
// musl's only when its time is up: it has the least. A command can run a server of
// its own at that address.
const noResolver = "# This network has no way out.\nnameserver 127.0.0.1\noptions timeout:1 attempts:1\n"

// stubSource is where systemd-resolved says what it asks itself.
const stubSource = "/run/systemd/resolve/resolv.conf"

// resolverFor is the resolv.conf of a command with a network of its own.
func resolverFor(n Network, tool string) string {
	if n == NetworkPrivate {
		return noResolver
	}
	host, _ := os.ReadFile(resolvConf) // where there is none, none is shown
	upstream, _ := os.ReadFile(stubSource)
	return natResolver(tool, string(host), string(upstream))
}

// natResolver makes of the host's resolv.conf one that works behind tool: servers
// at the host's loopback are reached through the tool, or replaced by those that
// the host's own stub asks (upstream).
func natResolver(tool, host, upstream string) string {
	servers, rest, forwardable := parseResolver(host)
	switch {
	case tool == natPasta && forwardable:
		servers = append([]string{pastaDNS}, servers...)
	case tool == natSlirp && forwardable:
		servers = append([]string{slirpDNS}, servers...)
	case len(servers) == 0:
		servers, _, _ = parseResolver(upstream)
	}
	var b bytes.Buffer
	for _, s := range servers {
		fmt.Fprintln(&b, "nameserver", s)
	}
	b.WriteString(rest)
	return b.String()
}

// parseResolver gives the servers of a resolv.conf that can be reached from
// elsewhere, its other lines, and whether it has any server of IPv4: those are what
// pasta and slirp forward to.
func parseResolver(conf string) (servers []string, rest string, forwardable bool) {
	for line := range strings.Lines(conf) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			if len(fields) > 0 && (fields[0] == "search" || fields[0] == "domain" || fields[0] == "options") {
				rest += strings.TrimSpace(line) + "\n"
			}
			continue
		}
		addr, err := netip.ParseAddr(fields[1])
		if err != nil {
			continue
		}
		forwardable = forwardable || addr.Is4()
		if !addr.IsLoopback() && addr.Zone() == "" {
			servers = append(servers, addr.String())
		}
	}
	return servers, rest, forwardable
}

// pastaArgs: no port of the command's is opened on the host and none of the host's
// inside; the gateway's address is not the host's loopback.
func pastaArgs(namespace string) []string {
	return []string{"--config-net", "--no-map-gw", "--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none",
		"--dns-forward", pastaDNS, "--no-netns-quit", "--quiet",
		// It is run by who is 0 where the namespace was made, and must stay so to
		// enter it; else it would become nobody, or make another user namespace.
		"--runas", "0", "--netns-only", "--netns", namespace}
}

// slirpArgs: the same, in slirp4netns' words.
func slirpArgs(namespace string, readyFD int) []string {
	return []string{"--configure", "--mtu=65520", "--disable-host-loopback", "--enable-sandbox", "--enable-seccomp",
		"--ready-fd=" + strconv.Itoa(readyFD), "--netns-type=path", namespace, "tap0"}
}
