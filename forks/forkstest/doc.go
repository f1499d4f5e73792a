// Package forkstest holds the tests that every driver of package forks passes,
// a driver that fails when told to, and what such tests need: volumes of real
// file systems on loop files, running as an ordinary user, tricky trees, and a
// reading of a tree that is independent of the drivers.
//
// A driver's test file calls [Main] from TestMain and [Run] for each volume:
//
//	func TestMain(m *testing.M) { os.Exit(forkstest.Main(m, Backend())) }
//	func TestSuite(t *testing.T) { forkstest.RunVolumes(t, Backend()) }
//
// A tree is seen where it stands, or mounted for as long as it is looked at: by
// root in the test itself, for an ordinary user by a process with capabilities in
// a user namespace that both live in, so that the driver and what runs in a tree
// have none. Crashes are processes that kill themselves at a step or are killed.
//
// What must hold: a test that cannot run for lack of privilege or of a tool
// skips and says so; nothing stays mounted or on disk when the tests end.
package forkstest
