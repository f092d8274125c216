"""FlexGEMM's operations against dense convolutions, curves written bit by bit and loops over points."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from sparseconv.interop import flex_gemm
from sparseconv.interop.flex_gemm.ops import grid_sample, spconv
from sparseconv.interop.flex_gemm.ops.grid_sample import GridSample3dFunction, grid_sample_3d, grid_sample_3d_torch
from sparseconv.interop.flex_gemm.ops.serialize import decode_seq, encode_seq
from sparseconv.interop.flex_gemm.ops.spconv import sparse_conv3d, sparse_submanifold_conv3d
from tests.forked import printed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES = (6, 7, 5)
SHAPE = torch.Size([2, 3, *EDGES])


@pytest.fixture(autouse=True)
def _defaults(monkeypatch):
    for name in ("ALGORITHM", "HASHMAP_RATIO", "SERIALIZATION_MODE"):
        monkeypatch.setattr(spconv, name, getattr(spconv, name))


def scene(device="cpu", seed=0):
    """Shuffled voxels and fp64 features."""
    gen = torch.Generator().manual_seed(seed)
    coords = (torch.rand(2, *EDGES, generator=gen) < 0.25).nonzero().int()
    coords = coords[torch.randperm(len(coords), generator=gen)]
    feats = torch.randn(len(coords), 3, generator=gen, dtype=torch.float64)
    return feats.to(device).requires_grad_(), coords.to(device)


def layer(kernel, device="cpu", seed=1):
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, *kernel, 3, generator=gen, dtype=torch.float64)
    bias = torch.randn(4, generator=gen, dtype=torch.float64)
    return weight.to(device).requires_grad_(), bias.to(device).requires_grad_()


def dense_conv(feats, coords, weight, bias, at, **window):
    """torch's convolution of the dense volume, read at voxels."""
    places = tuple(coords.long().t())
    volume = feats.new_zeros(2, *EDGES, 3).index_put(places, feats).permute(0, 4, 1, 2, 3)
    found = F.conv3d(volume, weight.permute(0, 4, 1, 2, 3), bias, **window)
    return found.permute(0, 2, 3, 4, 1)[tuple(at.long().t())]


def check_same(got, want, inputs):
    """Values, and gradients of every input."""
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    inputs = [t for t in inputs if t is not None]
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=got.dtype).to(got.device)
    for mine, theirs in zip(*(torch.autograd.grad(y, inputs, grad) for y in (got, want))):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("kernel", "dilation"), [((3, 3, 3), (1, 1, 1)), ((1, 5, 3), (1, 1, 2)), ((3, 3, 3), 2), ((1, 1, 1), (1, 1, 1))]
)
def test_submanifold(kernel, dilation, biased, device):
    feats, coords = scene(device)
    weight, bias = layer(kernel, device)
    bias = bias if biased else None
    got, cache = sparse_submanifold_conv3d(feats, coords, SHAPE, weight, bias, dilation=dilation)
    gap = (dilation,) * 3 if isinstance(dilation, int) else dilation
    padding = tuple(d * (k // 2) for d, k in zip(gap, kernel))
    want = dense_conv(feats, coords, weight, bias, coords, padding=padding, dilation=dilation)
    check_same(got, want, (feats, weight, bias))
    again, kept = sparse_submanifold_conv3d(feats, coords, SHAPE, weight, bias, cache, dilation)
    assert kept is cache
    assert torch.equal(again, got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["BXYZ", "Z_ORDER", "HILBERT"])
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        ((2, 2, 2), {"stride": (2, 2, 2)}),
        ((3, 3, 3), {"stride": (2, 2, 2), "padding": (1, 1, 1)}),
        ((3, 3, 3), {"padding": (2, 2, 2), "dilation": (2, 2, 2)}),
        ((1, 2, 3), {"stride": (1, 3, 2), "padding": (0, 1, 0)}),
    ],
)
def test_strided(kernel, window, mode, device):
    spconv.SERIALIZATION_MODE = getattr(spconv.SerializationMode, mode)
    feats, coords = scene(device)
    weight, bias = layer(kernel, device)
    got, out_coords, cache = sparse_conv3d(feats, coords, SHAPE, weight, bias, **window)
    places = tuple(coords.long().t())
    sites = torch.zeros(2, *EDGES, dtype=torch.float64, device=device).index_put(places, feats.new_ones(len(coords)))
    seen = F.conv3d(sites[:, None], torch.ones(1, 1, *kernel, dtype=torch.float64, device=device), **window)[:, 0]
    everywhere = seen.nonzero().int()
    rows = [tuple(row) for row in out_coords.tolist()]
    assert sorted(rows) == [tuple(row) for row in everywhere.tolist()]
    if mode == "BXYZ":
        assert rows == sorted(rows)
    else:
        depth = (max(*EDGES, *seen.shape[1:]) - 1).bit_length()
        names = {"Z_ORDER": "z_order", "HILBERT": "hilbert"}
        codes = encode_seq(out_coords, (2, 3, *(1 << depth,) * 3), names[mode])
        assert bool((codes.diff() > 0).all())
    check_same(got, dense_conv(feats, coords, weight, bias, out_coords, **window), (feats, weight, bias))
    given = everywhere[::3].flip(0)
    some, same, _ = sparse_conv3d(feats, coords, SHAPE, weight, bias, out_coords=given, **window)
    assert same is given
    check_same(some, dense_conv(feats, coords, weight, bias, given, **window), (feats, weight, bias))
    again = sparse_conv3d(feats, coords, SHAPE, weight, bias, cache, **window)
    assert torch.equal(again[0], got)
    assert torch.equal(again[1], out_coords)
    assert again[2] is cache


def test_derivatives_of_any_order():
    coords = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0], [0, 2, 1, 1]])
    feats = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 3, 1, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    shape = (1, 2, 3, 3, 3)
    calls = (
        lambda x, w, b: sparse_submanifold_conv3d(x, coords, shape, w, b)[0],
        lambda x, w, b: sparse_conv3d(x, coords, shape, w, b, stride=2, padding=1)[0],
    )
    for run in calls:
        assert torch.autograd.gradcheck(run, (feats, weight, bias))
        assert torch.autograd.gradgradcheck(run, (feats, weight, bias))
    points = torch.rand(1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2 + 0.2

    def sample(x, at):
        return grid_sample_3d(x, coords, shape, at)

    assert torch.autograd.gradcheck(sample, (feats, points.requires_grad_()))
    assert torch.autograd.gradgradcheck(sample, (feats, points))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_and_autocast(dtype):
    feats, coords = scene()
    weight, bias = layer((3, 3, 3))
    want, _ = sparse_submanifold_conv3d(feats, coords, SHAPE, weight, bias)
    size = float(want.detach().abs().max())
    low = [t.detach().to(dtype) for t in (feats, weight, bias)]
    got, _ = sparse_submanifold_conv3d(low[0], coords, SHAPE, low[1], low[2])
    assert got.dtype == dtype
    assert float((got.double() - want.detach()).abs().max()) < 4 * torch.finfo(dtype).eps * size
    points = torch.rand(2, 9, 3) * torch.tensor(EDGES)
    assert grid_sample_3d(low[0], coords, SHAPE, points).dtype == dtype
    if dtype != torch.float32:
        with torch.autocast("cpu", dtype):
            got, _ = sparse_submanifold_conv3d(feats.float(), coords, SHAPE, weight.float(), bias.float())
        assert got.dtype == dtype


def test_caches_have_the_tables():
    feats, coords = scene()
    rows = {tuple(c): i for i, c in enumerate(coords.tolist())}
    steps = list(itertools.product((-1, 0, 1), repeat=3))

    def table(starts, found, sign):
        lines = [[found.get((b, *(v + sign * s for v, s in zip(v, step))), 2**32 - 1) for step in steps]
                 for b, *v in starts.tolist()]  # fmt: skip
        return torch.tensor(lines)

    weight, _ = layer((3, 3, 3))
    _, cache = sparse_submanifold_conv3d(feats, coords, SHAPE, weight)
    assert cache["neighbor_map"].dtype == torch.uint32
    assert torch.equal(cache.neighbor_map.long(), table(coords, rows, 1))
    _, out_coords, strided = sparse_conv3d(feats, coords, SHAPE, weight, padding=1)
    outs = {tuple(c): i for i, c in enumerate(out_coords.tolist())}
    assert torch.equal(strided["neighbor_map"].long(), table(out_coords, rows, 1))
    assert torch.equal(strided["neighbor_map_bwd"].long(), table(coords, outs, -1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_serves_its_own_voxels_alone(mode, dtype):
    with mode():
        (feats, coords), (weight, bias) = scene(), layer((3, 3, 3))
        coords = coords.to(dtype)
        want, cache = sparse_submanifold_conv3d(feats, coords, SHAPE, weight, bias)
        for same in (coords, coords.clone(), coords.clone()):
            assert torch.equal(sparse_submanifold_conv3d(feats, same, SHAPE, weight, bias, cache)[0], want)
        with pytest.raises(ValueError, match="other voxels"):  # as many of them
            sparse_submanifold_conv3d(feats, coords.flip(0), SHAPE, weight, bias, cache)
        _, out_coords, strided = sparse_conv3d(feats, coords, SHAPE, weight, padding=1)
        sparse_conv3d(feats, coords, SHAPE, weight, None, strided, out_coords, padding=1)
        with pytest.raises(ValueError, match="out_coords"):
            sparse_conv3d(feats, coords, SHAPE, weight, None, strided, out_coords.flip(0), padding=1)
        coords[:] = coords.flip(0)
        for kept, convolve in ((cache, sparse_submanifold_conv3d), (strided, sparse_conv3d)):
            with pytest.raises(ValueError, match="other voxels"):
                convolve(feats, coords, SHAPE, weight, bias, kept, **({"padding": 1} if kept is strided else {}))


def test_the_steps_of_a_call():
    feats, coords = scene()
    weight, bias = layer((3, 3, 3))
    ones, twos = (1, 1, 1), (2, 2, 2)
    grad = torch.randn(len(coords), 4, dtype=torch.float64)
    own = spconv.SubMConv3dFunction
    cache = own._compute_neighbor_cache(coords, SHAPE, (3, 3, 3), ones, True)
    y = own._sparse_submanifold_conv_forward(feats, cache, weight, bias)
    assert torch.equal(y, own.apply(feats, coords, SHAPE, None, weight, bias, ones)[0])
    found = own._sparse_submanifold_conv_backward(grad, feats, cache, weight, bias)
    for mine, wanted in zip(found, torch.autograd.grad(y, (feats, weight, bias), grad)):
        assert torch.equal(mine, wanted)
    assert own._sparse_submanifold_conv_backward(grad, feats, cache, weight.detach(), None)[1:] == (None, None)
    own = spconv.SparseConv3dFunction
    out_coords = own._get_output_coords(coords, SHAPE, (3, 3, 3), twos, ones, ones)
    cache = own._compute_neighbor_cache(coords, out_coords, SHAPE, (3, 3, 3), twos, ones, ones, True)
    y = own._sparse_conv_forward(feats, cache, weight, bias)
    assert torch.equal(y, own.apply(feats, coords, SHAPE, None, weight, bias, None, twos, ones, ones)[0])
    got = own._sparse_conv_backward(torch.ones_like(y), feats, cache, weight, bias)
    assert torch.equal(got[2], torch.full((4,), float(len(y)), dtype=torch.float64))


def test_the_steps_of_a_call_by_the_names_of_their_arguments():
    feats, coords = scene()
    weight, bias = layer((3, 3, 3))
    ones = (1, 1, 1)
    cache = spconv.SubMConv3dFunction._compute_neighbor_cache(coords, SHAPE, (3, 3, 3), ones)
    named = {"feats": feats, "neighbor_cache": cache, "weight": weight, "bias": bias}
    y = spconv.SubMConv3dFunction._sparse_submanifold_conv_forward(**named)
    assert torch.equal(y, sparse_submanifold_conv3d(feats, coords, SHAPE, weight, bias)[0])
    out_coords = spconv.SparseConv3dFunction._get_output_coords(coords, SHAPE, (3, 3, 3), ones, ones, ones)
    given = coords, out_coords, SHAPE, (3, 3, 3), ones, ones, ones
    named["neighbor_cache"] = spconv.SparseConv3dFunction._compute_neighbor_cache(*given)
    y = spconv.SparseConv3dFunction._sparse_conv_forward(**named)
    assert torch.equal(y, sparse_conv3d(feats, coords, SHAPE, weight, bias, padding=1)[0])


def test_a_window_larger_than_the_shape_reaches_no_voxel():
    coords = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.int32)
    feats, (weight, bias) = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), layer((2, 2, 2))
    weight = weight[..., :3]
    y, out_coords, cache = sparse_conv3d(feats, coords, (2, 3, 1, 1, 1), weight, bias, stride=2)
    assert y.shape == (0, 4)
    assert out_coords.shape == (0, 4)
    assert out_coords.dtype == torch.int32
    assert cache.neighbor_map.shape == (0, 8)
    assert cache.neighbor_map_bwd.shape == (2, 8)
    y.sum().backward()
    assert feats.grad is not None
    assert not feats.grad.any()


# ---- codes


def walk(mode, depth):
    """All voxels of a cube in the order of a curve: from numbers to voxels, in lists of bits."""
    cells = []
    for number in range(8**depth):
        code = number ^ number >> 1 if mode == "hilbert" else number
        bits = f"{code:0{3 * depth}b}" if depth else ""
        axes = [[int(b) for b in bits[axis::3]] for axis in range(3)]
        for level in reversed(range(depth)) if mode == "hilbert" else ():
            for axis in (2, 1, 0):
                for below in range(level + 1, depth):
                    if axes[axis][level]:
                        axes[0][below] ^= 1
                    else:
                        axes[0][below], axes[axis][below] = axes[axis][below], axes[0][below]
        cells.append([int("".join(map(str, axis)) or "0", 2) for axis in axes])
    return torch.tensor(cells).view(-1, 3).int()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["z_order", "hilbert"])
def test_codes_are_places_along_the_curve(mode, depth, device):
    cells = walk(mode, depth)
    coords = torch.cat([F.pad(cells, (1, 0), value=item) for item in range(3)]).to(device)
    shape = (3, 7, 1 << depth, 1, (1 << depth) - (depth > 1))  # the longest axis counts
    codes = encode_seq(coords, shape, mode)
    assert codes.dtype == torch.int32
    assert codes.tolist() == list(range(3 * len(cells)))
    assert torch.equal(decode_seq(codes, shape, mode), coords)


@pytest.mark.parametrize("mode", ["z_order", "hilbert"])
@pytest.mark.parametrize(
    ("items", "edge", "dtype"),
    [(4, 1024, torch.int32), (5, 1024, torch.int64), (5, 2048, torch.int64), (2, 1 << 21, torch.int64)],
)
def test_codes_of_many_bits(mode, items, edge, dtype):
    coords = torch.randint(0, edge, (500, 4), generator=torch.Generator().manual_seed(0)).int()
    coords[:, 0] %= items
    coords[0], coords[1] = torch.tensor([items - 1, *[edge - 1] * 3]), torch.tensor([items - 1, 0, 0, 0])
    codes = encode_seq(coords, (items, 1, edge, edge, edge), mode)
    assert codes.dtype == dtype
    assert torch.equal(decode_seq(codes, (items, 1, edge, edge, edge), mode), coords)
    depth = (edge - 1).bit_length()
    word = 2**32 if dtype == torch.int32 else 2**64
    for code, (item, *axes) in zip(codes[:50].tolist(), coords.tolist()):
        assert code % word >> 3 * depth == item
        if mode == "z_order":
            spread = "".join(f"{x:0{depth}b}"[b] for b in range(depth) for x in axes)
            assert code % word & (1 << 3 * depth) - 1 == int(spread, 2)


# ---- points


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_grid_sample(mode, device, monkeypatch):
    feats, coords = scene(device)
    gen = torch.Generator().manual_seed(4)
    points = torch.rand(2, 150, 3, generator=gen, dtype=torch.float64) * (torch.tensor(EDGES) + 3) - 1.5
    points[0, 0] = torch.tensor([-0.25, 0.5, 0.5])
    points = points.to(device).requires_grad_()
    got = grid_sample_3d(feats, coords, SHAPE, points, mode)
    rows = {tuple(c): feats[i] for i, c in enumerate(coords.tolist())}
    lines = []
    for item, point in itertools.product(range(2), range(150)):
        at = points[item, point]
        if mode == "nearest":
            cell = tuple(int(v) for v in at.tolist())  # towards zero
            lines.append(rows.get((item, *cell), feats.new_zeros(3)))
            continue
        total, weights = feats.new_zeros(3), feats.new_zeros(())
        low = [int(v) for v in (at.detach() - 0.5).floor().tolist()]
        for step in itertools.product((0, 1), repeat=3):
            cell = [v + s for v, s in zip(low, step)]
            if (item, *cell) in rows:
                weight = torch.stack([1 - (at[a] - cell[a] - 0.5).abs() for a in range(3)]).prod()
                total, weights = total + weight * rows[(item, *cell)], weights + weight
        lines.append(total / weights if float(weights.detach()) else total)
    want = torch.stack(lines).view(2, 150, 3)
    assert int((want != 0).any(-1).sum()) > 25
    check_same(got, want, (feats, points) if mode == "trilinear" else (feats,))
    monkeypatch.setattr(grid_sample, "MOST_POINTS", 70)
    parts = grid_sample_3d(feats, coords, SHAPE, points, mode)
    again = grid_sample_3d(feats, coords, SHAPE, points[:, :70], mode)
    assert torch.allclose(parts, want, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), feats)[0] for y in (parts[:, :70], again)]
    assert torch.allclose(*grads)
    for same in (grid_sample_3d_torch, GridSample3dFunction.apply):
        assert torch.equal(same(feats, coords.double(), SHAPE, points, mode), parts)


# ---- what is empty, and what is wrong


def test_empty():
    none, coords = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, 4, dtype=torch.int32)
    weight = torch.ones(4, 3, 3, 3, 3, requires_grad=True)
    for y in (
        sparse_submanifold_conv3d(none, coords, SHAPE, weight)[0],
        sparse_conv3d(none, coords, SHAPE, weight, stride=2)[0],
    ):
        assert y.shape == (0, 4)
        y.sum().backward()
    assert weight.grad.eq(0).all()
    assert none.grad.shape == (0, 3)
    for mode in ("nearest", "trilinear"):
        assert grid_sample_3d(none, coords, SHAPE, torch.rand(2, 5, 3), mode).eq(0).all()
        assert grid_sample_3d(none, coords, SHAPE, torch.rand(2, 0, 3), mode).shape == (2, 0, 3)
    for mode in ("z_order", "hilbert"):
        assert decode_seq(encode_seq(coords, SHAPE, mode), SHAPE, mode).shape == (0, 4)


def _wrong():
    feats, coords = scene()
    weight, bias = layer((3, 3, 3))
    _, cache = sparse_submanifold_conv3d(feats, coords, SHAPE, weight)
    _, _, other = sparse_conv3d(feats, coords, SHAPE, weight)

    def subm(x=feats, c=coords, shape=SHAPE, w=weight, b=bias, kept=None, gap=1):
        return lambda: sparse_submanifold_conv3d(x, c, shape, w, b, kept, gap)

    def sample(x=feats, c=coords, shape=SHAPE, at=None, mode="trilinear"):
        return lambda: grid_sample_3d(x, c, shape, torch.rand(2, 4, 3) if at is None else at, mode)

    outside = coords + torch.tensor([0, 0, 3, 0], dtype=torch.int32)
    return [
        (subm(x=feats[1:]), ValueError, "a row for each voxel"),
        (subm(x=feats[:, :2]), ValueError, "2 channels"),
        (subm(c=coords[:, 1:]), ValueError, r"\(N, 4\)"),
        (subm(c=coords.float()), TypeError, "integers"),
        (subm(c=torch.cat([coords[:-1], coords[:1]])), ValueError, "same voxel"),
        (subm(c=outside), ValueError, "must lie within the shape"),
        (subm(shape=EDGES), ValueError, "shape must be"),
        (subm(shape=torch.Size([1, 3, *EDGES])), ValueError, "batch item"),
        (subm(w=weight[..., 0]), ValueError, "weight must be"),
        (subm(w=torch.ones(4, 2, 2, 2, 3, dtype=torch.float64)), ValueError, "odd"),
        (subm(w=weight.float()), TypeError, "cast one"),
        (subm(b=bias[:3]), ValueError, "bias"),
        (subm(kept=cache, gap=2), ValueError, "dilation"),
        (subm(kept=cache, w=torch.ones(4, 1, 1, 1, 3, dtype=torch.float64)), ValueError, "kernel_size"),
        (subm(kept=cache, x=feats[1:]), ValueError, "a row for each voxel"),
        (subm(kept=other), TypeError, "neighbor_cache"),
        (lambda: sparse_conv3d(feats, coords, SHAPE, weight, None, other, stride=2), ValueError, "stride"),
        (lambda: sparse_conv3d(feats, coords, SHAPE, weight, stride=0), ValueError, "stride"),
        (lambda: sparse_conv3d(feats, coords, SHAPE, weight, out_coords=coords + 9), ValueError, "batch"),
        (lambda: spconv.set_algorithm("fast"), ValueError, "algorithm"),
        (sample(mode="cubic"), ValueError, "mode"),
        (sample(at=torch.rand(4, 3)), ValueError, r"\(B, L, 3\)"),
        (sample(at=torch.rand(3, 4, 3)), ValueError, "at most 2"),
        (sample(at=torch.full((2, 4, 3), float("nan"))), ValueError, "finite"),
        (sample(shape=torch.Size([2, 9, *EDGES])), ValueError, "9 channels"),
        (lambda: encode_seq(outside, SHAPE), ValueError, "holds indices"),
        (lambda: encode_seq(coords, (1, 3, *EDGES)), ValueError, "batch items"),
        (lambda: encode_seq(coords, (1, 1, 1 << 22, 1, 1)), ValueError, "bits"),
        (lambda: encode_seq(coords, SHAPE, "peano"), ValueError, "mode"),
        (lambda: decode_seq(torch.zeros(3), SHAPE), TypeError, "code"),
    ]


def test_what_is_wrong_is_said():
    for call, kind, words in _wrong():
        with pytest.raises(kind, match=words):
            call()


def test_settings_are_kept():
    spconv.set_algorithm(spconv.Algorithm.EXPLICIT_GEMM)
    spconv.set_hashmap_ratio(3.0)
    assert (spconv.ALGORITHM, spconv.HASHMAP_RATIO) == ("explicit_gemm", 3.0)
    flex_gemm.utils.load_autotune_cache()
    assert flex_gemm.utils.get_autotune_cache() == {}


def test_install():
    code = """
import sys
from sparseconv.interop import flex_gemm as ours
ours.install()
import flex_gemm
import flex_gemm.ops.spconv
from flex_gemm.ops.spconv import sparse_submanifold_conv3d
from flex_gemm.ops.spconv.submanifold_conv3d import SubMConv3dFunction
from flex_gemm.ops.grid_sample import grid_sample_3d
from flex_gemm.ops.serialize import encode_seq
flex_gemm.ops.spconv.set_algorithm(flex_gemm.ops.spconv.Algorithm.IMPLICIT_GEMM)
assert flex_gemm is ours and sparse_submanifold_conv3d is ours.ops.spconv.sparse_submanifold_conv3d
ours.uninstall()
assert not [name for name in sys.modules if name.startswith("flex_gemm")]
"""
    printed("-c", code)


def test_a_trace_of_tensors_is_refused():
    coords, weight = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]), torch.ones(3, 3, 3, 3, 4)
    with pytest.raises(RuntimeError, match=r"use torch\.export"):
        torch.jit.trace(
            lambda x, c: sparse_submanifold_conv3d(x, c, (1, 4, 2, 2, 2), weight)[0], (torch.ones(2, 4), coords)
        )
