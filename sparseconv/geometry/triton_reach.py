"""The voxels that a window reaches from the rows of a grid, on the GPU: each once, in lexicographic order."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cells import below, claim, popcount
from sparseconv.geometry.triton_launch import (
    NUM_GATES,
    Arena,
    Launcher,
    Report,
    ceil_div,
    crew_of,
    gates_of,
    leave,
    on_device,
    pointer,
    wait_for_all,
)

if TYPE_CHECKING:
    from sparseconv.geometry.ranges import IndexRange

Ints = tuple[int, ...]
INT32 = torch.iinfo(torch.int32)
#: from here on a number of cells is too large for the keys
TOO_MANY = 2**62
#: up to this many cells a bit for each 64 of them (here 16 MB, and half of that for ranks) costs less than a sort
MOST_MARKED = 2**33
#: programs of a launch at most, whose sums one program adds up
MOST_PROGRAMS = 1024


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
    moves = _moves(offsets, stride, torus, within, to_fine, coords.device)
    low, high = moves.bounds(extent)
    sizes = tuple(b - a + 1 for a, b in zip(low, high))
    cells = batch_size * math.prod(sizes)
    if cells >= TOO_MANY or min(low) < INT32.min or max(high) >= INT32.max:
        return None
    most = min(coords.shape[0] * moves.each, cells)
    if most >= 2**29:
        return None
    four = (0,) * (4 - len(low))
    box = (*low, *four, *sizes, *four)
    with on_device(coords.device):
        return (_marked if cells <= MOST_MARKED else _claimed)(coords, moves, cells, most, box)


@dataclass(frozen=True, eq=False)
class _Moves:
    """What of a window does not depend on the rows: as the kernels read it, and how it moves a box.

    data = [factor, divisor, start of the torus, its size (0: none), box] of each axis, the offset of each tap
    """

    data: torch.Tensor  # int64 on the device
    taps: int
    each: int  # results of one row at most
    is_whole: bool  # results of a division must be whole; otherwise they are rounded down, and one tap tells all
    bounds_of: tuple[tuple[int, int, int], ...]  # (smallest offset, largest, stride) of each axis
    torus: IndexRange | None
    to_fine: bool

    def bounds(self, extent: IndexRange) -> tuple[list[int], list[int]]:
        """The lowest and the highest place on each axis that rows in ``extent`` may reach."""
        if self.torus is not None:
            return list(self.torus.start), [end - 1 for end in self.torus.end]
        places = list(zip(self.bounds_of, extent.start, extent.end))
        if self.to_fine:
            low = [s * start + first for (first, _, s), start, _ in places]
            return low, [s * (end - 1) + last for (_, last, s), _, end in places]
        low = [(start - last) // s for (_, last, s), start, _ in places]
        return low, [(end - 1 - first) // s for (first, _, s), _, end in places]


@lru_cache(maxsize=512)
def _moves(
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: IndexRange | None,
    within: IndexRange | None,
    to_fine: bool,
    device: torch.device,
) -> _Moves:
    axes = range(len(stride))
    first = [min(o[axis] for o in offsets) for axis in axes]
    last = [max(o[axis] for o in offsets) for axis in axes]
    classes = Counter(tuple(o % s for o, s in zip(offset, stride)) for offset in offsets)
    # windows side by side: each fine voxel lies in one, and rounding down tells in which
    tiles = set(itertools.product(*(range(a, a + s) for a, s in zip(first, stride))))
    is_tiling = not to_fine and len(offsets) == len(tiles) and set(offsets) == tiles
    sign, taps = (1, offsets) if to_fine else (-1, (tuple(first),) if is_tiling else offsets)
    box, data = within or torus, []
    for axis in axes:
        fold = (0, 0) if torus is None else (torus.start[axis], torus.shape[axis])
        inside = (INT32.min, INT32.max) if box is None else (box.start[axis], box.end[axis])
        data += [*((stride[axis], 1) if to_fine else (1, stride[axis])), *fold, *inside]
    data += [sign * v for offset in taps for v in offset]
    each = len(offsets) if to_fine else max(classes.values())
    bounds = tuple(zip(first, last, stride))
    host = torch.tensor(data, dtype=torch.int64)
    return _Moves(host.to(device), len(taps), each, not is_tiling, bounds, torus, to_fine)


def _marked(coords: torch.Tensor, moves: _Moves, cells: int, most: int, box: Ints) -> torch.Tensor:
    """One bit for each 64 cells, then a word for each of those that are not empty: ranks in order, without a sort."""
    (n, columns), device = coords.shape, coords.device
    lines, words = ceil_div(cells, 4096), min(most, ceil_div(cells, 64))
    programs = min(crew_of(device, max(ceil_div(n, 128), ceil_div(lines, 512))), MOST_PROGRAMS)
    i32, i64 = torch.int32, torch.int64
    arrays = [(i64, lines), (i32, lines), (i32, 2 * MOST_PROGRAMS), (i64, words), (i32, words), (i32, words)]
    arena, report = Arena(device, arrays), Report(2, device)
    bits, ranks, sums, found, places, starts = (arena[i] for i in range(6))
    args = (
        pointer(coords), pointer(moves.data), bits, ranks, sums, found, places, starts, gates_of(device),
        report.pointer, n, moves.taps, lines, programs, *box,
    )  # fmt: skip
    _MARK(device, (programs,), args, (columns - 1, moves.is_whole, 128, 512, MOST_PROGRAMS, NUM_GATES))
    report.sent()
    count, words = report.read()
    reached = torch.empty(count, columns, dtype=torch.int32, device=device)
    if count:
        _EMIT(
            device, (ceil_div(words, 128),), (found, places, starts, pointer(reached), words, *box), (columns - 1, 128)
        )
    return reached


def _claimed(coords: torch.Tensor, moves: _Moves, cells: int, most: int, box: Ints) -> torch.Tensor:
    """A hash table that finds each key once, and a sort: for boxes too large for bits."""
    (n, columns), device = coords.shape, coords.device
    capacity = most + most // 2 + 64
    table = torch.zeros(2 * capacity + 2, dtype=torch.int64, device=device)
    keys = torch.empty(most, dtype=torch.int64, device=device)
    args = (pointer(coords), pointer(moves.data), pointer(table), pointer(keys), n, capacity, *box)
    _CLAIM(device, (ceil_div(n, 128), moves.taps), args, (columns - 1, moves.is_whole, 128))
    count = int(table[-2])
    keys = torch.sort(keys[:count]).values
    reached = torch.empty(count, columns, dtype=torch.int32, device=device)
    if count:
        _DECODE(device, (ceil_div(count, 256),), (pointer(keys), pointer(reached), count, *box), (columns - 1, 256))
    return reached


# ---- kernels


@triton.jit
def one_of(axis: tl.constexpr, first, second, third, fourth):
    """A number of one axis, int64."""
    if axis == 0:
        return first.to(tl.int64)
    elif axis == 1:
        return second.to(tl.int64)
    elif axis == 2:
        return third.to(tl.int64)
    else:
        return fourth.to(tl.int64)


@triton.jit
def keys_of(
    row, tap, coords_ptr, window_ptr, n, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys of what rows see through a tap, and which of them are real."""
    live = row < n
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    key = tl.load(place, mask=live, other=0).to(tl.int64)
    offset_ptr = window_ptr + 6 * RANK + tap * RANK
    for axis in tl.static_range(RANK):
        axis_ptr = window_ptr + 6 * axis
        value = tl.load(place + 1 + axis, mask=live, other=0).to(tl.int64) * tl.load(axis_ptr)
        value = value + tl.load(offset_ptr + axis)
        divisor = tl.load(axis_ptr + 1)
        whole = value // divisor
        rest = value - whole * divisor
        if WHOLE:
            live = live & (rest == 0)
        else:
            whole = tl.where(rest < 0, whole - 1, whole)
        start = tl.load(axis_ptr + 2)
        size = tl.load(axis_ptr + 3)
        turned = (whole - start) % tl.maximum(size, 1)
        turned = start + tl.where(turned < 0, turned + size, turned)
        value = tl.where(size > 0, turned, whole)
        live = live & (value >= tl.load(axis_ptr + 4)) & (value < tl.load(axis_ptr + 5))
        low = one_of(axis, low0, low1, low2, low3)
        key = key * one_of(axis, size0, size1, size2, size3) + (value - low)
    return key, live


@triton.jit
def store_coords(
    coords_ptr, row, key, live, low0, low1, low2, low3, size0, size1, size2, size3, RANK: tl.constexpr
):  # fmt: skip
    """Keys back to coordinates, those of a key in a row."""
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    for back in tl.static_range(RANK):
        size = one_of(RANK - 1 - back, size0, size1, size2, size3)
        rest = key // size
        low = one_of(RANK - 1 - back, low0, low1, low2, low3)
        tl.store(place + RANK - back, (key - rest * size + low).to(tl.int32), mask=live)
        key = rest
    tl.store(place, key.to(tl.int32), mask=live)


@triton.jit
def mark_kernel(
    coords_ptr, window_ptr, bits_ptr, ranks_ptr, sums_ptr, words_ptr, places_ptr, starts_ptr, gates_ptr, report_ptr,
    n, num_taps, num_lines, programs, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, SUMS: tl.constexpr,
    NUM_GATES: tl.constexpr,
):  # fmt: skip
    """Which cells are reached, 64 a word, and how many before each word; all programs wait for each other in between.

    A line of 64 bits says which of 4096 cells' words are not empty; ranks count those before a line. The words that are
    not empty lie side by side: words their cells, places which they are, starts how many cells lie before. The report
    has the numbers of cells and of words.
    """
    program = tl.program_id(0)
    for first in range(program * SPAN, num_lines, programs * SPAN):
        line = first + tl.arange(0, SPAN)
        tl.store(bits_ptr + line, tl.zeros((SPAN,), tl.int64), mask=line < num_lines)
    wait_for_all(gates_ptr, programs)
    one = tl.full((BLOCK,), 1, tl.int64)
    for first in range(program * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        for tap in range(num_taps):
            key, live = keys_of(
                row, tap, coords_ptr, window_ptr, n, low0, low1, low2, low3, size0, size1, size2, size3, RANK, WHOLE
            )
            word = key >> 6
            tl.atomic_or(bits_ptr + (word >> 6), one << (word & 63), mask=live, sem="relaxed")
    wait_for_all(gates_ptr + 1, programs)
    num_words = add_up(bits_ptr, ranks_ptr, sums_ptr, gates_ptr + 2, num_lines, programs, SPAN, SUMS)
    for first in range(program * SPAN, num_words, programs * SPAN):
        slot = first + tl.arange(0, SPAN)
        tl.store(words_ptr + slot, tl.zeros((SPAN,), tl.int64), mask=slot < num_words)
    wait_for_all(gates_ptr + 3, programs)
    for first in range(program * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        for tap in range(num_taps):
            key, live = keys_of(
                row, tap, coords_ptr, window_ptr, n, low0, low1, low2, low3, size0, size1, size2, size3, RANK, WHOLE
            )
            word = key >> 6
            line = tl.load(bits_ptr + (word >> 6), mask=live, other=0)
            slot = tl.load(ranks_ptr + (word >> 6), mask=live, other=0) + popcount(line & below(word & 63))
            tl.atomic_or(words_ptr + slot, one << (key & 63), mask=live, sem="relaxed")
            tl.store(places_ptr + slot, word.to(tl.int32), mask=live)
    wait_for_all(gates_ptr + 4, programs)
    count = add_up(words_ptr, starts_ptr, sums_ptr + SUMS, gates_ptr + 5, num_words, programs, SPAN, SUMS)
    if program == 0:
        tl.store(report_ptr, count.to(tl.int64))
        tl.store(report_ptr + 1, num_words.to(tl.int64))
    leave(gates_ptr, programs, NUM_GATES)


@triton.jit
def add_up(words_ptr, before_ptr, sums_ptr, gate_ptr, length, programs, SPAN: tl.constexpr, SUMS: tl.constexpr):
    """before[i] = bits set in the words before the i-th; returns those of all words. Every program sums a run."""
    each = (length + programs - 1) // programs
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, length)
    total = tl.zeros((), tl.int32)
    for start in range(begin, end, SPAN):
        at = start + tl.arange(0, SPAN)
        total += tl.sum(popcount(tl.load(words_ptr + at, mask=at < end, other=0)), 0)
    tl.store(sums_ptr + tl.program_id(0), total)
    wait_for_all(gate_ptr, programs)
    lane = tl.arange(0, SUMS)
    sums = tl.load(sums_ptr + lane, mask=lane < programs, other=0)
    base = tl.sum(tl.where(lane < tl.program_id(0), sums, 0), 0)
    for start in range(begin, end, SPAN):
        at = start + tl.arange(0, SPAN)
        count = popcount(tl.load(words_ptr + at, mask=at < end, other=0))
        tl.store(before_ptr + at, base + tl.cumsum(count, 0) - count, mask=at < end)
        base += tl.sum(count, 0)
    return tl.sum(sums, 0)


@triton.jit
def emit_kernel(
    words_ptr, places_ptr, starts_ptr, coords_ptr, num_words, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The coordinates of the cells of BLOCK words, one cell of each at a time."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = slot < num_words
    word = tl.load(words_ptr + slot, mask=real, other=0)
    row = tl.load(starts_ptr + slot, mask=real, other=0)
    key = tl.load(places_ptr + slot, mask=real, other=0).to(tl.int64) << 6
    while tl.max((word != 0).to(tl.int32), 0) > 0:
        bit = popcount((word & -word) - 1)
        store_coords(
            coords_ptr, row, key + bit, word != 0, low0, low1, low2, low3, size0, size1, size2, size3, RANK
        )  # fmt: skip
        row += 1
        word = word & (word - 1)


@triton.jit
def claim_kernel(
    coords_ptr, window_ptr, table_ptr, keys_ptr, n, capacity, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Claim the keys of what BLOCK rows see through one tap, and append those that were not there before."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, live = keys_of(
        row, tl.program_id(1), coords_ptr, window_ptr, n, low0, low1, low2, low3, size0, size1, size2, size3,
        RANK, WHOLE,
    )  # fmt: skip
    _slot, known = claim(table_ptr, key, live, capacity, tl.full((), 0x4000000000000000, tl.int64))
    fresh = (live & ~known).to(tl.int64)
    total = tl.sum(fresh, 0)
    if total > 0:
        count_ptr = table_ptr + 2 * capacity.to(tl.int64)
        at = tl.atomic_add(count_ptr, total, sem="relaxed") + tl.cumsum(fresh, 0) - fresh
        tl.store(keys_ptr + at, key, mask=fresh > 0)


@triton.jit
def decode_kernel(
    keys_ptr, coords_ptr, n, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys back to coordinates."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row, mask=row < n, other=0)
    store_coords(coords_ptr, row, key, row < n, low0, low1, low2, low3, size0, size1, size2, size3, RANK)


_I32, _I64 = torch.int32, torch.int64
_MARK = Launcher(
    mark_kernel, (_I32, _I64, _I64, _I32, _I32, _I64, _I32, _I32, _I32, _I64, *(int,) * 12), cooperative=True
)
_EMIT = Launcher(emit_kernel, (_I64, _I32, _I32, _I32, *(int,) * 9))
_CLAIM = Launcher(claim_kernel, (_I32, _I64, _I64, _I64, *(int,) * 10), num_warps=1)
_DECODE = Launcher(decode_kernel, (_I64, _I32, *(int,) * 9))
