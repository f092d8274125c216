import torch, sys, traceback
import sparseconv.pointwise as pw
from sparseconv.pointwise.operations import activations as A, arithmetic as R, seeded as D, batch as B, gated as G
from sparseconv.pointwise.function import PointwiseDynamicFunction
bad=0
torch.manual_seed(0)
seen=set()
for m in (A,R,D,B,G):
    for n,f in vars(m).items():
        if not isinstance(f,PointwiseDynamicFunction) or id(f) in seen or f.schema.gather: continue
        seen.add(id(f))
        for dt,tol in ((torch.float16,2e-3),(torch.float64,1e-11)):
            args=[(torch.randn(37,66,dtype=dt)*2)[:, ::2].t() if t else {float:0.37,int:12345678901234,bool:True,None:0.5}[k] for t,k in zip(f.schema.is_tensor,f.schema.scalar_types)]
            try:
                r=f(*args); g=f(*[a.cuda() if torch.is_tensor(a) else a for a in args])
                same=g.cpu()==r; e=torch.where(same,0.0,(g.cpu().double()-r.double()).abs()/(1+r.double().abs())).max().item()
                if not e<tol or g.stride()!=r.stride() or g.dtype!=r.dtype: bad+=1; print("BAD",n,dt,e,g.stride(),r.stride())
            except Exception: bad+=1; print("FAIL",n,dt); traceback.print_exc(limit=3)
x=torch.randn(5000,64,device="cuda",requires_grad=True); it=torch.randint(0,4,(5000,),device="cuda",dtype=torch.int32)
s=torch.randn(4,64,device="cuda",requires_grad=True); h=torch.randn(4,64,device="cuda",requires_grad=True)
y=pw.batch_affine(x,it,s,h); w=torch.randn_like(y); gs=torch.autograd.grad((y*w).sum(),(x,s,h))
y2=x*s[it.long()]+h[it.long()]; g2=torch.autograd.grad((y2*w).sum(),(x,s,h))
print("affine",(y-y2).abs().max().item(),[(a-b).abs().max().item() for a,b in zip(gs,g2)])
u=pw.dropout(x.detach(),0.3,seed=5); v=pw.dropout(x.detach().cpu(),0.3,seed=5); print("dropout same bits",torch.equal(u.cpu(),v))
print("flip",torch.equal(pw.flip(x.detach(),[0,1]),x.detach().flip(0,1)), "chain",(pw.bias_activation(x,h[0],x,activation=pw.gelu)-torch.nn.functional.gelu(x+h[0]+x)).abs().max().item())
z=torch.ones(5,device="cuda",dtype=torch.bool); print("bool add", pw.add(z,z).dtype, pw.where(z,torch.arange(5,device="cuda"),torch.zeros((),device="cuda")).dtype)
print("cpu scalar", pw.add(x.detach(),torch.tensor(2.0))[0,0].item()-x[0,0].item())
@torch.compile(fullgraph=True)
def f(x,b): return pw.silu(pw.add(x,b)*2).sum()
l=f(x,h[0]); l.backward(); print("compile",l.item()-torch.nn.functional.silu((x+h[0])*2).sum().item(), x.grad.abs().sum().item())
e=pw.Epilogue(pw.leaky_relu,(0.2,)); import triton
import triton.language as tl
@triton.jit
def k(p, q, N: tl.constexpr, ACT: tl.constexpr):
    i=tl.arange(0,N); tl.store(q+i, ACT(tl.load(p+i)))
a=torch.randn(64,device="cuda"); b=torch.empty_like(a); k[(1,)](a,b,64,e.scalar); print("epilogue",torch.equal(b,torch.nn.functional.leaky_relu(a,0.2)))
big=torch.zeros(2**31+37,device="cuda",dtype=torch.int8); big[-1]=3; o=pw.add(big,1); print("big",o[-1].item(),o[-2].item(), int(o[::1000003].sum())); del big,o
g=torch.cuda.CUDAGraph(); pw.relu(a); torch.cuda.synchronize()
with torch.cuda.graph(g): c=pw.relu(a)
a.normal_(); g.replay(); print("graph",torch.equal(c,a.relu()))
print("bad",bad); sys.exit(bad>0)
