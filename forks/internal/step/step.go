// Package step marks the points between which a driver changes what is on
// disk. A crash may come at any of them; tests make it come.
package step

import "sync/atomic"

var hook atomic.Pointer[func(name string)]

// At marks a point: what stands before it in the code is done, what stands
// after it is not. Its name says where it is: "driver.method.what-is-done".
func At(name string) {
	if f := hook.Load(); f != nil {
		(*f)(name)
	}
}

// Hook lets f be called at every point of this process; nil ends that.
func Hook(f func(name string)) {
	if f == nil {
		hook.Store(nil)
		return
	}
	hook.Store(&f)
}
