"""Attention and depthwise convolution over shards of a scene equal those of the whole, with their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

import sparseconv as sc
from sparseconv import ops
from sparseconv.distributed import shard
from sparseconv.plan import shared_plan
from tests.ranks import on_ranks


def differences() -> list[str]:
    """What differs between this rank's part of the results and the whole scene's, in words."""
    gen = torch.Generator().manual_seed(1)
    grid = sc.VoxelGrid(torch.cat([torch.zeros(200, 1).int(), torch.randperm(512, generator=gen)[:200, None].int()], 1))
    shards = shard(grid.subset(torch.arange(200) % 2 == dist.get_rank()))
    rows = grid.lookup(shards.coords)
    plan, apart = shared_plan(grid, 5), shared_plan(shards, 5)
    q, k, v = torch.randn(3, 200, 2, 4, dtype=torch.float64, generator=gen)
    bias = torch.randn(5, 2, dtype=torch.float64, generator=gen)
    weight = torch.randn(5, 4, dtype=torch.float64, generator=gen)
    wrong = []
    for name, function in (
        ("attention", lambda q, k, v, plan: ops.neighborhood_attention(q, k, v, plan, bias=bias)),
        ("depthwise", lambda q, k, v, plan: ops.depthwise_convolution(v[:, 0], weight, plan)),
    ):
        whole = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        part = [t[rows].detach().requires_grad_() for t in (q, k, v)]
        want, got = function(*whole, plan), function(*part, apart)
        if not torch.allclose(got, want[rows], rtol=1e-9):
            wrong.append(f"{name} on rank {dist.get_rank()}")
        options = {"allow_unused": True, "materialize_grads": True}
        for letter, ours, theirs in zip(
            "qkv",
            torch.autograd.grad(got.square().sum(), part, **options),
            torch.autograd.grad(want.square().sum(), whole, **options),
            strict=True,
        ):
            if not torch.allclose(ours, theirs[rows], rtol=1e-9):
                wrong.append(f"gradient of {name} to {letter} on rank {dist.get_rank()}")
    weights = ops.neighborhood_softmax(ops.neighborhood_logits(q[rows], k[rows], apart), apart)
    if not torch.allclose(weights.sum(0), torch.full((2,), float(len(rows)), dtype=torch.float64)):
        wrong.append(f"sum of weights on rank {dist.get_rank()}")
    return wrong


def test_two_ranks_equal_one():
    assert on_ranks(2, differences) == [[], []]
