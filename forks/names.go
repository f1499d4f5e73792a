package forks

import "fmt"

// maxName is the longest id or key: it leaves room for a suffix in a file name.
const maxName = 128

// Check returns an error if id is no snapshot id: lower-case hex of 1 to 128
// characters.
func (id ID) Check() error {
	if len(id) == 0 || len(id) > maxName {
		return fmt.Errorf("snapshot id %q: want 1 to %d characters of lower-case hex", id, maxName)
	}
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return fmt.Errorf("snapshot id %q: want lower-case hex", id)
		}
	}
	return nil
}

// Check returns an error if k cannot be a fork's key.
func (k Key) Check() error {
	if len(k) == 0 || len(k) > maxName || k[0] == '.' {
		return fmt.Errorf("fork key %q: want 1 to %d characters of a-z 0-9 . _ -, not starting with a dot", k, maxName)
	}
	for _, c := range []byte(k) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '_' && c != '-' {
			return fmt.Errorf("fork key %q: want characters of a-z 0-9 . _ -", k)
		}
	}
	return nil
}
