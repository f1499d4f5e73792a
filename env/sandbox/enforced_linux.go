package sandbox

// Enforced is what of the limits is enforced here for commands of a level that
// can do with less ([Limits.BestEffort]). It costs next to nothing.
func Enforced(level Level, l Limits) Limits { return enforce(level, l).limits }
