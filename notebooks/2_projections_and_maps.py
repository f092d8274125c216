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
# # Projections and kernel maps, drawn
# Which voxel meets which? One line answers for every kind of convolution, axis by axis:
#
#     fine = stride * coarse + dilation * tap - padding        (tap = 0 .. kernel_size - 1)

# %%
import torch

import sparseconv as sc
from sparseconv.viz import show

window = sc.IndexProjection.window((3,), stride=2)
print("output 2 sees the inputs", window.region((2,)))
print("input 5 is seen by the outputs", window.preimage(sc.IndexRange((5,), (6,))))

# %% [markdown]
# ## On a line
# Six voxels. A grid with holes: at 3 and 6 nothing is there. Lines are edges, coloured by tap.

# %%
grid = sc.VoxelGrid(torch.tensor([[0, x] for x in (0, 1, 2, 4, 5, 7)]))
show(sc.ConvolutionPlan(grid, 3), title="kernel 3: outputs where inputs are (submanifold)")

# %%
full = sc.ConvolutionPlan(grid, 3, target="full")
show(full, title='kernel 3, target="full": every voxel that an input reaches')

# %% [markdown]
# ### Strides, and back

# %%
down = sc.ConvolutionPlan(grid, 2, stride=2)
show(down, title="kernel 2, stride 2")

# %%
show(down.transpose(), title="its transpose: the same edges, onto the voxels it came from")

# %%
generative = sc.ConvolutionPlan.transposed(down.target, 2, stride=2)
show(generative, title="transposed(...) onto new voxels: every child, also 3 and 6")

# %% [markdown]
# ### Dilation, and taps of your choice

# %%
show(sc.ConvolutionPlan(grid, 3, dilation=2), title="kernel 3, dilation 2")

# %%
show(sc.ConvolutionPlan(grid, taps=[(0,), (-1,), (4,)]), title="taps 0, -1 and +4")

# %% [markdown]
# ### Boundaries
# Outside is empty by default. A torus joins its ends; `forbid` keeps outputs whose whole window lies inside.

# %%
periodic = sc.ConvolutionPlan(grid, 3, boundary=sc.Boundary.periodic((8,)))
show(periodic, title="periodic, extent 8: 7 and 0 meet")

# %%
forbid = sc.ConvolutionPlan(grid, 3, boundary=sc.Boundary.forbid((8,)), target="full")
show(forbid, title="forbid: only whole windows")

# %% [markdown]
# ## In the plane
# A ring of voxels, and one output of a strided window. Dotted squares are taps that meet no voxel.

# %%
angle = torch.linspace(0, 2 * torch.pi, 200)
circle = torch.stack([0 * angle, 6 * angle.cos(), 6 * angle.sin()], 1).round().int()
ring = sc.VoxelGrid(torch.unique(circle, dim=0))
strided = sc.ConvolutionPlan(ring, 3, stride=2)
show(strided)

# %%
show(strided.transpose())

# %% [markdown]
# ## In space
# The inputs of one voxel on a sphere: a surface fills about a third of a 3 x 3 x 3 window.

# %%
generator = torch.Generator().manual_seed(0)
ball = torch.nn.functional.normalize(torch.randn(6_000, 3, generator=generator), dim=1)
sphere, _ = sc.voxelize(ball, voxel_size=0.1)
plan = sc.ConvolutionPlan(sphere, 3)
show(plan, unit="m")

# %% [markdown]
# ## As numbers
# The same edges as a table (a row a tap, -1 for none), and as pairs ordered by tap.

# %%
edges = sc.ConvolutionPlan(grid, 3).kernel_map
print(edges)
print(edges.neighbors)
print("inputs ", edges.in_rows.tolist())
print("outputs", edges.out_rows.tolist())
print("pairs of each tap", edges.tap_counts)
