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
// What must hold: a test that cannot run for lack of privilege or of a tool
// skips and says so; nothing stays mounted or on disk when the tests end.
package forkstest
