"""The voxels that a window reaches from the rows of a grid, on the GPU: each once, in lexicographic order.

    in:  rows (N, 1+D) int32, a window, a box around the rows
    out: coordinates (M, 1+D) int32; the CPU waits once, for M

A window of two cells at stride 2 sees x = 0, 1 and 5 from the coarse voxels 0, 0 and 2. Their bits in the box from 0 to
2 are 0b101, whose ranks are the rows of the result, ((0, 0), (0, 2)).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import NUM_BARRIERS, DeviceCount, barriers_of, programs_at_once
from sparseconv.gpu.launcher import Pointer, ceil_div, pointer
from sparseconv.gpu.report import Report

if TYPE_CHECKING:
    from sparseconv.geometry.ranges import IndexRange
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_probe import below, popcount
from sparseconv.gpu.cooperative import leave, wait_for_all
from sparseconv.gpu.launcher import RESIDENT, Launcher

_I32, _I64 = torch.int32, torch.int64


@triton.jit
def one_of(axis: tl.constexpr, first, second, third, fourth):
    """A number of one axis."""
    return first if axis == 0 else second if axis == 1 else third if axis == 2 else fourth


@triton.jit
def keys_of(
    row, step, coords_ptr, window_ptr, n, batches, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, IS_BOX: tl.constexpr,
):  # fmt: skip
    """Keys of what rows see in one step, and which of them are real; rows of no batch item see nothing."""
    live = row < n
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    key = tl.load(place, mask=live, other=-1).to(tl.int64)
    live = (key >= 0) & (key < batches)
    step_ptr = window_ptr + 8 * RANK + step * RANK
    for axis in tl.static_range(RANK):
        axis_ptr = window_ptr + 8 * axis
        given = tl.load(place + 1 + axis, mask=live, other=0)
        number = tl.load(step_ptr + axis)
        divisor = tl.load(axis_ptr + 1)
        if IS_BOX:
            value = given - tl.load(axis_ptr + 6)
            whole = value // divisor
            whole = tl.where(value - whole * divisor < 0, whole - 1, whole) - number
            live = live & (whole * divisor + tl.load(axis_ptr + 7) >= given)
        else:
            value = given * tl.load(axis_ptr) + number
            whole = value // divisor
            live = live & (whole * divisor == value)
        start = tl.load(axis_ptr + 2)
        size = tl.load(axis_ptr + 3)
        if size > 0:
            turned = (whole - start) % size
            whole = start + tl.where(turned < 0, turned + size, turned)
        live = live & (whole >= tl.load(axis_ptr + 4)) & (whole < tl.load(axis_ptr + 5))
        low = one_of(4 - RANK + axis, low0, low1, low2, low3)
        key = key * one_of(4 - RANK + axis, size0, size1, size2, size3) + (whole - low)
    return key, live


@triton.jit
def place_of(key, size0, size1, size2, size3):
    """The batch item of keys, and where they lie on each of four axes from the box's corner on."""
    rest = key // size3
    d = (key - rest * size3).to(tl.int32)
    key = rest // size2
    c = (rest - key * size2).to(tl.int32)
    rest = key // size1
    b = (key - rest * size1).to(tl.int32)
    key = rest // size0
    return key.to(tl.int32), (rest - key * size0).to(tl.int32), b, c, d


@triton.jit
def store_place(coords_ptr, row, live, batch, a, b, c, d, low0, low1, low2, low3, RANK: tl.constexpr):
    """Write places from the box's corner on into rows of coordinates."""
    place = coords_ptr + row.to(tl.int64) * (RANK + 1)
    tl.store(place, batch, mask=live)
    if RANK > 3:
        tl.store(place + RANK - 3, a + low0, mask=live)
    if RANK > 2:
        tl.store(place + RANK - 2, b + low1, mask=live)
    if RANK > 1:
        tl.store(place + RANK - 1, c + low2, mask=live)
    tl.store(place + RANK, d + low3, mask=live)


@triton.jit
def mark_kernel(
    coords_ptr, window_ptr, bits_ptr, ranks_ptr, sums_ptr, words_ptr, places_ptr, starts_ptr, barriers_ptr, report_ptr,
    n, batches, num_steps, num_lines, programs, low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, IS_BOX: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, SUMS: tl.constexpr,
    NUM_BARRIERS: tl.constexpr,
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
    wait_for_all(barriers_ptr, programs)
    one = tl.full((BLOCK,), 1, tl.int64)
    for first in range(program * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        for step in range(num_steps):
            key, live = keys_of(
                row, step, coords_ptr, window_ptr, n, batches, low0, low1, low2, low3, size0, size1, size2, size3,
                RANK, IS_BOX,
            )  # fmt: skip
            word = key >> 6
            mark(bits_ptr + (word >> 6), one << (word & 63), live)
    wait_for_all(barriers_ptr + 1, programs)
    num_words = add_up(bits_ptr, ranks_ptr, sums_ptr, barriers_ptr + 2, num_lines, programs, SPAN, SUMS)
    for first in range(program * SPAN, num_words, programs * SPAN):
        slot = first + tl.arange(0, SPAN)
        tl.store(words_ptr + slot, tl.zeros((SPAN,), tl.int64), mask=slot < num_words)
    wait_for_all(barriers_ptr + 3, programs)
    for first in range(program * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        for step in range(num_steps):
            key, live = keys_of(
                row, step, coords_ptr, window_ptr, n, batches, low0, low1, low2, low3, size0, size1, size2, size3,
                RANK, IS_BOX,
            )  # fmt: skip
            word = key >> 6
            line = tl.load(bits_ptr + (word >> 6), mask=live, other=0)
            slot = tl.load(ranks_ptr + (word >> 6), mask=live, other=0) + popcount(line & below(word & 63))
            fresh = mark(words_ptr + slot, one << (key & 63), live)
            tl.store(places_ptr + slot, word.to(tl.int32), mask=fresh)
    wait_for_all(barriers_ptr + 4, programs)
    count = add_up(words_ptr, starts_ptr, sums_ptr + SUMS, barriers_ptr + 5, num_words, programs, SPAN, SUMS)
    if program == 0:
        tl.store(report_ptr, count.to(tl.int64))
        tl.store(report_ptr + 1, num_words.to(tl.int64))
    leave(barriers_ptr, programs, NUM_BARRIERS)


@triton.jit
def mark(word_ptr, bit, live):
    """Set bits that are not set yet; several rows reach most cells, and to look costs less than to write."""
    seen = tl.load(word_ptr, mask=live, other=-1, cache_modifier=".cg")
    fresh = live & ((seen & bit) == 0)
    tl.atomic_or(word_ptr, bit, mask=fresh, sem="relaxed")
    return fresh


@triton.jit
def add_up(words_ptr, before_ptr, sums_ptr, barrier_ptr, length, programs, SPAN: tl.constexpr, SUMS: tl.constexpr):
    """before[i] = bits set in the words before the i-th; returns those of all words. Every program sums a run."""
    each = (length + programs - 1) // programs
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, length)
    total = tl.zeros((), tl.int32)
    for start in range(begin, end, SPAN):
        at = start + tl.arange(0, SPAN)
        total += tl.sum(popcount(tl.load(words_ptr + at, mask=at < end, other=0)), 0)
    tl.store(sums_ptr + tl.program_id(0), total)
    wait_for_all(barrier_ptr, programs)
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
    emit_words(
        words_ptr, places_ptr, starts_ptr, coords_ptr, num_words, 0x7FFFFFFF, low0, low1, low2, low3,
        size0, size1, size2, size3, RANK, BLOCK,
    )  # fmt: skip


@triton.jit
def emit_fixed_kernel(
    words_ptr, places_ptr, starts_ptr, coords_ptr, report_ptr, count_ptr, fault_ptr, num_rows,
    low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`emit_kernel` into so many rows: those behind the last cell are dead, and cells beyond them a fault.

    No word is empty, so that as many words as rows are enough, a program for BLOCK of either.
    """
    count = tl.load(report_ptr)
    num_words = tl.load(report_ptr + 1).to(tl.int32)
    emit_words(
        words_ptr, places_ptr, starts_ptr, coords_ptr, num_words, num_rows, low0, low1, low2, low3,
        size0, size1, size2, size3, RANK, BLOCK,
    )  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dead = (row >= count) & (row < num_rows)
    for column in tl.static_range(RANK + 1):
        tl.store(coords_ptr + row.to(tl.int64) * (RANK + 1) + column, -1, mask=dead)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.minimum(count, num_rows).to(tl.int32))
        if count > num_rows:
            tl.atomic_or(fault_ptr, 2, sem="relaxed")


@triton.jit
def emit_words(
    words_ptr, places_ptr, starts_ptr, coords_ptr, num_words, num_rows,
    low0, low1, low2, low3, size0, size1, size2, size3,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cells of this program's words, into no more than ``num_rows`` rows."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = slot < num_words
    word = tl.load(words_ptr + slot, mask=real, other=0)
    row = tl.load(starts_ptr + slot, mask=real, other=0)
    first = tl.load(places_ptr + slot, mask=real, other=0).to(tl.int64) << 6
    batch, a, b, c, d = place_of(first, size0, size1, size2, size3)
    while tl.max((word != 0).to(tl.int32), 0) > 0:
        # onwards by the bit along the last axis, and what is too much is carried to the axes before: 32 bits are enough
        on_d = d + popcount((word & -word) - 1)
        over = on_d // size3
        on_c = c + over
        on_d -= over * size3
        over = on_c // size2
        on_b = b + over
        on_c -= over * size2
        over = on_b // size1
        on_a = a + over
        on_b -= over * size1
        over = on_a // size0
        store_place(
            coords_ptr, row, (word != 0) & (row < num_rows), batch + over, on_a - over * size0, on_b, on_c, on_d,
            low0, low1, low2, low3, RANK,
        )  # fmt: skip
        row += 1
        word = word & (word - 1)


MARK = Launcher(
    mark_kernel, (_I32, _I32, _I64, _I32, _I32, _I64, _I32, _I32, _I32, _I64, *(int,) * 13), resident=RESIDENT
)
EMIT = Launcher(emit_kernel, (_I64, _I32, _I32, _I32, *(int,) * 9), num_warps=1)
EMIT_FIXED = Launcher(emit_fixed_kernel, (_I64, _I32, _I32, _I32, _I64, _I32, _I32, *(int,) * 9), num_warps=1)


Ints = tuple[int, ...]
#: up to this many cells a bit for each 64 of them (here 16 MB, and half of that for ranks) costs less than a sort
MOST_MARKED = 2**33
#: places along an axis lie between the negative of this and itself: sums of two fit in 32 bits
FARTHEST = 2**30
#: rows that a program of `mark_kernel` looks at together: two each thread, so that one waits while the other works
ROWS = 256
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
        (M, 1+D) int32; None where the box of possible results has more than `MOST_MARKED` cells, or is too large for
        32-bit coordinates.
    """
    columns, device = coords.shape[1], coords.device
    moves = _moves(offsets, stride, torus, within, to_fine, device)
    sizes = _sizes(coords, moves, extent, batch_size)
    if sizes is None:
        return None
    report = Report(2, device)
    arena = _mark(coords, moves, sizes, report.pointer)
    report.send()
    count, words = report.read()
    reached = torch.empty(count, columns, dtype=torch.int32, device=device)
    if count:
        emitted = (arena[FOUND], arena[PLACES], arena[STARTS], pointer(reached), words, *sizes.box)
        EMIT(device, (ceil_div(words, 32),), emitted, (columns - 1, 32))
    return reached


def reach_fixed(
    coords: torch.Tensor,
    extent: IndexRange,
    batch_size: int,
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: IndexRange | None,
    *,
    to_fine: bool,
    within: IndexRange,
    rows: int,
    device_count: DeviceCount,
    ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """`reach` for rows whose number the CPU does not know: it waits for nothing, and nothing is written out of bounds.

    Arguments are those of `reach`; coordinates outside of their extent may join what lies ``within`` all the same.

    Args:
        ends: (D,) int32 on the device; what is reached at or behind them is dropped too.
        rows: of the result; what is reached beyond them is dropped, and raises bit 1 of the fault flag.

    Returns:
        (rows, 1+D) int32, dead from the last reached one on; their number (1,) int32; and what the kernels read, to be
        kept as long as a graph that holds them may run. None where the box of possible results is too large.
    """
    moves = _moves(offsets, stride, torus, within, to_fine, coords.device)
    sizes = _sizes(coords, moves, extent, batch_size)
    if sizes is None:
        return None
    if ends is not None:
        moves = moves.ending_at(ends)
    device, columns = coords.device, coords.shape[1]
    reached = torch.empty(rows, columns, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    report = torch.empty(2, dtype=torch.int64, device=device)
    arena = _mark(coords, moves, sizes, pointer(report), device_count)
    found = (arena[FOUND], arena[PLACES], arena[STARTS], pointer(reached))
    more = (pointer(report), pointer(count), pointer(device_count.fault))
    EMIT_FIXED(device, (ceil_div(rows, 32),), (*found, *more, rows, *sizes.box), (columns - 1, 32))
    return reached, count, moves.data


@dataclass(frozen=True)
class _Sizes:
    """Cells of the box of possible results, the most results, their batch items, and the box as kernels take it."""

    cells: int
    most: int
    batches: int
    box: Ints


def _sizes(coords: torch.Tensor, moves: _Moves, extent: IndexRange, batch_size: int) -> _Sizes | None:
    """None where the box has too many cells, or leaves 32-bit coordinates."""
    seen, low, high = moves.bounds(extent)
    sizes = tuple(b - a + 1 for a, b in zip(low, high))
    cells = batch_size * math.prod(sizes)
    if cells > MOST_MARKED or min(*low, *seen) <= -FARTHEST or max(*high, *seen) >= FARTHEST:
        return None
    most = min(coords.shape[0] * moves.each, cells)
    if most >= 2**29:
        return None
    rest = 4 - len(low)
    return _Sizes(cells, most, batch_size, (*(0,) * rest, *low, *(1,) * rest, *sizes))


@dataclass(frozen=True, eq=False)
class _Moves:
    """What of a window does not depend on the rows: as the kernels read it, and how it moves a box.

        data = [factor, divisor, start of the torus, its size (0: none), box (2), first offset, last] of each axis,
               [a number for each axis] of each step

    A step is a tap, and its numbers what it adds before the division, which must leave no rest. Of a box of taps
    without gaps (``is_box``) it is one of the few coarse voxels whose windows a voxel lies in, counted back from the
    last.
    """

    data: torch.Tensor  # int32 on the device
    steps: int
    each: int  # results of one row at most
    is_box: bool
    spans: tuple[tuple[int, int, int], ...]  # (smallest offset, largest, stride) of each axis
    torus: IndexRange | None
    to_fine: bool

    def ending_at(self, ends: torch.Tensor) -> _Moves:
        """The same with a box that ends at (D,) int32, or before."""
        data = self.data.clone()
        last = data[: 8 * len(self.spans)].view(-1, 8)[:, 5]
        torch.minimum(last, ends, out=last)
        return replace(self, data=data)

    def bounds(self, extent: IndexRange) -> tuple[list[int], list[int], list[int]]:
        """Bounds of what is divided, and the lowest and the highest place on each axis that may be reached."""
        places = list(zip(self.spans, extent.start, extent.end))
        if self.to_fine:
            low = [s * start + first for (first, _, s), start, _ in places]
            high = [s * (end - 1) + last for (_, last, s), _, end in places]
            seen = low + high
        else:
            seen = [v for (first, last, _), start, end in places for v in (start - last, end - first)]
            low = [(start - last) // s for (_, last, s), start, _ in places]
            high = [(end - 1 - first) // s for (first, _, s), _, end in places]
        if self.torus is not None:
            low, high = list(self.torus.start), [end - 1 for end in self.torus.end]
        return seen, low, high


@lru_cache(maxsize=512)
def _moves(
    offsets: tuple[Ints, ...],
    stride: Ints,
    torus: IndexRange | None,
    within: IndexRange | None,
    to_fine: bool,
    device: torch.device,
) -> _Moves:
    spans = tuple((min(column), max(column), s) for column, s in zip(zip(*offsets), stride))
    is_box = not to_fine and len(set(offsets)) == math.prod(last - first + 1 for first, last, _ in spans)
    classes = Counter(tuple(o % s for o, s in zip(offset, stride)) for offset in offsets)
    if is_box:
        steps = list(itertools.product(*(range(-((first - last - 1) // s)) for first, last, s in spans)))
    else:
        steps = [tuple(v if to_fine else -v for v in offset) for offset in offsets]
    box, data = within or torus, []
    for axis, (first, last, s) in enumerate(spans):
        fold = (0, 0) if torus is None else (torus.start[axis], torus.shape[axis])
        inside = (-FARTHEST, FARTHEST) if box is None else (box.start[axis], box.end[axis])
        data += [*((s, 1) if to_fine else (1, s)), *fold, *inside, first, last]
    data += [v for step in steps for v in step]
    each = len(offsets) if to_fine else max(classes.values())
    return _Moves(torch.tensor(data, dtype=torch.int32).to(device), len(steps), each, is_box, spans, torus, to_fine)


#: the arrays that `_mark` leaves
BITS, RANKS, SUMS, FOUND, PLACES, STARTS = range(6)
_DTYPES = (_I64, _I32, _I32, _I64, _I32, _I32)


def _mark(
    coords: torch.Tensor, moves: _Moves, sizes: _Sizes, report: Pointer, device_count: DeviceCount | None = None
) -> Arena:
    """Launch `mark_kernel`: one bit for each 64 cells, then a word for each of those that are not empty."""
    (n, columns), device = coords.shape, coords.device
    lines, words = ceil_div(sizes.cells, 4096), min(sizes.most, ceil_div(sizes.cells, 64))
    programs = min(programs_at_once(device, max(ceil_div(n, ROWS), ceil_div(lines, 512))), MOST_PROGRAMS)
    arena = Arena(device, _DTYPES, (lines, lines, 2 * MOST_PROGRAMS, words, words, words))
    args = (
        pointer(coords), pointer(moves.data), *arena, barriers_of(device, device_count), report,
        n, sizes.batches, moves.steps, lines, programs, *sizes.box,
    )  # fmt: skip
    MARK(device, (programs,), args, (columns - 1, moves.is_box, ROWS, 512, MOST_PROGRAMS, NUM_BARRIERS))
    return arena
