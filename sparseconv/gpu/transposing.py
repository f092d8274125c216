"""A matrix transposed and cast in one launch: torch's own copy of that reads or writes one number at a time."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparseconv.gpu.launcher import Launcher, ceil_div, pointer

#: rows and columns of a tile
TILE = 64


@triton.jit
def transpose_kernel(from_ptr, into_ptr, rows, columns, BLOCK: tl.constexpr):
    """into (columns, rows) = from (rows, columns) transposed, in the dtype of into; rows and columns one by one."""
    row, column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(from_ptr + (row.to(tl.int64)[:, None] * columns + column[None, :]), inside, other=0.0)
    at = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(into_ptr + at, tl.trans(tile).to(into_ptr.dtype.element_ty), tl.trans(inside))


@cache
def _launcher(source: torch.dtype, into: torch.dtype) -> Launcher:
    return Launcher(transpose_kernel, (source, into, int, int))


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Whether `transpose` can read and write these: they begin at multiples of 16 bytes."""
    return not any(t.data_ptr() % 16 for t in tensors)


def transpose(source: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """``into`` (C, R) filled with ``source`` (R, C), in its own dtype.

    Both are contiguous and `is_aligned`, on one GPU.
    """
    rows, columns = source.shape
    if source.numel():
        grid = ceil_div(columns, TILE), ceil_div(rows, TILE)
        launch = _launcher(source.dtype, into.dtype)
        launch(source.device, grid, (pointer(source), pointer(into), rows, columns), (TILE,))
    return into
