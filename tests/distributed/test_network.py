"""A U-Net, pooling and norms over shards equal those of the whole scene."""

from __future__ import annotations

import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv import nn
from sparseconv.distributed import Sharded, shard
from sparseconv.ops import avg_pool, global_avg_pool, global_sum_pool, max_pool, sum_pool, unpool
from sparseconv.plan import shared_plan
from tests.distributed.ranks import on_ranks


def scene() -> sc.VoxelGrid:
    gen = torch.Generator().manual_seed(1)
    coords = torch.unique(torch.randint(0, 14, (700, 3), generator=gen), dim=0)
    return sc.VoxelGrid(torch.cat([torch.arange(len(coords))[:, None] % 2, coords], 1), 2)


def train(by: str) -> list[str]:
    """One step of a U-Net on a shard and on the whole scene; what differs, in words."""
    grid = scene()
    part = torch.arange(len(grid)) % dist.get_world_size() == dist.get_rank()
    shards = shard(grid.subset(part), by=by)
    rows = grid.lookup(shards.coords)
    torch.manual_seed(5)
    whole = nn.UNet(3, 4, (8, 16), block="residual").double()
    copy = nn.UNet(3, 4, (8, 16), block="residual").double()
    copy.load_state_dict(whole.state_dict())
    net = Sharded(copy)
    x = torch.randn(len(grid), 3, dtype=torch.float64)
    labels = torch.randint(4, (len(grid),))
    wrong = []

    def close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.allclose(got, want, rtol=1e-7, atol=1e-9):
            wrong.append(f"{name}: {float((got - want).abs().max()):.2g} on rank {dist.get_rank()}")

    want = whole(sc.SparseTensor(grid, x)).features
    got = net(sc.SparseTensor(shards, x[rows])).features
    close("logits", got, want[rows])
    loss = torch.nn.functional.cross_entropy
    loss(want, labels).backward()
    (loss(got, labels[rows], reduction="sum") / len(grid)).backward()
    for (name, a), b in zip(net.module.named_parameters(), whole.parameters()):
        close(f"gradient of {name}", a.grad, b.grad)
    for (name, a), b in zip(net.module.named_buffers(), whole.buffers()):
        close(name, a.double(), b.double())
    with torch.no_grad():
        close(
            "eval",
            net.eval()(sc.SparseTensor(shards, x[rows])).features,
            whole.eval()(sc.SparseTensor(grid, x)).features[rows],
        )
        plan, apart = shared_plan(grid, 3, stride=2), shared_plan(shards, 3, stride=2)
        coarse = plan.target.lookup(apart.target.coords)
        for pool in (sum_pool, avg_pool, lambda v, p: max_pool(v, p)[0]):
            close("pool", pool(x[rows], apart), pool(x, plan)[coarse])
        y = sum_pool(x, plan)
        close("unpool", unpool(y[coarse], apart.transpose()), unpool(y, plan.transpose())[rows])
        close("global sum", global_sum_pool(x[rows], shards), global_sum_pool(x, grid))
        close("global mean", global_avg_pool(x[rows], shards), global_avg_pool(x, grid))
    return wrong


def test_a_unet_and_pooling_over_three_ranks():
    assert not [line for lines in on_ranks(3, train, "kd") for line in lines]
