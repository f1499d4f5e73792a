package specs

import "time"

// defaultGrace is CONTRACT's.
const defaultGrace = 5 * time.Second

// Plan is a tournament as a plan file describes it, with every default filled
// in and every path of the file resolved.
type Plan struct {
	// File is the plan's path as it was given, for messages; Dir its folder,
	// absolute. Both are empty for a plan made from flags.
	File string `json:"-"`
	Dir  string `json:"-"`
	// BaseGiven says that the plan or a flag has a base; Base is then not the default.
	BaseGiven bool `json:"-"`

	Name       string            `json:"name" plan:"name" jsonschema:"The tournament's name. Default: the file's name."`
	Base       Base              `json:"base" jsonschema:"What the candidates start from. Default: HEAD, after unsaved work was saved."`
	Workdir    string            `json:"workdir" plan:"workdir" jsonschema:"Where commands run, relative to the tree. Default: the tree's own directory."`
	Shell      []string          `json:"shell" plan:"argv" jsonschema:"The command line that a run is handed to as its last argument. Default: [sh, -e, -c], which stops at the first line that fails."`
	Env        map[string]string `json:"env" plan:"env" jsonschema:"Variables added for every command. Values are text, taken as they are written."`
	PassEnv    []string          `json:"pass_env" plan:"names" jsonschema:"Names of the caller's variables that commands see as well; their values are masked in logs and reports."`
	Setup      *Setup            `json:"setup,omitempty" jsonschema:"Runs once, in a fork of the base, before the candidates, which start from its result."`
	Candidates []Candidate       `json:"candidates" plan:",required" jsonschema:"The ways to try, at least one. Each runs in a fork of its own."`
	Test       Test              `json:"test" plan:",required" jsonschema:"Says by its exit status alone whether a candidate's tree is right."`
	Score      *Score            `json:"score,omitempty" jsonschema:"Measures what passed the test."`
	Select     Select            `json:"select" jsonschema:"Which passing attempt wins. Default: first-pass."`
	// Parallel is how many attempts run at once, at least 1.
	Parallel int `json:"parallel" plan:"positive" jsonschema:"How many attempts run at once. Default: the number of CPUs."`
	// Timeout bounds the whole tournament; 0 is no bound.
	Timeout Duration `json:"timeout" jsonschema:"Bounds the whole tournament. Default: none."`
	// Grace passes between TERM and KILL.
	Grace     Duration  `json:"grace" jsonschema:"Passes between TERM and KILL. Default: 5s."`
	Limits    *Limits   `json:"limits,omitempty" jsonschema:"What each attempt may use. Default: no limits."`
	Home      Home      `json:"home" jsonschema:"The home directory that commands see: an overlay over the caller's, an empty one, or the real one. Default: overlay."`
	Mounts    []Mount   `json:"mounts" jsonschema:"Host paths brought into the commands' view."`
	Network   Network   `json:"network" jsonschema:"The network that commands see: the host's, a private one with nothing but loopback, or a private one with the way out. Default: host."`
	Isolation Isolation `json:"isolation" jsonschema:"The least isolation that is acceptable. Default: namespaces."`
	Promote   Promote   `json:"promote" jsonschema:"Whether the winner becomes HEAD; best only with select: all. Default: true; with select: all, false."`
	Apply     bool      `json:"apply" jsonschema:"Whether the winner is also applied to the directory that the base was taken from. Default: false."`
	Artifacts []string  `json:"artifacts" plan:"globs" jsonschema:"Files to copy from each attempt to the run's folder; globs relative to the tree."`
	Keep      Keep      `json:"keep" jsonschema:"Which attempts stay as snapshots. Default: winner."`
}

// Base says what candidates start from: exactly one field is set.
type Base struct {
	// Ref is a REF of the environment's history.
	Ref string `json:"ref,omitempty" plan:"ref,text-only" jsonschema:"A snapshot: HEAD, HEAD~N, a tag, or an id."`
	// Dir is a directory to capture, absolute.
	Dir string `json:"dir,omitempty" plan:"path" jsonschema:"A directory to capture, relative to the plan's folder."`
	// Tarball is an archive to take in, absolute.
	Tarball string `json:"tarball,omitempty" plan:"path" jsonschema:"An archive to take in, relative to the plan's folder."`
}

// Setup runs once, before the candidates, in a fork of the base.
type Setup struct {
	Run     string            `json:"run" plan:"command,required" jsonschema:"The command, handed to the shell."`
	Timeout Duration          `json:"timeout" jsonschema:"Bounds the command. Default: none."`
	Network Network           `json:"network" jsonschema:"Default: the plan's."`
	Env     map[string]string `json:"env" plan:"env" jsonschema:"Variables added to the plan's."`
}

// Candidate is one way to try. Exactly one of Run and Script is set. Its Env is
// what it adds to the plan's and wins over it, as in Setup; it does not repeat
// the plan's.
type Candidate struct {
	Name string `json:"name" plan:"template-name" jsonschema:"The candidate's name. Default: c1, c2, … by its place in the list."`
	Run  string `json:"run,omitempty" plan:"command" jsonschema:"The command, handed to the shell."`
	// Script is a file to run by its #! line, absolute.
	Script string `json:"script,omitempty" plan:"path" jsonschema:"A file to run by its #! line, relative to the plan's folder."`
	// Stdin is a file, absolute; empty is an empty input.
	Stdin   string              `json:"stdin,omitempty" plan:"path" jsonschema:"A file to read as standard input, relative to the plan's folder. Default: empty input."`
	Matrix  map[string][]string `json:"matrix,omitempty" plan:"matrix" jsonschema:"Lists of values; each combination is a candidate."`
	Exclude []map[string]string `json:"exclude,omitempty" plan:"combinations" jsonschema:"Combinations to leave out."`
	Include []map[string]string `json:"include,omitempty" plan:"combinations" jsonschema:"Combinations to add."`
	// Repeat is the number of attempts, at least 1.
	Repeat int `json:"repeat" plan:"positive" jsonschema:"The number of attempts. Default: 1."`
	// Timeout runs from the start of the command; 0 is no bound.
	Timeout Duration          `json:"timeout" jsonschema:"Bounds each attempt, from the start of its command. Default: none."`
	Env     map[string]string `json:"env" plan:"env" jsonschema:"Variables added to the plan's."`
	Workdir string            `json:"workdir" plan:"workdir" jsonschema:"Where the command runs, relative to the tree. Default: the plan's."`
	Network Network           `json:"network" jsonschema:"Default: the plan's."`
}

// Test says whether an attempt's tree is right, by its exit status alone.
type Test struct {
	Run      string   `json:"run" plan:"command,required" jsonschema:"The command, handed to the shell."`
	Timeout  Duration `json:"timeout" jsonschema:"Bounds each run of the test. Default: none."`
	Network  Network  `json:"network" jsonschema:"Default: the plan's."`
	Confirm  int      `json:"confirm" plan:"count" jsonschema:"How many more runs must pass after a pass. Default: 0."`
	Protect  []string `json:"protect" plan:"globs" jsonschema:"Files taken from the base before the test; globs relative to the tree."`
	OnTamper OnTamper `json:"on_tamper" jsonschema:"What a change to a protected file means. Default: reject."`
	OnBase   OnBase   `json:"on_base" jsonschema:"What the test must say of the base itself. Default: warn, if it already passes."`
}

// Score measures an attempt that passed.
type Score struct {
	Run  string `json:"run" plan:"command,required" jsonschema:"A command that prints one number on its last line."`
	Goal Goal   `json:"goal" jsonschema:"Whether more is better, or less. Default: max."`
}

// Limits bound each attempt; a zero field is no limit.
type Limits struct {
	// CPUs is in cores.
	CPUs float64 `json:"cpus,omitempty" plan:"cpus" jsonschema:"Cores, such as 2 or 0.5."`
	// Memory and Disk are in bytes.
	Memory  int64   `json:"memory,omitempty" plan:"memory" jsonschema:"Memory, such as 512MiB or 2GB; at least 1MiB."`
	PIDs    int     `json:"pids,omitempty" plan:"positive" jsonschema:"Processes at once."`
	Disk    int64   `json:"disk,omitempty" plan:"size" jsonschema:"Bytes written, such as 4GiB."`
	NoFile  int     `json:"nofile,omitempty" plan:"files" jsonschema:"Files that each process may have open."`
	Enforce Enforce `json:"enforce" jsonschema:"What to do where this machine cannot enforce a limit: stop (strict), or go on (best-effort). Default: strict."`
}

// Mount brings a host path into the commands' view.
type Mount struct {
	// From is a host path, absolute; To where it is seen, absolute.
	From string    `json:"from" plan:"path,required" jsonschema:"The host path; ~ is the home directory; relative to the plan's folder."`
	To   string    `json:"to" plan:"target" jsonschema:"Where commands see it, absolute. Default: the same path."`
	Mode MountMode `json:"mode" jsonschema:"Read-only, writable with the changes thrown away, or writable for real. Default: ro."`
}

// Duration is a length of time that is written with units, such as 1h30m, and
// is a number of seconds in JSON.
type Duration time.Duration

// The words a plan chooses from.
type (
	Select    string
	Home      string
	Network   string
	Isolation string
	Promote   string
	Keep      string
	OnTamper  string
	OnBase    string
	Goal      string
	Enforce   string
	MountMode string
)

// Their values, as CONTRACT §4 lists them; the first of each is the default.
const (
	FirstPass Select = "first-pass"
	BestScore Select = "best-score"
	All       Select = "all"

	HomeOverlay Home = "overlay"
	HomePrivate Home = "private"
	HomeHost    Home = "host"

	NetworkHost    Network = "host"
	NetworkPrivate Network = "private"
	NetworkNAT     Network = "nat"

	Namespaces Isolation = "namespaces"
	Process    Isolation = "process"

	PromoteTrue  Promote = "true"
	PromoteFalse Promote = "false"
	PromoteBest  Promote = "best"

	KeepWinner Keep = "winner"
	KeepPassed Keep = "passed"
	KeepAll    Keep = "all"
	KeepNone   Keep = "none"

	TamperReject OnTamper = "reject"
	TamperReport OnTamper = "report"

	BaseWarn   OnBase = "warn"
	BaseFails  OnBase = "fails"
	BasePasses OnBase = "passes"
	BaseSkip   OnBase = "skip"

	Max Goal = "max"
	Min Goal = "min"

	Strict     Enforce = "strict"
	BestEffort Enforce = "best-effort"

	MountRO      MountMode = "ro"
	MountOverlay MountMode = "overlay"
	MountRW      MountMode = "rw"
)
