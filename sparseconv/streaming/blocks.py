"""A scene's voxels in blocks: boxes of space with about as many voxels each, and which voxels lie in any box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sparseconv.geometry.ranges import IndexRange
from sparseconv.streaming.cells import Histogram, Tree, cells_of, halve, inside, shifts_for, side, trimmed, voxels_of
from sparseconv.streaming.device.ordering import OnCard, OnHost
from sparseconv.streaming.device.pipeline import Direct, pipeline_of, to_device
from sparseconv.streaming.store import Store
from sparseconv.trace.boxes import FAR, union, within

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


class Blocks:
    """A k-d tree of boxes that fill space; the smallest of them hold at most ``limit`` voxels each.

    Coordinates (N, 1+D) are read piece by piece and never held as a whole. The cuts are found by counting voxels in
    cells, and depend on the set of voxels and the limits alone. Within a block rows keep their order.

    The order lies in the store, or on a GPU, ``order_on``. Of several ranks each finds its own.
    """

    def __init__(
        self,
        coords: torch.Tensor,
        extent: IndexRange,
        limit: int,
        store: Store,
        piece: int,
        device: torch.device,
        spare_bytes: int = 0,
        order_on: torch.device | None = None,
    ) -> None:
        #: memory for the cells of rows, which are found twice where it does not do
        self.spare_bytes = spare_bytes
        self.coords, self.piece, self.device = coords, piece, device
        kind = torch.int32 if len(coords) < 2**31 else torch.int64
        if order_on is None:
            self.order = store.scratch("order", (len(coords),), kind)
            self._scratch = partial(store.scratch, "order.sorted", (len(coords),), kind)
        else:
            self.order = torch.empty(len(coords), dtype=kind, device=order_on)
            self._scratch = partial(torch.empty_like, self.order)
        axes = coords.shape[1] - 1
        #: the coarsest one; None for a scene of one block
        self.histogram: Histogram | None = None
        everything = IndexRange((0, *(-FAR,) * axes), (FAR, *(FAR,) * axes))
        self._is_sorted = False
        self.root = Block(everything, 0, len(coords), extent if len(coords) else None)
        self.refine(limit)

    def refine(self, limit: int) -> None:
        """Cut leaves that hold more than ``limit`` voxels."""
        self._spare: torch.Tensor | None = None
        large = [leaf for leaf in self.root.leaves if leaf.tight is not None and leaf.size > limit]
        made = {leaf.box: self._cut(leaf.box, leaf.tight, leaf.first, leaf.last, max(1, limit)) for leaf in large}
        self.root = _with(self.root, made)
        del self._spare
        if not self._is_sorted:  # one block
            torch.arange(len(self.order), out=self.order)
        self.leaves, self._by_box = self.root.leaves, {}
        open_ = [self.root]
        while open_:
            block = open_.pop()
            self._by_box[block.box] = block
            open_ += block.halves
        held = [leaf for leaf in self.leaves if leaf.tight is not None]
        axes = self.coords.shape[1]
        starts, ends = ([getattr(leaf.tight, side) for leaf in held] for side in ("start", "end"))
        self._starts, self._ends = (np.array(part, np.int64).reshape(-1, axes) for part in (starts, ends))
        self._rows = np.array([(leaf.first, leaf.last) for leaf in held], np.int64).reshape(-1, 2)

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

    def at(self, box: IndexRange) -> Block | None:
        """The block of a box, if it is one."""
        return self._by_box.get(box)

    def most_in(self, box: IndexRange | None) -> int:
        """No fewer voxels than lie in a box."""
        if box is None or not len(self._rows):
            return 0
        there = self._meets(box)
        by_leaves = int((self._rows[there, 1] - self._rows[there, 0]).sum())
        if self.histogram is None:
            return by_leaves
        return min(by_leaves, self.histogram.most_in(box))

    def _meets(self, box: IndexRange) -> np.ndarray:
        """Which leaves may hold voxels of a box."""
        sides = np.hstack((self._starts < np.array(box.end), self._ends > np.array(box.start)))
        return np.logical_and.reduce(sides, axis=1)

    def rows_in(self, box: IndexRange) -> Found:
        """The voxels in a box: those of whole leaves, one after another, and then those of leaves that it cuts."""
        there = self._meets(box).nonzero()[0]
        starts, ends = self._starts[there], self._ends[there]
        inner = np.logical_and.reduce(np.hstack((starts >= np.array(box.start), ends <= np.array(box.end))), axis=1)
        whole = _runs(self._rows[there[inner]])
        part = self._part(_runs(self._rows[there[~inner]]), box)
        counts = [last - first for first, last in whole]
        if self.order.is_cuda:
            rows = torch.empty(sum(counts) + len(part), dtype=torch.int64, device=self.order.device)
        else:  # numpy asks for large pages
            rows = torch.from_numpy(np.empty(sum(counts) + len(part), np.int64))
        ranges, done = [], 0
        for (first, last), count in zip(whole, counts):
            rows[done : done + count] = self.order[first:last]
            ranges.append((first, last, done))
            done += count
        rows[done:] = part
        return Found(rows, ranges)

    def _part(self, runs: list[tuple[int, int]], box: IndexRange) -> torch.Tensor:
        """Which of the rows of these ranges of the order lie in a box."""
        rows = torch.cat([self.order[:0], *(self.order[first:last] for first, last in runs)])
        found = [
            part[within(self._at(part), box).nonzero().flatten().to(part.device)] for part in rows.split(self.piece)
        ]
        return torch.cat(found)

    def _cut(
        self,
        box: IndexRange,
        tight: IndexRange | None,
        first: int,
        last: int,
        limit: int,
    ) -> Block:
        """The block of the rows first to last of the order, which lie in ``tight``; the order is changed to suit."""
        if tight is None or last - first <= limit or tight.size == 1:
            return Block(box, first, last, tight)
        shifts = shifts_for(tight, min(CELLS, max(64, 4 * min(last - first, self.piece))))
        start = [a >> s for a, s in zip(tight.start, shifts)]
        shape = [((e - 1) >> s) - a + 1 for e, s, a in zip(tight.end, shifts, start)]
        counts = torch.zeros(math.prod(shape), dtype=torch.int64, device=self.device)
        keys: list[torch.Tensor] = []
        for coords in self._read(first, last):
            key = cells_of(coords, start, shape, shifts)
            counts += torch.bincount(key, minlength=len(counts))
            if 4 * (last - first) <= self.spare_bytes:
                keys.append(key)
        cuts: list[tuple[IndexRange, IndexRange]] = []
        cells = counts.cpu().view(shape).numpy()
        if self.histogram is None:
            self.histogram = Histogram(cells, start, shifts)
        tree = halve(cells, IndexRange((0,) * len(shape), tuple(shape)), box, start, shifts, limit, cuts)
        owner = np.zeros(shape, np.int32)
        for number, (part, _) in enumerate(cuts):
            inside(owner, part)[...] = number
        owners = owner.ravel()
        sizes = np.bincount(owners, cells.ravel(), len(cuts)).astype(np.int64)
        starts = [first, *(first + sizes.cumsum()).tolist()]
        self._sort((first, last), torch.from_numpy(owners), starts[:-1], (start, shape, shifts), keys)
        leaves = []
        for number, (part, around) in enumerate(cuts):
            voxels = voxels_of(trimmed(cells, part), start, shifts)
            held = None if voxels is None else voxels.intersect(tight)
            span = starts[number], starts[number + 1]
            leaves.append(self._cut(around, held, *span, limit))
        return _joined(tree, leaves)

    def _sort(
        self, span: tuple[int, int], owner: torch.Tensor, ends: list[int], cells: tuple, keys: list[torch.Tensor]
    ) -> None:
        """Group a span of rows by their owners, each group in its old order, from ``ends`` on; their cells may be
        known."""
        if len(ends) == 1:
            return
        if self._is_sorted and self._spare is None:
            self._spare = self._scratch()
        into = self._spare if self._is_sorted else self.order  # of all rows, no order is there that would be read
        assert into is not None
        begin, end = span
        owner = owner.to(self.device, torch.int16 if len(ends) < 2**15 else torch.int32)
        placing = OnCard(into, ends) if into.is_cuda else OnHost(into, ends)
        for at in range(begin, end, self.piece):
            until = min(at + self.piece, end)
            key = keys.pop(0) if keys else cells_of(self._coords(at, until), *cells)
            placing.put(torch.index_select(owner, 0, key), self.order[at:until] if self._is_sorted else at)
        if self._is_sorted:
            self.order[begin:end] = into[begin:end]
        self._is_sorted = True

    def _read(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Coords of rows of the order piece by piece; on a GPU, the next comes while one is used."""
        spans = [(at, min(at + self.piece, last)) for at in range(first, last, self.piece)]
        has_copies = len(spans) > 1 and self.coords.device.type != self.device.type
        with pipeline_of(self.device) if has_copies else Direct() as pipeline:
            for _, coords in pipeline.prefetched(spans, lambda span: self._coords(*span)):
                if coords.is_cuda:
                    coords.record_stream(torch.cuda.current_stream(self.device))
                yield coords

    def _coords(self, first: int, last: int) -> torch.Tensor:
        """Coords of some rows of the order, on the device that sorts them."""
        if self._is_sorted:
            return self._at(self.order[first:last])
        coords = self.coords[first:last]
        if coords.device.type == "cpu" and self.device.type != "cpu":
            coords = torch.empty(coords.shape, dtype=coords.dtype, pin_memory=True).copy_(coords)
        return coords.to(self.device, non_blocking=True)

    def _at(self, rows: torch.Tensor) -> torch.Tensor:
        """Coords of rows of the scene, on the device that sorts them."""
        if self.coords.device.type != "cpu" or self.device.type == "cpu":
            rows = to_device(rows, len(self.coords), self.coords.device)
            return torch.index_select(self.coords, 0, rows).to(self.device)
        staged = torch.empty((len(rows), self.coords.shape[1]), dtype=self.coords.dtype, pin_memory=True)
        torch.index_select(self.coords, 0, rows, out=staged)
        return staged.to(self.device, non_blocking=True)


class Found(NamedTuple):
    """Rows (M,) int64 of voxels, where the order lies, and where ranges of `Blocks.order` lie among them: first and
    last of the order, and the place of the first."""

    rows: torch.Tensor
    ranges: list[tuple[int, int, int]]

    def place_of(self, block: Block | None) -> slice | None:
        """Where a block's own voxels lie, one after another; None where they do not."""
        if block is None:
            return None
        for first, last, at in self.ranges:
            if first <= block.first < block.last <= last:
                return slice(at + block.first - first, at + block.last - first)
        return None


def _joined(tree: Tree, leaves: list[Block]) -> Block:
    """The block of a tree of cuts, made of its leaves."""
    if isinstance(tree, int):
        return leaves[tree]
    whole, *parts = tree
    halves = tuple(_joined(part, leaves) for part in parts)
    return Block(whole, halves[0].first, halves[1].last, union(halves[0].tight, halves[1].tight), halves)


def _with(block: Block, cut: dict[IndexRange, Block]) -> Block:
    """A block with some leaves cut further."""
    if not block.halves:
        return cut.get(block.box, block)
    halves = tuple(_with(half, cut) for half in block.halves)
    return Block(block.box, block.first, block.last, union(halves[0].tight, halves[1].tight), halves)


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of rows, joined where they lie side by side."""
    made: list[tuple[int, int]] = []
    for first, last in rows.tolist():
        if made and made[-1][1] == first:
            first = made.pop()[0]
        made.append((first, last))
    return made


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


def piece_of(budget: int) -> int:
    """Rows that are looked at together where the whole scene is gone through."""
    return max(1, min(2**22, budget // (4 * ROW_BYTES)))
