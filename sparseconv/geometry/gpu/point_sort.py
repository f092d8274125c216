"""Points -> voxels on a GPU, in two launches and one wait: cells, their bounds, keys and order; then rows.

    in:  points (M, D), the edges of a voxel and the corner of voxel 0
    out: bounds of the cells and the number of voxels; then their coordinates, and the row of each point

The points 0.2, 2.5 and 0.7 on a line lie in the cells 0, 2 and 0. Their order is 0, 2, 1, in which voxels begin at the
places 0 and 2: the rows are (0, 1, 0). The host waits for the number of voxels, and then makes room for as many.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.cpu.sorted_table import KeySpace
from sparseconv.geometry.gpu.hash_table.hash_probe import axis_range
from sparseconv.geometry.gpu.hash_table.kernels import raise_ranges, report
from sparseconv.geometry.gpu.hash_table.table import aligned, bounds_of
from sparseconv.geometry.gpu.reached.kernels import place_of, store_place
from sparseconv.gpu.arena import Arena, Kinds
from sparseconv.gpu.cooperative import NUM_BARRIERS, barriers_of, leave, programs_at_once, wait_for_all
from sparseconv.gpu.launcher import RESIDENT, Launcher, ceil_div, constant, follow, pointer
from sparseconv.gpu.pinned import Report
from sparseconv.gpu.radix_sort.kernels import clear_lists, sort_together
from sparseconv.gpu.radix_sort.sort import (
    HELD,
    SUMMING,
    TOGETHER_WARPS,
    Passes,
    most_together,
    ticket_behind,
    together_constants,
)
from sparseconv.gpu.warp_asm import OPEN_TOGETHER, open_room

#: bits of a point's number in a line of the sort, of which there are fewer than `most_together`; the key has the others
ROW_BITS = 20
KEY_BITS = 63 - ROW_BITS
#: numbers that a program makes cells of at once; places of the order whose voxels are counted together, and such tiles
BLOCK, TILE, MOST_TILES = 1024, 1024, 1024
#: the arrays of a sort: keys, lines, order, voxels that begin in each tile, ranges of the cells, status
KEYS, LINES, ORDER, STARTS, RANGES, STATUS = range(6)
_I32, _I64 = torch.int32, torch.int64
_KINDS = Kinds((_I64, _I64, _I32, _I32, _I32, _I64))
Ints = tuple[int, ...]


class SortedPoints:
    """Points in the order of their cells: bounds of batch items and cells, inclusive, and the number of voxels."""

    def __init__(self, arena: Arena, rows: torch.Tensor, num_voxels: int, low: Ints, high: Ints) -> None:
        self.low, self.high, self.num_voxels = low, high, num_voxels
        self._arena, self._rows = arena, rows

    def merge(self, space: KeySpace) -> tuple[torch.Tensor, torch.Tensor]:
        """Voxels (N, 1+D) int32 in lexicographic order, and the row of each point (M,) int64; within the bounds."""
        rows, arena, rank = self._rows, self._arena, len(self.low) - 1
        coords = torch.empty(self.num_voxels, rank + 1, dtype=torch.int32, device=rows.device)
        n, rest = len(rows), 4 - rank
        box = (*(0,) * rest, *space.low[1:], *(1,) * rest, *space.size[1:])
        args = (arena[KEYS], arena[ORDER], arena[STARTS], pointer(coords), pointer(rows), n, *box)
        WRITE(rows.device, (ceil_div(n, TILE),), args, (rank,))
        return coords, rows


def sort_points(
    points: torch.Tensor, batch: torch.Tensor | None, size: tuple[float, ...], corner: tuple[float, ...]
) -> SortedPoints | None:
    """Put points (M, D), M > 0, in the order of floor((p - corner) / size) within batch items (M,) of any integers.

    Waits once, for bounds and number of voxels. None for points that are too many or no numbers, for cells, batch items
    or keys that are too large, and for narrower dtypes.
    """
    (n, rank), device = points.shape, points.device
    programs = programs_at_once(device, max(ceil_div(n, 32 * TOGETHER_WARPS), SUMMING))
    if n > most_together(programs) or points.dtype not in SORT:
        return None
    points, batch = aligned(points), None if batch is None else aligned(batch.long())
    passes = Passes(n, KEY_BITS, programs, together=True)
    lengths = (n, passes.words, ticket_behind(n) + 1, ceil_div(n, TILE), 16, 2)
    arena, answer = Arena(device, _KINDS, lengths), Report(4 + 2 * rank, device)
    args = (
        pointer(points), arena[KEYS] if batch is None else pointer(batch), *arena, barriers_of(device), answer.pointer,
        n, passes.share, programs, *_halves(size, corner),
    )  # fmt: skip
    SORT[points.dtype](device, (programs,), args, (rank, batch is not None))
    rows = torch.empty(n, dtype=torch.int64, device=device)  # while the card is at work
    found, unfit, *encoded = answer.read()
    return None if unfit else SortedPoints(arena, rows, found & 0xFFFFFFFF, *bounds_of(encoded))


@lru_cache(maxsize=64)
def _halves(size: tuple[float, ...], corner: tuple[float, ...]) -> Ints:
    """Edges and corners of four axes, each number as the two integers that launches take."""
    rest = 4 - len(size)
    return struct.unpack("<16i", struct.pack("<8d", *size, *(1.0,) * rest, *corner, *(0.0,) * rest))


# ---- kernels


PASSES, BITS, _ = map(constant, together_constants(KEY_BITS, True))
ROWS_BELOW, MOST_CELLS = constant(ROW_BITS), constant(float(1 << KEY_BITS))
NUMBERS, PLACES, TILES = constant(BLOCK), constant(TILE), constant(MOST_TILES)
BARRIERS, WARPS, HOLDS = constant(NUM_BARRIERS), constant(TOGETHER_WARPS), constant(HELD)


@triton.jit
def sort_points_kernel(
    points_ptr, batch_ptr, keys_ptr, lines_ptr, order_ptr, starts_ptr, ranges_ptr, status_ptr, barriers_ptr, report_ptr,
    n, share, programs,
    size0, size0_high, size1, size1_high, size2, size2_high, size3, size3_high,
    corner0, corner0_high, corner1, corner1_high, corner2, corner2_high, corner3, corner3_high,
    RANK: tl.constexpr, BATCHED: tl.constexpr,
):  # fmt: skip
    """Ranges of the cells, keys of the points, their order, voxels in each tile of it; programs wait for each other.

    The first word of the status counts voxels, and programs above them. The second one is not 0 where points have no
    cells or keys: then nothing is sorted. The last program reports both, and the ranges.
    """
    WIDTH: tl.constexpr = 2 if RANK == 1 else 4 if RANK <= 3 else 8
    EACH: tl.constexpr = NUMBERS // WIDTH
    column = tl.arange(0, WIDTH)
    size = by_axis(column, size0, size0_high, size1, size1_high, size2, size2_high, size3, size3_high)
    corner = by_axis(column, corner0, corner0_high, corner1, corner1_high, corner2, corner2_high, corner3, corner3_high)
    program = tl.program_id(0)
    end = tl.minimum((program + 1) * share, n)
    open_room(OPEN_TOGETHER)
    clear_lists(lines_ptr, n, share, programs, BITS)
    if program == 0:
        tl.store(ranges_ptr + tl.arange(0, 16), tl.zeros((16,), tl.int32))
        tl.store(status_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    tops = tl.zeros((EACH, WIDTH), tl.uint32)
    bottoms = tl.zeros((EACH, WIDTH), tl.uint32)
    wrong = tl.zeros((EACH, WIDTH), tl.int32)
    for first in range(program * share, end, EACH):
        row = first + tl.arange(0, EACH)
        cell, fits = cells_of(row, end, points_ptr, batch_ptr, column, size, corner, RANK, BATCHED)
        live = (row < end)[:, None] & (column <= RANK)[None, :]
        biased = cell.to(tl.uint32, bitcast=True) ^ 0x80000000
        tops = tl.maximum(tops, tl.where(live, biased, 0))
        bottoms = tl.maximum(bottoms, tl.where(live, ~biased, 0))
        wrong |= (live & ~fits).to(tl.int32)
    wait_for_all(barriers_ptr, programs)
    raise_ranges(ranges_ptr, tl.max(tops, 0), tl.max(bottoms, 0), RANK + 1, WIDTH)
    if tl.max(tl.max(wrong, 1), 0) > 0:
        tl.store(status_ptr + 1, 1)
    wait_for_all(barriers_ptr + 1, programs)
    fits, volume, low, scale = key_space(ranges_ptr, column, RANK)
    passes = 1
    for turn in tl.static_range(1, PASSES):
        passes += ((volume - 1) >> (turn * BITS) > 0).to(tl.int32)
    passes = tl.where(fits & (tl.load(status_ptr + 1) == 0), passes, 0)
    count = tl.zeros((), tl.int32)
    if passes > 0:
        for first in range(program * share, end, EACH):
            row = first + tl.arange(0, EACH)
            cell, _fits = cells_of(row, end, points_ptr, batch_ptr, column, size, corner, RANK, BATCHED)
            key = tl.sum((cell.to(tl.int64) - low[None, :]) * scale[None, :], 1)
            tl.store(keys_ptr + row, key, mask=row < end)
        tl.debug_barrier()
        sort_together(
            program, programs, keys_ptr, lines_ptr, order_ptr, barriers_ptr + 2, n, share, passes,
            BITS, WARPS, HOLDS, ROWS_BELOW,
        )  # fmt: skip
        wait_for_all(barriers_ptr + 1 + PASSES, programs)
        for tile in range(program, (n + PLACES - 1) // PLACES, programs):
            _row, _key, begins = voxels_of(tile, order_ptr, keys_ptr, n)
            here = tl.sum(begins, 0)
            tl.store(starts_ptr + tile, here)
            count += here
    before = tl.atomic_add(status_ptr, count.to(tl.int64) + 0x100000000, sem="acq_rel")
    if before >> 32 == programs - 1:
        tl.store(status_ptr + 1, (passes == 0).to(tl.int64))
        report(report_ptr, status_ptr, ranges_ptr, RANK + 1, WIDTH)
    leave(barriers_ptr, programs, BARRIERS)


@triton.jit
def by_axis(column, first, first_high, second, second_high, third, third_high, fourth, fourth_high):
    """The number of each axis, in two halves, at its column."""
    low = tl.where(column == 1, first, tl.where(column == 2, second, tl.where(column == 3, third, fourth)))
    high = tl.where(
        column == 1, first_high, tl.where(column == 2, second_high, tl.where(column == 3, third_high, fourth_high))
    )
    return ((high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def cells_of(row, end, points_ptr, batch_ptr, column, size, corner, RANK: tl.constexpr, BATCHED: tl.constexpr):
    """Batch items and cells of rows before an end, and which of these are numbers within 32 bits, the last left out."""
    is_axis = ((column > 0) & (column <= RANK))[None, :]
    at = row.to(tl.int64)[:, None] * RANK + (column - 1)[None, :]
    point = tl.load(points_ptr + at, mask=(row < end)[:, None] & is_axis, other=0).to(tl.float64)
    value = tl.where(is_axis, tl.floor((point - corner[None, :]) / size[None, :]), 0.0)
    fits = tl.abs(value) + 1.0 < 2147483648.0  # Triton 3.6 rounds constants to 24 bits
    cell = tl.where(fits, value, 0.0).to(tl.int32)
    if BATCHED:
        item = tl.load(batch_ptr + row, mask=row < end, other=0)[:, None]
        fits = fits & (is_axis | ((item >= 0) & (item < 2147483647)))
        cell = tl.where((column == 0)[None, :], item.to(tl.int32), cell)
    return cell, fits


@triton.jit
def key_space(ranges_ptr, column, RANK: tl.constexpr):
    """Whether cells have keys, how many keys there are, and of each column the lowest value and its scale in a key.

    The batch begins at 0.
    """
    count = tl.full((), 1.0, tl.float64)
    volume = tl.full((), 1, tl.int64)
    fits = count > 0
    lows = tl.zeros_like(column).to(tl.int64)
    scale = lows
    for back in tl.static_range(RANK + 1):
        axis = RANK - back
        low, extent = axis_range(ranges_ptr, axis)
        if axis == 0:
            extent += low
            low = low & 0
        lows = tl.where(column == axis, low, lows)
        scale = tl.where(column == axis, volume, scale)
        fits = fits & (extent <= 2147483647)
        count *= extent.to(tl.float64)
        volume *= extent
    return fits & (count < MOST_CELLS), volume, lows, scale


@triton.jit
def voxels_of(tile, order_ptr, keys_ptr, n):
    """Points at the places of a tile of the order, their keys, and 1 where a voxel begins."""
    at = tile * PLACES + tl.arange(0, PLACES)
    row = tl.load(order_ptr + at, mask=at < n, other=0)
    key = tl.load(keys_ptr + row, mask=at < n, other=0)
    ahead = tl.load(order_ptr + at - 1, mask=(at > 0) & (at < n), other=0)
    other = tl.load(keys_ptr + ahead, mask=(at > 0) & (at < n), other=-1)
    return row, key, ((key != other) & (at < n)).to(tl.int32)


@triton.jit
def write_kernel(
    keys_ptr, order_ptr, starts_ptr, coords_ptr, rows_ptr, n, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr,
):  # fmt: skip
    """The voxels that begin in a tile of the order, and the row of each of its points."""
    follow()
    tile = tl.program_id(0)
    others = tl.arange(0, TILES)
    first = tl.sum(tl.load(starts_ptr + others, mask=others < tile, other=0), 0)
    point, key, begins = voxels_of(tile, order_ptr, keys_ptr, n)
    row = first + tl.cumsum(begins, 0) - 1
    live = tile * PLACES + tl.arange(0, PLACES) < n
    tl.store(rows_ptr + point, row.to(tl.int64), mask=live)
    batch, a, b, c, d = place_of(key, size0, size1, size2, size3)
    store_place(coords_ptr, row, begins > 0, batch, a, b, c, d, low0, low1, low2, low3, RANK)


SORT = {
    dtype: Launcher(
        sort_points_kernel,
        (dtype, _I64, *_KINDS, _I32, _I64, *(int,) * 19),
        resident=RESIDENT,
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
WRITE = Launcher(write_kernel, (_I64, _I32, _I32, _I32, _I64, *(int,) * 9))
