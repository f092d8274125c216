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
# # Two processes, one scene
# A scene is cut into shards, one a process. Each computes the voxels that it owns; what it needs of the other, the
# halo, travels while the rest is computed. The result is that of one process.

# %%
import tempfile
from pathlib import Path

import torch

import sparseconv as sc
import two_ranks
from sparseconv.viz import View, new_figure, show
from sparseconv.viz.palette import INK, SECOND

# %% [markdown]
# ## What each process runs
# Everything is in a file, because each process imports it:

# %%
print(Path(two_ranks.__file__).read_text())

# %% [markdown]
# ## Run it
# On several GPUs the same code runs under `torchrun` with `init_process_group("nccl")`.

# %%
with tempfile.TemporaryDirectory() as folder:
    torch.multiprocessing.spawn(two_ranks.work, (2, folder), nprocs=2)
    shards = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
for rank, shard in enumerate(shards):
    print(
        f"rank {rank}: owns {len(shard['coords']):,} voxels, receives {shard['halo']} rows, "
        f"{shard['overlapped']:.0%} of its pairs need none of them"
    )

# %% [markdown]
# ## The same numbers as one process

# %%
grid, x, weight = two_ranks.scene()
alone = sc.ConvolutionPlan(grid, 3).execute(x, weight)
rows = grid.lookup(torch.cat([shard["coords"] for shard in shards]))
together = torch.empty_like(alone)
together[rows] = torch.cat([shard["y"] for shard in shards])
print(f"convolution: {(together - alone).abs().max():.1e} apart")

# %%
owner = torch.empty(len(grid), dtype=torch.long)
owner[rows] = torch.cat(
    [torch.full((len(s["coords"]),), rank) for rank, s in enumerate(shards)]
)
show(grid, owner, names=("rank 0", "rank 1"), title="voxels by owner")

# %% [markdown]
# ## Training
# `Sharded(net)` sums the gradients over the processes. The loss is that of the whole scene, the same on both.

# %%
with new_figure(5.5, 2.6) as figure:
    axes = figure.add_subplot()
    axes.plot(shards[0]["losses"], color=SECOND, linewidth=5, label="seen by rank 0")
    axes.plot(shards[1]["losses"], color=INK, label="seen by rank 1")
    axes.set_xlabel("step")
    axes.set_ylabel("mean squared error")
    axes.set_ylim(0)
    axes.legend()
View(figure)
