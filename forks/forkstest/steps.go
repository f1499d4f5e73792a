//go:build linux

package forkstest

import "github.com/agentenv/agentenv/forks/internal/step"

// OnStep lets f be called at every point between two changes that a driver
// makes on disk; nil ends that. See package step.
func OnStep(f func(name string)) { step.Hook(f) }
