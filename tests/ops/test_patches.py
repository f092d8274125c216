"""Patches against loops: who goes where, who sees whom, and attention by a dense mask in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseconv as sc
from sparseconv import ops
from sparseconv.ops import patches as module
from tests.cases import TOLERANCE, error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COUNTS = [(7, 3, 12), (4, 4), (1,), (0, 5, 0, 9, 0), (2, 1, 3), (0,), (), (16, 17)]


def by_hand(counts, size):
    """Patches as lists of places, and of those that count."""
    made, start = [], 0
    for n in counts:
        for first in range(0, n, size):
            own = list(range(first, min(n, first + size)))
            borrowed = [] if n < size else list(range(first + len(own) - size, first))
            made.append(([start + p for p in own], [start + p for p in borrowed]))
        start += n
    return made


def grid_of(counts, rank=3, seed=0):
    """Voxels of items in random order of rows."""
    gen = torch.Generator().manual_seed(seed)
    coords = [torch.cat([torch.full((n, 1), b), torch.randperm(64, generator=gen)[:n, None].expand(-1, rank)], 1)
              for b, n in enumerate(counts)]  # fmt: skip
    coords = torch.cat(coords) if coords else torch.zeros(0, rank + 1, dtype=torch.int64)
    return sc.VoxelGrid(coords[torch.randperm(len(coords), generator=gen)], max(1, len(counts)))


@pytest.mark.parametrize("size", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_slots_against_loops(counts, size):
    want = by_hand(counts, size)
    spare = 2 if sum(counts) else 0  # patches and rows that no item has
    total = sum(counts)
    layout = ops.Patches(torch.tensor(counts, dtype=torch.int32), size, len(want) + spare, total + spare)
    places, seen = layout.places.view(-1, size).tolist(), layout.seen.tolist()
    for (own, borrowed), shown, counted in zip(want, places, seen):
        order = own + borrowed if len(own) == size or not borrowed else own + sorted(borrowed)
        assert [p for p, s in zip(shown, counted) if s] == order
        assert all(own[0] <= p <= own[-1] for p, s in zip(shown, counted) if not s)
    assert all(all(row) for row in seen[len(want) :])
    assert [layout.places.tolist()[s] for s in layout.slots[:total].tolist()] == list(range(total))
    assert layout.slots[total:].tolist() == [0] * spare


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 100])
@pytest.mark.parametrize("counts", [*COUNTS, (3,) * 12], ids=str)
def test_patches_of_a_grid_are_those_of_its_counts(counts, size, shrink):
    grid = grid_of(counts)
    layout = ops.Patches.along(grid, size, shrink=shrink)
    want = ops.Patches(grid.batch_counts, layout.size, layout.num_patches, len(grid))
    assert torch.equal(layout.places, want.places)
    assert torch.equal(layout.slots, want.slots)
    assert bool(want.seen.all()) if layout.seen is None else torch.equal(layout.seen, want.seen)
    assert (layout.num_rows, layout.device) == (want.num_rows, want.device)


def dense(q, k, v, counts, size, scale, bias=None):
    """Attention of places, (N, H, C): a (N, N) matrix of how often a place is seen, 0 for never."""
    total = len(q)
    times = torch.zeros(total, total, dtype=torch.float64, device=q.device)
    for own, borrowed in by_hand(counts, size):
        for i in own:
            for j in own + borrowed:
                times[i, j] += 1
    logits = torch.einsum("ihc,jhc->hij", q, k) * scale
    if bias is not None:
        logits = logits + bias
    weights = logits.exp() * times
    return torch.einsum("hij,jhc->ihc", weights / weights.sum(2, keepdim=True), v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_attention_against_a_dense_mask(counts, dtype, device):
    grid = grid_of(counts).to(device)
    curves = ops.serialize(grid, ("hilbert", "z"))
    order, inverse = curves.order[0], curves.inverse[0]
    patches = ops.Patches.along(grid, 4)
    assert patches is ops.Patches.along(grid, 4)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(len(grid), 24, generator=gen).to(device, dtype).requires_grad_()

    def attention():
        q, k, v = patches.split(x, order).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        return patches.join(patches.attend(q, k, v, scale=0.7).transpose(1, 2).flatten(2), inverse)

    y = attention()
    assert y.dtype == dtype
    wide = x.detach().double().requires_grad_()
    parts = wide.index_select(0, order).view(-1, 3, 2, 4).unbind(1)
    want = dense(*parts, counts, 4, 0.7).flatten(1).index_select(0, inverse)
    assert error(y, want) < TOLERANCE[dtype] * (1 if dtype.itemsize > 2 else 3)
    weight = torch.randn(y.shape, generator=gen).to(device, dtype)
    (got,) = torch.autograd.grad(y, x, weight)
    (grad,) = torch.autograd.grad(want, wide, weight.double())
    assert error(got, grad) < TOLERANCE[dtype] * (1 if dtype.itemsize > 2 else 3)
    again = attention()
    assert torch.equal(again, y)
    assert torch.equal(torch.autograd.grad(again, x, weight)[0], got)


@pytest.mark.parametrize("counts", [(7, 3), (8, 5)])
def test_bias_and_derivatives_of_any_order(counts):
    grid = grid_of(counts)
    order, inverse = (kept[0] for kept in (ops.serialize(grid).order, ops.serialize(grid).inverse))
    patches = ops.Patches.along(grid, 4)
    x = torch.randn(len(grid), 6, dtype=torch.float64, requires_grad=True)
    shape = patches.num_patches, 1, 4, 4
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def attention(x, bias):
        q, k, v = patches.split(x, order).unflatten(2, (3, 1, 2)).permute(2, 0, 3, 1, 4).unbind()
        return patches.join(patches.attend(q, k, v, bias=bias)[:, 0], inverse)

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(attention, (x, bias))
        assert torch.autograd.gradgradcheck(attention, (x, bias))
    zero = torch.zeros(shape, dtype=torch.float64)
    torch.testing.assert_close(attention(x, zero), attention(x, None))


def test_shrunken_patches():
    grid = grid_of((9, 3, 0, 5))
    patches = ops.Patches.along(grid, 48, shrink=True)
    assert (patches.size, patches.num_patches, patches.seen) == (3, 6, None)
    assert ops.Patches.along(grid, 2, shrink=True).size == 2


def test_empty_slots_are_read_by_nobody():
    """A patch of one row, and rows of NaN in another item."""
    grid = sc.VoxelGrid(torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 1]]))
    patches = ops.Patches.along(grid, 8)
    x = torch.tensor([[2.0], [torch.nan], [torch.nan]], requires_grad=True)
    q = patches.split(x)[:, None]
    y = patches.join(patches.attend(q, q, q)[:, 0])
    y[0].sum().backward()
    assert y[0].item() == 2.0
    assert x.grad[0].item() == 1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lowered", [False, True], ids=["own dtype", "autocast"])
@pytest.mark.parametrize("size", [64, 61])
def test_empty_slots_take_no_memory_for_each_pair_of_slots(device, lowered, size):
    counts = torch.tensor([size - 20, 3 * size], device=device)
    patches = ops.Patches(counts, size, 4, int(counts.sum()))
    q, k, v = (torch.randn(4, 2, size, 8, device=device, requires_grad=True) for _ in range(3))
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast(device, torch.bfloat16, lowered):
        patches.attend(q, k, v)
    assert max(kept.values()) <= max(t.untyped_storage().nbytes() for t in (q, k, v))


def test_more_patches_than_a_call_takes(monkeypatch):
    grid = grid_of((30, 3))
    patches = ops.Patches.along(grid, 4)
    q, k, v = torch.randn(3, patches.num_patches, 2, 4, 8, dtype=torch.float64).unbind()
    want = patches.attend(q, k, v)
    monkeypatch.setattr(module, "PATCHES_A_CALL", 2)
    torch.testing.assert_close(patches.attend(q, k, v), want)


def test_grids_of_fixed_size():
    grid = grid_of((7, 3, 12))
    padded = torch.cat([grid.coords, torch.full((9, 4), -1, dtype=torch.int32)])
    fixed = sc.geometry.FixedGrid(padded, torch.tensor([len(grid)], dtype=torch.int32), grid)
    x = torch.randn(len(grid), 12)
    results = []
    for place, features in ((grid, x), (fixed, torch.cat([x, torch.full((9, 12), 3.0)]))):
        curves, patches = ops.serialize(place, "hilbert"), ops.Patches.along(place, 4)
        features = features.requires_grad_()
        q, k, v = patches.split(features, curves.order[0]).unflatten(2, (3, 1, 4)).permute(2, 0, 3, 1, 4).unbind()
        y = patches.join(patches.attend(q, k, v)[:, 0], curves.inverse[0])[: len(grid)]
        results.append((y, torch.autograd.grad(y.square().sum(), features)[0]))
    torch.testing.assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1][: len(grid)], results[0][1])
    assert not results[1][1][len(grid) :].any()
    with pytest.raises(ValueError, match="cannot shrink patches"):
        ops.Patches.along(fixed, 4, shrink=True)


def test_errors():
    patches = ops.Patches.along(grid_of((7, 3)), 4)
    with pytest.raises(ValueError, match=r"x must be \(10, C\)"):
        patches.split(torch.zeros(9, 4))
    with pytest.raises(ValueError, match="size must be at least 1"):
        ops.Patches.along(grid_of((7, 3)), 0)
    with pytest.raises(TypeError, match=r"counts must be a torch\.Tensor"):
        ops.Patches([3], 1, 3, 3)
    assert math.prod(patches.split(torch.zeros(10, 5)).shape) == 3 * 4 * 5
    with pytest.raises(TypeError, match="counts must be integers"):
        ops.Patches(torch.tensor([1.5, 2.0]), 2, 2, 4)
    more = torch.arange(11)  # of a grid with a voxel more, whose rows would be read without a word
    for call, words in (
        (lambda: patches.split(torch.zeros(10, 4), more), r"order must be \(10,\)"),
        (lambda: patches.rows(more), r"order must be \(10,\)"),
        (lambda: patches.join(torch.zeros(3, 4, 2), more), r"inverse must be \(10,\)"),
        (lambda: patches.join(torch.zeros(4, 4, 2)), r"y must be \(3, 4, C\)"),
        (lambda: patches.join(torch.zeros(4, 3, 2)), r"y must be \(3, 4, C\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
