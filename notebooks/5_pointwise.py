# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write a pointwise operator, and fuse it
# You write a function of scalars. `pointwise_dynamic` makes an operator of it, for any rank, strides and dtypes, with
# gradients. A convolution can apply it before it stores its result. On a CPU the torch function `reference=` runs.

# %%
import torch
import triton
import triton.language as tl

import sparseconv as sc
from sparseconv import pointwise as pw
from sparseconv.pointwise import Derivative, Epilogue, pointwise_dynamic
from sparseconv.viz import View, new_figure
from sparseconv.viz.palette import GREY, INK, SECOND

# %% [markdown]
# ## The function, and its derivative
# The "bent identity", (sqrt(x² + 1) - 1) / 2 + x. `grad0` is what comes in from above, `in0` the argument.


# %%
@pointwise_dynamic(
    promotion_methods=[(0, 1, "DEFAULT")],
    reference=lambda grad, x: grad * (x / (2 * (x * x + 1).sqrt()) + 1),
)
@triton.jit
def bent_grad(grad, x):
    return grad * (x / (2.0 * tl.sqrt(x * x + 1.0)) + 1.0)


@pointwise_dynamic(
    promotion_methods=[(0, "DEFAULT")],
    reference=lambda x: ((x * x + 1).sqrt() - 1) / 2 + x,
    derivative={0: Derivative(bent_grad, "grad0", "in0")},
)
@triton.jit
def bent(x):
    return (tl.sqrt(x * x + 1.0) - 1.0) * 0.5 + x


x = torch.linspace(-4, 4, 201, requires_grad=True)
y = bent(x)
(slope,) = torch.autograd.grad(y.sum(), x)
with new_figure(5.5, 2.8) as figure:
    axes = figure.add_subplot()
    axes.plot(x.detach(), y.detach(), label="bent(x)", color=INK)
    axes.plot(x.detach(), slope, label="its derivative", color=SECOND)
    axes.plot(x.detach(), pw.silu(x).detach(), ":", label="silu(x), for comparison", color=GREY)
    axes.set_xlabel("x")
    axes.set_ylabel("value")
    axes.legend()
View(figure)

# %% [markdown]
# ## Any layout, checked gradients

# %%
wide = torch.randn(4, 6, 5, dtype=torch.float64).permute(2, 0, 1)[:, ::2].requires_grad_()
print("strides", wide.stride(), "->", tuple(bent(wide).shape))
print("first derivatives:", torch.autograd.gradcheck(bent, wide))
print("second derivatives:", torch.autograd.gradgradcheck(bent, wide))
print("half precision stays half:", bent(torch.ones(3).half()).dtype)

# %% [markdown]
# ## In the store of a convolution
# `execute` takes a bias, a residual and an activation. GPU kernels apply them while the result is still in registers.
# Elsewhere they run after the convolution, with the same numbers and gradients.

# %%
generator = torch.Generator().manual_seed(0)
grid, _ = sc.voxelize(torch.rand(4_000, 3, generator=generator), voxel_size=0.05)
plan = sc.ConvolutionPlan(grid, 3)
features, w, bias = torch.randn(len(grid), 16), 0.1 * torch.randn(27, 16, 16), torch.randn(16)

fused = plan.execute(features, w, bias, residual=features, epilogue=bent)
apart = bent(plan.execute(features, w, bias) + features)
print("largest difference:", f"{(fused - apart).abs().max():.1e}")

# %% [markdown]
# An `Epilogue` sets the numbers that an activation takes, here the slope of a leaky ReLU:

# %%
leaky = plan.execute(features, w, epilogue=Epilogue(pw.leaky_relu, (0.1,)))
print(torch.equal(leaky, pw.leaky_relu(plan.execute(features, w), 0.1)))

# %% [markdown]
# ## What is written for the GPU
# There is one kernel for each rank, generated as readable text. This is the one for two axes:

# %%
from sparseconv.pointwise.kernel.codegen import source

text = source(bent.schema, 2, bent.config)
print(text[text.index("@triton.jit") :])
