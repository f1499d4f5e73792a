// Package copytree is the driver "copy": it needs nothing but a file system.
// Snapshots are layers of package layer; the work tree is a plain directory
// tree, made by sharing blocks (FICLONE) where the file system can, else by
// copying. Forks are overlays over the layers where this user can mount such on
// this store, else plain trees as well. What must hold for both kinds is said
// in forks/internal/layer/driver.
package copytree
