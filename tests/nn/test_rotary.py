"""Rotary positions against complex numbers, and in attention against a formula of differences of positions."""

from __future__ import annotations

import math

import pytest
import torch

import sparseconv as sc
from sparseconv import nn, ops
from tests.cases import TOLERANCE, error
from tests.nn.test_attention import DEVICES, scene


def pairs(x, rank):
    """(..., C) -> complex (..., D, F)."""
    first, second = x.unflatten(-1, (rank, 2, -1)).unbind(-2)
    return torch.complex(first, second)


def logits_of_differences(rope, q, k, apart):
    """(H, I, J) of q (I, H, C), k (J, H, C) and apart (I, J, D): the key's position less the query's."""
    turn = torch.polar(torch.ones(()).double(), apart.double()[..., None] * rope.inv_freq.double())
    products = pairs(q, rope.rank).conj()[:, None] * pairs(k, rope.rank)[None] * turn[:, :, None]
    return products.real.sum((3, 4)).permute(2, 0, 1)


def dense(net, x, apart_windows, positions):
    """The layer's result with a mask over all pairs of voxels."""
    q, k, v = net.qkv(x.features).unflatten(1, (3, net.num_heads, -1)).unbind(1)
    apart = positions[None] - positions[:, None]
    logits = logits_of_differences(net.rope, q, k, apart) * net.scale
    if net.rpe is not None:
        logits = logits + net.rpe(x.coords[None, :, 1:])[0]
    weights = logits.masked_fill(apart_windows, -torch.inf).softmax(2)
    return net.proj(torch.einsum("hij,jhc->ihc", weights, v).flatten(1))


def compared(y, want, inputs):
    assert error(y, want) < 1e-12
    weight = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine, theirs = (torch.autograd.grad((t * weight).sum(), inputs) for t in (y, want))
    for got, grad in zip(mine, theirs, strict=True):
        assert error(got, grad) < 1e-11


@pytest.mark.parametrize(("rank", "channels"), [(1, 2), (2, 8), (3, 12), (4, 16)])
def test_as_complex_numbers(rank, channels):
    gen = torch.Generator().manual_seed(0)
    rope = nn.RotaryPositions(channels, 50.0, rank=rank).double()
    x = torch.randn(7, 3, channels, generator=gen, dtype=torch.float64)
    at = torch.randint(-900, 900, (7, rank), generator=gen)
    y = rope(x, at)
    for row in range(7):
        for axis in range(rank):
            count = channels // rank // 2
            for j in range(count):
                angle = float(at[row, axis]) * float(rope.inv_freq[j])
                assert float(rope.inv_freq[j]) == pytest.approx(50.0 ** (-j / count), rel=1e-6)
                low = axis * 2 * count + j
                got, was = (torch.complex(t[row, :, low], t[row, :, low + count]) for t in (y, x))
                assert torch.allclose(got, was * complex(math.cos(angle), math.sin(angle)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("rpe", [False, True])
def test_windows(own_positions, rpe):
    torch.manual_seed(0)
    net = nn.WindowAttention(24, 2, 3, shift=1, rope=nn.RotaryPositions(12), enable_rpe=rpe).double()
    x = scene((40, 0, 60), 24)
    x = x.with_features(x.features.requires_grad_())
    positions = torch.randn(len(x.grid), 3).double().requires_grad_() if own_positions else None
    y = net(x, positions=positions).features
    window = torch.cat([x.coords[:, :1], (x.coords[:, 1:] + 1) // 3], 1)
    apart = (window[:, None] != window[None]).any(2)
    want = dense(net, x, apart, x.coords[:, 1:] if positions is None else positions)
    compared(y, want, [x.features, *net.parameters(), *([] if positions is None else [positions])])


@pytest.mark.parametrize("shrink", [False, True])
def test_patches_of_a_curve(shrink):
    """Patches that fill up exactly, so that a mask says all."""
    torch.manual_seed(0)
    net = nn.SerializedAttention(24, 2, 10, rope=nn.RotaryPositions(12, 1000), shrink_patches=shrink).double()
    x = scene((40, 30), 24)
    x = x.with_features(x.features.requires_grad_())
    order = ops.serial_codes(x.coords, "hilbert", depth=4).argsort()
    patch = torch.empty_like(order)
    patch[order] = torch.arange(70) // 10
    want = dense(net, x, patch[:, None] != patch[None], x.coords[:, 1:])
    y = net(x, ops.serialize(x.grid, "hilbert", depth=4)).features
    compared(y, want, [x.features, *net.parameters()])


def test_neighbourhoods_of_a_strided_plan():
    torch.manual_seed(0)
    rope, x = nn.RotaryPositions(6).double(), scene((40, 30), 12)
    plan = sc.ConvolutionPlan(x.grid, 3, stride=2, padding=1)
    q, k, v = (torch.randn(n, 2, 6).double().requires_grad_() for n in (len(plan.target), len(x.grid), len(x.grid)))
    fine, coarse = plan.source.coords[:, 1:], 2 * plan.target.coords[:, 1:]
    y = ops.neighborhood_attention(rope(q, coarse), rope(k, fine), v, plan)
    seen = torch.zeros(len(plan.target), len(x.grid), dtype=torch.bool)
    seen[plan.kernel_map.out_rows.long(), plan.kernel_map.in_rows.long()] = True
    logits = logits_of_differences(rope, q, k, fine[None] - coarse[:, None]) / 6**0.5
    want = torch.einsum("hij,jhc->ihc", logits.masked_fill(~seen, -torch.inf).softmax(2), v)
    compared(y, want, [q, k, v])


def test_derivatives_of_any_order():
    rope = nn.RotaryPositions(6).double()
    x, at = torch.randn(4, 2, 6).double().requires_grad_(), torch.randn(4, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(rope, (x, at), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(rope, (x, at))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("away", [0, 1 << 20])
def test_dtypes_autocast_and_the_same_bits(device, away):
    """Far from the origin too: an angle of a million needs more than fp32."""
    torch.manual_seed(0)
    net = nn.SerializedAttention(24, 2, 16, rope=nn.RotaryPositions(12)).to(device)
    x = scene((60, 30), 24, torch.float32).to(device)
    moved = sc.VoxelGrid(x.coords + torch.tensor([0, away, away, away], device=device), 2)
    want = net.double()(x.double()).features
    net.float()
    y = net(sc.SparseTensor(moved, x.features), ops.serialize(x.grid)).features
    assert error(y, want) < TOLERANCE[torch.float32]
    results = []
    for _ in range(2):
        net.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            y = net(sc.SparseTensor(moved, x.features), ops.serialize(x.grid)).features
        y.sum().backward()
        results.append([y, *(p.grad.clone() for p in net.parameters())])
    assert y.dtype == torch.bfloat16
    assert error(y, want) < 3 * TOLERANCE[torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halved_networks_keep_their_frequencies(dtype):
    torch.manual_seed(0)
    rope, x, at = nn.RotaryPositions(12), torch.randn(9, 2, 12).to(dtype), torch.randint(0, 900, (9, 3))
    want = rope.double()(x.double(), at)
    assert error(nn.RotaryPositions(12).to(dtype)(x, at), want) < TOLERANCE[dtype]


def test_stretching_is_of_training():
    torch.manual_seed(0)
    rope = nn.RotaryPositions(12, jitter=1.2, rescale=1.3).double()
    x, at = torch.randn(9, 2, 12).double(), torch.rand(9, 3).double()
    plain = nn.RotaryPositions(12).double()
    torch.manual_seed(1)
    drawn = [torch.empty(n).double().uniform_(-math.log(m), math.log(m)).exp() for n, m in ((3, 1.2), (1, 1.3))]
    torch.manual_seed(1)
    assert error(rope(x, at), plain(x, at * drawn[0] * drawn[1])) < 1e-13
    assert torch.equal(rope.eval()(x, at), plain(x, at))


def test_grids_of_fixed_size():
    torch.manual_seed(0)
    net = nn.SerializedAttention(24, 2, 16, rope=nn.RotaryPositions(12)).double()
    x = scene((60, 30), 24)
    padded = torch.cat([x.coords, torch.full((20, 4), -1, dtype=torch.int32)])
    fixed = sc.geometry.FixedGrid(padded, torch.tensor([90], dtype=torch.int32), x.grid)
    rows = torch.cat([x.features, torch.full((20, 24), torch.nan).double()])
    assert error(net(sc.SparseTensor(fixed, rows)).features[:90], net(x).features) < 1e-13


def test_no_voxel_names_and_errors():
    rope = nn.RotaryPositions(12)
    net = nn.SerializedAttention(24, 2, rope=rope)
    assert {name for name in net.state_dict() if "rope" in name} == {"rope.inv_freq"}
    for layer in (net, nn.WindowAttention(24, 2, rope=rope)):
        empty = sc.SparseTensor(sc.VoxelGrid(torch.zeros(0, 4).int(), 2), torch.zeros(0, 24))
        assert layer(empty).features.shape == (0, 24)
    x = scene((23, 40), 24, torch.float32)
    with pytest.raises(ValueError, match=r"rope turns 12"):
        nn.SerializedAttention(24, 4, rope=rope)
    with pytest.raises(ValueError, match="the layer has none"):
        nn.SerializedAttention(24, 2)(x, positions=x.coords[:, 1:])
    with pytest.raises(ValueError, match=r"positions \(N, 3\)"):
        net(x, positions=x.coords)
    with pytest.raises(ValueError, match="one row per position"):
        net(x, positions=x.coords[:5, 1:])
    with pytest.raises(ValueError, match="multiple of 6 channels; got 16"):
        nn.RotaryPositions(16)
    with pytest.raises(ValueError, match="base must be above 0"):
        nn.RotaryPositions(12, 0.0)
    with pytest.raises(ValueError, match="jitter must be at least 1"):
        nn.RotaryPositions(12, jitter=0.5)
