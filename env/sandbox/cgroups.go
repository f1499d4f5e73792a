package sandbox

// Cgroups is what cgroups can do here for this user.
type Cgroups struct {
	// CPU, Memory and PIDs say which version limits them; 0 is none.
	CPU, Memory, PIDs int
	// Kill and Freeze say whether all that a command started can be killed, and
	// stopped, at one stroke.
	Kill, Freeze bool
	// Why says, of what is missing, why, and Fix mends it; empty if all works.
	Why, Fix string
}
