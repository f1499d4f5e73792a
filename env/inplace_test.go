package env_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gotest.tools/v3/assert"

	"github.com/agentenv/agentenv/env"
	"github.com/agentenv/agentenv/env/sandbox"
	"github.com/agentenv/agentenv/forks"
	"github.com/agentenv/agentenv/forks/forkstest"
)

// place is an environment whose work tree is a directory of the user's.
type place struct {
	*testing.T
	root, dir string
	opts      env.Options
	said      []string
}

func newPlace(t *testing.T, top string, o env.Options) *place {
	t.Helper()
	p := &place{T: t, root: filepath.Join(top, "root"), dir: filepath.Join(top, "dir"), opts: o}
	p.opts.Notify = func(line string) { p.said = append(p.said, line) }
	writeSource(t, p.dir)
	e, err := env.Init(t.Context(), p.root, env.InitOptions{From: p.dir, InPlace: true}, p.opts)
	assert.NilError(t, err)
	assert.Equal(t, e.WorkTree(), p.dir)
	assert.NilError(t, e.Close())
	return p
}

// with opens the environment for changing it.
func (p *place) with(fn func(e *env.Env)) {
	p.Helper()
	e, err := env.Lock(p.Context(), p.root, "test", p.opts)
	assert.NilError(p, err)
	defer func() { assert.NilError(p, e.Close()) }()
	fn(e)
}

// edit changes the directory, in a way that name decides.
func (p *place) edit(name string) {
	p.Helper()
	cmd := exec.Command("/bin/sh", "-e", "-c", editScript(name))
	cmd.Dir = p.dir
	out, err := cmd.CombinedOutput()
	assert.NilError(p, err, string(out))
}

func (p *place) commit(message string) env.ID {
	p.Helper()
	var id env.ID
	p.with(func(e *env.Env) {
		s, made, err := e.Commit(p.Context(), message, false)
		assert.NilError(p, err)
		assert.Assert(p, made, "nothing was committed")
		id = s.ID
	})
	return id
}

func (p *place) read() forkstest.Manifest { p.Helper(); return forkstest.Read(p, p.dir) }

// clean checks that the directory is what HEAD says and that nothing is left.
func (p *place) clean() {
	p.Helper()
	e, err := env.Open(p.Context(), p.root, p.opts)
	assert.NilError(p, err)
	defer e.Close()
	s, err := e.Status(p.Context())
	assert.NilError(p, err)
	assert.Equal(p, s.Changes, 0)
	assert.Equal(p, s.Interrupted, "")
	assert.Assert(p, s.InPlace)
	left, err := e.Leftovers(p.Context())
	assert.NilError(p, err)
	assert.Equal(p, len(left), 0, left)
	for path := range p.read() {
		assert.Assert(p, !strings.Contains(path, ".agentenv"), path)
	}
	own, err := os.ReadDir(filepath.Join(p.root, "inplace"))
	assert.NilError(p, err)
	for _, d := range own {
		switch d.Name() {
		case "index", "state.json", "use":
		default:
			p.Errorf("left over: inplace/%s", d.Name())
		}
	}
}

func TestInPlace(t *testing.T) {
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		p := newPlace(t, dir, o)
		p.clean()
		_, err := os.Stat(filepath.Join(p.root, "inplace", "index"))
		assert.NilError(t, err) // the first capture is remembered, too
		first := p.read()
		var zero env.ID
		p.with(func(e *env.Env) { zero = e.Head().ID })

		// A commit stores the directory and changes no byte of it (SF18).
		p.edit("one")
		one := p.read()
		id := p.commit("one")
		forkstest.Equal(t, p.read(), one)
		p.clean()

		// A checkout saves what no snapshot holds (RS10), and keeps what it need
		// not touch.
		p.edit("two")
		two := p.read()
		keep := inodeOf(t, p.dir+"/keep")
		var saved env.ID
		p.with(func(e *env.Env) {
			res, err := e.Checkout(t.Context(), string(zero), false)
			assert.NilError(t, err)
			assert.Assert(t, res.Saved != nil)
			saved = *res.Saved
			assert.Equal(t, e.Head().ID, zero)
		})
		forkstest.Equal(t, p.read(), first)
		assert.Equal(t, inodeOf(t, p.dir+"/keep"), keep)
		p.clean()
		for id, want := range map[env.ID]forkstest.Manifest{saved: two, id: one} {
			p.with(func(e *env.Env) {
				_, err := e.Checkout(t.Context(), string(id), false)
				assert.NilError(t, err)
			})
			forkstest.Equal(t, p.read(), want)
			p.clean()
		}

		// A command works in the directory itself.
		p.with(func(e *env.Env) {
			res, err := e.Exec(t.Context(), shellRun(e, "pwd; echo exec >exec"), false, func(sandbox.Process) {})
			assert.NilError(t, err)
			assert.Equal(t, res.ExitCode, 0)
			assert.Assert(t, res.Created)
		})
		assert.Equal(t, contentOf(t, p.dir+"/exec"), "exec\n")
		p.clean()
	})
}

// A winner becomes the directory; work that no snapshot holds is saved first.
func TestInPlacePromotion(t *testing.T) {
	onBackends(t, func(t *testing.T, dir string, o env.Options) {
		p := newPlace(t, dir, o)
		assert.NilError(t, os.WriteFile(p.dir+"/mine", []byte("mine"), 0o600))
		p.with(func(e *env.Env) {
			f := frozenBy(t, e, editScript("won")+"rm -f mine")
			head, saved, err := e.Promote(t.Context(), f, "it won")
			assert.NilError(t, err)
			assert.Equal(t, e.Head().ID, head.ID)
			assert.Assert(t, saved != nil)
			forkstest.Equal(t, p.read(), stored(t, e, head.ID))
			assert.Equal(t, contentOf(t, p.dir+"/n"), "won\n")
			_, held := stored(t, e, saved.ID)["mine"]
			assert.Assert(t, held, "what no snapshot held was not saved")
		})
		_, err := os.Lstat(p.dir + "/mine")
		assert.ErrorIs(t, err, os.ErrNotExist)
		p.clean()
	})
}

// A winner that cannot be put in place stays in the history; HEAD does not move.
func TestInPlacePromotionRefused(t *testing.T) {
	p := newPlace(t, forkstest.Volume(t, "ext4"), optionsFor("copy"))
	before := p.read()
	chattr := func(flag string) {
		out, err := exec.Command("chattr", flag, p.dir+"/d1/1").CombinedOutput()
		assert.NilError(t, err, string(out))
	}
	var won env.ID
	p.with(func(e *env.Env) {
		head := e.Head().ID
		f := frozenBy(t, e, editScript("won"))
		chattr("+i")
		_, _, err := e.Promote(t.Context(), f, "it won")
		assert.ErrorContains(t, err, p.dir+"/d1/1")
		assert.Equal(t, e.Head().ID, head)
		won = f.ID
	})
	chattr("-i")
	forkstest.Equal(t, p.read(), before)
	p.clean()
	p.with(func(e *env.Env) {
		_, err := e.Checkout(t.Context(), string(won), false)
		assert.NilError(t, err)
		forkstest.Equal(t, p.read(), stored(t, e, won))
	})
}

// frozenBy runs a script in a fork of HEAD and freezes it.
func frozenBy(t *testing.T, e *env.Env, script string) env.Frozen {
	t.Helper()
	f, err := e.Fork(t.Context(), "candidate", e.Head().ID, sandbox.LevelNamespaces)
	assert.NilError(t, err)
	proc, err := f.Start(t.Context(), shellRun(e, script))
	assert.NilError(t, err)
	res, err := proc.Wait()
	assert.NilError(t, err)
	assert.Equal(t, res.ExitCode, 0, res.Reason)
	frozen, err := f.Freeze(t.Context(), e.Head().ID)
	assert.NilError(t, err)
	assert.NilError(t, f.Remove(t.Context()))
	return frozen
}

// What can make git run commands is promoted only when that was asked for.
func TestInPlacePromotionAsksForGit(t *testing.T) {
	for script, steers := range map[string]bool{
		"echo x >.git/hooks/post-checkout": true,
		"echo x >.git/COMMIT_EDITMSG; mkdir -p .git/refs/heads; echo x >.git/refs/heads/config": false,
	} {
		t.Run(script, func(t *testing.T) {
			top := t.TempDir()
			forkstest.Write(t, filepath.Join(top, "dir"), map[string]string{".git/config": "c", ".git/hooks/": "", ".git/modules/sub/config": "c"})
			p := newPlace(t, top, optionsFor("copy"))
			before := p.read()
			p.with(func(e *env.Env) {
				head := e.Head().ID
				f := frozenBy(t, e, script)
				s, _, err := e.Promote(t.Context(), f, "it won")
				if !steers {
					assert.NilError(t, err)
					assert.Equal(t, e.Head().ID, s.ID)
					return
				}
				assert.ErrorIs(t, err, env.ErrConflict)
				assert.ErrorContains(t, err, "--git")
				assert.Equal(t, e.Head().ID, head)
				forkstest.Equal(t, p.read(), before)
				_, err = e.Resolve(string(f.ID)) // the winner is kept
				assert.NilError(t, err)
			})
			p.clean()
			p.opts.Git = true
			p.with(func(e *env.Env) {
				f := frozenBy(t, e, "echo again >f; "+script)
				_, _, err := e.Promote(t.Context(), f, "it won")
				assert.NilError(t, err)
				assert.Equal(t, e.Head().ID, f.ID)
			})
			assert.Equal(t, contentOf(t, p.dir+"/f"), "again\n")
			p.clean()
		})
	}
}

// A checkout that cannot be done leaves everything as it is.
func TestInPlaceCheckoutRefused(t *testing.T) {
	p := newPlace(t, forkstest.Volume(t, "ext4"), optionsFor("copy"))
	var zero env.ID
	p.with(func(e *env.Env) { zero = e.Head().ID })
	p.edit("one")
	p.commit("one")
	one := p.read()
	out, err := exec.Command("chattr", "+i", p.dir+"/d1/1").CombinedOutput()
	assert.NilError(t, err, string(out))
	p.said = nil
	p.with(func(e *env.Env) {
		n := len(e.Log())
		_, err := e.Checkout(t.Context(), string(zero), false)
		assert.ErrorContains(t, err, p.dir+"/d1/1")
		assert.Equal(t, len(e.Log()), n)
	})
	assert.Equal(t, len(p.said), 0, p.said)
	out, err = exec.Command("chattr", "-i", p.dir+"/d1/1").CombinedOutput()
	assert.NilError(t, err, string(out))
	forkstest.Equal(t, p.read(), one)
	p.clean()
}

// RS05: the directory may be a mount point, and what is mounted below it is not
// ours.
func TestInPlaceOnMounts(t *testing.T) {
	top := forkstest.Volume(t, "ext4")
	dir := filepath.Join(top, "dir")
	forkstest.Write(t, dir, map[string]string{"m/": ""})
	assert.NilError(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { assert.NilError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	assert.NilError(t, unix.Mount("t", dir+"/m", "tmpfs", 0, ""))
	t.Cleanup(func() { assert.NilError(t, unix.Unmount(dir+"/m", unix.MNT_DETACH)) })
	forkstest.Write(t, dir, map[string]string{"m/data": "mine"})
	p := newPlace(t, top, optionsFor("copy"))
	assert.Assert(t, strings.Contains(strings.Join(p.said, "\n"), "m: is a mount point"), p.said)
	zero := p.read()
	var id env.ID
	p.with(func(e *env.Env) { id = e.Head().ID })
	p.edit("one")
	forkstest.Write(t, dir, map[string]string{"m/more": "more"})
	p.commit("one")
	p.with(func(e *env.Env) {
		_, err := e.Checkout(t.Context(), string(id), false)
		assert.NilError(t, err)
		v, err := e.View(t.Context(), id)
		assert.NilError(t, err)
		_, err = v.Lookup("m/data")
		assert.ErrorIs(t, err, forks.ErrNotFound)
	})
	now := p.read()
	assert.DeepEqual(t, forkstest.Differences(zero, now), []string{"m", "m/more"})
	assert.Equal(t, contentOf(t, dir+"/m/data"), "mine")
	p.clean() // what goes on in another file system makes nothing dirty
}

func TestInPlaceRefusals(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	dir, root := filepath.Join(home, "p"), filepath.Join(home, "root")
	forkstest.Write(t, dir, map[string]string{"f": "x"})
	forkstest.Write(t, root, map[string]string{"nodes/x/": ""})
	for want, in := range map[string]env.InitOptions{
		"running system":      {From: "/"},
		"is the home":         {From: home},
		"is in the root":      {From: filepath.Join(root, "nodes")},
		"no directory":        {From: dir + "/none"},
		"not a directory":     {From: dir + "/f"},
		"--kind rootfs":       {From: dir, Kind: env.Rootfs},
		"--mount-at":          {From: dir, MountAt: "/elsewhere"},
		"--cross-filesystems": {From: dir, CrossFilesystem: true},
	} {
		in.InPlace = true
		_, err := env.Init(t.Context(), root, in, optionsFor("copy"))
		assert.ErrorContains(t, err, want)
		assert.Assert(t, !env.Exists(root))
	}
}

// The root may be in the directory: it is no part of the tree.
func TestInPlaceAroundItsRoot(t *testing.T) {
	top := t.TempDir()
	dir, root := filepath.Join(top, "dir"), filepath.Join(top, "dir", ".cache", "root")
	p := &place{T: t, root: root, dir: dir, opts: optionsFor("copy")}
	writeSource(t, dir)
	e, err := env.Init(t.Context(), root, env.InitOptions{From: dir, InPlace: true}, p.opts)
	assert.NilError(t, err)
	zero := e.Head().ID
	v, err := e.View(t.Context(), zero)
	assert.NilError(t, err)
	_, err = v.Lookup(".cache/root")
	assert.ErrorIs(t, err, forks.ErrNotFound)
	assert.NilError(t, e.Close())
	p.edit("one")
	p.commit("one")
	p.with(func(e *env.Env) {
		_, err := e.Checkout(t.Context(), string(zero), false)
		assert.NilError(t, err)
	})
	assert.Assert(t, env.Exists(root))
	assert.Equal(t, contentOf(t, dir+"/d1/1"), "before")
	p.with(func(e *env.Env) { // nor does a command see it
		res, err := e.Exec(t.Context(), shellRun(e, "test -d .cache; test -z \"$(ls -A .cache/root)\""), false, func(sandbox.Process) {})
		assert.NilError(t, err)
		assert.Equal(t, res.ExitCode, 0)
		assert.Assert(t, !res.Created)
	})
}

func TestInPlaceDirectoryIsGone(t *testing.T) {
	p := newPlace(t, t.TempDir(), optionsFor("copy"))
	assert.NilError(t, os.Rename(p.dir, p.dir+"-moved"))
	p.with(func(e *env.Env) {
		_, err := e.Checkout(t.Context(), "HEAD", false)
		assert.ErrorIs(t, err, env.ErrUsage)
		assert.ErrorContains(t, err, p.dir)
		assert.Equal(t, len(e.Log()), 1)
	})
	_, err := os.Lstat(p.dir)
	assert.ErrorIs(t, err, os.ErrNotExist) // it is not made anew
	assert.NilError(t, os.Rename(p.dir+"-moved", p.dir))
	p.clean()
}

// The directory is gone: nothing is begun that the next command would undo in
// one that was made in its place (work that is in no snapshot).
func TestInPlaceDirectoryIsMadeAnew(t *testing.T) {
	p := newPlace(t, t.TempDir(), optionsFor("copy"))
	first := p.read()
	var zero env.ID
	p.with(func(e *env.Env) { zero = e.Head().ID })
	p.edit("one")
	p.commit("one")
	p.with(func(e *env.Env) {
		f := frozenBy(t, e, editScript("won"))
		assert.NilError(t, os.Rename(p.dir, p.dir+"-moved"))
		_, err := e.SaveWork(t.Context(), "before a tournament")
		assert.ErrorIs(t, err, env.ErrUsage)
		assert.ErrorContains(t, err, "is not there")
		_, _, err = e.Promote(t.Context(), f, "it won")
		assert.ErrorContains(t, err, "is not there")
	})
	forkstest.Write(t, p.dir, map[string]string{"mine": "precious"})
	for range 2 {
		r, err := env.Open(t.Context(), p.root, p.opts)
		assert.NilError(t, err)
		s, err := r.Status(t.Context())
		assert.NilError(t, err)
		assert.Assert(t, s.Dirty && s.Interrupted == "", "%+v", s)
		assert.NilError(t, r.Close())
		p.with(func(*env.Env) {})
		assert.Equal(t, contentOf(t, p.dir+"/mine"), "precious")
	}
	p.with(func(e *env.Env) {
		res, err := e.Checkout(t.Context(), string(zero), false)
		assert.NilError(t, err)
		v, err := e.View(t.Context(), *res.Saved)
		assert.NilError(t, err)
		_, err = v.Lookup("mine")
		assert.NilError(t, err)
		assert.NilError(t, v.Close())
	})
	forkstest.Equal(t, p.read(), first)
	p.clean()
}

// A checkout that was cut short is not finished in another directory.
func TestInPlaceInterruptedElsewhere(t *testing.T) {
	p := newPlace(t, forkstest.Volume(t, "ext4"), optionsFor("copy"))
	var zero env.ID
	p.with(func(e *env.Env) { zero = e.Head().ID })
	p.edit("one")
	p.commit("one")
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestInPlaceChild$")
	cmd.Env = append(os.Environ(), placeJob+"="+strings.Join([]string{"checkout", p.root, "copy", string(zero), "8"}, " "))
	assert.ErrorContains(t, cmd.Run(), "killed")
	assert.NilError(t, os.Rename(p.dir, p.dir+"-moved"))
	forkstest.Write(t, p.dir, map[string]string{"mine": "precious"})
	p.with(func(*env.Env) {})
	assert.Equal(t, contentOf(t, p.dir+"/mine"), "precious")
	assert.Equal(t, p.commit("anew"), func() (id env.ID) { p.with(func(e *env.Env) { id = e.Head().ID }); return }())
	assert.Equal(t, contentOf(t, p.dir+"/mine"), "precious")
}

// Whoever writes while a checkout or a promotion changes the directory loses
// nothing: it is in the directory, or in a snapshot.
func TestInPlaceWhileOthersWrite(t *testing.T) {
	onBackends(t, func(t *testing.T, top string, o env.Options) {
		p := newPlace(t, top, o)
		fill := func(text string) {
			for i := range 400 {
				forkstest.Write(t, p.dir, map[string]string{fmt.Sprintf("w%d/f%d", i%20, i): text})
			}
		}
		fill("a")
		a := p.commit("a")
		fill("bb")
		b := p.commit("b")
		stop, done := make(chan struct{}), make(chan int)
		go func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					done <- n
					return
				case <-time.After(500 * time.Microsecond):
				}
				text := fmt.Sprintf("NEW%d.", n)
				_ = os.MkdirAll(p.dir+"/w0", 0o755)
				_ = os.WriteFile(fmt.Sprintf("%s/w0/new-%d", p.dir, n), []byte(text), 0o644)
				saved := fmt.Sprintf("%s/w%d/f%d", p.dir, n%20, n%20)
				_ = os.WriteFile(p.dir+"/.save", []byte(text+"save"), 0o644)
				_ = os.Rename(p.dir+"/.save", saved)
			}
		}()
		for i := range 4 {
			p.with(func(e *env.Env) {
				_, err := e.Checkout(t.Context(), string([]env.ID{a, b}[i%2]), false)
				assert.NilError(t, err)
				assert.Equal(t, e.Head().ID, []env.ID{a, b}[i%2])
			})
		}
		close(stop)
		n := <-done
		assert.Assert(t, n > 50, n)
		p.commit("what came meanwhile")
		out, err := exec.Command("grep", "-rhoaE", "--include=new-*", "NEW[0-9]+[.]", p.dir, p.root).Output()
		assert.NilError(t, err)
		found := make(map[string]bool)
		for l := range strings.Lines(string(out)) {
			found[strings.TrimSpace(l)] = true
		}
		for i := range n {
			assert.Assert(t, found[fmt.Sprintf("NEW%d.", i)], "NEW%d is lost", i)
		}
	})
}

// What the winner wrote where the directory is excluded is not brought, and
// named.
func TestInPlacePromotionNamesExcluded(t *testing.T) {
	top := t.TempDir()
	p := &place{T: t, root: filepath.Join(top, "root"), dir: filepath.Join(top, "dir"), opts: optionsFor("copy")}
	writeSource(t, p.dir)
	e, err := env.Init(t.Context(), p.root, env.InitOptions{From: p.dir, InPlace: true, Exclude: []string{"deps"}}, p.opts)
	assert.NilError(t, err)
	f := frozenBy(t, e, "mkdir -p d1/deps; echo x >d1/deps/lib; echo y >brought")
	var said []string
	back := e.Divert(func(l string) { said = append(said, l) })
	_, _, err = e.Promote(t.Context(), f, "it won")
	back()
	assert.NilError(t, err)
	assert.Equal(t, contentOf(t, p.dir+"/brought"), "y\n")
	assert.DeepEqual(t, said, []string{"d1/deps: is excluded here, so what the snapshot has of it stays in the snapshot alone"})
	assert.NilError(t, e.Close())
}

// An older agentenv must not take the environment for one with a fork.
func TestInPlaceFormat(t *testing.T) {
	top := t.TempDir()
	p := newPlace(t, top, optionsFor("copy"))
	version := func(root string) int {
		var m struct{ Version int }
		data, err := os.ReadFile(filepath.Join(root, "meta.json"))
		assert.NilError(t, err)
		assert.NilError(t, json.Unmarshal(data, &m))
		return m.Version
	}
	assert.Equal(t, version(p.root), 2)
	e, err := env.Init(t.Context(), filepath.Join(top, "plain"), env.InitOptions{From: p.dir}, p.opts)
	assert.NilError(t, err)
	assert.NilError(t, e.Close())
	assert.Equal(t, version(filepath.Join(top, "plain")), 1)
}

// RS08: killed at any instant, and the next command mends it.
func TestInPlaceKilledAtRandom(t *testing.T) {
	times := 6
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		times = 60
	}
	p := newPlace(t, forkstest.Volume(t, "ext4"), optionsFor("copy"))
	for i := range 300 { // so that a checkout takes its time
		forkstest.Write(t, p.dir, map[string]string{fmt.Sprintf("many/%d/f", i): "one"})
	}
	one := p.commit("one")
	for i := range 300 {
		forkstest.Write(t, p.dir, map[string]string{fmt.Sprintf("many/%d/f", i): "two", fmt.Sprintf("more/%d", i): "x"})
	}
	two := p.commit("two")
	var want [2]forkstest.Manifest
	p.with(func(e *env.Env) { want[0], want[1] = stored(t, e, one), stored(t, e, two) })
	for i := range times {
		to := []env.ID{one, two}[i%2]
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestInPlaceChild$")
		cmd.Env = append(os.Environ(), placeJob+"="+strings.Join([]string{"checkout", p.root, "copy", string(to), "0"}, " "))
		assert.NilError(t, cmd.Start())
		time.Sleep(time.Duration(20+rand.IntN(200)) * time.Millisecond)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		p.with(func(e *env.Env) {
			at := 0
			if e.Head().ID == two {
				at = 1
			}
			forkstest.Equal(t, p.read(), want[at])
		})
		p.clean()
	}
}

// placeJob, in a child, says what it does and at which step it dies.
const placeJob = "AGENTENV_TEST_PLACE_JOB"

// TestInPlaceChild is what the children of [TestInPlaceCrashes] run.
func TestInPlaceChild(t *testing.T) {
	var op, root, backend, ref string
	var at int
	if _, err := fmt.Sscan(os.Getenv(placeJob), &op, &root, &backend, &ref, &at); err != nil {
		t.Skip("run by another test")
	}
	n := 0
	die := func(string) {
		if n++; n == at {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	ctx := context.Background()
	e, err := env.Lock(ctx, root, "test", optionsFor(backend))
	assert.NilError(t, err)
	var f env.Frozen
	if op == "promote" {
		f = frozenBy(t, e, editScript("won"))
	}
	env.OnStep(die)
	forkstest.OnStep(die)
	switch op {
	case "commit":
		_, _, err = e.Commit(ctx, "c", false)
	case "checkout":
		_, err = e.Checkout(ctx, ref, false)
	case "promote":
		_, _, err = e.Promote(ctx, f, "it won")
	}
	env.OnStep(nil)
	forkstest.OnStep(nil)
	assert.NilError(t, err)
	assert.NilError(t, e.Close())
}

// An operation that is killed at any step is finished or undone by the next
// command: the directory is the old one or the new one, as HEAD says, and what
// was in no snapshot before is in one then.
func TestInPlaceCrashes(t *testing.T) {
	stride := 5 // every step is reached in a long run
	if os.Getenv("AGENTENV_TEST_LONG") != "" {
		stride = 1
	}
	for _, op := range []string{"commit", "checkout", "promote"} {
		t.Run(op, func(t *testing.T) {
			p := newPlace(t, forkstest.Volume(t, "ext4"), optionsFor("copy"))
			var zero env.ID
			p.with(func(e *env.Env) { zero = e.Head().ID })
			p.edit("one")
			p.commit("one")
			steps := 0
			for at := 1; ; at += stride {
				p.with(func(e *env.Env) {
					_, err := e.Checkout(t.Context(), string(zero), false)
					assert.NilError(t, err)
				})
				p.edit("work" + fmt.Sprint(at))
				work := p.read()
				cmd := exec.Command("/proc/self/exe", "-test.run=^TestInPlaceChild$")
				cmd.Env = append(os.Environ(), placeJob+"="+strings.Join([]string{op, p.root, "copy", string(zero), fmt.Sprint(at)}, " "))
				out, err := cmd.CombinedOutput()
				if err == nil {
					break
				}
				ee, ok := err.(*exec.ExitError)
				assert.Assert(t, ok && ee.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL, "%v\n%s", err, out)
				steps = at
				p.recovered(work)
			}
			assert.Assert(t, steps > 5, steps)
		})
	}
}

// recovered lets the next command recover, and checks that the directory is
// what HEAD says, or still the work, and that the work is not lost.
//
// Until then, who only reads sees the HEAD that recovery gives, and hears of
// the interruption.
func (p *place) recovered(work forkstest.Manifest) {
	p.Helper()
	r, err := env.Open(p.Context(), p.root, p.opts)
	assert.NilError(p, err)
	foretold := r.Head().ID
	status, err := r.Status(p.Context())
	assert.NilError(p, err)
	assert.NilError(p, r.Close())
	left, err := filepath.Glob(filepath.Join(p.root, "inplace", "index.replacing"))
	assert.NilError(p, err)
	if len(left) > 0 {
		assert.Assert(p, status.Interrupted != "", "a Replace was cut short, and status does not say so")
	}
	p.with(func(e *env.Env) {
		assert.Equal(p, e.Head().ID, foretold)
		now, head := p.read(), stored(p.T, e, e.Head().ID)
		dirty := len(forkstest.Differences(now, head)) > 0
		if dirty {
			forkstest.Equal(p, now, work)
			return
		}
		for _, s := range e.Log() {
			if len(forkstest.Differences(stored(p.T, e, s.ID), work)) == 0 {
				return
			}
		}
		p.Fatalf("the work is in no snapshot, and not in the directory either")
	})
}

func inodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	assert.NilError(t, unix.Lstat(path, &st))
	return st.Ino
}

func contentOf(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	assert.NilError(t, err)
	return string(b)
}
