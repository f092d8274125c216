"""The work list of the implicit GEMM: rows in tiles of like taps, and for each tile the taps that live in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch

from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.program import Fixed

#: slots are padded to a multiple of this, so that schedules of every block size share one table
SLOT_ALIGNMENT = 256
#: bits of a row's tap mask that one sort key holds
WORD_BITS = 62
#: list columns beyond the last live tap that a kernel may read ahead
LOOKAHEAD = 4
#: beside a table row in a tile's list: this bit, whether the first half of the tile's rows has a neighbour there, and
#: the next, whether the second has
HALF_BIT = 28
ROW_BITS = (1 << HALF_BIT) - 1
#: rows that are sorted together where rows must stay near their neighbours: a few megabytes of features
CHUNK_ROWS = 32_768


@dataclass(frozen=True)
class Schedule:
    """A kernel map's rows cut into T tiles of ``block_m`` rows; NP = T * block_m slots, R tap rows in the table.

    Rows are permuted so that the rows of a tile share most of their taps; a tile then runs over its own list of live
    taps only. Where taps are split in groups, a row has a slot in each group, and ``slots`` says which where it has a
    live tap, so that the partial sums can be added in a fixed order.
    """

    block_m: int
    neighbors: (
        torch.Tensor
    )  # (R + 1, NP) int32: input row of a slot through a table row; -1 absent; the last row all -1
    out_rows: torch.Tensor  # (NP,) int32: the output row of a slot; -1 for padding
    tile_counts: torch.Tensor  # (T,) int32: live taps of a tile
    tile_rows: (
        torch.Tensor
    )  # (T, S) int32: the table rows of a tile's live taps, with HALF_BITs; R beyond tile_counts; S >= R + 4
    tile_taps: torch.Tensor  # (T, S) int32: the weight tap of each of them; 0 beyond tile_counts
    tile_order: torch.Tensor  # (T,) int32: the order of launch, most taps first
    slots: torch.Tensor | None = None  # (G, N_out) int32: a row's slot in each group of taps, -1 none; None: one group
    turned_taps: torch.Tensor | None = (
        None  # (T, S) int32: tile_taps of the reversed edges, where they were written too
    )

    @property
    def num_tiles(self) -> int:
        return self.tile_counts.shape[0]

    def executed_rows(self, by_halves: bool) -> int:
        """Rows that are multiplied: for each live tap those of the tile, or of its halves with a neighbour there.

        Read back from the device.
        """
        if not by_halves:
            return int(self.tile_counts.sum()) * self.block_m
        halves = self.tile_rows >> HALF_BIT
        return int((halves & 1).sum() + (halves >> 1).sum()) * (self.block_m // 2)

    def reversed(self) -> Schedule | None:
        """That of the reversed edges, where it costs nothing."""
        return None

    def launched(self, order: torch.Tensor) -> Schedule:
        """The same tiles in another order of launch (T,) int32."""
        arrays = self.neighbors, self.out_rows, self.tile_counts, self.tile_rows, self.tile_taps
        return Schedule(self.block_m, *arrays, order, self.slots, self.turned_taps)

    @cached_property
    def fixed(self) -> Fixed:
        """What a launch over the tiles takes."""
        return self._launched_in(self.tile_order)

    @cached_property
    def links(self) -> tuple[Fixed, ...]:
        """What a launch over the tiles of each group of taps takes, most taps first."""
        groups = 1 if self.slots is None else self.slots.shape[0]
        counts = self.tile_counts.view(groups, -1)
        each = counts.shape[1]
        order = torch.sort(counts, dim=1, descending=True, stable=True).indices
        order += each * torch.arange(groups, device=order.device)[:, None]
        padded = torch.nn.functional.pad(order.to(torch.int32), (0, -each % 4))  # each row begins at 16 bytes
        return tuple(self._launched_in(group) for group in padded)

    def _launched_in(self, order: torch.Tensor) -> Fixed:
        lists = (self.tile_counts, self.tile_rows, self.tile_taps, order)
        return Fixed((self.neighbors, self.out_rows, *lists), (self.out_rows.shape[0], self.tile_rows.shape[1]))


def tap_significance(num_taps: int) -> tuple[int, ...]:
    """Taps from the most to the least significant bit of a row's mask: farthest from the kernel's centre first.

    A far tap (a corner) is the rarest, and a rare tap costs most when the rows that have it are spread over many tiles.
    The box is taken to be the cube, else the square, else the line with this many taps.
    """
    for rank in (3, 2):
        side = round(num_taps ** (1 / rank))
        if side**rank == num_taps:
            break
    else:
        rank, side = 1, num_taps

    def distance(tap: int) -> int:
        total = 0
        for _ in range(rank):
            tap, digit = divmod(tap, side)
            total += abs(2 * digit - (side - 1))
        return total

    return tuple(sorted(range(num_taps), key=lambda tap: -distance(tap)))


def plane_groups(num_taps: int, parts: int = 3) -> tuple[tuple[int, ...], ...]:
    """Taps cut into ``parts`` runs of neighbouring tap numbers: the planes along the first axis of a cube."""
    edges = [round(part * num_taps / parts) for part in range(parts + 1)]
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(edges) if b > a)


def gray_rank(neighbors: torch.Tensor, taps: Sequence[int]) -> list[torch.Tensor]:
    """The rank in the Gray sequence of each row's tap mask, as int64 words, most significant first.

    ``taps`` are given from the most to the least significant bit. Two masks next to each other in the sequence differ
    in one bit, so sorted rows change their taps one at a time. Rows without a live tap come last.
    """
    words: list[torch.Tensor] = []
    carry: torch.Tensor | None = None
    alive = torch.zeros(neighbors.shape[1], dtype=torch.bool, device=neighbors.device)
    for start in range(0, len(taps), WORD_BITS):
        part = taps[start : start + WORD_BITS]
        word = torch.zeros(neighbors.shape[1], dtype=torch.int64, device=neighbors.device)
        for bit, tap in enumerate(reversed(part)):
            live = neighbors[tap] >= 0
            word |= live.to(torch.int64) << bit
            alive |= live
        for shift in (1, 2, 4, 8, 16, 32):  # prefix xor: Gray code to its rank
            word = word ^ (word >> shift)
        if carry is not None:
            word = word ^ (-carry & ((1 << len(part)) - 1))
        carry = word & 1
        words.append(word)
    if words:
        words[0] = torch.where(alive, words[0], 1 << WORD_BITS)
    return words


def row_order(
    neighbors: torch.Tensor,
    taps: Sequence[int],
    base_order: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Rows sorted by the Gray rank of their masks, inside chunks of ``chunk_rows`` rows of the base order if given."""
    num_rows = neighbors.shape[1]
    order = torch.arange(num_rows, device=neighbors.device) if base_order is None else base_order.long()
    keys = gray_rank(neighbors, taps)
    if chunk_rows is not None and num_rows > chunk_rows:
        chunk = torch.empty_like(order)
        chunk[order] = torch.arange(num_rows, device=neighbors.device) // chunk_rows
        if len(keys) == 1 and len(taps) + 1 + math.ceil(math.log2(num_rows / chunk_rows + 1)) < 63:
            keys = [(chunk << (len(taps) + 1)) | keys[0].clamp(max=1 << len(taps))]
        else:
            keys = [chunk, *keys]
    for key in reversed(keys):
        order = order[torch.sort(key[order], stable=True).indices]
    return order


def tile_lists(
    table: torch.Tensor, block_m: int, row_taps: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, table rows, weight taps and launch order of the tiles of a table; ``row_taps`` (G, R), -1 for none."""
    num_rows, num_slots = table.shape[0] - 1, table.shape[1]
    num_tiles = num_slots // block_m
    slots = table[:-1].view(num_rows, num_tiles, block_m) >= 0
    first, second = (half.any(dim=2).t() for half in (slots[..., : block_m // 2], slots[..., block_m // 2 :]))  # (T, R)
    live = first | second
    counts = live.sum(dim=1, dtype=torch.int32)
    width = num_rows + LOOKAHEAD
    position = torch.where(live, live.cumsum(dim=1) - 1, width - 1)  # dead taps meet in the last column
    rows = torch.arange(num_rows, dtype=torch.int32, device=table.device) | (first.int() + 2 * second.int()) << HALF_BIT
    taps = row_taps.clamp(min=0).repeat_interleave(num_tiles // row_taps.shape[0], dim=0)
    tile_rows = torch.full((num_tiles, width), num_rows, dtype=torch.int32, device=table.device)
    tile_taps = torch.zeros((num_tiles, width), dtype=torch.int32, device=table.device)
    tile_rows.scatter_(1, position, rows)
    tile_taps.scatter_(1, position, taps)
    tile_rows[:, -1] = num_rows
    tile_taps[:, -1] = 0
    order = torch.sort(counts, descending=True, stable=True).indices.to(torch.int32)
    return counts, tile_rows, tile_taps, order


def build_schedule(
    neighbors: torch.Tensor,
    num_taps: int,
    block_m: int,
    *,
    base_order: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    significance: Sequence[int] | None = None,
) -> Schedule:
    """Build a schedule in plain torch operations, without waiting for the device.

    Args:
        neighbors: (K, N_out) int32, the map's table.
        num_taps: K.
        block_m: rows of a tile; a power of two that divides 256.
        base_order: (N_out,) a permutation of the rows that keeps neighbours close (a Morton order); equal masks stay
            in this order. Default: the rows as they come.
        chunk_rows: sort by mask only inside runs of this many rows of the base order, for locality.
        groups: taps cut into groups with a row order of their own each; each row then has one slot a group.
        significance: taps from the most to the least significant bit of the mask; default ``tap_significance``.

    Returns:
        The schedule. Slots are padded to a multiple of 256 in each group.

    Example::

        schedule = build_schedule(kernel_map.neighbors, kernel_map.num_taps, block_m=128)
    """
    if block_m < 1 or SLOT_ALIGNMENT % block_m:
        raise ValueError(f"block_m must divide {SLOT_ALIGNMENT}, got {block_m}")
    if neighbors.ndim != 2 or neighbors.shape[0] != num_taps:
        raise ValueError(f"neighbors must have shape (K={num_taps}, N_out), got {tuple(neighbors.shape)}")
    device = neighbors.device
    num_out = neighbors.shape[1]
    ranking = tuple(significance) if significance is not None else tap_significance(num_taps)
    parts = [tuple(range(num_taps))] if groups is None else [tuple(group) for group in groups]
    if sorted(tap for part in parts for tap in part) != list(range(num_taps)):
        raise ValueError(f"groups must hold each of the {num_taps} taps exactly once, got {parts}")
    num_rows = max(map(len, parts), default=0)
    padded = -(-num_out // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    table = torch.full((num_rows + 1, len(parts) * padded), -1, dtype=torch.int32, device=device)
    out_rows = torch.full((len(parts) * padded,), -1, dtype=torch.int32, device=device)
    row_taps = torch.full((len(parts), num_rows), -1, dtype=torch.int32)
    slots = torch.full((len(parts), num_out), -1, dtype=torch.int32, device=device) if len(parts) > 1 else None
    for index, part in enumerate(parts):
        order = row_order(neighbors, [tap for tap in ranking if tap in part], base_order, chunk_rows)
        begin = index * padded
        alive = torch.zeros(num_out, dtype=torch.bool, device=device)
        for row, tap in enumerate(part):
            torch.index_select(neighbors[tap], 0, order, out=table[row, begin : begin + num_out])
            alive |= table[row, begin : begin + num_out] >= 0
        row_taps[index, : len(part)] = torch.tensor(part, dtype=torch.int32)
        span = out_rows[begin : begin + num_out]
        span.copy_(order)
        if slots is not None:
            place = torch.arange(begin, begin + num_out, dtype=torch.int32, device=device)
            slots[index, order] = torch.where(alive, place, -1)
    if device.type == "cuda":
        row_taps = row_taps.pin_memory()
    lists = tile_lists(table, block_m, row_taps.to(device, non_blocking=True))
    return Schedule(block_m, table, out_rows, *lists, slots=slots)


def retile(schedule: Schedule, block_m: int) -> Schedule:
    """The same rows in the same order in tiles of another size; the table is shared, only the lists are new."""
    if block_m == schedule.block_m:
        return schedule
    if schedule.slots is not None:
        raise ValueError("a schedule of several groups of taps cannot be cut anew: build it for its tile size")
    table = schedule.neighbors
    if table.is_cuda:
        return _on_gpu()[1].retile_on_gpu(schedule, block_m)
    row_taps = torch.arange(table.shape[0] - 1, dtype=torch.int32, device=table.device)[None]
    counts, tile_rows, tile_taps, order = tile_lists(table, block_m, row_taps)
    return Schedule(block_m, table, schedule.out_rows, counts, tile_rows, tile_taps, order)


def schedule_of(
    kernel_map: KernelMap,
    block_m: int,
    transposed: bool = False,
    split: int = 1,
    chunked: bool = False,
    in_order: bool = False,
) -> Schedule:
    """The map's schedule at a tile size, built on first use and kept with the map; transposed: of the reversed edges.

    A map with a mirror symmetry is its own reverse with the taps exchanged, so its one table serves both directions.
    ``split``: taps in so many groups with a row order each. ``chunked``: rows sorted inside runs of neighbouring rows,
    which are those of ``kernel_map.prepared["row_order"]`` where the geometry left one, and tiles launched in order.
    ``in_order``: rows sorted as a whole; tiles with about as many taps launched in the order of their rows.
    Where every output row has one edge, no tile has two taps and neither makes a difference.
    """
    if transposed and kernel_map.mirror is None:
        return schedule_of(kernel_map.reverse(), block_m, False, split, chunked, in_order)
    key = ("schedule", block_m, transposed, split, chunked, in_order)
    schedule = kernel_map.prepared.get(key)
    if schedule is None:
        schedule = kernel_map.prepared[key] = _schedule(kernel_map, *key[1:])
    return schedule


@cache
def _on_gpu() -> tuple[Any, Any, Any]:
    from sparseconv.geometry.gpu import fused  # Triton is loaded where it is used
    from sparseconv.geometry.gpu.tiles import build, sortless

    return build, sortless, fused


def schedule_ahead(kernel_map: KernelMap, block_m: int) -> None:
    """Start to compile what `schedule_of` launches for tiles of so many rows, in one group of taps, not in runs."""
    if kernel_map.device.type == "cuda":
        _on_gpu()[0].schedule_ahead(kernel_map, block_m)


def _schedule(
    kernel_map: KernelMap, block_m: int, transposed: bool, split: int, chunked: bool, in_order: bool
) -> Schedule:
    if transposed:
        straight = schedule_of(kernel_map, block_m, False, split, chunked, in_order)
        turned = straight.reversed()
        if turned is not None:
            return turned
        taps = straight.turned_taps
        if taps is None:
            taps = _mirrored(straight.tile_taps, kernel_map)
        return Schedule(
            block_m,
            straight.neighbors,
            straight.out_rows,
            straight.tile_counts,
            straight.tile_rows,
            taps,
            straight.tile_order,
            straight.slots,
            straight.tile_taps,
        )
    by_gpu = _is_cuda(kernel_map.device) and "row_order" not in kernel_map.prepared
    if by_gpu and _on_gpu()[1].meets_once(kernel_map):
        if split > 1 or chunked or in_order:
            return schedule_of(kernel_map, block_m)
        return _on_gpu()[1].one_tap_schedule(kernel_map, block_m)
    if split > 1:
        return _build(kernel_map, by_gpu, block_m, plane_groups(kernel_map.num_taps, split))
    name = "chunked schedule" if chunked else "schedule"
    base = kernel_map.prepared.get(name)
    if base is None:
        base = kernel_map.prepared[name] = _build(kernel_map, by_gpu, block_m, None, CHUNK_ROWS if chunked else None)
    schedule = retile(base, block_m)
    if in_order:
        return schedule.launched(_about_as_many(schedule))
    return _in_order(schedule) if chunked and schedule is not base else schedule


@cache
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"  # a string that torch prints anew each time


def _in_order(schedule: Schedule) -> Schedule:
    """The same tiles, launched in the order of their rows."""
    order = torch.arange(schedule.num_tiles, dtype=torch.int32, device=schedule.tile_order.device)
    return schedule.launched(order)


def _about_as_many(schedule: Schedule) -> torch.Tensor:
    """The order of launch by half the number of taps, most first; tiles of the same number as they lie.

    Tiles next to each other have like taps, thus on a surface the same direction, and read the same rows.
    """
    taps = schedule.neighbors.shape[0] - 1
    counts = schedule.tile_counts >> 1
    if not counts.is_cuda:
        return torch.sort(counts, descending=True, stable=True).indices.to(torch.int32)
    order = torch.empty_like(counts)
    _on_gpu()[0].rank_tiles(counts, order, taps)
    return order


def _mirrored(tile_taps: torch.Tensor, kernel_map: KernelMap) -> torch.Tensor:
    """The mirrored tap of each."""
    mirror = kernel_map.mirror or ()
    last = len(mirror) - 1
    if all(tap == last - place for place, tap in enumerate(mirror)):
        return last - tile_taps
    taps = kernel_map.prepared["mirror"] = _on_device(mirror, tile_taps.device)  # a graph that reads it keeps the map
    return taps[tile_taps.long()]


@lru_cache(maxsize=64)
def _on_device(mirror: tuple[int, ...], device: torch.device) -> torch.Tensor:
    taps = torch.tensor(mirror, dtype=torch.int32)
    return (taps.pin_memory() if device.type == "cuda" else taps).to(device, non_blocking=True)


def _build(
    kernel_map: KernelMap,
    by_gpu: bool,
    block_m: int,
    groups: Sequence[Sequence[int]] | None,
    chunk_rows: int | None = None,
) -> Schedule:
    if by_gpu:
        build, _, fused = _on_gpu()
        made = fused.schedule_made(kernel_map, block_m, chunk_rows) if groups is None else None
        return made or build.schedule_on_gpu(kernel_map, block_m, groups, chunk_rows)
    rows = kernel_map.prepared.get("row_order")
    schedule = build_schedule(
        kernel_map.neighbors, kernel_map.num_taps, block_m, base_order=rows, chunk_rows=chunk_rows, groups=groups
    )
    return schedule if chunk_rows is None else _in_order(schedule)
