package sandbox

import (
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"
)

func TestNATResolver(t *testing.T) {
	const search = "search a.example b.example\noptions edns0\n"
	for _, c := range []struct{ tool, host, upstream, want string }{
		{natPasta, "nameserver 192.0.2.1\n" + search, "", "nameserver 169.254.1.1\nnameserver 192.0.2.1\n" + search},
		{natSlirp, "nameserver 192.0.2.1\n", "", "nameserver 10.0.2.3\nnameserver 192.0.2.1\n"},
		{natVeth, "nameserver 192.0.2.1\n# x\nsortlist 1.2.3.4\n", "", "nameserver 192.0.2.1\n"},
		{natPasta, "nameserver 127.0.0.53\n" + search, "nameserver 192.0.2.9\n", "nameserver 169.254.1.1\n" + search},
		{natVeth, "nameserver 127.0.0.53\n" + search, "nameserver 192.0.2.9\nsearch other\n", "nameserver 192.0.2.9\n" + search},
		{natPasta, "nameserver 2001:db8::1\nnameserver fe80::1%eth0\n", "", "nameserver 2001:db8::1\n"},
		{natPasta, "nameserver ::1\n", "nameserver 192.0.2.9\n", "nameserver 192.0.2.9\n"},
		{natVeth, "", "", ""},
		{natPasta, "nameserver nonsense\nnameserver\n", "", ""},
	} {
		assert.Check(t, natResolver(c.tool, c.host, c.upstream) == c.want, "%s %q: %q", c.tool, c.host, natResolver(c.tool, c.host, c.upstream))
	}
}

func TestNamesLocalhost(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "127.0.0.1 localhost": true, "127.0.0.1\tx LOCALHOST\n": true, "# 127.0.0.1 localhost\n": false,
		"127.0.0.1 localhost.localdomain\n": false, "localhost": false,
	} {
		assert.Check(t, namesLocalhost([]byte(text)) == want, "%q", text)
	}
}

func TestParseRoutes(t *testing.T) {
	const text = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n" +
		"eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n" +
		"eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n" +
		"tun0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n"
	got := parseRoutes(text)
	assert.Assert(t, len(got) == 2 && got[0].String() == "192.0.2.0/24" && got[1].String() == "10.0.0.0/8", "%v", got)
	for _, pool := range vethPools {
		for range 1000 {
			p := randomSubnet(pool)
			assert.Assert(t, p.Bits() == vethBits && p == p.Masked() && pool.Contains(p.Addr()) && pool.Contains(p.Addr().Next().Next().Next()), "%v", p)
		}
	}
	assert.Check(t, overlaps(got, netip.MustParsePrefix("10.1.2.4/30")))
	assert.Check(t, !overlaps(got, netip.MustParsePrefix("172.16.0.0/30")))
}

// TestNetworkNamespaceRefused: if the machine allows every namespace but this one,
// the error says so, and names no other.
func TestNetworkNamespaceRefused(t *testing.T) {
	s := newSpec(Command{Level: LevelNamespaces, Network: NetworkPrivate})
	e := explainNetwork(s, unix.EPERM)
	if e == nil {
		t.Skip("no namespaces here")
	}
	assert.Equal(t, e.What, "network namespace")
	assert.ErrorContains(t, e, "--network host")
	assert.Check(t, e.Is(ErrSandbox))
	s.Network = ""
	assert.Check(t, explainNetwork(s, unix.EPERM) == nil)
}

func TestDefaultRoute(t *testing.T) {
	const titles = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
	const none = "00000000000000000000000000000000"
	for _, c := range []struct {
		name, v4, v6 string
		want         bool
	}{
		{"nothing", "", "", false},
		{"IPv4", titles + "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n", "", true},
		{"a neighbour", titles + "eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n", "", false},
		{"half of the world", titles + "eth0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n", "", false},
		{"refused", titles + "*\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0\n", "", false},
		{"IPv6", titles, none + " 00 " + none + " 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0\n", true},
		{"IPv6's own", titles, none + " 00 " + none + " 00 " + none + " ffffffff 00000001 00000000 00200200       lo\n", false},
		{"IPv6 net", titles, "fec00000000000000000000000000000 40 " + none + " 00 " + none + " 00000100 00000001 00000000 00000001     eth0\n", false},
	} {
		assert.Check(t, (defaultRoute4(c.v4) || defaultRoute6(c.v6)) == c.want, c.name)
	}
}

// TestPastaDate: programs are preferred by date where both are there.
func TestPastaDate(t *testing.T) {
	OnlyPath(t)
	for version, want := range map[string]int{
		"pasta 2025_01_21.4f2c8e7": 20250121, "pasta 0^20250611.g0293c6f-1.fc42.x86_64": 20250611,
		"pasta 0.0~git20250503.587980c-2": 20250503, "pasta unknown version\nCopyright 20250503": 0, "": 0,
	} {
		dir := t.TempDir()
		for _, name := range []string{natPasta, natSlirp} {
			assert.NilError(t, os.WriteFile(dir+"/"+name, []byte("#!/bin/sh\necho '"+version+"'\n"), 0o755))
		}
		assert.Check(t, pastaDate(dir+"/pasta") == want, "%q: %d", version, pastaDate(dir+"/pasta"))
		t.Setenv("PATH", dir)
		tools, err := findNAT()
		if err != nil || !hasDefaultRoute() {
			continue
		}
		assert.Check(t, (tools[0].name == natPasta) == (want >= pastaRefuses), "%q: %v", version, tools)
	}
}

// TestNoWayOut: where there is none, it is said what to install.
func TestNoWayOut(t *testing.T) {
	OnlyPath(t)
	t.Setenv("PATH", "/nowhere")
	err := CheckNetwork(LevelNamespaces, NetworkNAT)
	assert.ErrorContains(t, err, "sudo apt install passt")
	_, terr := TryNAT()
	assert.Error(t, terr, err.Error())
}
