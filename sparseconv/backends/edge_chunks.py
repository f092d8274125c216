"""The edges of a kernel map cut into runs of output rows, each small enough for a cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
import torch

from sparseconv.geometry.kernel_map import KernelMap


@dataclass(frozen=True)
class Chunk:
    """Output rows [start, stop) and every edge that ends there, except those of the identity tap.

    The edges lie by tap, and their products go to a buffer in the same order; ``slots`` says where in that buffer the
    products of each output row are. In a map of three taps whose middle one is the identity, rows 0 and 1 with
    the edges (tap 0, in 0, out 1) and (tap 2, in 1, out 0)::

        in_rows = [0, 1]; taps = ((0, 0, 1), (2, 1, 2)); slots = [1, 0]; offsets = [0, 1, 2]

    Each tap's run is padded to whole tiles of ``tile`` edges by row 0, which no slot names; a chunk starts at a whole
    number of tiles. Here the tile is 1.
    """

    start: int
    stop: int
    in_rows: torch.Tensor  # (E,) int32
    taps: tuple[tuple[int, int, int], ...]  # (tap, first edge, last edge + 1), live ones only
    tile_taps: torch.Tensor  # (E / tile,) int64: the tap of each tile
    slots: torch.Tensor  # (edges without padding,) int32
    offsets: torch.Tensor  # (stop - start + 1,) int32: output row r owns slots[offsets[r]:offsets[r+1]]


@dataclass(frozen=True)
class EdgeChunks:
    """The chunks of a map in order of output rows, and the most edges, with their padding, that one of them has."""

    chunks: tuple[Chunk, ...]
    max_edges: int

    @classmethod
    def of(cls, kernel_map: KernelMap, edges: int, tile: int, threads: int = 1) -> EdgeChunks:
        """Chunks of at most about ``edges`` edges, as many for each thread, kept with the map for the next call."""
        key = (cls, edges, tile, threads)
        kept = kernel_map.prepared.get(key)
        if kept is None:
            kept = kernel_map.prepared[key] = _cut(kernel_map, edges, tile, threads)
        return kept


@dataclass(frozen=True)
class EdgeRuns:
    """The edges of a map by tap and output row, and runs of them whose output rows lie near each other.

    A part is a span of output rows, for one thread; its runs (tap, first edge, last edge + 1) go span by smaller span,
    whose rows stay in a cache while tap after tap reads them.
    """

    in_rows: torch.Tensor  # (P,) int32
    out_rows: torch.Tensor  # (P,) int32
    parts: tuple[tuple[tuple[int, int, int], ...], ...]

    @classmethod
    def of(cls, kernel_map: KernelMap, rows: int, threads: int) -> EdgeRuns:
        """As many parts as threads, with about as many edges each, in spans of about ``rows`` output rows."""
        key = (cls, rows, threads)
        kept = kernel_map.prepared.get(key)
        if kept is None:
            kept = kernel_map.prepared[key] = cls(*_sorted(kernel_map), ())._cut(kernel_map, rows, threads)
        return kept

    def _cut(self, kernel_map: KernelMap, rows: int, threads: int) -> EdgeRuns:
        grid = np.minimum(np.arange(0, kernel_map.num_out + rows, max(1, rows // 4)), kernel_map.num_out)
        starts = np.cumsum([0, *kernel_map.tap_counts]).tolist()
        outs = self.out_rows.numpy()
        places = np.stack([a + np.searchsorted(outs[a:b], grid) for a, b in pairwise(starts)])  # (K, grid)
        before = places.sum(0) - places[:, 0].sum()  # edges that end before each row of the grid
        spans = -(-max(1, -(-kernel_map.num_out // rows)) // threads) * threads
        cuts = np.searchsorted(before, np.arange(1, spans) * before[-1] // spans)
        bounds = places[:, [0, *cuts, -1]].T.tolist()
        runs = [[(tap, a, b) for tap, (a, b) in enumerate(zip(*span)) if a < b] for span in pairwise(bounds)]
        each = spans // threads
        parts = tuple(tuple(chain.from_iterable(runs[i : i + each])) for i in range(0, spans, each))
        return EdgeRuns(self.in_rows, self.out_rows, parts)


def _cut(kernel_map: KernelMap, edges: int, tile: int, threads: int) -> EdgeChunks:
    rows, num_taps = kernel_map.num_out, kernel_map.num_taps
    in_rows, out_rows, counts = _by_tap_and_row(kernel_map)
    by_row = torch.sort(out_rows, stable=True).indices.numpy()  # a row's edges in order of taps: its sum has one order
    degree = np.bincount(out_rows.numpy(), minlength=rows)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(degree, out=offsets[1:])
    cost = offsets[1:] + np.arange(1, rows + 1)  # an output row costs about what an edge does
    total = int(cost[-1]) if rows else 0
    count = -(-max(1, -(-total // edges)) // threads) * threads
    inner = np.searchsorted(cost, np.arange(1, count) * total // count) // tile * tile
    cuts = [0, *inner.tolist(), rows]

    starts = np.cumsum([0, *counts])
    by_tap = (out_rows.numpy()[a:b] for a, b in pairwise(starts.tolist()))
    bounds = np.stack([a + np.searchsorted(outs, cuts) for a, outs in zip(starts.tolist(), by_tap)])  # (K, chunks + 1)
    live = np.diff(bounds)
    room = -(-live // tile) * tile  # edges and padding of each (tap, chunk)
    first = (np.cumsum(room.T) - room.T.ravel()).reshape(count, num_taps)
    place = np.repeat((first.T - bounds[:, :-1]).ravel().astype(np.int32), live.ravel())
    place += np.arange(len(place), dtype=np.int32)
    padded = np.zeros(int(room.sum()), np.int32)
    padded[place] = in_rows.numpy()
    slots = place[by_row]

    chunks = []
    for (start, stop), sizes, base in zip(pairwise(cuts), room.T.tolist(), first[:, 0].tolist()):
        ends = list(accumulate(sizes, initial=0))
        own = slots[offsets[start] : offsets[stop]] - np.int32(base)
        chunks.append(
            Chunk(
                start,
                stop,
                torch.from_numpy(padded[base : base + ends[-1]]),
                tuple((tap, a, b) for tap, (a, b) in enumerate(pairwise(ends)) if a < b),
                torch.from_numpy(np.repeat(np.arange(num_taps), np.array(sizes) // tile)),
                torch.from_numpy(own),
                torch.from_numpy(offsets[start : stop + 1] - offsets[start]),
            )
        )
    return EdgeChunks(tuple(chunks), max(len(c.in_rows) for c in chunks))


def _by_tap_and_row(kernel_map: KernelMap) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Input and output rows of every edge but the identity tap's, by tap and then by output row; edges of each tap."""
    (in_rows, out_rows), counts = _sorted(kernel_map), list(kernel_map.tap_counts)
    if kernel_map.identity_tap is not None:
        before = sum(counts[: kernel_map.identity_tap])
        after = before + counts[kernel_map.identity_tap]
        in_rows, out_rows = (torch.cat([t[:before], t[after:]]) for t in (in_rows, out_rows))
        counts[kernel_map.identity_tap] = 0
    return in_rows, out_rows, counts


def _sorted(kernel_map: KernelMap) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output rows of every edge by tap and then by output row: the map's own, where they lie so."""
    in_rows, out_rows, counts = kernel_map.in_rows, kernel_map.out_rows, kernel_map.tap_counts
    descents = np.flatnonzero(np.diff(out_rows.numpy()) < 0) + 1
    if np.isin(descents, np.cumsum(counts)).all():
        return in_rows, out_rows
    taps = torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
    order = torch.sort(out_rows, stable=True).indices
    order = order[torch.sort(taps[order], stable=True).indices]
    return in_rows[order], out_rows[order]
