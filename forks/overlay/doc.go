// Package overlay is the driver "overlay": snapshots are the layers of
// forks/internal/layer, a fork is a mount of those layers below a private upper
// directory, so that making one, or checking one out, costs the same whatever
// the size of the tree. The upper is the list of changes; when nobody works in
// the fork it becomes the next layer by rename. The work is done by
// forks/internal/layer/driver, which says what must hold; this package is the
// driver's name and its probe.
//
// How a tree is seen: as root the work tree is mounted at work/current of the
// store by Attach, until Detach. Otherwise, and for all other forks, whoever
// works in it mounts [forks.Mount] in a namespace of its own. Status, Commit and
// Checkout need no mount.
//
// What shows inside of how it is made:
//
//   - Renaming a directory that lies in a layer gives EXDEV, as rename(2) between
//     file systems does; mv(1) and most programs then copy.
//   - Writing to one name of a file that has several in a layer splits it from
//     the others, which keep the old bytes.
//   - A file keeps neither inode number nor open descriptors over its first
//     change: who has it open for reading goes on reading the old one.
//
// index, metacopy, nfs_export and redirect_dir are off, since with them a layer
// that was moved shows other files than were stored; marks are in user.overlay.*,
// for root too, so that each reads what the other wrote.
//
// Forks other than the work tree are mounted volatile, so that an unmount does
// not sync the whole file system; Commit makes durable what it keeps.
package overlay
