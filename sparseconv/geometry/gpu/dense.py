"""Rows of features to a dense array and back, channels first, in one launch each way; differentiable to any order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparseconv.autograd_function import Function
from sparseconv.geometry.gpu.reached import one_of
from sparseconv.gpu.launcher import Launcher, pointer

BLOCK_N, BLOCK_C = 64, 32


class Box(NamedTuple):
    """The cells of a dense array: items, the first cell and the number of cells along each axis."""

    items: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


def to_dense(features: torch.Tensor, coords: torch.Tensor, box: Box) -> torch.Tensor:
    """(N, C) at distinct coords (N, 1+D) int32 -> (B, C, *shape), zero elsewhere; rows outside of the box are left out.

    >>> box = Box(1, (0,), (3,))
    >>> to_dense(torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 1]], dtype=torch.int32), box).tolist()  # doctest: +SKIP
    [[[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]]
    """
    dense: torch.Tensor = _ToDense.apply(features, coords, box)
    return dense


def serves(features: torch.Tensor, coords: torch.Tensor) -> bool:
    """Whether the kernels take these."""
    return features.is_cuda and coords.dtype == torch.int32 and features.dtype in _LAUNCHERS and features.numel() > 0


class _ToDense(Function):
    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, coords: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.save_for_backward(coords)
        ctx.box = box
        dense = features.new_zeros((box.items, features.shape[1], *box.shape))
        _launch(features.contiguous(), coords, dense, box, gather=False)
        return dense

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (coords,) = ctx.saved_tensors
        return _ToRows.apply(grad, coords, ctx.box), None, None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, coords: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.save_for_backward(coords)
        ctx.box = box
        features = dense.new_empty((coords.shape[0], dense.shape[1]))
        _launch(features, coords, dense.contiguous(), box, gather=True)
        return features

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (coords,) = ctx.saved_tensors
        return _ToDense.apply(grad, coords, ctx.box), None, None


def _launch(features: torch.Tensor, coords: torch.Tensor, dense: torch.Tensor, box: Box, gather: bool) -> None:
    rows, channels = features.shape
    tensors = [t if t.data_ptr() % 16 == 0 and t.is_contiguous() else t.clone() for t in (features, coords, dense)]
    rank = len(box.shape)
    axes = [(*values, *(0,) * (4 - rank)) for values in (box.start, box.shape)]
    args = (*map(pointer, tensors), rows, channels, box.items, *axes[0], *axes[1])
    grid = (triton.cdiv(rows, BLOCK_N), triton.cdiv(channels, BLOCK_C))
    _LAUNCHERS[features.dtype](features.device, grid, args, (rank, gather, BLOCK_N, BLOCK_C))
    written = features if gather else dense
    if tensors[0 if gather else 2] is not written:
        written.copy_(tensors[0 if gather else 2])


@triton.jit
def dense_kernel(
    feats_ptr,
    coords_ptr,
    dense_ptr,
    rows,
    channels,
    items,
    start0,
    start1,
    start2,
    start3,
    size0,
    size1,
    size2,
    size3,
    RANK: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dense[item, c, cell] = feats[n, c] for each row n within the box; with GATHER the other way round, 0 outside."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = n < rows
    at = coords_ptr + n * (RANK + 1)
    item = tl.load(at, mask=live, other=-1).to(tl.int64)
    inside = live & (item >= 0) & (item < items)
    cell = tl.zeros((BLOCK_N,), dtype=tl.int64)
    cells = tl.full((), 1, dtype=tl.int64)
    for axis in tl.static_range(RANK):
        size = one_of(axis, size0, size1, size2, size3)
        place = tl.load(at + 1 + axis, mask=live, other=0).to(tl.int64) - one_of(axis, start0, start1, start2, start3)
        inside = inside & (place >= 0) & (place < size)
        cell = cell * size + place
        cells = cells * size
    there = (live[:, None]) & (c < channels)[None, :]
    met = inside[:, None] & (c < channels)[None, :]
    feats = feats_ptr + n[:, None] * channels + c[None, :]
    dense = dense_ptr + (item[:, None] * channels + c[None, :]) * cells + cell[:, None]
    if GATHER:
        tl.store(feats, tl.load(dense, mask=met, other=0.0), mask=there)
    else:
        tl.store(dense, tl.load(feats, mask=there, other=0.0), mask=met)


_LAUNCHERS = {
    dtype: Launcher(dense_kernel, (dtype, torch.int32, dtype, *(int,) * 11))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
