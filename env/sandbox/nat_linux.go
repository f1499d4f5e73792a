package sandbox

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/reexec"
	"github.com/moby/sys/userns"
	"golang.org/x/sys/unix"
)

// The ways out of a network of a command's own.
const (
	natPasta = "pasta"
	natSlirp = "slirp4netns"
	natVeth  = "veth and nftables"
)

// natTool is a way out that this machine has.
type natTool struct {
	name string
	// path is the program's; for natVeth that of ip.
	path string
	// nft is for natVeth.
	nft string
}

// natTools are those of this machine, best first: if one does not work, the next
// is tried.
type natTools []natTool

// NATTool says by what commands with [NetworkNAT] reach the network here, if it
// works: the name of a program, or of the kernel's own means. Its error is an
// [*Error] that says what to install. It costs next to nothing; [TryNAT] tries it.
func NATTool() (string, error) {
	tools, err := findNAT()
	if err != nil {
		return "", err
	}
	return tools[0].name, nil
}

// Files that say what this machine can do.
const (
	tunDevice   = "/dev/net/tun"
	ipv4Forward = "/proc/sys/net/ipv4/ip_forward"
)

func findNAT() (natTools, error) {
	var tools natTools
	why := errors.New("nat needs the program pasta or slirp4netns, and neither is installed")
	fix := "run: sudo apt install passt (or slirp4netns), or use --network private, which has no way out"
	for _, name := range []string{natPasta, natSlirp} {
		path := lookTool(name)
		if path == "" {
			continue
		}
		if err := unix.Access(tunDevice, unix.R_OK|unix.W_OK); err != nil {
			why = &os.PathError{Op: name + " needs to open", Path: tunDevice, Err: err}
			fix = "run: sudo modprobe tun, or give the container --device /dev/net/tun; or use --network private, which has no way out"
			break
		}
		tools = append(tools, natTool{name: name, path: path})
	}
	if len(tools) == 2 && (!hasDefaultRoute() || pastaDate(tools[0].path) < pastaRefuses) {
		slices.Reverse(tools)
	}
	veth := natTool{name: natVeth, path: lookTool("ip"), nft: lookTool("nft")}
	if mayMount() && !userns.RunningInUserNS() && veth.path != "" && veth.nft != "" {
		// The setting is of the whole machine: it is not ours to change.
		if on, err := os.ReadFile(ipv4Forward); err == nil && strings.TrimSpace(string(on)) == "1" {
			return append(tools, veth), nil
		}
		fix += "; root can also let the kernel do it: sysctl net.ipv4.ip_forward=1"
	}
	if len(tools) == 0 {
		return nil, &Error{What: "network", Err: why, Fix: fix}
	}
	return tools, nil
}

// pastaRefuses is the date of the first pasta that tells the command of a refused
// connection. The answer (RST) of those before lacks the ACK without which the kernel
// drops it (RFC 9293, 3.10.7.3), so the command waits until it gives up, as measured
// with Debian's of 2023, which does not know its own date.
const pastaRefuses = 20250320

var (
	pastaDates sync.Map // of int, by path
	dateOfTool = regexp.MustCompile(`(20\d\d)_?(\d\d)_?(\d\d)`)
)

// pastaDate is the date in what a pasta calls its version, as the number YYYYMMDD;
// 0 if there is none. It costs a process, once.
func pastaDate(path string) int {
	if date, ok := pastaDates.Load(path); ok {
		return date.(int)
	}
	var said bytes.Buffer
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Stdout = &said
	if start(cmd) != nil || cmd.Wait() != nil {
		return 0
	}
	date := 0
	if line, _, _ := strings.Cut(said.String(), "\n"); dateOfTool.MatchString(line) {
		date, _ = strconv.Atoi(strings.Join(dateOfTool.FindStringSubmatch(line)[1:], "")) // digits
	}
	pastaDates.Store(path, date)
	return date
}

// hasDefaultRoute says whether this machine has a way to everywhere. Without, most
// pastas do not start; the others do, and reach what the machine reaches.
func hasDefaultRoute() bool { return hasDefault4() || hasDefault6() }

func hasDefault4() bool {
	routes, err := os.ReadFile("/proc/net/route")
	return err != nil || defaultRoute4(string(routes))
}

func hasDefault6() bool {
	routes, err := os.ReadFile("/proc/net/ipv6_route") // a kernel without IPv6 has none
	return err == nil && defaultRoute6(string(routes))
}

// defaultRoute4 looks for one in /proc/net/route.
func defaultRoute4(routes string) bool {
	for line := range strings.Lines(routes) {
		if f := strings.Fields(line); len(f) >= 8 && f[1] == "00000000" && f[7] == "00000000" && leads(f[3]) {
			return true
		}
	}
	return false
}

// defaultRoute6 looks for one in /proc/net/ipv6_route.
func defaultRoute6(routes string) bool {
	for line := range strings.Lines(routes) {
		f := strings.Fields(line)
		if len(f) >= 10 && strings.Trim(f[0], "0") == "" && f[1] == "00" && f[9] != "lo" && leads(f[8]) {
			return true
		}
	}
	return false
}

// leads says whether a route with these flags leads anywhere.
func leads(flags string) bool {
	f, err := strconv.ParseUint(flags, 16, 32)
	return err == nil && f&unix.RTF_UP != 0 && f&unix.RTF_REJECT == 0
}

// checkNAT says whether there is a way out, as far as that can be seen.
func checkNAT() error {
	tools, err := findNAT()
	if err == nil && tools.needRoute() && !hasDefault4() {
		// That of IPv6 may do, and some pastas can do without any.
		_, err = TryNAT()
	}
	return err
}

// needRoute says whether nothing but pasta is there.
func (t natTools) needRoute() bool { return len(t) == 1 && t[0].name == natPasta }

// TryNAT is [NATTool] that makes a network with a way out, and leaves nothing of it.
// It costs some tens of milliseconds.
func TryNAT() (string, error) {
	tools, err := findNAT()
	if err != nil {
		return "", err
	}
	attr, err := helperAttr(LevelNamespaces, newSpec(Command{Level: LevelNamespaces, Network: NetworkNAT}))
	if err != nil {
		return "", &Error{What: "user namespace", Err: err}
	}
	ours, theirs, err := controlPair()
	if err != nil {
		return "", &Error{What: "pipes", Err: err, Fix: fixFor(err)}
	}
	defer ours.Close()
	cmd := reexec.Command(natName)
	cmd.Env, cmd.Dir, cmd.SysProcAttr, cmd.ExtraFiles = []string{}, "/", attr, []*os.File{theirs}
	tools.around(cmd, natTrial)
	err = start(cmd)
	theirs.Close()
	if err != nil {
		return "", explain("namespaces", fmt.Errorf("start of a process for the network: %w", errnoOf(err)))
	}
	m, err := readMessage(bufio.NewReader(ours))
	_ = cmd.Wait() // it said how it went
	if err != nil {
		return "", &Error{What: "network", Err: errors.New("the process that tried nat was killed")}
	}
	if m.next() == sayFailed {
		e := parseFailed(m)
		if tools.needRoute() && !hasDefault4() {
			return "", &Error{What: "network", Err: fmt.Errorf("this machine has no default route that its pasta can use: %w", e.Err),
				Fix: "connect the machine to a network, or run: sudo apt install slirp4netns, which needs none; or use --network private"}
		}
		return "", explain(e.What, e)
	}
	return m.next(), nil
}

// toolDirs is where programs are that an ordinary PATH lacks.
var toolDirs = []string{"/usr/bin", "/usr/sbin", "/sbin"}

// lookTool finds a program, also where an ordinary PATH does not look; empty if
// there is none.
func lookTool(name string) string {
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	for _, dir := range toolDirs {
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

// natTrial stands for the number of descriptors where there is no init to come.
const natTrial = "try"

// wrap puts that process around the init that cmd is. It hands on the streams and
// descriptors.
func (t natTools) wrap(cmd *exec.Cmd) {
	if len(t) > 0 {
		t.around(cmd, strconv.Itoa(len(cmd.ExtraFiles)-1)) // the socket is the first
	}
}

func (t natTools) around(cmd *exec.Cmd, extra string) {
	cmd.Args = []string{natName, extra}
	for _, tool := range t {
		cmd.Args = append(cmd.Args, tool.name, tool.path, tool.nft)
	}
	// The init's own namespaces are made by it.
	cmd.SysProcAttr.Cloneflags &^= helperNamespaces | unix.CLONE_NEWNET
	cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNS | unix.CLONE_NEWPID
}

// planNetwork finds the ways out of the command's network.
func planNetwork(s *spec) (natTools, error) {
	if s.Network != NetworkNAT {
		return nil, nil
	}
	return findNAT()
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

// resolverFor is the resolv.conf of a command with a network of its own, and tool
// its way out.
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
