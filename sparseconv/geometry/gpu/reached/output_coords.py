"""The voxels that a window reaches from the rows of a grid, on the GPU: each once, in lexicographic order.

    in:  rows (N, 1+D) int32, a window, a box around the rows
    out: coordinates (M, 1+D) int32; the host waits once, for M

A window of two cells at stride 2 sees x = 0, 1 and 5 from the coarse voxels 0, 0 and 2. Their bits in the box from 0 to
2 are 0b101, whose ranks are the rows of the result, ((0, 0), (0, 2)). Boxes of more than 2^33 cells are hashed and
sorted instead.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from sparseconv.geometry.gpu.reached.kernels import CLAIM, DECODE, EMIT, EMIT_FIXED, MARK
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import NUM_BARRIERS, DeviceCount, barriers_of, programs_at_once
from sparseconv.gpu.launcher import Pointer, ceil_div, pointer
from sparseconv.gpu.report import Report

if TYPE_CHECKING:
    from sparseconv.geometry.ranges import IndexRange

Ints = tuple[int, ...]
#: from here on a number of cells is too large for the keys, and a place for sums of 32 bits
TOO_MANY, FARTHEST = 2**62, 2**30
#: up to this many cells a bit for each 64 of them (here 16 MB, and half of that for ranks) costs less than a sort
MOST_MARKED = 2**33
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
        (M, 1+D) int32; None where the box of possible results is too large for 64-bit keys or 32-bit coordinates.
    """
    moves = _moves(offsets, stride, torus, within, to_fine, coords.device)
    sizes = _sizes(coords, moves, extent, batch_size)
    if sizes is None:
        return None
    return (_marked if sizes.cells <= MOST_MARKED else _claimed)(coords, moves, sizes)


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
    """`reach` for rows whose number the host does not know: it waits for nothing, and nothing is written out of bounds.

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
    if sizes is None or sizes.cells > MOST_MARKED:
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
    """None where the box is too large for 64-bit keys or 32-bit coordinates."""
    seen, low, high = moves.bounds(extent)
    sizes = tuple(b - a + 1 for a, b in zip(low, high))
    cells = batch_size * math.prod(sizes)
    if cells >= TOO_MANY or min(*low, *seen) <= -FARTHEST or max(*high, *seen) >= FARTHEST:
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
_I32, _I64 = torch.int32, torch.int64
_DTYPES = (_I64, _I32, _I32, _I64, _I32, _I32)


def _marked(coords: torch.Tensor, moves: _Moves, sizes: _Sizes) -> torch.Tensor:
    """One bit for each 64 cells, then a word for each of those that are not empty: ranks in order, without a sort."""
    columns, device = coords.shape[1], coords.device
    report = Report(2, device)
    arena = _mark(coords, moves, sizes, report.pointer)
    report.send()
    count, words = report.read()
    reached = torch.empty(count, columns, dtype=torch.int32, device=device)
    if count:
        emitted = (arena[FOUND], arena[PLACES], arena[STARTS], pointer(reached), words, *sizes.box)
        EMIT(device, (ceil_div(words, 32),), emitted, (columns - 1, 32))
    return reached


def _mark(
    coords: torch.Tensor, moves: _Moves, sizes: _Sizes, report: Pointer, device_count: DeviceCount | None = None
) -> Arena:
    """Launch `mark_kernel`."""
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


def _claimed(coords: torch.Tensor, moves: _Moves, sizes: _Sizes) -> torch.Tensor:
    """A hash table that finds each key once, and a sort: for boxes too large for bits."""
    (n, columns), device, most, box = coords.shape, coords.device, sizes.most, sizes.box
    capacity = most + most // 2 + 64
    table = torch.zeros(2 * capacity + 2, dtype=torch.int64, device=device)
    keys = torch.empty(most, dtype=torch.int64, device=device)
    args = (pointer(coords), pointer(moves.data), pointer(table), pointer(keys), n, sizes.batches, capacity, *box)
    CLAIM(device, (ceil_div(n, 128), moves.steps), args, (columns - 1, moves.is_box, 128))
    count = int(table[-2])
    keys = torch.sort(keys[:count]).values
    reached = torch.empty(count, columns, dtype=torch.int32, device=device)
    if count:
        DECODE(device, (ceil_div(count, 256),), (pointer(keys), pointer(reached), count, *box), (columns - 1, 256))
    return reached
