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
# # Coming from spconv
# Three steps: run the old code with one import changed, move its weights, write the model with this library's layers.

# %%
import torch

import sparseconv as sc
import sparseconv.interop.spconv.pytorch as spconv  # was: import spconv.pytorch as spconv
from sparseconv import nn
from sparseconv.interop import load
from sparseconv.viz import show

# %% [markdown]
# ## 1. The old code, one import changed

# %%
torch.manual_seed(0)
theirs = spconv.SparseSequential(
    spconv.SubMConv3d(3, 16, 3, bias=False, indice_key="subm1"),
    torch.nn.BatchNorm1d(16),
    torch.nn.ReLU(),
    spconv.SparseConv3d(16, 32, 3, stride=2, padding=1, bias=False, indice_key="down1"),
    torch.nn.BatchNorm1d(32),
    torch.nn.ReLU(),
    spconv.SparseInverseConv3d(32, 16, 3, bias=False, indice_key="down1"),
)

ball = torch.nn.functional.normalize(torch.randn(5_000, 3), dim=1)
grid, _ = sc.voxelize(ball + 1.0, voxel_size=0.05)
features = torch.randn(len(grid), 3)

x = spconv.SparseConvTensor(features, grid.coords, spatial_shape=[41, 41, 41], batch_size=1)
y = theirs(x)
print(type(y).__name__, tuple(y.features.shape))
print("on the same indices:", torch.equal(y.indices, x.indices))

# %% [markdown]
# ## 2. The weights
# spconv keeps (C_out, k0, k1, k2, C_in); here it is one matrix a tap, (27, C_in, C_out).


# %%
class Ours(nn.SparseModule):
    """The same network: no keys, the decoder is told onto which tensor it returns."""

    def __init__(self):
        super().__init__()
        fine = nn.SubmanifoldConv(3, 16, 3, bias=False)
        self.fine = nn.Sequential(fine, nn.BatchNorm(16), nn.ReLU())
        down = nn.Conv(16, 32, 3, stride=2, padding=1, bias=False)
        self.down = nn.Sequential(down, nn.BatchNorm(32), nn.ReLU())
        self.up = nn.InverseConv(32, 16, 3, stride=2, padding=1, bias=False)

    def forward(self, x):
        fine = self.fine(x)
        return self.up(self.down(fine), onto=fine)


ours = Ours()
places = {"0": "fine.0", "1": "fine.1", "3": "down.0", "4": "down.1", "6": "up"}
rename = lambda key: places[key.split(".")[0]] + key[1:]  # noqa: E731
report = load(ours, theirs.state_dict(), "spconv", rename=rename)
print(report)

# %% [markdown]
# ## 3. The same numbers

# %%
theirs.eval()
ours.eval()
expected = theirs(x).features
got = ours(sc.SparseTensor(grid, features))
difference = (got.features - expected).abs().max()
print(f"largest difference: {difference:.1e}, largest number: {expected.abs().max():.2f}")
show(got, unit="m", title="the result, on the voxels it came from")

# %% [markdown]
# ## Where the two differ, on purpose
# A key that is used again on other voxels is an error here, and so are duplicate voxels:

# %%
try:
    sc.VoxelGrid(torch.tensor([[0, 1, 2, 3], [0, 4, 4, 4], [0, 1, 2, 3]]))
except ValueError as error:
    print(error)

# %% [markdown]
# The whole list, and the calls of other libraries side by side, are in the documentation under *Bring your model* and
# *Migration*.
