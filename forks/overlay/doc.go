// Package overlay is the room of the driver "overlay": snapshots are the layers
// of forks/internal/layer, a fork is a mount of those layers below a private
// upper directory, so that making one costs the same whatever the size of the
// tree.
//
// What must hold, besides what package forks asks of every driver:
//
//   - index, metacopy, nfs_export and redirect_dir are off. So renaming a
//     directory of a lower layer gives EXDEV, and writing to one name of a
//     lower hard-link group splits it; tests' models know both.
//   - One upper directory is mounted once. It becomes a layer by rename when its
//     processes are dead and its mount is gone; its work directory is deleted,
//     never used again.
//   - Layers are given by descriptor. Past 64 of them they are flattened into a
//     new layer; the old ones go when no mount holds them.
//   - The metadata of a tree's root is copied to the upper directory when the
//     fork is made: an overlay would show that of the fresh directory.
//   - Attempts mount volatile, and Commit makes durable what it keeps; a work
//     tree is never mounted volatile.
package overlay
