"""The kernels that schedules are built by: live taps listed by tile, tiles ranked by their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.tiles.schedule import HALF_BIT
from sparseconv.geometry.gpu.window.passes import SEARCH_TYPES
from sparseconv.geometry.gpu.window.taps import entry_of, look, take
from sparseconv.geometry.gpu.window.window_3x3x3 import corners, look_at_plane
from sparseconv.gpu.launcher import Launcher

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
        count, _ = list_live(alive, line_of_ptr, tile_rows_ptr + lists, tile_taps_ptr + lists)
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
    """Write the live taps of a tile and their table rows, from the masks of its rows; returns their number, and for
    each of 32 taps whether it lives."""
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
    return tl.sum(here, 0), here


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
    launch_order_ptr, n, num_runs, num_taps, capacity, num_slots, tiles, num_lines, room,
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
    count, here = list_live(alive, line_of_ptr, tile_rows_ptr + lists, tile_taps_ptr + lists)
    end_lists(count, tile_rows_ptr + lists, tile_taps_ptr + lists, num_lines, room, ROOM)
    turned_ptr = tile_taps_ptr + (tiles.to(tl.int64) * room + 3) // 4 * 4 + lists  # at 16 bytes
    taps = tl.arange(0, 32)
    tl.store(turned_ptr + (tl.cumsum(here, 0) - here), 26 - taps, mask=here > 0)
    rest = tl.arange(0, ROOM)
    tl.store(turned_ptr + rest, 26, mask=(rest >= count) & (rest < room))
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


_I32, _I64 = torch.int32, torch.int64
TILES = Launcher(tiles_kernel, (*SEARCH_TYPES, *(_I32,) * 10, *(int,) * 8))
TILES_64 = Launcher(tiles_kernel, (*SEARCH_TYPES, _I64, *(_I32,) * 9, *(int,) * 8))
CUBE_TILES = Launcher(cube_tiles_kernel, (*SEARCH_TYPES, *(_I32,) * 10, *(int,) * 8))
RANKS = Launcher(rank_kernel, (_I32, _I32, int))
