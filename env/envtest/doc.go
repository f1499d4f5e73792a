// Package envtest is the suite that every Executor of package sandbox must pass. What
// it asks is what package sandbox promises; a part of it that makes no sense
// at a level is not run there.
package envtest
