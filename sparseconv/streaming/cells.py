"""A scene's voxels counted in cells, and boxes of cells cut into boxes with about as many voxels each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sparseconv.geometry.ranges import IndexRange

#: rows that a CPU's cache holds with what is made of them
CACHED = 2**15
#: a leaf by its number, or a box with its two halves
Tree = Any


class Histogram:
    """Voxels in the cells of a scene, ``start`` the first cell and ``shifts`` the bits that a cell leaves out, an axis.

    Sums over all cells before each corner answer for any box in one look.
    """

    def __init__(self, cells: np.ndarray, start: list[int], shifts: list[int]) -> None:
        self.start, self.shifts, self.shape = start, shifts, cells.shape
        self._voxels = _summed(cells)

    def most_in(self, box: IndexRange) -> int:
        """No fewer voxels than lie in a box."""
        shape = [n + 1 for n in self.shape]
        low = [min(max((a >> s) - f, 0), n - 1) for a, s, f, n in zip(box.start, self.shifts, self.start, shape)]
        ends = zip(box.end, self.shifts, self.start, shape)
        high = [min(max(((e - 1) >> s) - f + 1, 0), n - 1) for e, s, f, n in ends]
        corners = self._voxels[np.ix_(*((first, max(first, last)) for first, last in zip(low, high)))]
        for _ in low:
            corners = corners[1] - corners[0]
        return int(corners)


def _summed(cells: np.ndarray) -> np.ndarray:
    """Voxels in the cells before each corner of a cell, along every axis."""
    sums = np.zeros([n + 1 for n in cells.shape], np.int64)
    sums[(slice(1, None),) * cells.ndim] = cells
    for axis in range(cells.ndim):
        sums = sums.cumsum(axis)
    return sums


def trimmed(cells: np.ndarray, part: IndexRange) -> IndexRange | None:
    """The cells of a box that hold voxels, as a box."""
    spans = [line.nonzero()[0] for line in _marginals(inside(cells, part))]
    if not spans[0].size:
        return None
    start = tuple(a + int(span[0]) for a, span in zip(part.start, spans))
    return IndexRange(start, tuple(a + int(span[-1]) + 1 for a, span in zip(part.start, spans)))


def inside(cells: np.ndarray, part: IndexRange) -> np.ndarray:
    """The cells of a box."""
    return cells[tuple(slice(a, b) for a, b in zip(part.start, part.end))]


def _marginals(cells: np.ndarray) -> list[np.ndarray]:
    """Voxels by their cell along each axis."""
    return [cells.sum(tuple(a for a in range(cells.ndim) if a != axis)) for axis in range(cells.ndim)]


def voxels_of(cells: IndexRange | None, start: list[int], shifts: list[int]) -> IndexRange | None:
    """The voxels of a box of cells."""
    if cells is None:
        return None
    low, high = ([(a + n) << s for a, n, s in zip(start, edge, shifts)] for edge in (cells.start, cells.end))
    return IndexRange(tuple(low), tuple(high))


def shifts_for(tight: IndexRange, most: int) -> list[int]:
    """How many bits of each coordinate a cell leaves out, so that there are at most so many cells.

    Cells are as near cubes as may be; items of a batch share one only where there are more of them than cells per side.
    """
    shifts = [0] * tight.rank
    while True:
        shape = [((e - 1) >> s) - (a >> s) + 1 for a, e, s in zip(tight.start, tight.end, shifts)]
        if math.prod(shape) <= most:
            return shifts
        longest = max(range(tight.rank), key=lambda axis: shape[axis])
        if longest:
            longest = min((a for a, n in enumerate(shape) if a and n > 1), key=lambda a: (shifts[a], -shape[a]))
        shifts[longest] += 1


def cells_of(coords: torch.Tensor, start: list[int], shape: list[int], shifts: list[int]) -> torch.Tensor:
    """The number (M,) int32 of the cell of each of coords (M, 1+D). On a CPU, a piece at a time stays in its cache."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = [axis for axis, count in enumerate(shape) if count > 1]
    before = -sum(start[axis] * strides[axis] for axis in axes)  # sums may wrap round, and end right
    numbers = torch.full((len(coords),), (before + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=coords.device)
    piece = CACHED if coords.device.type == "cpu" else max(1, len(coords))
    for part, into in zip(coords.split(piece), numbers.split(piece)):
        for axis in axes:
            places = part[:, axis]
            into.add_((places if places.dtype.itemsize > 2 else places.int()) >> shifts[axis], alpha=strides[axis])
    return numbers


def halve(
    cells: np.ndarray,
    part: IndexRange,
    box: IndexRange,
    start: list[int],
    shifts: list[int],
    limit: int,
    cuts: list[tuple[IndexRange, IndexRange]],
) -> Tree:
    """Cut a box of cells while it holds more than ``limit`` voxels; ``cuts`` takes the pieces with their boxes."""
    here = inside(cells, part)
    total, spans = int(here.sum()), []
    if total > limit:
        marginals = _marginals(here)
        spans = [line.nonzero()[0] for line in marginals]
    lengths = [(int(s[-1]) - int(s[0])) << shifts[axis] for axis, s in enumerate(spans)]
    if not any(lengths):  # few voxels, or one cell, which the caller cuts anew
        cuts.append((part, box))
        return len(cuts) - 1
    axis = max(range(part.rank), key=lambda a: lengths[a])
    count = -(-total // limit)
    sums, wanted = marginals[axis].cumsum(), total * (count // 2) / count
    begin, end = int(spans[axis][0]), int(spans[axis][-1])
    where = part.start[axis] + min(max(int(np.abs(sums - wanted).argmin()), begin), end - 1) + 1
    edge = (start[axis] + where) << shifts[axis]
    sides = (
        halve(cells, side(part, axis, where, lower), side(box, axis, edge, lower), start, shifts, limit, cuts)
        for lower in (True, False)
    )
    return (box, *sides)


def side(box: IndexRange, axis: int, cut: int, lower: bool) -> IndexRange:
    """One side of a box that is cut across an axis."""
    start, end = list(box.start), list(box.end)
    (end if lower else start)[axis] = cut
    return IndexRange(tuple(start), tuple(end))
