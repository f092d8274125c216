"""Schedules on the GPU: the table of neighbours in the order of rows, cut into tiles with a list of live taps each.

    in:  a `WindowSearch` and the order of its rows
    out: a `Schedule`

In tiles of two rows, the order (2, 0, 1) gives the slots (2, 0 | 1, -1). Their columns of the table are

    tap 0   -1 -1 |  0 -1
    tap 1    2  0 |  1 -1
    tap 2   -1  1 | -1 -1

so that the first tile lists the taps 1 and 2, the second the taps 0 and 1. (Tiles have 16 rows and more, and slots are
padded to a multiple of 256.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sparseconv.geometry.gpu.order.row_keys import row_keys
from sparseconv.geometry.gpu.order.row_order import row_order
from sparseconv.geometry.gpu.pairs.found_edges import FoundEdges, ReversedEdges
from sparseconv.geometry.gpu.tiles.kernels import CUBE_TILES, RANKS, TILES, TILES_64
from sparseconv.geometry.gpu.tiles.schedule import LOOKAHEAD, SLOT_ALIGNMENT, Schedule, tap_significance
from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.search import search_table
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.launcher import Pointer, ceil_div, pointer, power_of_2
from sparseconv.gpu.radix_sort.sort import sort_rows
from sparseconv.gpu.streams import building, current

#: rows up to which a search keeps its scratch memory, some 50 bytes a row: small maps are wanted in two orders of rows
#: (taps split in groups or not), and to search again costs the host more than to build a schedule
KEPT_ROWS = 65_536
#: the arrays of a schedule: table, output rows, lists of the tiles, and slots where taps are in groups
_DTYPES = (torch.int32,) * 7


def schedule_on_gpu(
    kernel_map: KernelMap,
    block_m: int,
    groups: Sequence[Sequence[int]] | None = None,
    chunk_rows: int | None = None,
) -> Schedule:
    """The schedule of a kernel map on a GPU: from the search that found its edges, else from its table."""
    if isinstance(kernel_map.source, FoundEdges):
        schedule = build_schedule(kernel_map.source.searched(), block_m, groups=groups, chunk_rows=chunk_rows)
        if kernel_map.num_out > KEPT_ROWS:
            kernel_map.source.wrote("schedule")
        return schedule
    significance = tap_significance(kernel_map.num_taps)
    source = kernel_map.source
    turned = source.found.search if isinstance(source, ReversedEdges) else None
    # of fixed size it is as large as the schedule itself, and nothing else reads it: it is not kept
    table = source.neighbors if isinstance(source, ReversedEdges) and source.padded else kernel_map.neighbors
    search = search_table(table, None if turned is None else turned.device_count)
    if turned is not None:
        turned.kept.append(search.window.data)
    schedule = build_schedule(search, block_m, significance=significance, groups=groups, chunk_rows=chunk_rows)
    if turned is not None:
        turned.kept.extend(search.kept)
    return schedule


def build_schedule(
    search: WindowSearch,
    block_m: int,
    *,
    significance: Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    chunk_rows: int | None = None,
) -> Schedule:
    """The schedule of what a window sees, without waiting for the device.

    Args:
        search: the window's search.
        block_m: rows of a tile; a power of two that divides 256.
        significance: taps from the most to the least significant bit of a row's mask; default: `tap_order`.
        groups: taps cut into groups with a row order of their own each; default: all in one.
        chunk_rows: sort only inside runs of about this many neighbouring rows, for locality; keys then lose their last
            bits, and the launch order is the order of the tiles.

    Returns:
        A `Schedule` whose slots are padded to a multiple of 256 in each group.
    """
    if block_m < 1 or SLOT_ALIGNMENT % block_m:
        raise ValueError(f"block_m must divide {SLOT_ALIGNMENT}; got {block_m}")
    taps = search.window.num_taps
    parts = search.window.all_taps if groups is None else tuple(tuple(group) for group in groups)
    if groups is not None and sorted(tap for part in parts for tap in part) != list(range(taps)):
        raise ValueError(f"groups must hold each of the {taps} taps exactly once; got {parts}")
    if significance is None and groups is None:
        order = row_order(search, chunk_rows)
    else:
        with building():
            order = sort_rows(row_keys(search, parts, significance, chunk_rows))
    schedule = make_tiles(search, order, parts, block_m, chunk_rows is not None)
    side = current()
    if side is not None and isinstance(order, torch.Tensor):
        side.retire(order)
    return schedule


def make_tiles(
    search: WindowSearch,
    order: torch.Tensor | Pointer,
    parts: tuple[tuple[int, ...], ...],
    block_m: int,
    in_order: bool = False,
) -> Schedule:
    """The schedule of rows in the ``order`` of each group: (G, N_out) integers, or the place of (N_out,) int32."""
    n, device, window = search.rows, search.coords.device, search.window
    taps, plain = window.num_taps, parts == window.all_taps
    lines = taps if plain else max(map(len, parts), default=0)
    padded = -(-n // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    slots, room = len(parts) * padded, lines + LOOKAHEAD
    tiles = slots // block_m
    split, cube = len(parts) > 1, plain and search.is_cube
    length = tiles * room  # of the lists of all tiles; those of the reversed edges follow, at a multiple of 16 bytes
    turned = (length + 3) & -4 if cube else 0
    lengths = (lines + 1) * slots, slots, tiles, length, turned + length, tiles
    arena = Arena(device, _DTYPES, (*lengths, len(parts) * n) if split else lengths)
    if tiles:
        line_of, weight_taps = encode_parts(parts, device)
        search.kept.extend((line_of, weight_taps))
        wide = isinstance(order, torch.Tensor) and order.dtype == torch.int64
        table, out_rows, counts, tile_rows, tile_taps, launch_order, *slots_of = arena
        arrays = (
            *search.pointers, pointer(order) if isinstance(order, torch.Tensor) else order, pointer(line_of),
            pointer(weight_taps), table, out_rows, *(slots_of or (out_rows,)), counts, tile_rows, tile_taps,
            launch_order,
        )  # fmt: skip
        numbers = n, window.num_runs, taps, search.capacity, slots, padded // block_m, lines, room
        if cube:
            CUBE_TILES(device, (tiles,), (*arrays, *numbers), (block_m, power_of_2(room), in_order))
        else:
            constants = (*search.constants, block_m, power_of_2(room), split, taps <= 32, plain, in_order)
            (TILES_64 if wide else TILES)(device, (tiles,), (*arrays, *numbers), constants)
        if not in_order:
            _rank(counts, launch_order, tiles, lines, device)
    neighbors, out, tile_count, listed, taps_of, ranked, *slot_of = map(arena.tensor, range(len(arena)))
    return Schedule(
        block_m, neighbors.view(lines + 1, slots), out, tile_count, listed.view(tiles, room),
        taps_of[:length].view(tiles, room), ranked, slot_of[0].view(len(parts), n) if split else None,
        taps_of[turned:].view(tiles, room) if cube else None,
    )  # fmt: skip


def rank_tiles(counts: torch.Tensor, order: torch.Tensor, lines: int) -> None:
    """Write the order of launch (T,) int32 of tiles with ``counts`` (T,) int32 live taps each, ``lines`` at most."""
    _rank(pointer(counts), pointer(order), counts.shape[0], lines, counts.device)


def _rank(counts: Pointer, order: Pointer, tiles: int, lines: int, device: torch.device) -> None:
    bins, mine = power_of_2(lines + 2), 64  # numbers of live taps that a tile may have, and one for no tile
    block = min(4096, max(1024, power_of_2(tiles)))  # all tiles at once, if they are not too many
    RANKS(device, (ceil_div(tiles, mine),), (counts, order, tiles), (bins, mine, block))


@lru_cache(maxsize=512)
def encode_parts(parts: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, K) int32 table row of each tap in each group and (G, R) int32 tap of each table row; -1 for none."""
    line_of = torch.full((len(parts), sum(map(len, parts))), -1, dtype=torch.int32)
    weight_taps = torch.full((len(parts), max(map(len, parts), default=0)), -1, dtype=torch.int32)
    for index, part in enumerate(parts):
        for line, tap in enumerate(part):
            line_of[index, tap] = line
            weight_taps[index, line] = tap
    return line_of.to(device), weight_taps.to(device)
