package sandbox

import (
	"net/netip"
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
