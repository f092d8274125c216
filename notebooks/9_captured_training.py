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
# # Captured training
# On a GPU, a step on a new scan is mostly Python: the GPU waits for launches. A compiled network is recorded once, kernel
# maps included, and replayed for scenes of any size. One line does it, and the loop stays yours. What you see here ran on a
# CPU, where the same program runs without CUDA graphs: it shows what happens, not how fast.

# %%
import torch
from torch.nn import functional as F

import sparseconv as sc
from sparseconv import nn
from sparseconv.viz import View, new_figure, show
from sparseconv.viz.palette import INK

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## Scenes that differ at every step
# A sphere and a plane, sampled anew: other points, another number of voxels. Which voxel belongs to which?


# %%
def scene(seed):
    generator = torch.Generator().manual_seed(seed)
    count = 400 + 40 * (seed % 7)
    ball = F.normalize(torch.randn(count, 3, generator=generator), dim=1) * 0.4
    floor = torch.rand(count, 3, generator=generator) - 0.5
    floor[:, 2] = -0.3
    points = torch.cat([ball, floor]).to(device)
    grid, rows = sc.voxelize(points, 0.08)
    on_ball = sc.ops.voxelize_features(
        (torch.arange(len(points), device=device) < count).float()[:, None], rows, len(grid)
    )
    height = grid.positions()[:, 2:]
    x = sc.SparseTensor(grid, torch.cat([torch.ones_like(height), height], 1))
    return x, (on_ball[:, 0] > 0.5).long()


x, labels = scene(0)
print("voxels:", [len(scene(seed)[0].grid) for seed in range(4)])
show(x.grid, labels, names=("plane", "sphere"), unit="m", title="what is learnt")

# %% [markdown]
# ## One line
# On a GPU, `sc.accelerate` finds the sparse parts of a model and compiles each of them. On a CPU it leaves the model as it
# is, so `torch.compile` is asked for the same program there. The optimizer is made and used as always.

# %%
torch.manual_seed(0)
net = nn.UNet(2, 2, channels=(16, 32)).to(device)
model = sc.accelerate(net) if device == "cuda" else torch.compile(net, backend="sparseconv")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for step in range(40):
    x, labels = scene(step)
    loss = F.cross_entropy(model(x).features, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

with new_figure(5.5, 2.6) as figure:
    axes = figure.add_subplot()
    axes.plot(losses, color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy")
    axes.set_ylim(0)
View(figure)

# %% [markdown]
# ## On scenes it never saw
# Evaluation has a program of its own, which reads the weights as they are at each call.

# %%
model.eval()
right = total = 0
with torch.no_grad():
    for seed in range(1000, 1010):
        x, labels = scene(seed)
        predicted = model(x).features.argmax(1)
        right += (predicted == labels).sum().item()
        total += len(labels)
print(f"{right / total:.1%} of {total:,} voxels are right")
show(x.grid, predicted, names=("plane", "sphere"), unit="m", title="predicted")

# %% [markdown]
# ## What happened
# `explain` lists the programs: where each begins, how many calls were replayed, and for how many voxels there is room. The
# first call of a program runs eagerly; its voxels decide the room.

# %%
print(nn.explain(model))
