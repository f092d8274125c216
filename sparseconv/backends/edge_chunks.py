"""The edges of a kernel map cut into runs of output rows, each small enough for a cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from sparseconv.geometry.kernel_map import KernelMap


@dataclass(frozen=True)
class Chunk:
    """Output rows [start, stop) and every edge that ends there, except those of the identity tap.

    The edges lie by tap, and their products go to a buffer in the same order; ``slots`` says where in that buffer the
    products of each output row are. In a map of three taps whose middle one is the identity, rows 0 and 1 with
    the edges (tap 0, in 0, out 1) and (tap 2, in 1, out 0)::

        in_rows = [0, 1]; out_rows = [1, 0]; taps = ((0, 0, 1, 1), (2, 1, 2, 2)); slots = [1, 0]; offsets = [0, 1, 2]

    Each tap's run is padded to whole tiles of ``tile`` edges by row 0, which no slot names; a chunk starts at a whole
    number of tiles. Here the tile is 1.
    """

    start: int
    stop: int
    in_rows: torch.Tensor  # (E,) int32
    out_rows: torch.Tensor  # (E,) int32
    padding: torch.Tensor  # int64: the places among the E that are no edges
    taps: tuple[tuple[int, int, int, int], ...]  # (tap, first edge, last edge + 1, the same with padding), live ones
    tile_taps: torch.Tensor  # (E / tile,) int64: the tap of each tile
    tile_offsets: torch.Tensor  # (K + 1,) int32: tap k owns the tiles [tile_offsets[k], tile_offsets[k+1])
    slots: torch.Tensor  # (edges without padding,) int32
    offsets: torch.Tensor  # (stop - start + 1,) int32: output row r owns slots[offsets[r]:offsets[r+1]]


def edge_chunks(kernel_map: KernelMap, edges: int, tile: int, threads: int = 1) -> tuple[Chunk, ...]:
    """The chunks of a map in order of output rows, of at most about ``edges`` edges, as many for each thread.

    They are kept with the map for the next call.
    """
    key = (Chunk, edges, tile, threads)
    kept = kernel_map.prepared.get(key)
    if kept is None:
        kept = kernel_map.prepared[key] = _cut(kernel_map, edges, tile, threads)
    return kept


def _cut(kernel_map: KernelMap, edges: int, tile: int, threads: int) -> tuple[Chunk, ...]:
    rows, identity = kernel_map.num_out, kernel_map.identity_tap
    ins, outs = (t.numpy() for t in sorted_edges(kernel_map))
    runs = list(pairwise(accumulate(kernel_map.tap_counts, initial=0)))
    if identity is not None:
        runs[identity] = (0, 0)
    others = sum(b - a for a, b in runs)
    count = -(-max(1, -(-(others + rows) // edges)) // threads) * threads
    # the cuts are looked for among some rows, since looking at each edge takes longer than its convolution may
    grid = np.arange(0, rows, -(-max(1, rows // (64 * count)) // tile) * tile) if rows else np.zeros(1, np.int64)
    grid = np.append(grid, rows)
    places = np.stack([a + np.searchsorted(outs[a:b], grid) for a, b in runs])  # (K, grid): first edge at or after it
    cost = places.sum(0) - places[:, 0].sum() + grid  # an output row costs about what an edge does
    inner = np.searchsorted(cost[:-1], np.arange(1, count) * cost[-1] // count)
    cuts = [0, *np.minimum(inner, len(grid) - 2).tolist(), len(grid) - 1]
    bounds = places[:, cuts].T.tolist()
    return tuple(
        _chunk(ins, outs, [*zip(firsts, lasts)], int(grid[start]), int(grid[stop]), tile)
        for (start, stop), (firsts, lasts) in zip(pairwise(cuts), pairwise(bounds))
    )


def _chunk(ins: np.ndarray, outs: np.ndarray, runs: list[tuple[int, int]], start: int, stop: int, tile: int) -> Chunk:
    """The chunk of output rows [start, stop), whose edges are ``runs`` of the edges by tap."""
    room = [-(-(b - a) // tile) * tile for a, b in runs]
    ends = list(accumulate(room, initial=0))
    nowhere = np.full(tile, stop, np.int32)  # the output row of padding, until all are in order
    pieces = [(slice(a, b), size - b + a) for (a, b), size in zip(runs, room) if size]
    none = np.zeros(0, np.int32)
    in_rows = np.concatenate([none, *(x for run, pad in pieces for x in (ins[run], np.zeros(pad, np.int32)))])
    out_rows = np.concatenate([none, *(x for run, pad in pieces for x in (outs[run], nowhere[:pad]))])
    spans = [(tap, a, a + last - first, b) for tap, ((a, b), (first, last)) in enumerate(zip(pairwise(ends), runs))]
    padding = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for _, _, a, b in spans)])
    live = len(out_rows) - len(padding)
    # by row, and by tap within a row, so that a sum has one order: sorted as numbers, which is faster than argsort
    bits = max(1, len(out_rows)).bit_length()
    kind = np.uint32 if (stop - start + 1) << bits < 1 << 32 else np.uint64
    keys = (out_rows - np.int32(start)).astype(kind) << kind(bits)
    keys |= np.arange(len(keys), dtype=kind)
    keys.sort()
    offsets = np.searchsorted(keys[:live], np.arange(stop - start + 1, dtype=kind) << kind(bits)).astype(np.int32)
    out_rows[padding] = 0
    return Chunk(
        start,
        stop,
        torch.from_numpy(in_rows),
        torch.from_numpy(out_rows),
        torch.from_numpy(padding),
        tuple(span for span in spans if span[1] < span[2]),
        torch.from_numpy(np.repeat(np.arange(len(runs)), np.array(room) // tile)),
        torch.from_numpy(np.array(ends, np.int32) // np.int32(tile)),
        torch.from_numpy((keys[:live] & kind((1 << bits) - 1)).astype(np.int32)),
        torch.from_numpy(offsets),
    )


def sorted_edges(kernel_map: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output rows of every edge by tap and then by output row: the map's own, where they lie so."""
    in_rows, out_rows, counts = kernel_map.in_rows, kernel_map.out_rows, kernel_map.tap_counts
    descends = np.diff(out_rows.numpy(), prepend=-1) < 0
    begins = np.cumsum(counts)
    descends[begins[begins < len(descends)]] = False
    if not descends.any():
        return in_rows, out_rows
    taps = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
    order = torch.sort(out_rows, stable=True).indices
    order = order[torch.sort(taps[order], stable=True).indices]
    return in_rows[order], out_rows[order]


def reversed_edges(kernel_map: KernelMap) -> tuple[KernelMap, list[int] | slice]:
    """A map with the reversed edges, and which of this map's taps each of its own is.

    The reversed edges of a tap are those of its mirror, where there is one: the chunks of the map serve twice.
    """
    return (kernel_map.reverse(), slice(None)) if kernel_map.mirror is None else (kernel_map, list(kernel_map.mirror))
