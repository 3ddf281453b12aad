import sys, torch, time, importlib
from triton.testing import do_bench
from flash_clipping.ops.clipped_sum import triton as T_, table
which = sys.argv[1]
import flash_clipping; print(flash_clipping.__file__)
variants = {}
if which == "new":
    import sys as _s
    H = "flash_clipping.ops.clipped_sum.hopper"
    mods = {k: importlib.import_module(H+"_"+k) for k in "bdefg"}
    def make(m):
        def f(pairs, coef):
            _s.modules[H] = m
            return T_.clipped_sums_many(pairs, coef)
        return f
    variants = {k: make(m) for k, m in mods.items()}
    sys.path.insert(0, "../..")
    from rescale import clipped_sum as sk
    variants["sketch"] = lambda pairs, coef: [sk(A, G, coef) for A, G in pairs]
else:
    variants = {"landed": T_.clipped_sums_many}
torch.manual_seed(0)
dev = "cuda"
print(torch.cuda.get_device_name())
# correctness
for B, T, ws in ((3, 64, [(128, 128)]), (5, 128, [(136, 72)]), (2, 2048, [(264, 520)]), (5, 197, [(136, 72), (520, 264)]), (3, 1, [(64, 128)]), (4, 128, [(1024, 2048), (8, 8), (520, 264)]), (2, 1088, [(72, 40)] * 40 + [(1024, 1032)] * 3)):
    pairs = [(torch.randn(B, T, d, device=dev, dtype=torch.bfloat16), torch.randn(B, T, p, device=dev, dtype=torch.bfloat16)) for d, p in ws]
    coef = torch.rand(B, device=dev); 
    if B > 2: coef[1] = 0; pairs[0][0][1, -1, 3] = float("nan")
    keep = coef != 0
    for n, f in variants.items():
        if n == "sketch": continue
        t=time.time(); sums = f(pairs, coef); torch.cuda.synchronize()
        err = max(((s.double() - torch.einsum("bpd,b->pd", torch.bmm(G[keep].double().mT, A[keep].double()), coef[keep].double())).norm() / torch.einsum("bpd,b->pd", torch.bmm(G[keep].double().mT, A[keep].double()), coef[keep].double()).norm()).item() for s, (A, G) in zip(sums, pairs))
        print(B, T, ws[:3], n, f"error {err:.1e}", f"{time.time()-t:.1f} s", flush=True)
for B, T, d, p, n in ((8, 1024, 2048, 2048, 4), (8, 1024, 2048, 5632, 2), (8, 1024, 5632, 2048, 2), (32, 256, 2048, 5632, 2), (4, 2048, 4096, 11008, 1), (16, 512, 1024, 4096, 4), (64, 197, 1024, 4096, 4), (64, 128, 768, 3072, 6), (64,128,768,768,8)):
    A, G = torch.randn(B, T, d, device="cuda", dtype=torch.bfloat16), torch.randn(B, T, p, device="cuda", dtype=torch.bfloat16); coef = torch.rand(B, device="cuda") * .9 + .1
    pairs = [(A.clone(), G.clone()) for _ in range(n)]
    fs = {"cublas": lambda: [torch.mm(G.flatten(0, 1).t(), A.flatten(0, 1)) for A, G in pairs]}
    for k, f in variants.items(): fs[k] = lambda f=f: f(pairs, coef)
    line = []
    ref = torch.einsum("bpd,b->pd", torch.bmm(G[:, :, :256].double().mT, A.double()), coef.double()) if d <= 2048 else None
    t = {k: [] for k in fs}
    for r in range(3):
        for k, f in fs.items(): t[k].append(do_bench(f, warmup=8, rep=25, return_mode="median"))
    t = {k: sorted(v)[1] for k, v in t.items()}
    errs = {k: ((f(pairs, coef)[0][:256].double() - ref).norm() / ref.norm()).item() if ref is not None else float("nan") for k, f in variants.items()}
    print((B, T, d, p, n), "; ".join(f"{k} {v*1e3:.0f} us {t['cublas']/v:.3f}" + (f" err {errs[k]:.0e}" if k in errs else "") for k, v in t.items()), flush=True)
