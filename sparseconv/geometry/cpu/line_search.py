"""The edges of a window found on the CPU, one search for a line of taps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from sparseconv.geometry.cpu import compiled
from sparseconv.geometry.cpu.sorted_table import KeySpace
from sparseconv.geometry.grid import VoxelGrid
from sparseconv.geometry.other_voxels import FEW
from sparseconv.geometry.ranges import IndexRange, Ints

Edges = tuple[torch.Tensor, torch.Tensor]  # input rows (P_k,) and output rows (P_k,) of one tap, int32


def edges_by_lines(
    fine: VoxelGrid, coarse: VoxelGrid, stride: Ints, offsets: tuple[Ints, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Every edge fine = stride * coarse + offsets[k] as (in_rows, out_rows, tap_offsets); None past 63-bit keys.

    In a key space that holds the whole reach of the window, a tap adds a constant to a key. Consecutive taps along the
    last axis add consecutive constants, so their voxels lie at consecutive places among sorted keys. One binary search
    thus serves a line of taps. On one grid at stride 1, half of the taps are the other half's, reversed. The 27 taps of
    a submanifold kernel 3 take four searches.
    """
    space = _reach(fine, coarse, stride, offsets)
    if space is None:
        return None
    if compiled.serves(fine) and (edges := compiled.found_edges(space, fine, coarse, stride, offsets)) is not None:
        return edges
    one_grid = coarse is fine and all(s == 1 for s in stride)
    order = fine._table.rows
    keys = space.keys(fine.coords)[order]
    rows = order.int()
    queries = keys if one_grid else space.keys(coarse.coords * torch.tensor((1, *stride)))
    by = space.factors[1:]
    deltas = [sum(o * f for o, f in zip(offset, by)) for offset in offsets]
    found: dict[int, Edges] = {}
    mirrors: dict[int, int] = {}
    if one_grid:
        tap_of = {offset: tap for tap, offset in enumerate(offsets)}
        opposite = {tap: tap_of.get(tuple(-o for o in offset)) for offset, tap in tap_of.items()}
        mirrors = {tap: other for tap, other in opposite.items() if other is not None and deltas[tap] < 0}
    searched = sorted((d, tap) for tap, d in enumerate(deltas) if tap not in mirrors)
    if len(queries) * len(searched) <= FEW:
        _search_at_once(keys, queries, searched, one_grid, rows, found)
    else:
        for line in _lines(searched):
            _search(keys, queries, line, one_grid, rows, found)
    for tap, other in mirrors.items():
        found[tap] = found[other][::-1]
    ordered = [found[tap] for tap in range(len(offsets))]
    counts = torch.tensor([0, *(len(ins) for ins, _ in ordered)])
    return torch.cat([ins for ins, _ in ordered]), torch.cat([outs for _, outs in ordered]), counts.cumsum(0)


def _reach(fine: VoxelGrid, coarse: VoxelGrid, stride: Ints, offsets: tuple[Ints, ...]) -> KeySpace | None:
    """The keys of every point that is on the fine grid, where a window stands, or seen through a tap.

    So what a tap adds to a key fits 64 bits, however far padding moves the taps away.
    """
    start, end = [0], [max(fine.batch_size, 1)]
    for axis, step in enumerate(stride):
        reach = [0, *(offset[axis] for offset in offsets)]
        seen = (step * coarse.extent.start[axis] + min(reach), step * (coarse.extent.end[axis] - 1) + max(reach) + 1)
        start.append(min(fine.extent.start[axis], seen[0]))
        end.append(max(fine.extent.end[axis], seen[1]))
    try:
        return KeySpace.covering(IndexRange(tuple(start), tuple(end)))
    except ValueError:
        return None


def _lines(taps: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(delta, tap), ascending -> runs of consecutive deltas."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(taps), 1) if b[0] != a[0] + 1), len(taps)]
    return [taps[a:b] for a, b in pairwise(cuts) if a < b]


def _search(
    keys: torch.Tensor,
    queries: torch.Tensor,
    line: list[tuple[int, int]],
    one_grid: bool,
    rows: torch.Tensor,
    found: dict[int, Edges],
) -> None:
    """The edges of a line of taps: ``places`` is where the key of the tap at hand is, or would be, among ``keys``."""
    (first, _), n = line[0], len(keys)
    wanted = queries + first
    if one_grid and first in (0, 1):
        places = torch.arange(first, n + first)
    else:
        places = torch.from_numpy(np.searchsorted(keys.numpy(), wanted.numpy()))
    ended = torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])
    for delta, tap in line:
        if delta != first:
            wanted += 1
        hit = torch.index_select(ended, 0, places) == wanted
        outs = torch.from_numpy(np.flatnonzero(hit.numpy()))
        ins = torch.index_select(places, 0, outs)
        found[tap] = (
            torch.index_select(rows, 0, ins),
            torch.index_select(rows, 0, outs) if one_grid else outs.int(),
        )
        places += hit


def _search_at_once(
    keys: torch.Tensor,
    queries: torch.Tensor,
    taps: list[tuple[int, int]],
    one_grid: bool,
    rows: torch.Tensor,
    found: dict[int, Edges],
) -> None:
    """The edges of all taps in a small scene, by one binary search for each: few calls take less time there."""
    wanted = queries + torch.tensor([delta for delta, _ in taps])[:, None]
    ended = torch.cat([keys, keys.new_full((1,), torch.iinfo(torch.int64).max)])
    places = torch.searchsorted(keys, wanted)
    hit = ended[places] == wanted
    lines, outs = map(torch.from_numpy, np.nonzero(hit.numpy()))
    ins = rows[places[lines, outs]]
    outs = rows[outs] if one_grid else outs.int()
    counts = np.count_nonzero(hit.numpy(), axis=1).tolist()
    for (_, tap), *edges in zip(taps, ins.split(counts), outs.split(counts)):
        found[tap] = (edges[0], edges[1])
