"""A scene's voxels in blocks: boxes of space with about as many voxels each, and which voxels lie in any box."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.boxes import FAR, meets, union
from sparseconv.streaming.store import Store

#: cells of the histogram by which boxes are cut
CELLS = 2**18
#: bytes of a row while its block is looked for
ROW_BYTES = 96


@dataclass(frozen=True)
class Block:
    """A box of space, its voxels (rows first to last of `Blocks.order`), and the box around these, None for none."""

    box: IndexRange
    first: int
    last: int
    tight: IndexRange | None
    halves: tuple[Block, ...] = ()

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def leaves(self) -> list[Block]:
        """The blocks of this one that are not cut any more, in order."""
        return [leaf for half in self.halves for leaf in half.leaves] if self.halves else [self]


#: a leaf by its number, or a box with its two halves
Tree = Any


class Blocks:
    """A k-d tree of boxes that fill space; the smallest of them hold at most ``limit`` voxels each.

    Coordinates (N, 1+D) are read piece by piece and never held as a whole. The cuts are found by counting voxels in
    cells, and depend on the set of voxels and the limit alone. Within a block rows keep their order.
    """

    def __init__(
        self, coords: torch.Tensor, extent: IndexRange, limit: int, store: Store, piece: int, device: torch.device
    ) -> None:
        self.coords, self.piece, self.device = coords, piece, device
        self.order = store.scratch("order", (len(coords),), torch.int32 if len(coords) < 2**31 else torch.int64)
        axes = coords.shape[1] - 1
        self._spare = store.scratch("order.sorted", (len(coords),), self.order.dtype)
        everything = IndexRange((0, *(-FAR,) * axes), (FAR, *(FAR,) * axes))
        for first in range(0, len(coords), piece):
            last = min(first + piece, len(coords))
            self.order[first:last] = torch.arange(first, last, dtype=self.order.dtype)
        self.root = self._cut(everything, extent if len(coords) else None, 0, len(coords), max(1, limit))
        self.leaves = self.root.leaves
        held = [(leaf.tight.start, leaf.tight.end, leaf.size) for leaf in self.leaves if leaf.tight is not None]
        self._held = [np.array(part, np.int64) for part in zip(*held)]
        del self._spare

    def chosen(self, fits: Callable[[Block], bool]) -> list[Block]:
        """The largest blocks that fit, in order; leaves are taken as they are."""
        taken, open_ = [], [self.root]
        while open_:
            block = open_.pop()
            if not block.halves or fits(block):
                taken.append(block)
            else:
                open_ += reversed(block.halves)
        return taken

    def most_in(self, box: IndexRange | None) -> int:
        """No fewer voxels than lie in a box."""
        if box is None or not self._held:
            return 0
        starts, ends, sizes = self._held
        there = ((starts < np.array(box.end)) & (ends > np.array(box.start))).all(1)
        return int(sizes[there].sum())

    def rows_in(self, box: IndexRange) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (M,) int64 and coords (M, 1+D) int32 of the voxels in a box, block after block."""
        found, places = [torch.zeros(0, dtype=torch.int64)], [self.coords[:0].int().cpu()]
        for block in self.leaves:
            if block.tight is None or not meets(block.tight, box):
                continue
            for first in range(block.first, block.last, self.piece):
                rows = self.order[first : min(first + self.piece, block.last)].long()
                coords = self.coords[rows.to(self.coords.device)].int().cpu()
                if not box.encloses(block.tight):
                    inside = within(coords, box)
                    rows, coords = rows[inside], coords[inside]
                found.append(rows)
                places.append(coords)
        return torch.cat(found), torch.cat(places)

    def _cut(self, box: IndexRange, tight: IndexRange | None, first: int, last: int, limit: int) -> Block:
        """The block of the rows first to last of the order, which lie in ``tight``; the order is changed to suit."""
        if tight is None or last - first <= limit or tight.size == 1:
            return Block(box, first, last, tight)
        shifts = _shifts(tight, min(CELLS, max(64, 4 * min(last - first, self.piece))))
        start = [a >> s for a, s in zip(tight.start, shifts)]
        shape = [((e - 1) >> s) - a + 1 for e, s, a in zip(tight.end, shifts, start)]
        counts = torch.zeros(math.prod(shape), dtype=torch.int64, device=self.device)
        for at in range(first, last, self.piece):
            coords = self._coords(self.order[at : min(at + self.piece, last)])
            counts += torch.bincount(_cells(coords, start, shape, shifts), minlength=len(counts))
        cuts: list[tuple[IndexRange, IndexRange]] = []
        cells = counts.cpu().view(shape)
        tree = _halve(cells, IndexRange((0,) * len(shape), tuple(shape)), box, start, shifts, limit, cuts)
        owner, sizes = torch.zeros(shape, dtype=torch.int32), []
        for number, (part, _) in enumerate(cuts):
            inside = tuple(slice(a, b) for a, b in zip(part.start, part.end))
            owner[inside] = number
            sizes.append(int(cells[inside].sum()))
        self._sort(first, last, owner.flatten(), sizes, (start, shape, shifts))
        starts = [first]
        for size in sizes:
            starts.append(starts[-1] + size)

        def made(tree: Tree) -> Block:
            if isinstance(tree, int):
                part, around = cuts[tree]
                voxels = _voxels(_trimmed(cells, part), start, shifts)
                held = None if voxels is None else voxels.intersect(tight)
                return self._cut(around, held, starts[tree], starts[tree + 1], limit)
            whole, *parts = tree
            halves = tuple(made(part) for part in parts)
            held = union(halves[0].tight, halves[1].tight)
            return Block(whole, halves[0].first, halves[1].last, held, halves)

        return made(tree)

    def _sort(self, first: int, last: int, owner: torch.Tensor, sizes: list[int], cells: tuple) -> None:
        """Group the rows first to last by their owners, each group in its old order."""
        if len(sizes) == 1:
            return
        owner = owner.to(self.device)
        starts = torch.tensor([0, *sizes], device=self.device).cumsum(0)[:-1] + first
        for at in range(first, last, self.piece):
            until = min(at + self.piece, last)
            rows = self.order[at:until]
            owners = owner[_cells(self._coords(rows), *cells)].long()
            sorted_owners, order = owners.sort(stable=True)
            counts = torch.bincount(owners, minlength=len(sizes))
            moves = starts - (counts.cumsum(0) - counts)
            places = moves[sorted_owners] + torch.arange(len(rows), device=self.device)
            self._spare[places.cpu()] = rows[order.cpu()]
            starts = starts + counts
        for at in range(first, last, self.piece):
            until = min(at + self.piece, last)
            self.order[at:until] = self._spare[at:until]

    def _coords(self, rows: torch.Tensor) -> torch.Tensor:
        """Coords of rows, on the device that sorts them."""
        return self.coords[rows.long().to(self.coords.device)].to(self.device)


def _trimmed(cells: torch.Tensor, part: IndexRange) -> IndexRange | None:
    """The cells of a box that hold voxels, as a box."""
    held = cells[tuple(slice(a, b) for a, b in zip(part.start, part.end))].nonzero()
    if not len(held):
        return None
    low, high = torch.aminmax(held, dim=0)
    start = tuple(a + n for a, n in zip(part.start, low.tolist()))
    return IndexRange(start, tuple(a + n + 1 for a, n in zip(part.start, high.tolist())))


def _voxels(cells: IndexRange | None, start: list[int], shifts: list[int]) -> IndexRange | None:
    """The voxels of a box of cells."""
    if cells is None:
        return None
    low, high = ([(a + n) << s for a, n, s in zip(start, edge, shifts)] for edge in (cells.start, cells.end))
    return IndexRange(tuple(low), tuple(high))


def within(coords: torch.Tensor, box: IndexRange) -> torch.Tensor:
    """(M,) bool: which coords (M, 1+D) lie in a box."""
    inside = torch.ones(len(coords), dtype=torch.bool, device=coords.device)
    for axis, (start, end) in enumerate(zip(box.start, box.end)):
        inside &= (coords[:, axis] >= max(start, -(2**31))) & (coords[:, axis] <= min(end - 1, 2**31 - 1))
    return inside


def _shifts(tight: IndexRange, most: int) -> list[int]:
    """How many bits of each coordinate a cell leaves out, so that there are at most so many cells."""
    shifts = [0] * tight.rank
    while True:
        shape = [((e - 1) >> s) - (a >> s) + 1 for a, e, s in zip(tight.start, tight.end, shifts)]
        if math.prod(shape) <= most:
            return shifts
        longest = max(range(tight.rank), key=lambda axis: shape[axis])
        shifts[longest] += 1


def _cells(coords: torch.Tensor, start: list[int], shape: list[int], shifts: list[int]) -> torch.Tensor:
    key = torch.zeros(len(coords), dtype=torch.int64, device=coords.device)
    for axis, (a, n, s) in enumerate(zip(start, shape, shifts)):
        key = key * n + ((coords[:, axis].long() >> s) - a)
    return key


def _halve(
    cells: torch.Tensor,
    part: IndexRange,
    box: IndexRange,
    start: list[int],
    shifts: list[int],
    limit: int,
    cuts: list[tuple[IndexRange, IndexRange]],
) -> Tree:
    """Cut a box of cells while it holds more than ``limit`` voxels; ``cuts`` takes the pieces with their boxes."""
    inside = cells[tuple(slice(a, b) for a, b in zip(part.start, part.end))]
    total = int(inside.sum())
    spans: list[torch.Tensor] = []
    if total > limit:
        marginals = [inside.sum(tuple(a for a in range(part.rank) if a != axis)) for axis in range(part.rank)]
        spans = [m.nonzero().flatten() for m in marginals]
    lengths = [(int(s[-1]) - int(s[0])) << shifts[axis] for axis, s in enumerate(spans)]
    if not any(lengths):  # few voxels, or one cell, which the caller cuts anew
        cuts.append((part, box))
        return len(cuts) - 1
    axis = max(range(part.rank), key=lambda a: lengths[a])
    count = -(-total // limit)
    sums, wanted = marginals[axis].cumsum(0), total * (count // 2) / count
    begin, end = int(spans[axis][0]), int(spans[axis][-1])
    where = part.start[axis] + min(max(int((sums.double() - wanted).abs().argmin()), begin), end - 1) + 1
    edge = (start[axis] + where) << shifts[axis]
    sides = (
        _halve(cells, side(part, axis, where, lower), side(box, axis, edge, lower), start, shifts, limit, cuts)
        for lower in (True, False)
    )
    return (box, *sides)


def side(box: IndexRange, axis: int, cut: int, lower: bool) -> IndexRange:
    """One side of a box that is cut across an axis."""
    start, end = list(box.start), list(box.end)
    (end if lower else start)[axis] = cut
    return IndexRange(tuple(start), tuple(end))


def halves(box: IndexRange, coords: torch.Tensor) -> tuple[IndexRange, IndexRange] | None:
    """A box cut where it halves the voxels in it; None where that is one voxel or none."""
    inside = coords[within(coords, box)]
    if len(inside) < 2:
        return None
    low, high = torch.aminmax(inside, dim=0)
    axis = int((high.long() - low.long()).argmax())
    middle = int(inside[:, axis].long().sort().values[len(inside) // 2])
    cut = middle if middle > int(low[axis]) else middle + 1
    return side(box, axis, cut, True), side(box, axis, cut, False)
