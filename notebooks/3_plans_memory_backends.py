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
# # Plans, memory and backends
# What a plan holds, what it costs, who executes it, and why.

# %%
import pickle
import time

import torch

import sparseconv as sc
from sparseconv.plan import shared_plan
from sparseconv.viz import View, new_figure
from sparseconv.viz.palette import INK

generator = torch.Generator().manual_seed(0)
ball = torch.nn.functional.normalize(torch.randn(600_000, 3, generator=generator), dim=1)
grid, _ = sc.voxelize(ball, voxel_size=0.015)
plan = sc.ConvolutionPlan(grid, 3)
print(plan)

# %% [markdown]
# ## How full are the windows?
# `coverage` counts the outputs with 0, 1, ... 27 inputs. A dense convolution would compute all 27 for each.

# %%
with new_figure(6, 2.6) as figure:
    axes = figure.add_subplot()
    axes.bar(range(28), plan.coverage.tolist(), color=INK)
    axes.set_xlabel("inputs of an output voxel, itself included")
    axes.set_ylabel("voxels")
    pairs, dense = plan.kernel_map.num_pairs, 27 * grid.extent.size
    axes.set_title(f"{pairs:,} pairs; dense in the same box: {dense:,}")
View(figure)

# %% [markdown]
# ## Why it runs as it does
# Every backend is asked in order. One that cannot says why, in a sentence.

# %%
x, w = torch.randn(len(grid), 32), torch.randn(27, 32, 64)
print(plan.explain(x, w))

# %% [markdown]
# Asked for by name, a backend that cannot serve is an error, before anything runs.

# %%
try:
    sc.ConvolutionPlan(grid, 3, backend="triton_implicit_gemm").execute(x, w)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Memory
# Beside its result, a call takes a bounded workspace. It is known before the call.

# %%
widths = [8, 16, 32, 64, 128, 256]
with new_figure(6, 2.8) as figure:
    axes = figure.add_subplot()
    for name, bytes_of in {
        "workspace": lambda c: plan.workspace_bytes(c, c),
        "result": lambda c: 4 * len(grid) * c,
        "all pairs at once (not done)": lambda c: 4 * plan.kernel_map.num_pairs * c,
    }.items():
        axes.plot(widths, [bytes_of(c) / 2**20 for c in widths], "o-", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
    axes.set_xticks(widths, [str(c) for c in widths])
    axes.set_xlabel("channels, in and out")
    axes.set_ylabel("MiB (fp32)")
    axes.legend()
View(figure)

# %% [markdown]
# ## Once, and then many times
# Building finds the edges; the first call also makes what the backend keeps with them. Of the others the least of five
# is shown.


# %%
def milliseconds(function):
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


fresh = {}


def build():
    fresh["plan"] = sc.ConvolutionPlan(grid, 3)
    fresh["plan"].kernel_map.num_pairs


times = {"build the plan": min(milliseconds(build) for _ in range(5))}
times["first call"] = milliseconds(lambda: fresh["plan"].execute(x, w))
times["a later call"] = min(milliseconds(lambda: fresh["plan"].execute(x, w)) for _ in range(5))
with new_figure(6, 1.8) as figure:
    axes = figure.add_subplot()
    axes.barh(list(times), list(times.values()), color=INK)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms, {len(grid):,} voxels, 32 to 64 channels, fp32, on this machine's CPU")
View(figure)

# %% [markdown]
# ## Shared, frozen, portable
# Layers ask the grid for their plan, and the second one finds the first one's. A plan pickles, so a data
# loader's worker can build it.

# %%
first, second = shared_plan(grid, 3), shared_plan(grid, (3, 3, 3))
print("one map for two layers:", first.kernel_map is second.kernel_map)
again = pickle.loads(pickle.dumps(plan))
print("same bits after a pickle:", torch.equal(again.execute(x, w), plan.execute(x, w)))
print("same bits in two runs:", torch.equal(plan.execute(x, w), plan.execute(x, w)))
down = sc.ConvolutionPlan(grid, 2, stride=2)
print("transposing takes", f"{milliseconds(down.transpose):.2f} ms:", down.transpose())
