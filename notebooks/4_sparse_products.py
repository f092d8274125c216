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
# # Sparse products, from pooling to equivariance
# One pattern: gather rows, multiply, sum in segments. An *info* holds the index lists: which rows meet, and where their
# product is added. One call makes the infos of a product and of all its gradients.

# %%
import torch

import sparseconv as sc
from sparseconv import ops
from sparseconv.products import (
    sparse_mul,
    sparse_product_infos,
    sparse_scale,
    sparse_scale_infos,
    sparse_vecmat,
)
from sparseconv.viz import View, draw_cells, new_figure
from sparseconv.viz.palette import DIVERGING, ROW, WINDOW

generator = torch.manual_seed(0)

# %% [markdown]
# ## A sum with factors: average pooling
#     z[out] += scale * x[i]
# The pictures show the input, the mean of each 2 x 2 window, and the transpose of that mean. The transpose gives every
# voxel its window's value, divided by the number of voxels in the window.

# %%
cells = torch.cartesian_prod(torch.arange(1), torch.arange(16), torch.arange(16))
places = cells[:, 1:] - 7.5
grid = sc.VoxelGrid(cells[(places.norm(dim=1) < 8) & (places.norm(dim=1) > 3)])
x = torch.sin(grid.positions() @ torch.tensor([[0.8], [0.5]]))

plan = sc.ConvolutionPlan(grid, 2, stride=2)
edges = plan.kernel_map
degree = torch.bincount(edges.out_rows.long(), minlength=edges.num_out)
mean = sparse_scale_infos(
    edges.in_rows,
    edges.out_rows,
    1 / degree[edges.out_rows.long()].float(),
    edges.num_out,
    edges.num_in,
)
pooled = sparse_scale(x, *mean)
same = torch.allclose(pooled, ops.avg_pool(x, plan), atol=1e-6)
print("the library's pooling gives the same:", same)

spread = sparse_scale(pooled, mean[1], mean[0])  # the two infos exchanged: the transpose
with new_figure(8.6, 2.9) as figure:
    shown = {"x": (grid, x), "mean": (plan.target, pooled), "and its transpose": (grid, spread)}
    for axes, (title, (where, values)) in zip(figure.subplots(1, 3), shown.items()):
        draw_cells(axes, where)
        cells = axes.collections[0]
        cells.set_array(values[:, 0].numpy())
        cells.set_cmap(DIVERGING)
        cells.set_clim(-1, 1)
        axes.set_xlim(-1, 17)
        axes.set_ylim(-1, 17)
        axes.set_title(title)
    figure.colorbar(cells, ax=figure.axes, label="value", shrink=0.8)
View(figure)

# %% [markdown]
# ## A product with matrices: convolution
#     z[out] += x[i] @ w[tap]
# The kernel map has the infos ready. `execute` is the faster way to the same numbers.

# %%
window = sc.ConvolutionPlan(grid, 3)
features, w = torch.randn(len(grid), 4), torch.randn(9, 4, 8)
product = sparse_vecmat(features, w, *window.kernel_map.product_infos())
difference = (product - window.execute(features, w)).abs().max()
print(f"largest difference to execute: {difference:.1e}")

# %% [markdown]
# ## Products over neighbours: attention
# A logit is the inner product of the two rows of an edge. The result is a sum of rows, weighted by the softmax of the
# logits. Both have gradients of any order. The picture shows the weights of one voxel, which looks at 3 x 3 places.

# %%
q, k, v = (torch.randn(len(grid), 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
y = ops.neighborhood_attention(q, k, v, window)
grad = torch.autograd.grad(y.square().sum(), q, create_graph=True)[0]
grad.square().sum().backward()
print("attention", tuple(y.shape), "- gradient of a gradient to v:", tuple(v.grad.shape))

weights = ops.neighborhood_softmax(ops.neighborhood_logits(q, k, window).detach() / 8, window)
row = len(grid) // 2
with new_figure(4.8, 3.6) as figure:
    axes = figure.add_subplot()
    draw_cells(axes, grid)
    mine = window.kernel_map.out_rows == row
    attention = torch.zeros(len(grid), dtype=torch.float64)
    attention[window.kernel_map.in_rows[mine].long()] = weights[mine]
    cells = axes.collections[0]
    cells.set_array(attention.numpy())
    cells.set_cmap("Blues")
    cells.set_edgecolor(ROW)
    centre = grid.positions()[row]
    axes.plot(*centre[:, None], "x", color=WINDOW)
    axes.set_title(f"where voxel {row} (x) looks")
    figure.colorbar(cells, ax=axes, label="share of attention")
View(figure)

# %% [markdown]
# ## Products of rows: what rotates stays what it is
# Two vectors make a number (their inner product) and a vector (their cross product). Each is a sparse table of which
# component meets which, with a sign:

# %%
each = [0, 1, 2]
dot = sparse_product_infos(each, each, [0, 0, 0], None, out_size=1, in1_size=3, in2_size=3)
cross = sparse_product_infos(
    [1, 2, 2, 0, 0, 1], [2, 1, 0, 2, 1, 0], [0, 0, 1, 1, 2, 2], [1.0, -1, 1, -1, 1, -1], 3, 3, 3
)
a, b = torch.randn(2, 5, 3, 16)  # 5 items, 3 components, 16 channels
same = torch.allclose(sparse_mul(a, b, *cross), torch.linalg.cross(a, b, dim=1), atol=1e-6)
print("cross product:", same)

turn = torch.linalg.qr(torch.randn(3, 3)).Q
turn = turn * torch.linalg.det(turn)  # a rotation, not a reflection


def rotated(t):
    return torch.einsum("ij,njc->nic", turn, t)


before = rotated(sparse_mul(a, b, *cross))
after = sparse_mul(rotated(a), rotated(b), *cross)
invariant = sparse_mul(rotated(a), rotated(b), *dot) - sparse_mul(a, b, *dot)
apart = (before - after).abs().max()
print(f"rotate then multiply, or multiply then rotate: {apart:.1e} apart")
print(f"the inner product does not turn: {invariant.abs().max():.1e}")

# %% [markdown]
# Higher angular momenta only have longer tables. `examples/equivariant_tensor_product.py` makes them and trains an
# interatomic potential, whose forces are gradients and whose training needs gradients of those.
