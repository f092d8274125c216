"""Codes along several curves in one launch; torch takes some 700 operations for those of a point transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.table import aligned
from sparseconv.gpu.launcher import Launcher, ceil_div, constant, pointer

BLOCK = 256
#: the largest code, of rows that no scene has
LAST = constant((1 << 63) - 1)


def codes(
    coords: torch.Tensor, orders: Sequence[str], depth: int | torch.Tensor, signed: bool | torch.Tensor
) -> torch.Tensor:
    """(M, N) int64: `sparseconv.ops.serial_codes` of coords (N, 1+D) int32 that fit, for each of M curves.

    ``depth`` and ``signed`` are of the CPU, or () on the device.
    """
    rows, rank = coords.shape[0], coords.shape[1] - 1
    found = torch.empty(len(orders), rows, dtype=torch.int64, device=coords.device)
    if not rows:
        return found
    is_known, told = isinstance(depth, int), found
    if not is_known:
        told = torch.stack([torch.as_tensor(value, device=coords.device).long() for value in (depth, signed)])
    host = (depth, int(signed)) if is_known else (0, 0)
    kinds = sum(
        (order.startswith("hilbert") + 2 * order.endswith("-trans")) << 2 * at for at, order in enumerate(orders)
    )
    coords = aligned(coords)
    args = (*map(pointer, (coords, told, found)), rows, *host, kinds)
    CODES(coords.device, (ceil_div(rows, BLOCK), len(orders)), args, (rank, is_known, BLOCK))
    return found


@triton.jit
def turn(axis, first, level, below):
    """An axis and the first one, below this level: the first mirrored where the axis has its bit, else both exchanged.

    Of the first axis itself the results are its own in both places.
    """
    on = (axis >> level) & 1
    exchanged = (first ^ axis) & (on - 1) & below
    return axis ^ exchanged, first ^ (-on & below | exchanged)


@triton.jit
def codes_kernel(
    coords_ptr, told_ptr, codes_ptr, rows, depth, signed, kinds,
    RANK: tl.constexpr, IS_KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """codes[curve, row], two bits of ``kinds`` a curve: 1 Hilbert's, 2 the first two axes exchanged."""
    if not IS_KNOWN:
        depth = tl.load(told_ptr).to(tl.int32)
        signed = tl.load(told_ptr + 1).to(tl.int32)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    kind = kinds >> 2 * tl.program_id(1)
    hilbert, exchanged = kind & 1, (kind >> 1) & 1
    one = tl.full((BLOCK,), 1, tl.int64)
    half = ((one << depth) >> 1) * signed
    at = coords_ptr + row * (RANK + 1)
    item = tl.load(at, mask=live, other=0).to(tl.int64)
    x0 = tl.load(at + 1 + (exchanged if RANK > 1 else 0), mask=live, other=0).to(tl.int64) + half
    x1, x2, x3 = x0, x0, x0
    if RANK > 1:
        x1 = tl.load(at + 2 - exchanged, mask=live, other=0).to(tl.int64) + half
    if RANK > 2:
        x2 = tl.load(at + 3, mask=live, other=0).to(tl.int64) + half
    if RANK > 3:
        x3 = tl.load(at + 4, mask=live, other=0).to(tl.int64) + half
    for step in range(1, depth * hilbert):
        level = depth - step
        below = (one << level) - 1
        x0 ^= -((x0 >> level) & 1) & below
        if RANK > 1:
            x1, x0 = turn(x1, x0, level, below)
        if RANK > 2:
            x2, x0 = turn(x2, x0, level, below)
        if RANK > 3:
            x3, x0 = turn(x3, x0, level, below)
    code = tl.zeros((BLOCK,), tl.int64)
    for bit in range(depth):
        place = bit * RANK
        code |= ((x0 >> bit) & 1) << (place + RANK - 1)
        if RANK > 1:
            code |= ((x1 >> bit) & 1) << (place + RANK - 2)
        if RANK > 2:
            code |= ((x2 >> bit) & 1) << (place + RANK - 3)
        if RANK > 3:
            code |= ((x3 >> bit) & 1) << place
    number = code ^ (code >> 1)  # a Gray code -> the number whose code it is
    number ^= number >> 2
    number ^= number >> 4
    number ^= number >> 8
    number ^= number >> 16
    number ^= number >> 32
    code = tl.where(hilbert != 0, number, code) | (item << (depth * RANK))
    tl.store(codes_ptr + tl.program_id(1).to(tl.int64) * rows + row, tl.where(item < 0, LAST, code), mask=live)


CODES = Launcher(codes_kernel, (torch.int32, torch.int64, torch.int64, int, int, int, int))
