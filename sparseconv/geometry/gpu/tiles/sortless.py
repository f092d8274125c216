"""Schedules on the GPU that need no sort: of edges that meet each output row once, and of rows sorted before."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.pairs.found_edges import FoundEdges
from sparseconv.geometry.gpu.tiles.build import rank_tiles
from sparseconv.geometry.gpu.tiles.kernels import either
from sparseconv.geometry.gpu.tiles.schedule import HALF_BIT, LOOKAHEAD, SLOT_ALIGNMENT, Schedule
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu.launcher import Launcher, pointer, power_of_2


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


def retile(schedule: Schedule, block_m: int) -> Schedule:
    """The same rows in the same order in tiles of another size, of one group of taps; only the lists are new."""
    if schedule.slots is not None:
        raise ValueError("a schedule of several groups of taps cannot be cut anew: build it for its tile size")
    lines, slots = schedule.neighbors.shape[0] - 1, schedule.neighbors.shape[1]
    device, room, tiles = schedule.neighbors.device, lines + LOOKAHEAD, slots // block_m
    new = _allocate(block_m, 0, 0, tiles, room, device)
    lists = (new.tile_counts, new.tile_rows, new.tile_taps, new.tile_order)
    if tiles:
        args = (*map(pointer, (schedule.neighbors, *lists[:3])), slots, lines, room)
        _LISTS(device, (tiles,), args, (block_m, 16, power_of_2(room)))
        rank_tiles(new.tile_counts, new.tile_order, lines)
    return replace(new, neighbors=schedule.neighbors, out_rows=schedule.out_rows)


def _allocate(block_m: int, height: int, slots: int, tiles: int, room: int, device: torch.device) -> Schedule:
    """Arrays of a schedule as the memory was: (height, slots) of the table and (tiles, room) of the lists."""
    sizes = (height * slots, slots, tiles, tiles * room, tiles * room, tiles)
    padded = [(size + 31) & -32 for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=device)  # one allocation: each costs the host its time
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

HALVES = tl.constexpr(HALF_BIT)


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


@triton.jit
def lists_kernel(
    table_ptr, counts_ptr, tile_rows_ptr, tile_taps_ptr, num_slots, num_lines, room,
    BLOCK_M: tl.constexpr, LINES: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """One program lists the live taps of one tile, LINES rows of the table at once; a row's number is its tap's."""
    tile = tl.program_id(0)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    half = (tl.arange(0, BLOCK_M) >= BLOCK_M // 2).to(tl.int32)
    lists = tile.to(tl.int64) * room
    count = tl.zeros((), tl.int32)
    for start in range(0, num_lines, LINES):
        line = start + tl.arange(0, LINES)
        found = tl.load(
            table_ptr + line.to(tl.int64)[:, None] * num_slots + slot[None, :],
            mask=(line < num_lines)[:, None], other=-1,
        )  # fmt: skip
        halves = tl.reduce((found >= 0).to(tl.int32) << half[None, :], 1, either)
        live = (halves > 0).to(tl.int32)
        at = lists + count + tl.cumsum(live, 0) - live
        tl.store(tile_rows_ptr + at, line | halves << HALVES, mask=live > 0)
        tl.store(tile_taps_ptr + at, line, mask=live > 0)
        count += tl.sum(live, 0)
    column = tl.arange(0, ROOM)
    dead = (column >= count) & (column < room)
    tl.store(tile_rows_ptr + lists + column, num_lines, mask=dead)
    tl.store(tile_taps_ptr + lists + column, 0, mask=dead)
    tl.store(counts_ptr + tile, count)


_I32, _I64 = torch.int32, torch.int64
ONE_TAP = Launcher(one_tap_kernel, (_I64, *(_I32,) * 9, int, int, int), num_warps=4)
_LISTS = Launcher(lists_kernel, (*(_I32,) * 4, int, int, int), num_warps=2)
