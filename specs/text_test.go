package specs

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"gotest.tools/v3/assert"
	"pgregory.net/rapid"
)

func TestParseDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"30s": 30 * time.Second, "5m": 5 * time.Minute, "1h30m": 90 * time.Minute, "1.5h": 90 * time.Minute,
		"250ms": 250 * time.Millisecond, "1us": time.Microsecond, "1µs": time.Microsecond, "1ns": 1,
		"8760h": 8760 * time.Hour, ".5s": 500 * time.Millisecond, "90m": 90 * time.Minute,
	} {
		d, err := ParseDuration(text)
		assert.NilError(t, err)
		assert.Equal(t, d, want, text)
	}
	for text, want := range map[string]string{
		"": "need a unit", "5": "need a unit", "0": "need a unit", "1:30": "need a unit", "1e3": "need a unit",
		"5 m": "need a unit", "5M": "need a unit", "five": "need a unit", "+5s": "need a unit", "s": "need a unit",
		"1e3s": "need a unit", "5min": "need a unit", "5m ": "need a unit", "1_000s": "need a unit", "none": "need a unit",
		"٥s": "need a unit", "PT5M": "need a unit", "5m\n": "need a unit",
		"1d": "the longest unit is the hour", "2 weeks": "the longest unit is the hour",
		"0s": "more than zero", "0h0m": "more than zero", "-1s": "more than zero", "-5": "more than zero", "0.1ns": "more than zero",
		"8760h1ns": "at most 8760h", "99999h": "at most 8760h", "9999999999999999999h": "at most 8760h",
	} {
		_, err := ParseDuration(text)
		assert.ErrorContains(t, err, want, text)
		assert.Assert(t, !strings.Contains(err.Error(), "\n"), text)
	}
}

func TestDurationIsSecondsInJSON(t *testing.T) {
	for d, want := range map[time.Duration]string{0: "0", 90 * time.Minute: "5400", 250 * time.Millisecond: "0.25"} {
		out, err := json.Marshal(Duration(d))
		assert.NilError(t, err)
		assert.Equal(t, string(out), want)
	}
	assert.Equal(t, Duration(90*time.Second).String(), "1m30s")
}

// What is accepted is what Go reads, and writing it down again reads the same.
func TestDurationRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(1, int64(maxDuration)).Draw(t, "d"))
		got, err := ParseDuration(d.String())
		assert.NilError(t, err)
		assert.Equal(t, got, d)
	})
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{
		"512MiB": 512 << 20, "2GB": 2e9, "2GiB": 2 << 30, "1B": 1, "1.5KiB": 1536, "10kB": 10_000, "10KB": 10_000,
		"1TiB": 1 << 40, "3TB": 3e12, "4 MiB": 4 << 20,
	} {
		n, err := parseSize(text)
		assert.NilError(t, err)
		assert.Equal(t, n, want, text)
	}
	for _, text := range []string{"", "512", "2G", "2g", "2m", "-1MiB", "1e3MB", "MiB", "1,5GB", "2gb", "0MiB", "0.1B", "99999999999TiB"} {
		_, err := parseSize(text)
		assert.Assert(t, err != nil, text)
	}
}

func TestNames(t *testing.T) {
	for _, name := range []string{"a", "0", "a-b-9", strings.Repeat("x", 64)} {
		assert.NilError(t, CheckName(name))
	}
	for _, name := range []string{"", "-a", "A", "a b", "a_b", "a.b", "a/b", "é", "a\n", strings.Repeat("x", 65)} {
		assert.Assert(t, CheckName(name) != nil, name)
	}
	for file, want := range map[string]string{
		"plan.yaml": "plan", "/a/My Plan.v2.yml": "my-plan-v2", ".agentenv.yaml": "agentenv", "é.yaml": "tournament",
		"-": "tournament", "": "tournament", "__x__.yaml": "x", "plan": "plan", ".yaml": "yaml", "a--b.yaml": "a-b",
		strings.Repeat("ab-", 40) + ".yaml": strings.TrimSuffix(strings.Repeat("ab-", 22)[:64], "-"),
	} {
		assert.Equal(t, NameFrom(file), want, file)
	}
	rapid.Check(t, func(t *rapid.T) {
		assert.NilError(t, CheckName(NameFrom(rapid.String().Draw(t, "file"))))
	})
}

func TestParseMount(t *testing.T) {
	for text, want := range map[string]Mount{
		"/a":                {"/a", "/a", MountRO},
		"/a:rw":             {"/a", "/a", MountRW},
		"/a:/b":             {"/a", "/b", MountRO},
		"/a:/b:overlay":     {"/a", "/b", MountOverlay},
		"~/m:/m:ro":         {"/home/u/m", "/m", MountRO},
		"data":              {"/plans/data", "/plans/data", MountRO},
		"./ro":              {"/plans/ro", "/plans/ro", MountRO},
		"/dev/kvm:/dev/kvm": {"/dev/kvm", "/dev/kvm", MountRO},
		"/a:~/b":            {"/a", "/home/u/b", MountRO},
		"ro":                {"/plans/ro", "/plans/ro", MountRO},
	} {
		m, err := ParseMount(text, testOptions)
		assert.NilError(t, err)
		assert.DeepEqual(t, m, want)
	}
	for text, want := range map[string]string{
		"": "a path is due", ":/b": "a path is due", "/a:": "an absolute path is due", "/a:b": "an absolute path is due",
		"/a:/b:wr": "FROM[:TO]", "/a:/b:/c:ro": "FROM[:TO]", "/": "mounted over /", "/a:/": "mounted over /",
		"/a:/proc": "over /proc", "/a:/proc/1": "below /proc", "/a:/sys/": "over /sys", "/a:/dev": "over /dev", "~x": "only ~",
	} {
		_, err := ParseMount(text, testOptions)
		assert.ErrorContains(t, err, want, text)
	}
	_, err := ParseMount("~/x", Options{Dir: "/"})
	assert.ErrorContains(t, err, "HOME is not set")
}

func TestNearest(t *testing.T) {
	words := []string{"timeout", "test", "env", "run", "name"}
	for word, want := range map[string]string{
		"timout": "timeout", "tiemout": "timeout", "TIMEOUT": "timeout", "time_out": "timeout", "tests": "test",
		"rnu": "run", "Env": "env", "frob": "", "xyz": "", "": "", "\u00a0run": "run",
	} {
		assert.Equal(t, nearest(word, words), want, word)
	}
}

func TestPatternsCompile(t *testing.T) {
	// JSON Schema wants ECMA 262 patterns: nothing here is Go's alone.
	for _, p := range []string{namePattern, durationPattern, sizePattern, cpusPattern, variablePattern, axisPattern} {
		assert.Assert(t, !regexp.MustCompile(`\\[pPzAQEx]|\(\?`).MatchString(p), p)
	}
}
