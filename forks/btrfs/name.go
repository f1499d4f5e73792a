package btrfs

// Name is the word users write for this driver.
const Name = "btrfs"

// lost is what a user has to do without where the driver does not work.
const lost = "forks, commits and checkouts by snapshot, and trees without an overlay"
