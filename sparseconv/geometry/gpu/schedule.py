"""Schedules on the GPU: the table of neighbors in the order of rows, cut into tiles with a list of live taps each.

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
import triton
import triton.language as tl

from sparseconv.geometry.gpu.edge_lists import FoundEdges, ReversedEdges
from sparseconv.geometry.gpu.lists import HALF_BIT, LOOKAHEAD, SLOT_ALIGNMENT, Schedule, tap_significance
from sparseconv.geometry.gpu.row_order import row_keys, row_order
from sparseconv.geometry.gpu.search import SEARCH_TYPES, WindowSearch, search_table
from sparseconv.geometry.gpu.taps import entry_of, look, take
from sparseconv.geometry.gpu.window_3x3x3 import corners, look_at_plane
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.launcher import Launcher, Pointer, ceil_div, pointer
from sparseconv.gpu.program import power_of_2
from sparseconv.gpu.radix_sort import sort_rows
from sparseconv.gpu.streams import current, map_stream

_I32, _I64 = torch.int32, torch.int64

HALVES = tl.constexpr(HALF_BIT)


@triton.jit
def tiles_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    order_ptr, line_of_ptr, weight_taps_ptr, out_ptr, out_rows_ptr, slots_ptr, counts_ptr, tile_rows_ptr, tile_taps_ptr,
    launch_order_ptr, n, num_runs, num_taps, capacity, num_slots, tiles_per_group, num_lines, room,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, BLOCK_M: tl.constexpr, ROOM: tl.constexpr, SPLIT: tl.constexpr,
    MASKED: tl.constexpr, PLAIN: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """One program makes one tile: its columns of the permuted table, its output rows and its list of live taps.

    Rows are looked up anew in their new order: cheaper than to gather single words of a table in the old one.
    IN_ORDER: tiles are launched as they lie; else `rank_kernel` ranks them.
    """
    tile = tl.program_id(0)
    group = tile // tiles_per_group
    place = (tile % tiles_per_group) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = place < n
    row = tl.load(order_ptr + group.to(tl.int64) * n + place, mask=real, other=0).to(tl.int32)
    entry = entry_of(row, real, entries_ptr, SIDES)
    half = (tl.arange(0, BLOCK_M) >= BLOCK_M // 2).to(tl.int32)
    alive = tl.zeros((BLOCK_M,), tl.int32)
    count = tl.zeros((), tl.int32)
    lists = tile.to(tl.int64) * room
    line_of_ptr += group * num_taps
    runs_ptr = window_ptr + 3 * RANK
    for run in range(0, num_runs, 3):  # all loads of three runs before any store: they are on their way together
        tap_a, length_a, a0, a1, a2, a3 = look_and_take(
            runs_ptr, run, num_runs, row, entry, real, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr,
            rows_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES, LENGTH,
        )  # fmt: skip
        tap_b, length_b, b0, b1, b2, b3 = look_and_take(
            runs_ptr, run + 1, num_runs, row, entry, real, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr,
            rows_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES, LENGTH,
        )  # fmt: skip
        tap_c, length_c, c0, c1, c2, c3 = look_and_take(
            runs_ptr, run + 2, num_runs, row, entry, real, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr,
            rows_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES, LENGTH,
        )  # fmt: skip
        for part in tl.static_range(3):
            tap = tap_a if part == 0 else tap_b if part == 1 else tap_c
            length = length_a if part == 0 else length_b if part == 1 else length_c
            for step in tl.static_range(LENGTH):
                if part == 0:
                    found = a0 if step == 0 else a1 if step == 1 else a2 if step == 2 else a3
                elif part == 1:
                    found = b0 if step == 0 else b1 if step == 1 else b2 if step == 2 else b3
                else:
                    found = c0 if step == 0 else c1 if step == 1 else c2 if step == 2 else c3
                if PLAIN:
                    line = tl.where(length > step, tap + step, -1)
                else:
                    line = tl.load(line_of_ptr + tap + step, mask=length > step, other=-1)
                target = out_ptr + line.to(tl.int64) * num_slots + slot
                tl.store(target, found, mask=slot < tl.where(line >= 0, num_slots, 0))
                if PLAIN and MASKED:
                    alive |= (found >= 0).to(tl.int32) << (tap + step)
                elif MASKED:
                    alive |= tl.where(line >= 0, (found >= 0).to(tl.int32) << (tap + step), 0)
                else:
                    here = tl.where(line >= 0, (found >= 0).to(tl.int32), 0)
                    halves = tl.reduce(here << half, 0, either)
                    alive |= here
                    tl.store(tile_rows_ptr + lists + count, line | halves << HALVES, mask=halves > 0)
                    tl.store(tile_taps_ptr + lists + count, tap + step, mask=halves > 0)
                    count += (halves > 0).to(tl.int32)
    if MASKED:
        count = list_live(alive, line_of_ptr, tile_rows_ptr + lists, tile_taps_ptr + lists)
    end_lists(count, tile_rows_ptr + lists, tile_taps_ptr + lists, num_lines, room, ROOM)
    tl.store(out_ptr + num_lines.to(tl.int64) * num_slots + slot, -1)
    tl.store(counts_ptr + tile, count)
    if SPLIT:
        for line in range(num_lines):  # a shorter group leaves rows of the table to nobody else
            tap = tl.load(weight_taps_ptr + group * num_lines + line)
            tl.store(out_ptr + slot, -1, mask=slot < tl.where(tap < 0, num_slots, 0))
            out_ptr += num_slots
        tl.store(slots_ptr + group.to(tl.int64) * n + row, tl.where(alive != 0, slot, -1), mask=real)
    tl.store(out_rows_ptr + slot, tl.where(real, row, -1))
    if IN_ORDER:
        tl.store(launch_order_ptr + tile, tile)


@triton.jit
def look_and_take(
    runs_ptr, run, num_runs, row, entry, live, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr,
    around_ptr, window_ptr, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """First tap, length and up to four found rows of a run; beyond the last run the length is 0."""
    EDGE: tl.constexpr = 1 << ((SHIFTS >> (4 * RANK)) & 15)
    run_ptr = runs_ptr + tl.minimum(run, num_runs - 1) * (2 + RANK)
    tap = tl.load(run_ptr)
    length = tl.where(run < num_runs, tl.load(run_ptr + 1), 0)
    seen, near, far, cell = look(
        row, entry, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, around_ptr,
        window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES,
    )  # fmt: skip
    found0, near, far = take(rows_ptr, seen, near, far, cell, 0, EDGE, SIDES)
    found1 = found0
    found2 = found0
    found3 = found0
    if LENGTH > 1:
        found1, near, far = take(rows_ptr, seen, near, far, cell, 1, EDGE, SIDES)
    if LENGTH > 2:
        found2, near, far = take(rows_ptr, seen, near, far, cell, 2, EDGE, SIDES)
    if LENGTH > 3:
        found3, near, far = take(rows_ptr, seen, near, far, cell, 3, EDGE, SIDES)
    return tap, length, found0, found1, found2, found3


@triton.jit
def list_live(alive, line_of_ptr, rows_ptr, taps_ptr):
    """Write the live taps of a tile and their table rows, from the masks of its rows; returns their number."""
    BLOCK_M: tl.constexpr = alive.shape[0]
    taps = tl.arange(0, 32)
    first = tl.arange(0, BLOCK_M) < BLOCK_M // 2
    mask = alive.to(tl.uint32, bitcast=True).to(tl.uint64)
    both = tl.reduce(tl.where(first, mask, mask << 32), 0, either)  # the masks of both halves at once
    shift = taps.to(tl.uint64)
    halves = ((both >> shift) & 1 | (both >> shift + 31) & 2).to(tl.int32)
    here = (halves > 0).to(tl.int32)
    line = tl.load(line_of_ptr + taps, mask=here > 0, other=-1)
    at = tl.cumsum(here, 0) - here
    tl.store(rows_ptr + at, line | halves << HALVES, mask=here > 0)
    tl.store(taps_ptr + at, taps, mask=here > 0)
    return tl.sum(here, 0)


@triton.jit
def end_lists(count, rows_ptr, taps_ptr, num_lines, room, ROOM: tl.constexpr):
    """Fill what lies behind a tile's live taps: the table's empty row, and tap 0."""
    rest = tl.arange(0, ROOM)
    tl.store(rows_ptr + rest, num_lines, mask=(rest >= count) & (rest < room))
    tl.store(taps_ptr + rest, 0, mask=(rest >= count) & (rest < room))


@triton.jit
def cube_tiles_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    order_ptr, line_of_ptr, weight_taps_ptr, out_ptr, out_rows_ptr, slots_ptr, counts_ptr, tile_rows_ptr, tile_taps_ptr,
    launch_order_ptr, n, num_runs, num_taps, capacity, num_slots, tiles_per_group, num_lines, room,
    BLOCK_M: tl.constexpr, ROOM: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """`tiles_kernel` for the 27 cells around rows, in one group of taps."""
    tile = tl.program_id(0)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = slot < n
    row = tl.load(order_ptr + slot, mask=real, other=0).to(tl.int32)
    entry = tl.load(entries_ptr + row, mask=real, other=-1)
    bit, a, b, c, d, e, f, g, h = corners(entry, real, info_ptr, around_ptr)
    # all rows are read before any is stored: they are on their way together
    found0, found1, found2, found3, found4, found5, found6, found7, found8 = look_at_plane(
        bit, a, b, c, d, e, f, g, h, rows_ptr, 0
    )  # fmt: skip
    found9, found10, found11, found12, found13, found14, found15, found16, found17 = look_at_plane(
        bit, a, b, c, d, e, f, g, h, rows_ptr, 1
    )  # fmt: skip
    found18, found19, found20, found21, found22, found23, found24, found25, found26 = look_at_plane(
        bit, a, b, c, d, e, f, g, h, rows_ptr, 2
    )  # fmt: skip
    alive = store_plane(
        out_ptr, slot, num_slots, found0, found1, found2, found3, found4, found5, found6, found7, found8, 0
    )  # fmt: skip
    alive |= store_plane(
        out_ptr, slot, num_slots, found9, found10, found11, found12, found13, found14, found15, found16, found17, 9
    )  # fmt: skip
    alive |= store_plane(
        out_ptr, slot, num_slots, found18, found19, found20, found21, found22, found23, found24, found25, found26, 18
    )  # fmt: skip
    lists = tile.to(tl.int64) * room
    count = list_live(alive, line_of_ptr, tile_rows_ptr + lists, tile_taps_ptr + lists)
    end_lists(count, tile_rows_ptr + lists, tile_taps_ptr + lists, num_lines, room, ROOM)
    tl.store(out_ptr + num_slots.to(tl.int64) * num_lines + slot, -1)
    tl.store(counts_ptr + tile, count)
    tl.store(out_rows_ptr + slot, tl.where(real, row, -1))
    if IN_ORDER:
        tl.store(launch_order_ptr + tile, tile)


@triton.jit
def store_plane(
    out_ptr, slot, num_slots, found0, found1, found2, found3, found4, found5, found6, found7, found8,
    TAP: tl.constexpr,
):  # fmt: skip
    """Write nine rows of the table from TAP on; returns a bit for each of them that is not -1."""
    out_ptr += TAP * num_slots.to(tl.int64)
    alive = tl.zeros(slot.shape, tl.int32)
    for tap in tl.static_range(9):
        if tap < 3:
            found = found0 if tap == 0 else found1 if tap == 1 else found2
        elif tap < 6:
            found = found3 if tap == 3 else found4 if tap == 4 else found5
        else:
            found = found6 if tap == 6 else found7 if tap == 7 else found8
        tl.store(out_ptr + slot, found)
        out_ptr += num_slots
        alive |= (found >= 0).to(tl.int32) << (TAP + tap)
    return alive


@triton.jit
def either(a, b):
    """Bitwise or."""
    return a | b


@triton.jit
def rank_kernel(counts_ptr, order_ptr, num_tiles, BINS: tl.constexpr, MINE: tl.constexpr, BLOCK: tl.constexpr):
    """order[number of tiles that go before a tile] = tile: more taps first, then the lower number."""
    first = tl.program_id(0) * MINE
    tile = first + tl.arange(0, MINE)
    bin_of = tl.arange(0, BINS)
    mine = BINS - 1 - tl.load(counts_ptr + tile, mask=tile < num_tiles, other=0)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_tiles, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = BINS - 1 - tl.load(counts_ptr + other, mask=other < num_tiles, other=BINS - 1)
        total += tl.histogram(theirs, BINS)  # what lies beyond the last tile goes to bin 0, where no tile is
        before += tl.histogram(tl.where(other < first, theirs, 0), BINS)
    total = tl.where(bin_of == 0, 0, total)
    base = tl.cumsum(total, 0) - total + tl.where(bin_of == 0, 0, before)
    rank = tl.sum(tl.where(bin_of[None, :] == mine[:, None], base[None, :], 0), 1)
    same = (mine[None, :] == mine[:, None]) & (tile[None, :] < tile[:, None])
    tl.store(order_ptr + rank + tl.sum(same.to(tl.int32), 1), tile, mask=tile < num_tiles)


TILES = Launcher(tiles_kernel, (*SEARCH_TYPES, *(_I32,) * 10, *(int,) * 8))
CUBE_TILES = Launcher(cube_tiles_kernel, (*SEARCH_TYPES, *(_I32,) * 10, *(int,) * 8))
RANKS = Launcher(rank_kernel, (_I32, _I32, int))


#: rows up to which a search keeps its scratch memory, about 50 bytes a row: small maps are wanted in two orders of rows
#: (taps split in groups or not), and to search again costs the CPU more than to build a schedule
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
            kernel_map.source.mark_built("schedule")
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
        chunk_rows: sort only inside runs of about this many neighboring rows, for locality; keys then lose their last
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
        with map_stream():
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
    lengths = (lines + 1) * slots, slots, tiles, tiles * room, tiles * room, tiles
    arena = Arena(device, _DTYPES, (*lengths, len(parts) * n) if split else lengths)
    if tiles:
        line_of, weight_taps = encode_parts(parts, device)
        search.kept.extend((line_of, weight_taps))
        order = order.int() if isinstance(order, torch.Tensor) else order
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
            TILES(device, (tiles,), (*arrays, *numbers), constants)
        if not in_order:
            # bins for the numbers of live taps and for no tile; blocks of all tiles, if they are not too many
            sizes = power_of_2(lines + 2), 64, min(4096, max(1024, power_of_2(tiles)))
            RANKS(device, (ceil_div(tiles, sizes[1]),), (counts, launch_order, tiles), sizes)
    neighbors, out, tile_count, listed, taps_of, ranked, *slot_of = map(arena.tensor, range(len(arena)))
    return Schedule(
        block_m, neighbors.view(lines + 1, slots), out, tile_count, listed.view(tiles, room), taps_of.view(tiles, room),
        ranked, slot_of[0].view(len(parts), n) if split else None,
    )  # fmt: skip


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


def meets_once(kernel_map: KernelMap) -> bool:
    """Whether every output row has exactly one edge, as where a stride as large as the kernel is turned round.

    Of a grid of fixed size, every real one.
    """
    if isinstance(kernel_map.source, FoundEdges):  # as a window found them, not turned round
        return False
    straight = kernel_map.reverse()
    origin = straight.source
    if not isinstance(origin, FoundEdges) or not origin.search.window.meets_once:
        return False
    return straight.meets_all if origin.padded else 0 < kernel_map.num_pairs == kernel_map.num_out


def one_tap_schedule(kernel_map: KernelMap, block_m: int) -> Schedule:
    """The schedule of edges that meet each output row once, without waiting for the device.

    Edges lie by tap already. Each tap's begin a run of 256 slots, so a tile has one tap, whose edges are the one row of
    the table; runs of different taps over the same input rows are launched together. Dead rows have runs without a tap.

    Args:
        kernel_map: K taps, P = N_out edges.
        block_m: rows of a tile; a power of two that divides 256.

    Returns:
        A `Schedule` of P // 256 + K runs, and one more where there may be dead rows.
    """
    taps, device = kernel_map.num_taps, kernel_map.in_rows.device
    origin = kernel_map.reverse().source
    device_count = origin.search.device_count if isinstance(origin, FoundEdges) else None
    lists_of = taps + (device_count is not None)
    runs = kernel_map.num_pairs // SLOT_ALIGNMENT + lists_of
    each = SLOT_ALIGNMENT // block_m
    slots, tiles, room = runs * SLOT_ALIGNMENT, runs * each, 1 + LOOKAHEAD
    schedule = _allocate(block_m, 2, slots, tiles, room, device)
    pairs = (kernel_map.tap_offsets, kernel_map.in_rows, kernel_map.out_rows)
    lists = (schedule.tile_counts, schedule.tile_rows, schedule.tile_taps, schedule.tile_order)
    count = kernel_map.out_rows if device_count is None else device_count.count
    arrays = (*pairs, count, schedule.neighbors, schedule.out_rows, *lists)
    args = (*map(pointer, arrays), taps, slots, kernel_map.num_out)
    constants = (power_of_2(lists_of), SLOT_ALIGNMENT, block_m, each, room, power_of_2(room), device_count is not None)
    ONE_TAP(device, (runs,), args, constants)
    return schedule


def _allocate(block_m: int, height: int, slots: int, tiles: int, room: int, device: torch.device) -> Schedule:
    """Arrays of a schedule as the memory was: (height, slots) of the table and (tiles, room) of the lists."""
    sizes = (height * slots, slots, tiles, tiles * room, tiles * room, tiles)
    padded = [(size + 31) & -32 for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=device)  # one allocation: each costs the CPU its time
    table, out_rows, counts, tile_rows, tile_taps, order = memory.split(padded)
    return Schedule(
        block_m,
        table.view(height, slots),
        out_rows,
        counts[:tiles],
        tile_rows[: tiles * room].view(tiles, room),
        tile_taps[: tiles * room].view(tiles, room),
        order[:tiles],
    )


# ---- kernels


@triton.jit
def one_tap_kernel(
    offsets_ptr, in_rows_ptr, out_rows_ptr, count_ptr, table_ptr, slot_rows_ptr, counts_ptr, tile_rows_ptr,
    tile_taps_ptr, order_ptr, num_taps, num_slots, num_rows,
    TAPS: tl.constexpr, RUN: tl.constexpr, BLOCK_M: tl.constexpr, EACH: tl.constexpr, ROOM: tl.constexpr,
    WIDTH: tl.constexpr, DEAD: tl.constexpr,
):  # fmt: skip
    """One program makes one run of RUN slots, of one tap or of none, and the EACH tiles in it.

    DEAD: rows from ``count`` on come after the last tap as if they were another one's edges, but without any.
    """
    run = tl.program_id(0)
    tap = tl.arange(0, TAPS)
    start = tl.load(offsets_ptr + tap, mask=tap < num_taps, other=0)
    stop = tl.load(offsets_ptr + tap + 1, mask=tap < num_taps, other=0)
    if DEAD:
        real = tl.minimum(tl.maximum(tl.load(count_ptr), 0), num_rows)
        start = tl.where(tap == num_taps, real, start)
        stop = tl.where(tap == num_taps, num_rows, stop)
    runs = ((stop - start + RUN - 1) // RUN).to(tl.int32)
    last = tl.cumsum(runs, 0)
    mine = (run >= last - runs) & (run < last)
    owned = tl.sum(mine.to(tl.int32), 0) > 0
    if DEAD:  # a count that is no such thing: a fault was raised, and every tile still is in the order once
        ordered = owned & (tl.sum(runs, 0) <= tl.num_programs(0))
    else:
        ordered = owned
    my_tap = tl.sum(tl.where(mine, tap, 0), 0)
    my_runs = tl.maximum(tl.sum(tl.where(mine, runs, 0), 0), 1)
    index = tl.where(owned, run - tl.sum(tl.where(mine, last - runs, 0), 0), 0)
    begin = tl.sum(tl.where(mine, start, 0), 0) + index.to(tl.int64) * RUN
    end = tl.sum(tl.where(mine, stop, 0), 0)
    lane = tl.arange(0, RUN)
    slot = run.to(tl.int64) * RUN + lane
    met = end
    if DEAD:
        met = tl.where(my_tap < num_taps, end, 0)
    live = begin + lane < met
    out_row = tl.load(out_rows_ptr + begin + lane, mask=live, other=-1)
    if DEAD:
        out_row = tl.where(live, out_row, tl.where(begin + lane < end, (begin + lane).to(tl.int32), -1))
    tl.store(table_ptr + slot, tl.load(in_rows_ptr + begin + lane, mask=live, other=-1))
    tl.store(table_ptr + num_slots + slot, tl.full((RUN,), -1, tl.int32))
    tl.store(slot_rows_ptr + slot, out_row)
    each = tl.arange(0, EACH)
    tile = run * EACH + each
    count = (begin + each * BLOCK_M < met).to(tl.int32)
    tl.store(counts_ptr + tile, count)
    column = tl.arange(0, WIDTH)
    listed = column[None, :] < count[:, None]
    at = tile.to(tl.int64)[:, None] * ROOM + column[None, :]
    second = (begin + each * BLOCK_M + BLOCK_M // 2 < met).to(tl.int32)  # the first half is met before it
    halves = (1 + 2 * second)[:, None] << HALVES
    tl.store(tile_rows_ptr + at, tl.where(listed, halves, 1), mask=(column < ROOM)[None, :])
    tl.store(tile_taps_ptr + at, tl.where(listed, my_tap, 0), mask=(column < ROOM)[None, :])
    # runs of each tap that begin less far into it than this one does into its own; equals in the order of taps
    whole = index * runs // my_runs
    rest = index * runs - whole * my_runs
    earlier = tl.where(tap < my_tap, whole + (runs > 0).to(tl.int32), whole + (rest > 0).to(tl.int32))
    rank = tl.where(ordered, tl.sum(tl.where(mine, index, earlier), 0), run)
    tl.store(order_ptr + rank * EACH + each, tile)


ONE_TAP = Launcher(one_tap_kernel, (_I64, *(_I32,) * 9, int, int, int), num_warps=4)
