"""The voxels that a window reaches from the rows of a grid, on the GPU: a hash table finds each once."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cells import claim
from sparseconv.geometry.triton_launch import Launcher, ceil_div, on_device, pointer

if TYPE_CHECKING:
    from sparseconv.geometry.ranges import IndexRange

Ints = tuple[int, ...]
INT32 = torch.iinfo(torch.int32)
#: from here on a number of cells is too large for the keys
TOO_MANY = 2**62


def reach(
    coords: torch.Tensor,
    extent: IndexRange,
    batch_size: int,
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: IndexRange | None,
    *,
    to_fine: bool,
    within: IndexRange | None = None,
) -> torch.Tensor | None:
    """Every voxel that the window joins with a row, in lexicographic order; waits once, for their number.

        to_fine: stride * row + offsets[k]          else: (row - offsets[k]) / stride, where that is whole

    Args:
        coords: (N, 1+D) int32 on a GPU, N > 0.
        extent: a box around the rows.
        batch_size: their batch items.
        torus: the torus of the result, where it lives on one.
        within: the box that results must lie in.

    Returns:
        (M, 1+D) int32; None where the box of possible results is too large for 64-bit keys or 32-bit coordinates.
    """
    axes = range(len(stride))
    low, high = [], []
    for axis in axes:
        first, last = min(o[axis] for o in offsets), max(o[axis] for o in offsets)
        start, end, step = extent.start[axis], extent.end[axis] - 1, stride[axis]
        if torus is not None:
            low.append(torus.start[axis])
            high.append(torus.end[axis] - 1)
        elif to_fine:
            low.append(step * start + first)
            high.append(step * end + last)
        else:
            low.append((start - last) // step)
            high.append((end - first) // step)
    sizes = [b - a + 1 for a, b in zip(low, high)]
    volume = batch_size * math.prod(sizes)
    if volume >= TOO_MANY or min(low) < INT32.min or max(high) >= INT32.max:
        return None
    boxes = within or torus
    data = [volume]
    for axis in axes:
        fold = (0, 0) if torus is None else (torus.start[axis], torus.shape[axis])
        box = (low[axis], high[axis] + 1) if boxes is None else (boxes.start[axis], boxes.end[axis])
        scale = (stride[axis], 1) if to_fine else (1, stride[axis])
        data += [low[axis], sizes[axis], *scale, *fold, *box]
    sign = 1 if to_fine else -1
    data += [sign * v for offset in offsets for v in offset]
    classes = Counter(tuple(o % s for o, s in zip(offset, stride)) for offset in offsets)
    each = len(offsets) if to_fine else max(classes.values())  # results of one row at most
    n, device = coords.shape[0], coords.device
    most = min(n * each, volume)
    capacity = most + most // 2 + 64
    if capacity >= 2**30:
        return None
    host = torch.tensor(data, dtype=torch.int64)
    window = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    table = torch.zeros(2 * capacity + 2, dtype=torch.int64, device=device)
    keys = torch.empty(most, dtype=torch.int64, device=device)
    rank = len(stride)
    with on_device(device):
        grid = (ceil_div(n, 128), len(offsets))
        args = (pointer(coords), pointer(window), pointer(table), pointer(keys), n, capacity)
        _REACH(device, grid, args, (rank, 128))
        count = int(table[-2])
        keys = torch.sort(keys[:count]).values
        reached = torch.empty(count, 1 + rank, dtype=torch.int32, device=device)
        if count:
            decoded = (pointer(keys), pointer(window), pointer(reached), count)
            _DECODE(device, (ceil_div(count, 256),), decoded, (rank, 256))
    return reached


# ---- kernels


@triton.jit
def reach_kernel(coords_ptr, window_ptr, table_ptr, keys_ptr, n, capacity, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Claim the keys of what BLOCK rows see through one tap, and append those that were not there before."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    key = tl.load(place, mask=live, other=0).to(tl.int64)
    volume = tl.load(window_ptr)
    offset_ptr = window_ptr + 1 + 8 * RANK + tl.program_id(1) * RANK
    for axis in tl.static_range(RANK):
        axis_ptr = window_ptr + 1 + 8 * axis
        value = tl.load(place + 1 + axis, mask=live, other=0).to(tl.int64) * tl.load(axis_ptr + 2)
        value = value + tl.load(offset_ptr + axis)
        divisor = tl.load(axis_ptr + 3)
        whole = value // divisor
        live = live & (whole * divisor == value)
        size = tl.load(axis_ptr + 5)
        start = tl.load(axis_ptr + 4)
        turned = (whole - start) % tl.maximum(size, 1)
        turned = start + tl.where(turned < 0, turned + size, turned)
        value = tl.where(size > 0, turned, whole)
        live = live & (value >= tl.load(axis_ptr + 6)) & (value < tl.load(axis_ptr + 7))
        key = key * tl.load(axis_ptr + 1) + (value - tl.load(axis_ptr))
    _slot, known = claim(table_ptr, key, live, capacity, volume)
    fresh = (live & ~known).to(tl.int64)
    total = tl.sum(fresh, 0)
    if total > 0:
        count_ptr = table_ptr + 2 * capacity.to(tl.int64)
        at = tl.atomic_add(count_ptr, total, sem="relaxed") + tl.cumsum(fresh, 0) - fresh
        tl.store(keys_ptr + at, key, mask=fresh > 0)


@triton.jit
def decode_kernel(keys_ptr, window_ptr, coords_ptr, n, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Keys back to coordinates."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    key = tl.load(keys_ptr + row, mask=live, other=0)
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    for back in tl.static_range(RANK):
        axis_ptr = window_ptr + 1 + 8 * (RANK - 1 - back)
        size = tl.load(axis_ptr + 1)
        tl.store(place + RANK - back, (key % size + tl.load(axis_ptr)).to(tl.int32), mask=live)
        key = key // size
    tl.store(place, key.to(tl.int32), mask=live)


_I32, _I64 = torch.int32, torch.int64
_REACH = Launcher(reach_kernel, (_I32, _I64, _I64, _I64, int, int), num_warps=1)
_DECODE = Launcher(decode_kernel, (_I64, _I64, _I32, int))
