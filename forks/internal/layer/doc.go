// Package layer is the on-disk format of a snapshot, and what the drivers that
// use it (overlay and copy) have in common: reading a tree, storing what
// changed in it, and reading snapshots back.
//
// A store's root holds, all directories made with mode 0700:
//
//	nodes/ID/record   the change record: everything about the snapshot but file bytes
//	nodes/ID/tree/    what changed against the base, as an overlay's lower directory
//	nodes/ID/source   the index of a captured directory (a cache; may be missing)
//	nodes/ID/removed  a marker: the snapshot is removed, others build upon it
//	nodes/ID/lookup   the record of a large layer, to be read path by path (a cache)
//	nodes/.overlays   for whom a trial of overlays went well (a cache)
//	work/current/     the work tree; work/base and work/index belong to it.
//	                  Where it is a mount and not mounted: what refuses writes
//	forks/KEY/tree/   a plain fork, with its base and index beside it
//	forks/KEY/stack/  a fork that is an overlay, see [Stack]; work/stack/ likewise
//	tmp/NAME/         what is being made; a flock on it says that its maker lives
//
// The record is authoritative. It has for every path that changed the owner,
// mode, times, xattrs, hard-link group, device number and symlink target, and
// the paths that are gone. tree/ has the bytes of the regular files of the
// record; it also carries directories, links, whiteouts (0/0 character
// devices) and metadata, as far as the caller's rights allow, so that it can be
// mounted.
//
// What must hold:
//
//   - A layer appears under nodes/ by one rename, after all it holds is durable,
//     and never changes, nor what it is built upon. A snapshot that would have
//     more than [MaxLayers] layers is stored with the nearest of them merged into
//     it, against one further down.
//   - flock(2) on nodes/ is held, shared, from the look at the layers that a fork
//     is built upon until the fork can be seen, and alone while layers are found
//     unneeded and moved away.
//   - A record is checksummed. A damaged one is an error that wraps
//     [forks.ErrDamaged] and names the snapshot; a record of a newer format is
//     refused. Neither hinders other snapshots.
//   - Who is not root has layers of his own group alone: his user namespaces know
//     no other. Which one a path had is in the record, and plain trees get it.
//   - A hard-link group is stored whole in one layer: when its members change,
//     all of them are stored again. A group's number is unique in a state.
//   - An index is a cache of one machine. It is believed only where its
//     checksum, layout and base are right, and without it everything still
//     works, by reading file contents.
package layer
