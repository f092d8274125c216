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
# # A first convolution
# Points become voxels, and voxels get features. A plan says which voxels meet; then a convolution is one call.

# %%
import math

import torch

import sparseconv as sc
from sparseconv import ops
from sparseconv.viz import View, new_figure, scatter3d, show
from sparseconv.viz.palette import DIVERGING, GREY, INK

torch.manual_seed(0)
u, v = 2 * math.pi * torch.rand(2, 20_000)
radius = 1 + 0.4 * v.cos()
points = torch.stack([radius * u.cos(), radius * u.sin(), 0.4 * v.sin()], 1)  # a torus, in m

grid, point_rows = sc.voxelize(points, voxel_size=0.06)
share = len(grid) / grid.extent.size
print(f"{len(points):,} points in {len(grid):,} voxels, {share:.0%} of their box")
show(grid, unit="m", title="a torus in voxels of 6 cm, coloured by height")

# %% [markdown]
# ## Plan, then execute
# The plan is geometry alone: 27 taps, and for each the pairs of voxels that it joins. It is built once.

# %%
plan = sc.ConvolutionPlan(grid, kernel_size=3)
print(plan)

# %% [markdown]
# Features are rows in the order of the grid. Here: one channel, a wave along x buried in noise. The weights of a
# convolution are one matrix a tap, (27, channels in, channels out); a mean over the window has the same number in each.

# %%
wave = torch.sin(6 * grid.positions()[:, :1])
noisy = wave + torch.randn(len(grid), 1)

ones = torch.ones(27, 1, 1)
neighbours = plan.execute(torch.ones(len(grid), 1), ones)  # how many voxels each window holds
smooth = noisy
for _ in range(4):
    smooth = plan.execute(smooth, ones) / neighbours

with new_figure(9, 2.8) as figure:
    several = {"noisy": noisy, "after four means": smooth, "true": wave}
    for n, (title, values) in enumerate(several.items(), 1):
        axes = figure.add_subplot(1, 3, n, projection="3d")
        look = {"unit": "m", "s": 6, "cmap": DIVERGING, "vmin": -1.5, "vmax": 1.5}
        dots = scatter3d(axes, grid, values[:, 0], **look)
        axes.set_title(title)
    figure.colorbar(dots, ax=figure.axes, label="value", shrink=0.6, pad=0.08, extend="both")
error = [(values - wave).square().mean().sqrt().item() for values in (noisy, smooth)]
print(f"error (root mean square): {error[0]:.2f} before, {error[1]:.2f} after")
View(figure)

# %% [markdown]
# ## Learn the weights instead
# `execute` is differentiable. Eight channels, two layers, and a loss that asks for the wave:

# %%
w1 = (0.2 * torch.randn(27, 1, 8)).requires_grad_()
w2 = (0.1 * torch.randn(27, 8, 1)).requires_grad_()
optimizer = torch.optim.Adam([w1, w2], 0.01)
losses = []
for _ in range(150):
    noisy = wave + torch.randn(len(grid), 1)  # new noise at each step
    guess = plan.execute(torch.tanh(plan.execute(noisy, w1)), w2)
    loss = (guess - wave).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item() ** 0.5)

with new_figure(5.5, 2.6) as figure:
    axes = figure.add_subplot()
    axes.plot(losses, color=INK)
    axes.axhline(error[0], color=GREY, linestyle=":")
    axes.annotate("the noise itself", (150, error[0]), va="bottom", ha="right")
    axes.set_xlabel("step")
    axes.set_ylabel("error (root mean square)")
    axes.set_ylim(0, 1.2)
View(figure)

# %% [markdown]
# ## Coarser voxels
# With a stride the plan makes its own target: every coarse voxel that holds at least one fine voxel. The picture shows
# the smoothed wave, averaged over these.

# %%
down = sc.ConvolutionPlan(grid, 2, stride=2)
coarse = ops.avg_pool(smooth, down)  # a mean over the voxels that are there
print(down)
show(
    sc.SparseTensor(down.target, coarse),
    unit="m",
    title=f"{len(down.target):,} voxels of 12 cm",
)
