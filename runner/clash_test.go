package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gotest.tools/v3/assert"
)

func TestClash(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	says := func(text string) bool {
		t.Helper()
		assert.NilError(t, os.WriteFile(log, []byte(text), 0o600))
		s := clash(log)
		assert.Assert(t, s == "" || strings.HasPrefix(s, "; ") && !strings.Contains(s, "\n"), "%q", s)
		return s != ""
	}
	for _, text := range []string{
		"Error: listen EADDRINUSE: address already in use :::3001\n    at Server.setupListenHandle\n",
		"OSError: [Errno 98] Address already in use\n",
		"listen tcp :8080: bind: address already in use\nexit status 1\n",
		"java.net.BindException: Address already in use\n\tat java.base/sun.nio.ch.Net.bind0(Native Method)\n",
		"nginx: [emerg] bind() to 0.0.0.0:80 failed (98: Address already in use)\n",
		"LOG:  could not bind IPv4 address \"127.0.0.1\": Address already in use\n",
		"Os { code: 98, kind: AddrInUse, message: \"Address already in use\" }",
		"Web server failed to start. Port 8080 was already in use.\n",
		"Error: That port is already in use.\n",
		"Port 5000 is in use by another program.\n",
		"Error: Port 5173 is already in use\n",
		"Something is already running on port 3000.\n",
		"[ERROR] Do you already have another mysqld server running on port: 3306 ?\n",
		strings.Repeat("x\n", clashTail) + "bind: Address already in use",
	} {
		assert.Check(t, says(text), text)
	}
	for _, text := range []string{
		"", "connection refused\n", "port 8080 is open\n",
		"Address already in use\n" + strings.Repeat("x\n", clashTail),
	} {
		assert.Check(t, !says(text), text)
	}
	assert.Equal(t, clash(filepath.Join(t.TempDir(), "none")), "")
}

func TestCutOff(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	for text, said := range map[string]bool{
		"curl: (6) Could not resolve host: example.org\n":                             true,
		"curl: (6) Couldn't resolve host 'example.org'\n":                             true,
		"getaddrinfo EAI_AGAIN registry.npmjs.org\n":                                  true,
		"dial tcp: lookup example.org on 10.0.0.1:53: server misbehaving\n":           true,
		"connect: Network is unreachable\n":                                           true,
		"socket.gaierror: [Errno -3] Temporary failure in name resolution\n":          true,
		"FAIL: want 1, got 2\n":                                                       false,
		"Network is unreachable\n" + strings.Repeat("x\n", clashTail) + "FAIL: 2 ≠ 1": false,
	} {
		assert.NilError(t, os.WriteFile(log, []byte(text), 0o600))
		assert.Check(t, (cutOff(log) != "") == said, text)
	}
}
