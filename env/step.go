package env

import "sync/atomic"

// stepHook is called at every point between two changes that an operation
// makes on disk. Only tests set it: a crash may come at any such point, and
// they make it come. The drivers mark theirs in the same way.
var stepHook atomic.Pointer[func(name string)]

// step marks a point: what stands before it in the code is done, what stands
// after it is not.
func step(name string) {
	if f := stepHook.Load(); f != nil {
		(*f)(name)
	}
}
