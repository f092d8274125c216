"""The edges of a kernel map cut into runs of output rows, each small enough for a cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from sparseconv.geometry.kernel_map import KernelMap


@dataclass(frozen=True)
class Chunk:
    """Output rows [start, stop) and every edge that ends there, except those of the identity tap.

    The edges lie by tap, and their products go to a buffer in the same order; ``slots`` says where in that buffer the
    products of each output row are. In a map of three taps whose middle one is the identity, rows 0 and 1 with
    the edges (tap 0, in 0, out 1) and (tap 2, in 1, out 0)::

        in_rows = [0, 1]; taps = ((0, 0, 1), (2, 1, 2)); slots = [1, 0]; offsets = [0, 1, 2]

    With tiles of ``tile`` edges each tap's run is padded to whole tiles by row 0, which no slot names, and
    ``tile_taps`` has the tap of each tile.
    """

    start: int
    stop: int
    in_rows: torch.Tensor  # (E,) int32
    taps: tuple[tuple[int, int, int], ...]  # (tap, first edge, last edge + 1), live ones only
    tile_taps: torch.Tensor  # (E / tile,) int64; empty without tiles
    slots: torch.Tensor  # (edges without padding,) int32
    offsets: torch.Tensor  # (stop - start + 1,) int32: output row r owns slots[offsets[r]:offsets[r+1]]


@dataclass(frozen=True)
class EdgeChunks:
    """The chunks of a map in order of output rows, and the most edges and padding that one of them has."""

    chunks: tuple[Chunk, ...]
    max_edges: int

    @classmethod
    def of(cls, kernel_map: KernelMap, edges: int, tile: int = 1) -> EdgeChunks:
        """Chunks of about ``edges`` edges, kept with the map: asked for again, they are there."""
        key = (cls, edges, tile)
        kept = kernel_map.prepared.get(key)
        if kept is None:
            kept = kernel_map.prepared[key] = _cut(kernel_map, edges, tile)
        return kept


def _cut(kernel_map: KernelMap, edges: int, tile: int) -> EdgeChunks:
    rows, num_taps = kernel_map.num_out, kernel_map.num_taps
    in_rows, out_rows, tap = kernel_map.in_rows, kernel_map.out_rows, kernel_map.pair_taps
    if kernel_map.identity_tap is not None:
        before = sum(kernel_map.tap_counts[: kernel_map.identity_tap])
        after = before + kernel_map.tap_counts[kernel_map.identity_tap]
        in_rows, out_rows, tap = (torch.cat([t[:before], t[after:]]) for t in (in_rows, out_rows, tap))
    degree = torch.bincount(out_rows, minlength=rows)
    cost = torch.cumsum(degree + 1, 0)
    total = int(cost[-1]) if rows else 0
    count = max(1, -(-total // edges))
    inner = torch.searchsorted(cost, torch.arange(1, count) * total // count)
    cuts = [0, *inner.tolist(), rows]
    if count > 1:
        owner = torch.bucketize(out_rows, inner.int(), right=True, out_int32=True)
        order = torch.sort(owner, stable=True).indices
        in_rows, out_rows = in_rows[order], out_rows[order]
        cell = owner.mul_(num_taps).add_(tap)
    else:
        cell = tap
    live = torch.bincount(cell, minlength=count * num_taps)
    room = (live + (tile - 1)) // tile * tile  # edges and padding of each (chunk, tap)
    first_room = torch.cumsum(room, 0) - room
    by_row = torch.sort(out_rows, stable=True).indices  # each row's edges in order of taps: sums have one order
    padded = int(room.sum())
    if tile > 1:
        shift = first_room - (torch.cumsum(live, 0) - live)
        place = torch.arange(len(in_rows)) + torch.repeat_interleave(shift, live, output_size=len(in_rows))
        in_rows = torch.zeros(padded, dtype=torch.int32).index_copy_(0, place, in_rows)
        by_row = place[by_row]
    slots = by_row.int()
    offsets = torch.zeros(rows + 1, dtype=torch.int32)
    torch.cumsum(degree, 0, out=offsets[1:])
    tile_taps = torch.repeat_interleave(torch.arange(num_taps).repeat(count), room // tile) if tile > 1 else by_row[:0]

    chunks, base, edge = [], 0, 0
    for (start, stop), sizes, used in zip(
        pairwise(cuts), room.view(count, num_taps).tolist(), live.view(count, num_taps).sum(1).tolist()
    ):
        taps, last = [], 0
        for k, size in enumerate(sizes):
            if size:
                taps.append((k, last, last + size))
                last += size
        chunks.append(
            Chunk(
                start,
                stop,
                in_rows[base : base + last],
                tuple(taps),
                tile_taps[base // tile : (base + last) // tile],
                slots[edge : edge + used] - base,
                offsets[start : stop + 1] - edge,
            )
        )
        base, edge = base + last, edge + used
    return EdgeChunks(tuple(chunks), max(len(c.in_rows) for c in chunks))
