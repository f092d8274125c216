"""Attention modules against dense attention with a mask, written out in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseconv as sc
from sparseconv import nn, ops
from sparseconv.ops.serialization import ORDERS
from tests.cases import TOLERANCE, error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def scene(counts=(23, 40), channels=8, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    coords = []
    for b, n in enumerate(counts):
        cells = torch.randperm(512, generator=gen)[:n]
        coords.append(torch.stack([torch.full((n,), b), cells // 64, cells // 8 % 8, cells % 8], 1))
    coords = torch.cat(coords)[torch.randperm(sum(counts), generator=gen)]
    grid = sc.VoxelGrid(coords, len(counts))
    return sc.SparseTensor(grid, torch.randn(len(grid), channels, generator=gen).to(dtype))


def by_hand(net, x, order, size):
    """Patch by patch, in loops; the bias by the differences of voxels."""
    qkv = net.qkv(x.features).view(len(x.grid), 3, net.num_heads, -1)
    codes = ops.serial_codes(x.coords, order, depth=4)
    y = torch.zeros_like(qkv[:, 0])
    for item in range(x.grid.batch_size):
        rows = [r for r in codes.argsort().tolist() if x.coords[r, 0] == item]
        for first in range(0, len(rows), size):
            own = rows[first : first + size]
            seen = own if first == 0 else rows[first + len(own) - size : first] + own
            q, k, v = qkv[own, 0], qkv[seen, 1], qkv[seen, 2]
            logits = torch.einsum("ihc,jhc->hij", q, k) / q.shape[2] ** 0.5
            if net.rpe is not None:
                bound, table = net.rpe.bound, net.rpe.rpe_table
                for i, row in enumerate(own):
                    for j, other in enumerate(seen):
                        apart = (x.coords[row, 1:] - x.coords[other, 1:]).clamp(-bound, bound).tolist()
                        logits[:, i, j] += sum(table[a * (2 * bound + 1) + bound + d] for a, d in enumerate(apart))
            y[own] = torch.einsum("hij,jhc->ihc", logits.softmax(2), v)
    return net.proj(y.flatten(1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rpe", [False, True])
def test_serialized_attention_by_hand(order, rpe):
    torch.manual_seed(0)
    net = nn.SerializedAttention(8, 2, 12, enable_rpe=rpe).double()
    x = scene((23, 40, 7))
    features = x.features.clone().requires_grad_()
    y = net(x.with_features(features), ops.serialize(x.grid, order, depth=4))
    assert y.grid is x.grid
    mine = torch.autograd.grad(y.features.square().sum(), [features, *net.parameters()])
    want = by_hand(net, x.with_features(features), order, 12)
    theirs = torch.autograd.grad(want.square().sum(), [features, *net.parameters()])
    assert error(y.features, want) < 1e-13
    for got, grad in zip(mine, theirs, strict=True):
        assert error(got, grad) < 1e-12


@pytest.mark.parametrize(("shift", "low"), [(0, 0), (2, 0), ((1, 0, 3), -5)])
@pytest.mark.parametrize("rpe", [False, True])
def test_windows_against_a_dense_mask(rpe, shift, low):
    torch.manual_seed(0)
    net = nn.WindowAttention(8, 2, (4, 3, 5), shift=shift, enable_rpe=rpe).double()
    x = scene((40, 0, 60))
    x = sc.SparseTensor(sc.VoxelGrid(x.coords + torch.tensor([0, low, low, low]), 3), x.features.requires_grad_())
    y = net(x).features
    moves = torch.tensor(shift if isinstance(shift, tuple) else (shift,) * 3)
    window = torch.cat([x.coords[:, :1], (x.coords[:, 1:] + moves) // torch.tensor([4, 3, 5])], 1)
    q, k, v = net.qkv(x.features).view(-1, 3, 2, 4).unbind(1)
    logits = torch.einsum("ihc,jhc->hij", q, k) / 2
    if rpe:
        logits = logits + net.rpe(x.coords[None, :, 1:])[0]
    apart = (window[:, None] != window[None]).any(2)
    weights = logits.masked_fill(apart, -torch.inf).softmax(2)
    want = net.proj(torch.einsum("hij,jhc->ihc", weights, v).flatten(1))
    assert error(y, want) < 1e-13
    weight = torch.randn(y.shape, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((t * weight).sum(), [x.features, *net.parameters()]) for t in (y, want))
    for got, grad in zip(mine, theirs, strict=True):
        assert error(got, grad) < 1e-12


def test_windows_of_no_voxel_and_errors():
    net = nn.WindowAttention(8, 2, 4, enable_rpe=True)
    empty = sc.SparseTensor(sc.VoxelGrid(torch.zeros(0, 4).int(), 2), torch.zeros(0, 8))
    assert net(empty).features.shape == (0, 8)
    x = scene(dtype=torch.float32)
    assert ops.Patches.windows(x.grid, 4)[1] is ops.Patches.windows(x.grid, (4, 4, 4), shift=0)[1]
    fixed = sc.geometry.FixedGrid(x.coords, torch.tensor([len(x.grid)], dtype=torch.int32), x.grid)
    with pytest.raises(ValueError, match="ordinary grids alone"):
        net(sc.SparseTensor(fixed, x.features))
    with pytest.raises(ValueError, match="window_size"):
        nn.WindowAttention(8, 2, 0)


def test_shrunken_patches():
    net = nn.SerializedAttention(8, 2, 48, shrink_patches=True).double()
    x = scene((23, 7))
    assert error(net(x).features, by_hand(net, x, "z", 7)) < 1e-13


@pytest.mark.parametrize("device", DEVICES)
def test_dtypes_and_autocast(device):
    net = nn.SerializedAttention(8, 2, 16).to(device)
    x = scene(dtype=torch.float32).to(device)
    want = net.double()(x.double()).features
    net = net.float()
    assert error(net(x).features, want) < TOLERANCE[torch.float32]
    with torch.autocast(device, torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    assert error(y.features, want) < 3 * TOLERANCE[torch.bfloat16]
    y.features.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_derivatives_of_any_order():
    net = nn.SerializedAttention(2, 1, 3, enable_rpe=True).double()
    x = scene((5, 2), 2)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            lambda f: net(x.with_features(f)).features, x.features.requires_grad_(), fast_mode=True
        )


def test_no_voxel_and_empty_items():
    net = nn.SerializedAttention(8, 2, 16, enable_rpe=True)
    empty = sc.SparseTensor(sc.VoxelGrid(torch.zeros(0, 4).int(), 2), torch.zeros(0, 8))
    y = net(empty)
    assert y.features.shape == (0, 8)
    y.features.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())
    alone = sc.SparseTensor(sc.VoxelGrid(torch.tensor([[1, 0, 0, 0]]), 3), torch.ones(1, 8))
    assert bool(net(alone).features.isfinite().all())


def test_rows_may_come_in_any_order():
    net = nn.SerializedAttention(8, 2, 12, enable_rpe=True).double()
    x = scene()
    turn = torch.randperm(len(x.grid))
    moved = sc.SparseTensor(sc.VoxelGrid(x.coords[turn], x.grid.batch_size), x.features[turn])
    assert error(net(moved).features, net(x).features[turn]) < 1e-14


def test_dropout_is_of_training():
    torch.manual_seed(0)
    net, x = nn.SerializedAttention(8, 2, 12, attn_drop=0.5, proj_drop=0.5).double(), scene()
    assert not torch.equal(net(x).features, net(x).features)
    net.eval()
    assert torch.equal(net(x).features, net(x).features)


def test_names_and_errors():
    net = nn.SerializedAttention(8, 2, 48, enable_rpe=True, order_index=2, qkv_bias=False)
    shapes = {name: tuple(p.shape) for name, p in net.state_dict().items()}
    assert shapes == {
        "qkv.weight": (24, 8),
        "proj.weight": (8, 8),
        "proj.bias": (8,),
        "rpe.rpe_table": (3 * 23, 2),
    }
    x = scene(dtype=torch.float32)
    with pytest.raises(ValueError, match="curve number 2, but there are 2"):
        net(x)
    with pytest.raises(ValueError, match="serialize its own grid"):
        nn.SerializedAttention(8, 2)(x, ops.serialize(scene((3,)).grid))
    with pytest.raises(TypeError, match="curves must be a Serialization"):
        net(x, "z")
    with pytest.raises(TypeError, match="takes a SparseTensor"):
        net(x.features)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        nn.SerializedAttention(8, 3)
