"""Edges and reached voxels on a CPU by compiled loops, where llvmlite is installed; the same as without it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.cpu.loops import collect_loop, edge_loop, key_loop, mark_loop
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.keys import KeySpace
from sparseconv.geometry.ranges import IndexRange, Ints
from sparseconv.geometry.window import Window
from sparseconv.llvm.compile import missing

#: words of 64 voxels that are looked at in any scene, and for each voxel of a large one
WORDS, WORDS_EACH = 1 << 19, 16


def serves(grid: VoxelGrid) -> bool:
    """Whether the loops take a grid."""
    return grid.coords.is_cpu and grid.count is None and missing() is None


class _Lines(NamedTuple):
    """The taps of a window that are searched, as lines along the last axis; see `loops` for the arrays."""

    firsts: torch.Tensor
    cuts: torch.Tensor
    taps: torch.Tensor
    mirrors: torch.Tensor


def find_edges(
    fine: VoxelGrid, coarse: VoxelGrid, window: Window
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Every edge that a window joins as (in_rows, out_rows, tap_offsets); None past 63-bit keys.

    In a key space that holds the whole reach of the window, a tap adds a constant to a key, and consecutive taps along
    the last axis add consecutive constants. Keys and queries ascend, so a line of taps is found in one walk along both.
    One walk counts the edges, and a second one writes them. On one grid at stride 1, half of the taps are the other
    half's, reversed: the 27 taps of a submanifold kernel 3 take five lines.
    """
    stride, offsets = window.stride, window.offsets
    space = _reach(fine, coarse, stride, offsets)
    if space is None:
        return None
    one_grid = coarse is fine and not window.is_strided
    keys, rows, _ = _sorted_keys(space, fine, (1,) * fine.rank)
    queries, called, ascend = (keys, rows, True) if one_grid else _sorted_keys(space, coarse, stride)
    lines = _lines(offsets, one_grid)
    deltas = (lines.firsts * torch.tensor(space.factors[1:])).sum(1)
    ends, held = torch.empty(len(offsets) + 1, dtype=torch.int64), torch.zeros(len(lines.taps), dtype=torch.int64)
    sizes = len(fine), len(coarse), len(deltas), len(offsets)
    places = [*map(torch.Tensor.data_ptr, (keys, rows, queries, called, deltas, *lines[1:], held, ends))]
    search = edge_loop()
    count = search(0, *sizes, *places, None, None)
    ins, outs = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
    search(1, *sizes, *places, ins.data_ptr(), outs.data_ptr())
    if not ascend:  # by output row within a tap, as of a grid in lexicographic order
        taps = torch.repeat_interleave(torch.arange(len(offsets)), ends.diff())
        order = torch.argsort(taps * len(coarse) + outs)
        ins, outs = ins[order], outs[order]
    return ins, outs, ends


def _sorted_keys(space: KeySpace, grid: VoxelGrid, stride: Ints) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The keys of stride * voxels in ascending order, with a larger one behind them, (N+1,) int64; their rows (N,)
    int32; and whether they lie so in the grid."""
    by = space.factors
    factors = _numbers([by[0], *map(mul, by[1:], stride), -sum(map(mul, space.low, by))])
    keys = torch.empty(len(grid) + 1, dtype=torch.int64)
    if key_loop(len(by))(len(grid), grid.coords.data_ptr(), factors, keys.data_ptr()):
        return keys, torch.arange(len(grid), dtype=torch.int32), True
    order = grid._table.rows
    keys[:-1] = keys[:-1][order]
    return keys, order.int(), False


def _reach(fine: VoxelGrid, coarse: VoxelGrid, stride: Ints, offsets: tuple[Ints, ...]) -> KeySpace | None:
    """The keys of every point that is on the fine grid, where a window stands, or seen through a tap.

    So what a tap adds to a key fits 64 bits, however far padding moves the taps away.
    """
    start, end = [0], [max(fine.batch_size, 1)]
    for axis, (step, moves) in enumerate(zip(stride, zip(*offsets))):
        start.append(min(fine.extent.start[axis], step * coarse.extent.start[axis] + min(0, *moves)))
        end.append(max(fine.extent.end[axis], step * (coarse.extent.end[axis] - 1) + max(0, *moves) + 1))
    try:
        return KeySpace(IndexRange(start, end))
    except ValueError:
        return None


def reached_voxels(
    grid: VoxelGrid, window: Window, box: IndexRange, *, to_fine: bool
) -> tuple[torch.Tensor, IndexRange] | None:
    """The voxels in a box that a window reaches, (M, 1+D) int32 in lexicographic order, and their extent.

    A bit for each voxel of the box is set, and what is set is listed. None where the window does not fill a box, where
    ``box`` is too large for its voxels, and where nothing is reached.
    """
    *outer, length = box.shape
    words = -(-length // 64)
    size = grid.batch_size * prod(outer) * words
    if not window.fills_box or not 0 < size <= max(WORDS, WORDS_EACH * len(grid)):
        return None
    axes = zip(window.spans, box.start, box.shape)
    numbers = [
        (s, 1, -last, -first, low, count) if to_fine else (1, s, first, last, low, count)
        for (first, last, s), low, count in axes
    ]
    bits = torch.zeros(size, dtype=torch.int64)
    places = _numbers(chain(*numbers)), bits.data_ptr()
    found = mark_loop(grid.rank)(len(grid), grid.batch_size, words, grid.coords.data_ptr(), *places)
    if found == 0:
        return None
    with torch.inference_mode(False):  # torch counts writes to them
        coords = torch.empty(found, 1 + grid.rank, dtype=torch.int32)
    ends = _numbers([0] * (2 + 2 * grid.rank))
    collect_loop(grid.rank)(grid.batch_size, words, *places, coords.data_ptr(), ends)
    _, *low = ends[: 1 + grid.rank]
    _, *high = ends[1 + grid.rank :]
    return coords, IndexRange(low, [h + 1 for h in high])


def _numbers(values: Iterable[int]) -> Any:
    """An array of int64, each number modulo 2^64."""
    numbers = [*values]
    return (ctypes.c_int64 * len(numbers))(*numbers)


@lru_cache(maxsize=1024)
def _lines(offsets: tuple[Ints, ...], one_grid: bool) -> _Lines:
    """The lines of a window's taps in lexicographic order; of one grid, each pair of opposite taps is searched once."""
    tap_of = {offset: tap for tap, offset in enumerate(offsets)}
    opposite = {offset: tap_of.get(tuple(-o for o in offset), -1) if one_grid else -1 for offset in offsets}
    nought = (0,) * len(offsets[0])
    searched = sorted(offset for offset in offsets if opposite[offset] < 0 or offset >= nought)
    starts = [at for at, (*outer, last) in enumerate(searched) if at == 0 or searched[at - 1] != (*outer, last - 1)]
    taps = [tap_of[offset] for offset in searched]
    mirrors = [-1 if opposite[offset] == tap else opposite[offset] for offset, tap in zip(searched, taps)]
    return _Lines(*map(torch.tensor, ([searched[at] for at in starts], [*starts, len(taps)], taps, mirrors)))
