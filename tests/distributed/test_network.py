"""A U-Net, pooling and norms over shards equal those of the whole scene."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sparseconv as sc
from sparseconv import nn
from sparseconv.distributed import Sharded, shard
from sparseconv.ops import avg_pool, global_avg_pool, global_sum_pool, max_pool, sum_pool, unpool
from sparseconv.plan import shared_plan
from tests.ranks import SHARDS, on_ranks


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


def small_net() -> torch.nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.SubmanifoldConv(3, 8, 3, bias=False), nn.BatchNorm(8), nn.ReLU(), nn.Conv(8, 6, 2, stride=2), nn.Linear(6, 2)
    )


def beside_data_parallelism(kind: str) -> list[str]:
    """Two scenes, each over two ranks; data parallelism over the other dimension of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "space"))
    data, space = mesh["data"].get_local_rank(), mesh["space"].get_local_rank()
    grid = scene()
    x = torch.randn(2, len(grid), 3, generator=torch.Generator().manual_seed(2))
    part = torch.arange(len(grid)) % 2 == space
    shards = shard(grid.subset(part), mesh["space"], by="slab")
    rows = grid.lookup(shards.coords)
    net: torch.nn.Module = Sharded(small_net(), mesh["space"])
    if kind == "fully_shard":
        fully_shard(net, mesh=mesh["data"])
    else:
        net = DistributedDataParallel(net, process_group=mesh["data"].get_group())
    y = net(sc.SparseTensor(shards, x[data][rows]))
    y.features.square().sum().backward()
    whole = small_net()
    loss = sum(whole(sc.SparseTensor(grid, x[i])).features.square().sum() for i in range(2)) / 2
    wrong = []
    for (name, p), want in zip(net.named_parameters(), torch.autograd.grad(loss, whole.parameters())):
        grad = p.grad.full_tensor() if kind == "fully_shard" else p.grad
        if not torch.allclose(grad, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
            wrong.append(f"{name}: {float((grad - want).abs().max()):.2g}")
    return wrong


no_mean = pytest.mark.skipif(not SHARDS, reason="fully_shard of this torch does not average over gloo, of no layer")


@pytest.mark.parametrize("kind", ["DistributedDataParallel", pytest.param("fully_shard", marks=no_mean)])
def test_beside_data_parallelism_on_a_mesh(kind):
    assert not [line for lines in on_ranks(4, beside_data_parallelism, kind) for line in lines]


def autocast_and_checkpoints() -> list[float]:
    """bf16 by autocast, with the activations computed again in the backward pass."""
    grid = scene()
    shards = shard(grid.subset(torch.arange(len(grid)) % 2 == dist.get_rank()))
    rows = grid.lookup(shards.coords)
    x = torch.randn(len(grid), 3, generator=torch.Generator().manual_seed(2))
    net, whole = Sharded(small_net()), small_net()
    mine = sc.SparseTensor(shards, x[rows])
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(lambda f: net(mine.with_features(f)).features, mine.features, use_reentrant=False)
        want = whole(sc.SparseTensor(grid, x)).features
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    want.float().square().sum().backward()
    return [
        float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in zip(net.module.parameters(), whole.parameters())
    ]


def test_autocast_and_checkpointing():
    for errors in on_ranks(2, autocast_and_checkpoints):
        assert max(errors) < 0.1
