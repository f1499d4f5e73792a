package copytree
import ("testing";"context";"os";"os/exec";"time";"fmt";"github.com/agentenv/agentenv/forks";"github.com/moby/sys/reexec")
func sh(t *testing.T, s string) string { out,err:=exec.Command("bash","-c",". /work/shared/fixtures.sh; "+s).CombinedOutput(); if err!=nil {t.Fatalf("%s: %v\n%s",s,err,out)}; return string(out)}
func TestSmoke(t *testing.T){
 base:="/tmp/stx/smoke"+os.Getenv("SM"); sh(t,"chattr -R -i -a "+base+" 2>/dev/null; chmod -R u+rwX "+base+" 2>/dev/null; rm -rf "+base+"; mkdir -p "+base+"/src")
 src:=base+"/src"
 f:="fx_caps $S/c; fx_suid $S/s; fx_sparse $S/sp; fx_hardlinks $S/h; fx_longname $S/ln; fx_badnames $S/bn; fx_modes $S/m; fx_times $S/t; fx_special $S/x; fx_xattr $S/xa; fx_acl $S/acl; fx_links $S/l"
 if os.Getuid()!=0 { f="fx_sparse $S/sp; fx_hardlinks $S/h; fx_longname $S/ln; fx_badnames $S/bn; fx_modes $S/m; fx_times $S/t; fx_special $S/x; fx_xattr $S/xa; fx_acl $S/acl; fx_links $S/l" }
 sh(t,"S="+src+"; "+f)
 ctx:=context.Background()
 d,err:=Backend().Open(ctx,base+"/store"); if err!=nil {t.Fatal(err)}
 step:=func(n string, fn func() error){ t0:=time.Now(); if err:=fn(); err!=nil {t.Fatal(n,": ",err)}; fmt.Println(n,time.Since(t0)) }
 step("capture",func() error {c,err:=d.Capture(ctx,"aa01","",forks.Source{Dir:src}); fmt.Println(len(c.List),c.Warnings);return err})
 var tr forks.Tree
 step("fork",func() error {tr,err=d.Fork(ctx,forks.Work,"aa01"); fmt.Println(tr);return err})
 man:=func(p string) string { return sh(t,"manifest "+p) }
 var m0 string
 if os.Getuid()==0 { m0=man(src); if m1:=man(tr.Mount.Dir); m0!=m1 { os.WriteFile("/tmp/stx/m0",[]byte(m0),0644);os.WriteFile("/tmp/stx/m1",[]byte(m1),0644); t.Fatal("fork differs") } }
 step("status",func() error {c,err:=d.Status(ctx,forks.Work); for _,x:=range c.List {fmt.Println(x.Kind,x.Path)};return err})
 step("commit none",func() error {c,err:=d.Commit(ctx,forks.Work,"aa02"); if len(c.List)>0 {t.Fatal(c)};return err})
 sh(t,"cd "+tr.Mount.Dir+"; rm -r h/b; echo x >>h/three; chmod 600 t/d/old; mkdir new; echo n>new/f; rm -rf l/real; ln -s /tmp l/real; rm -r bn; echo file >bn; touch xa/f")
 step("status2",func() error {c,err:=d.Status(ctx,forks.Work); for _,x:=range c.List {fmt.Println(x.Kind,x.Path)};return err})
 m2:=man(tr.Mount.Dir)
 step("commit2",func() error {c,err:=d.Commit(ctx,forks.Work,"aa02"); fmt.Println(len(c.List));return err})
 step("status3",func() error {c,err:=d.Status(ctx,forks.Work); if len(c.List)>0{t.Fatal(c.List)};return err})
 step("co1",func() error {return d.Checkout(ctx,forks.Work,"aa01")})
 if os.Getuid()==0 { if m1:=man(tr.Mount.Dir); m0!=m1 { os.WriteFile("/tmp/stx/m0",[]byte(m0),0644);os.WriteFile("/tmp/stx/m1",[]byte(m1),0644); t.Fatal("checkout differs") } }
 step("status4",func() error {c,err:=d.Status(ctx,forks.Work); if len(c.List)>0{t.Fatal(c.List)};return err})
 step("co2",func() error {return d.Checkout(ctx,forks.Work,"aa02")})
 if m1:=man(tr.Mount.Dir); m2!=m1 { os.WriteFile("/tmp/stx/m0",[]byte(m2),0644);os.WriteFile("/tmp/stx/m1",[]byte(m1),0644); t.Fatal("checkout2 differs") }
 step("fork2",func() error {tr,err=d.Fork(ctx,"k","aa02"); return err})
 if m1:=man(tr.Mount.Dir); m2!=m1 { os.WriteFile("/tmp/stx/m0",[]byte(m2),0644);os.WriteFile("/tmp/stx/m1",[]byte(m1),0644); t.Fatal("fork2 differs") }
 step("diff",func() error {c,err:=d.Diff(ctx,"aa01","aa02"); for _,x:=range c.List {fmt.Println(x.Kind,x.Path)};return err})
 step("rmfork",func() error {return d.RemoveFork(ctx,"k")})
 step("rmsnap",func() error {return d.RemoveSnapshot(ctx,"aa01")})
 fmt.Println(d.Snapshots(ctx)); fmt.Println(sh(t,"ls "+base+"/store/* "))
 step("sweep",func() error {n,err:=d.Sweep(ctx);fmt.Println(n);return err})
 step("apply",func() error {r,err:=d.Apply(ctx,"aa02","aa02",src,forks.ApplyOptions{});fmt.Println(r);return err})
 step("rmwork",func() error {return d.RemoveFork(ctx,forks.Work)})
 step("rmsnap2",func() error {return d.RemoveSnapshot(ctx,"aa02")})
 fmt.Println(sh(t,"ls "+base+"/store/* "))
}
func TestMain(m *testing.M) { if reexec.Init() { return }; os.Exit(m.Run()) }
