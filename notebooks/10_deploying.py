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
# # Deploying
# A trained network becomes one file: a program that finds the kernel maps of each scene it is given. The process that
# runs it needs torch and sparseconv, and no class of yours.

# %%
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import sparseconv as sc
from sparseconv import nn
from sparseconv.viz import View, new_figure
from sparseconv.viz.palette import INK

folder = Path(tempfile.mkdtemp())


def scene(points, seed):
    generator = torch.Generator().manual_seed(seed)
    grid, _ = sc.voxelize(torch.rand(points, 3, generator=generator), 0.04)
    return grid, torch.randn(len(grid), 4, generator=generator)


# %% [markdown]
# ## Export
# The example sets the channels and the dtypes of the program. The number of voxels stays free. Before `export` writes
# the file, it compares program and network on the example, bit by bit.

# %%
torch.manual_seed(0)
net = nn.UNet(4, 5, channels=(16, 32)).eval()
grid, features = scene(3_000, 0)
sc.export.export(net, (grid.coords, features), folder / "net.pt2")
print(f"{(folder / 'net.pt2').stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## Another process
# It runs the program on another scene than the example.

# %%
other, x = scene(9_000, 1)
torch.save((other.coords, x), folder / "scene.pt")
program = """
import sys, torch, sparseconv
run = torch.export.load(sys.argv[1] + "/net.pt2").module()
torch.save(run(*torch.load(sys.argv[1] + "/scene.pt")), sys.argv[1] + "/answer.pt")
"""
subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
answer = torch.load(folder / "answer.pt")
with torch.no_grad():
    expected = net(sc.SparseTensor(other, x)).features
print(tuple(answer.shape), "the same bits:", torch.equal(answer, expected))

# %% [markdown]
# ## Scenes of any size
# One program serves them all, from no voxel to as many as memory holds. The time is the least of five calls, kernel
# maps included.

# %%
run = torch.export.load(folder / "net.pt2").module()
sizes, seconds = [], []
for points in (500, 2_000, 4_000, 8_000, 16_000):
    grid, x = scene(points, points)
    run(grid.coords, x)  # kernels for these channels are compiled once
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        run(grid.coords, x)  # its maps are found anew
        taken.append(time.perf_counter() - begin)
    sizes.append(len(grid))
    seconds.append(min(taken))

with new_figure(5.5, 2.6) as figure:
    axes = figure.add_subplot()
    axes.plot(sizes, [1e3 * s for s in seconds], "o-", color=INK)
    axes.set_xlabel("voxels")
    axes.set_ylabel("milliseconds a scene")
    axes.set_ylim(0, 1.1e3 * max(seconds))
View(figure)

# %% [markdown]
# ## What it refuses
# A program checks coordinates as a `VoxelGrid` does.

# %%
try:
    run(torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]]), torch.randn(2, 4))
except ValueError as error:
    print(error)
