"""What each of the two processes of notebook 8 runs."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv import nn
from sparseconv.distributed import Sharded, ShardedConvolutionPlan, shard


def scene():
    """A torus of voxels, features, and weights: the same wherever it is called."""
    generator = torch.Generator().manual_seed(0)
    u, v = 2 * torch.pi * torch.rand(2, 20_000, generator=generator)
    radius = 20 + 8 * v.cos()
    points = torch.stack([radius * u.cos(), radius * u.sin(), 8 * v.sin()], 1)
    grid, _ = sc.voxelize(points, 1.0)
    return (
        grid,
        torch.randn(len(grid), 4, generator=generator),
        torch.randn(27, 4, 8, generator=generator),
    )


def work(rank: int, world: int, folder: str) -> None:
    """Share the scene out, convolve it, train on it, and write down what this rank saw."""
    warnings.filterwarnings(
        "ignore", "`torch.distributed", FutureWarning
    )  # of names that torch 2.13 gave anew
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    whole, x, weight = scene()
    mine = torch.arange(len(whole)) % world == rank  # what this rank happens to hold
    grid = shard(whole.subset(mine), by="kd")
    x = grid.bring(x[mine])  # features travel to the owners of their voxels
    plan = ShardedConvolutionPlan(grid, 3)
    found = {
        "coords": grid.coords,
        "y": plan.execute(x, weight),
        "halo": plan.halo_rows,
        "overlapped": plan.overlapped,
    }

    torch.manual_seed(0)
    net = Sharded(nn.UNet(4, 1, channels=(8, 16), block="plain"))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    height = grid.positions()[:, 2:] / 8
    losses = []
    for _ in range(30):
        loss = (
            net(sc.SparseTensor(grid, x)).features - height
        ).square().sum() / grid.num_global_voxels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(grid.all_sum(loss.detach())))
    torch.save(found | {"losses": losses}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
