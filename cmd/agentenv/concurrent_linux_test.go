package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"gotest.tools/v3/assert"
)

// writers is how many processes change an environment at once.
const writers = 30

// together runs n commands at once; each has to succeed. It returns what they
// wrote to standard output.
func (u *owner) together(t *testing.T, n int, args func(i int) []string) []string {
	t.Helper()
	outs := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			c := u.command(u.src, "agentenv", append([]string{"--root", u.root, "-q"}, args(i)...)...)
			var out, errs bytes.Buffer
			c.Stdout, c.Stderr = &out, &errs
			err := c.Run()
			assert.Check(t, err == nil, "%v: %v: %s", args(i), err, errs.String())
			outs[i] = strings.TrimSpace(out.String())
		})
	}
	wg.Wait()
	return outs
}

func distinct(t *testing.T, list []string) {
	t.Helper()
	seen := map[string]bool{}
	for _, s := range list {
		assert.Assert(t, s != "" && !seen[s], "%q twice in %q", s, list)
		seen[s] = true
	}
}

// TestManyAtOnce: of thirty processes at once none loses what another did, and
// readers meanwhile see one state after the other.
func TestManyAtOnce(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		u.init(t, "base")
		stop := u.load(t)
		// Each exec changes one file; the snapshot that follows has it.
		u.together(t, writers, func(i int) []string {
			return []string{"exec", "--", "sh", "-c", fmt.Sprintf("echo %d >by%d", i, i)}
		})
		list := u.log(t)
		assert.Equal(t, len(list), 1+writers)
		for i, s := range list[:writers] {
			assert.Equal(t, *s.Parent, list[i+1].ID, "one parent after the other")
			assert.Equal(t, s.Stats.Added, 1)
		}
		distinct(t, u.together(t, writers, func(i int) []string { return []string{"commit", "--allow-empty", "-m", fmt.Sprint(i)} }))
		u.together(t, writers, func(i int) []string { return []string{"tag", fmt.Sprintf("t-%d", i)} })
		stop()
		assert.Equal(t, len(u.log(t)), 1+2*writers)
		assert.Equal(t, strings.Count(u.agentenv(t, "tag")+"\n", "\n"), writers)
		assert.Equal(t, u.agentenv(t, "exec", "--no-commit", "--", "sh", "-c", "ls | grep -c ^by"), fmt.Sprint(writers))
		u.swept(t)
	})
}

// TestManyDifferentThings: commands of all kinds at once, all of which succeed.
func TestManyDifferentThings(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		base := string(u.init(t, "base"))
		u.together(t, 15, func(i int) []string {
			return [][]string{
				{"exec", "--", "sh", "-c", fmt.Sprintf("echo %d >by%d", i, i)},
				{"checkout", base},
				{"commit", "-m", "m"},
				{"tag", fmt.Sprintf("t-%d", i), base},
				{"status", "--json"},
			}[i%5]
		})
		list := u.log(t)
		contains(t, list, nil, "at once")
		for _, s := range list {
			u.agentenv(t, "checkout", string(s.ID))
		}
		u.swept(t)
	})
}

// TestLeftoversOfTheDead: neither a lock file that names a living process, nor
// a socket that nobody listens on, is an obstacle.
func TestLeftoversOfTheDead(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		u.init(t, "base")
		lock := filepath.Join(u.root, "agentenv.lock")
		for _, content := range []string{
			fmt.Sprintf(`{"pid":%d,"op":"tournament","since":"2020-01-01T00:00:00Z"}`, os.Getpid()),
			`{"pid":99999999,"op":"supervise","since":"2020-01-01T00:00:00Z"}`, "", "{", "12345\n",
		} {
			assert.NilError(t, os.WriteFile(lock, []byte(content), 0o600))
			u.own(t, lock)
			u.agentenv(t, "commit", "--allow-empty", "-m", "after a crash")
		}
		assert.NilError(t, os.Remove(lock))
		u.agentenv(t, "commit", "--allow-empty", "-m", "without a lock file")

		sock := filepath.Join(u.root, "agentenv.sock")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: sock, Net: "unix"})
		assert.NilError(t, err)
		l.SetUnlinkOnClose(false)
		assert.NilError(t, l.Close())
		u.own(t, sock)
		u.agentenv(t, "commit", "--allow-empty", "-m", "beside a stale socket")
		u.agentenv(t, "status")
		assert.Equal(t, len(u.log(t)), 8)
	})
}

// everyCommand are commands of all kinds, each right in itself.
func everyCommand(id string) [][]string {
	return [][]string{
		{"log"}, {"status"}, {"head"}, {"show", id}, {"branches"}, {"tag"}, {"runs"},
		{"commit"}, {"checkout", id}, {"exec", "--", "true"}, {"tag", "x"}, {"delete", id}, {"apply"},
		{"tournament", "--plain", "--test", "true", "--", "true"},
	}
}

// TestNewerFormat: what a newer agentenv wrote is refused by every command, and
// left as it is.
func TestNewerFormat(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		id := string(u.init(t, "base"))
		meta := filepath.Join(u.root, "meta.json")
		data, err := os.ReadFile(meta)
		assert.NilError(t, err)
		newer := []byte(strings.Replace(string(data), `"version":1`, `"version":99`, 1))
		assert.Assert(t, !bytes.Equal(newer, data))
		assert.NilError(t, os.WriteFile(meta, newer, 0o600))
		for _, args := range everyCommand(id) {
			code, said := u.refused(t, args...)
			assert.Equal(t, code, "damaged", "%v: %s", args, said)
			assert.Assert(t, strings.Contains(said, "format 99") && strings.Contains(said, "newer agentenv"), "%v: %s", args, said)
		}
		_, _, code := u.run(t, u.src, "agentenv", "--root", u.root, "init", "--from", u.src)
		assert.Equal(t, code, exitUsage)
		got, err := os.ReadFile(meta)
		assert.NilError(t, err)
		assert.Assert(t, bytes.Equal(got, newer), "the newer history was written to")
		assert.NilError(t, os.WriteFile(meta, data, 0o600))
		assert.Equal(t, u.tree(t), whole("base"))
	})
}

// TestDamage: a damaged history or snapshot is named, and the rest is usable.
func TestDamage(t *testing.T) {
	onBackends(t, func(t *testing.T, u *owner) {
		base := string(u.init(t, "base"))
		u.agentenv(t, "exec", "--", "sh", "-c", stateScript("second"))
		second := u.agentenv(t, "head")
		u.agentenv(t, "checkout", base)
		u.agentenv(t, "exec", "--", "sh", "-c", stateScript("third"))
		third := u.agentenv(t, "head")

		meta := filepath.Join(u.root, "meta.json")
		data, err := os.ReadFile(meta)
		assert.NilError(t, err)
		for _, bad := range []string{"", "{", string(data[:len(data)/2]), "null"} {
			assert.NilError(t, os.WriteFile(meta, []byte(bad), 0o600))
			for _, args := range everyCommand(base) {
				code, said := u.refused(t, args...)
				assert.Equal(t, code, "damaged", "%v: %s", args, said)
				assert.Assert(t, strings.Contains(said, meta), "%v: %s", args, said)
			}
		}
		assert.NilError(t, os.WriteFile(meta, data, 0o600))

		// One snapshot is gone. It is named, and whatever does not need it works.
		node, away := filepath.Join(u.root, "nodes", second), filepath.Join(u.root, "nodes", second+".away")
		assert.NilError(t, os.Rename(node, away))
		assert.Equal(t, len(u.log(t)), 3)
		u.agentenv(t, "status")
		for _, args := range [][]string{{"show", second}, {"checkout", second}} {
			code, said := u.refused(t, args...)
			assert.Equal(t, code, "damaged", said)
			assert.Assert(t, strings.Contains(said, second), said)
		}
		assert.Equal(t, u.tree(t), whole("third"))
		u.agentenv(t, "checkout", base)
		assert.Equal(t, u.tree(t), whole("base"))
		u.agentenv(t, "checkout", third)
		u.agentenv(t, "exec", "--", "sh", "-c", stateScript("fourth"))
		assert.Equal(t, u.tree(t), whole("fourth"))
		assert.NilError(t, os.Rename(away, node))
		u.agentenv(t, "checkout", second)
		assert.Equal(t, u.tree(t), whole("second"))
	})
}
