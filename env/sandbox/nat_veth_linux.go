package sandbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// vethTries bounds the search for a subnet that nobody has.
const vethTries = 100

// vethPools are where subnets are taken from (RFC 1918), the emptiest first.
var vethPools = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
}

// vethBits is the size of a command's subnet: two addresses.
const vethBits = 30

// veth joins the namespace to the host's by a pair of devices, and has the kernel
// translate addresses. Both end with this process: the devices with the
// namespace, the rules with the program that owns them.
func (n *natInit) veth(namespace string) error {
	routes, err := os.ReadFile("/proc/net/route")
	if err != nil {
		return err
	}
	taken := parseRoutes(string(routes))
	for i := range vethTries {
		net := randomSubnet(vethPools[i%len(vethPools)])
		if overlaps(taken, net) {
			continue
		}
		// The device's name is the subnet's, so no two commands have one.
		name := fmt.Sprintf("ae%x", binary.BigEndian.Uint32(net.Addr().AsSlice()))
		err := n.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
		if err != nil && strings.Contains(err.Error(), "exists") {
			continue
		}
		if err != nil {
			return err
		}
		n.undo = func() { _ = n.ip("link", "del", name) } // else the kernel does it
		return n.join(name, net)
	}
	return errors.New("no private subnet is free")
}

// join sets the addresses of a pair of devices, and the rules.
func (n *natInit) join(name string, net netip.Prefix) error {
	outer := net.Addr().Next()
	inner := outer.Next()
	prefix := func(a netip.Addr) string { return netip.PrefixFrom(a, vethBits).String() }
	if err := n.rules(name, net); err != nil {
		return err
	}
	for _, args := range [][]string{{"addr", "add", prefix(outer), "dev", name}, {"link", "set", name, "up"}} {
		if err := n.ip(args...); err != nil {
			return err
		}
	}
	return n.within(func() error {
		for _, args := range [][]string{
			{"addr", "add", prefix(inner), "dev", "eth0"}, {"link", "set", "lo", "up"}, {"link", "set", "eth0", "up"},
			{"route", "add", "default", "via", outer.String()},
		} {
			if err := n.ip(args...); err != nil {
				return err
			}
		}
		return nil
	})
}

func (n *natInit) ip(args ...string) error {
	cmd := exec.Command(n.tool.path, args...)
	return n.withWords(cmd, cmd.Run)
}

// vethRules lets the command out and nobody in: not from elsewhere, nor from
// another command; nor does it reach the host itself. The owner flag ends the
// table with the program that made it. It is one line: nft reads it as typed.
const vethRules = `table inet %[1]s { flags owner; ` +
	`chain out { type nat hook postrouting priority srcnat; ip saddr %[3]s oifname != "%[2]s" masquerade; }; ` +
	`chain host { type filter hook input priority filter; iifname "%[2]s" reject; }; ` +
	`chain inside { type filter hook forward priority filter; oifname "%[2]s" ct state != { established, related } reject; }; }` + "\n"

// rules has nft hold the rules as long as this process lives.
func (n *natInit) rules(name string, net netip.Prefix) error {
	table := "agentenv_" + name
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command(n.tool.nft, "--interactive")
	cmd.Stdin = r
	return n.withWords(cmd, func() error {
		err := cmd.Start()
		r.Close()
		if err != nil {
			return err
		}
		n.rulesEnd = w
		if _, err := fmt.Fprintf(w, vethRules, table, name, net); err != nil {
			return err
		}
		for end := time.Now().Add(natReady / 2); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			if exec.Command(n.tool.nft, "list", "chain", "inet", table, "inside").Run() == nil {
				return nil
			}
		}
		return errors.New("it did not take the rules")
	})
}

// parseRoutes reads the destinations of /proc/net/route, the default ones left
// out.
func parseRoutes(text string) []netip.Prefix {
	var found []netip.Prefix
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 8 {
			continue
		}
		to, err := strconv.ParseUint(f[1], 16, 32)
		mask, merr := strconv.ParseUint(f[7], 16, 32)
		if err != nil || merr != nil || mask == 0 {
			continue // the first line has titles
		}
		var addr [4]byte
		binary.NativeEndian.PutUint32(addr[:], uint32(to))
		bits := 0
		for m := mask; m != 0; m &= m - 1 {
			bits++
		}
		found = append(found, netip.PrefixFrom(netip.AddrFrom4(addr), bits))
	}
	return found
}

func overlaps(taken []netip.Prefix, p netip.Prefix) bool {
	for _, t := range taken {
		if t.Overlaps(p) {
			return true
		}
	}
	return false
}

// randomSubnet takes any subnet of a pool.
func randomSubnet(pool netip.Prefix) netip.Prefix {
	size := uint32(1) << (vethBits - pool.Bits())
	var addr [4]byte
	binary.BigEndian.PutUint32(addr[:], binary.BigEndian.Uint32(pool.Addr().AsSlice())+rand.Uint32N(size)<<(32-vethBits))
	return netip.PrefixFrom(netip.AddrFrom4(addr), vethBits)
}
