"""The passes of a search on the GPU: blocks around blocks, tap masks and sort keys, sums of edge counts, row order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_table.hash_probe import axis_blocks, axis_range, count_blocks, find
from sparseconv.geometry.gpu.hash_table.table import KEYS, STATUS, CoordinateTable, pack_shifts, rows_per_chunk
from sparseconv.geometry.gpu.order.morton_runs import key_in
from sparseconv.geometry.gpu.window.counts import Counters, scan_tap
from sparseconv.geometry.gpu.window.found import LINES, SORT_KEYS, STARTS, WindowSearch
from sparseconv.geometry.gpu.window.taps import entry_of, look
from sparseconv.geometry.gpu.window.window_3x3x3 import count_in_warps, mask_of_cube
from sparseconv.gpu.cooperative import NUM_BARRIERS, barriers_of, leave, programs_at_once, wait_for_all
from sparseconv.gpu.launcher import RESIDENT, Launcher, Pointer, ceil_div, constant, pointer, power_of_2
from sparseconv.gpu.radix_sort.kernels import count_digits
from sparseconv.gpu.radix_sort.sort import COOPERATIVE_STEPS, COOPERATIVE_WARPS, Passes, digits_of
from sparseconv.gpu.warp_asm import OPEN_COUNTERS, open_room

#: chunks that a program of a search sums at once: one number for all sizes, so that none is compiled for
SCANNED = constant(1024)
#: rows whose masks one of its programs reads together, and numbers of blocks that it asks for at once
ROWS_EACH, LOOKUPS = constant(128), constant(512)
#: its barriers; its warps, and keys that each of their threads counts at once
BARRIERS, WARPS, STEPS = constant(NUM_BARRIERS), constant(COOPERATIVE_WARPS), constant(COOPERATIVE_STEPS)
#: programs that read masks at most, as many as an H200 holds: each adds its totals to those of all, one after another
MASKING = 2112
_I32, _I64 = torch.int32, torch.int64


def launch_masks(
    search: WindowSearch,
    words: torch.Tensor,
    keys: Pointer,
    counters: Counters | None,
    chunk: int,
    room: int,
    lost: int,
    groups: int = 1,
) -> None:
    """Masks of all target rows -> ``keys``; where there are ``counters``, counts of their edges too."""
    n, window = search.coords.shape[0], search.window
    programs = min(ceil_div(n, 128), MASKING)
    totals, counts = (keys, keys) if counters is None else counters.pointers
    args = (
        *search.pointers, pointer(words), keys, counts, totals,
        n, window.num_runs, window.num_taps, search.capacity, search.chunks, chunk, room, lost, programs,
    )  # fmt: skip
    taps, counted = power_of_2(window.num_taps), counters is not None
    constants = (*search.constants, groups, counted, taps, search.chunk_rows, 128, search.is_cube)
    (CUBE_MASKS if search.is_cube else MASKS)(words.device, (programs,), args, constants)


def launch_around(table: CoordinateTable, around: Pointer, blocks: int) -> None:
    """The blocks around each block of a table, of the first ``blocks`` of them at most."""
    arena = table.arena
    constants = around_constants(table.shifts)
    block = constants[-1]
    ranges, slots, ids, _, _ = table.pointers
    programs = min(ceil_div(blocks, block), 4096)
    args = (ranges, slots, ids, arena[KEYS], arena[STATUS], around, table.capacity, blocks, programs)
    AROUND(table.coords.device, (programs,), args, constants)


def around_constants(shifts: tuple[int, ...]) -> tuple[int, ...]:
    """The constants of `around_kernel` for blocks of these edges."""
    sides = 3 ** (len(shifts) - 1)
    lanes = power_of_2(sides)
    return len(shifts), pack_shifts(shifts), sides, lanes, max(1, 256 // lanes)


def launch_search(search: WindowSearch, counters: Counters, passes: Passes, programs: int) -> None:
    """Surroundings, masks and sums of counts in one launch, and the digits of a cube's keys."""
    (table, scratch, pending), window = search.found, search.window
    taps, device, n = window.num_taps, table.coords.device, search.rows
    totals, counts = counters.pointers
    args = (
        *search.pointers, pointer(window.key_words), scratch[SORT_KEYS], counts, totals,
        barriers_of(device, table.device_count),
        table.arena[KEYS], table.arena[STATUS],
        scratch[STARTS], pointer(pending.offsets), pending.report.pointer, scratch[LINES],
        n, window.num_runs, taps, search.capacity, search.chunks,
        passes.states, passes.counting, programs,
    )  # fmt: skip
    bits = window.key_bits if search.is_cube else 0
    SEARCH(device, (programs,), args, search_constants(search.constants, taps, n, bits))


def search_programs(device: torch.device, taps: int, n: int) -> tuple[int, int]:
    """Programs of a `search_kernel` over ``n`` target rows, and how many of them no tap keeps busy."""
    programs = programs_at_once(device, max(taps, ceil_div(n, 128)))
    return programs, max(1, programs - taps)


def search_constants(looks: tuple, taps: int, n: int, bits: int) -> tuple:
    """The constants of `search_kernel` for ``n`` target rows; ``looks`` are those of a look-up.

    ``bits`` of a cube's keys are counted; 0: the window is another.
    """
    return (*looks[:5], power_of_2(taps), rows_per_chunk(n), *(digits_of(bits)[:2] if bits else (0, 0)))


# ---- kernels


@triton.jit
def around_kernel(
    ranges_ptr, table_ptr, ids_ptr, keys_ptr, status_ptr, around_ptr, capacity, most, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, SIDES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """around[block, side] = the number of the block there, -1 if it is empty; of ``most`` blocks at most."""
    num_blocks = tl.minimum((tl.load(status_ptr) >> 32).to(tl.int32), most)
    find_around(
        ranges_ptr, table_ptr, ids_ptr, keys_ptr, num_blocks, around_ptr, capacity, programs,
        COLUMNS, SHIFTS, SIDES, LANES, BLOCK,
    )  # fmt: skip


@triton.jit
def find_around(
    ranges_ptr, table_ptr, ids_ptr, keys_ptr, num_blocks, around_ptr, capacity, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, SIDES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`around_kernel` for every ``programs``-th run of BLOCK blocks."""
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    side = tl.arange(0, LANES)
    delta = tl.zeros((LANES,), tl.int64)
    power: tl.constexpr = SIDES // 3
    rest = side
    scale = power
    for axis in tl.static_range(1, COLUMNS):
        _low, extent = axis_range(ranges_ptr, axis)
        delta = delta * axis_blocks(extent, (SHIFTS >> (4 * axis)) & 15) + (rest // scale - 1)
        rest = rest % scale
        scale = scale // 3 if axis < COLUMNS - 1 else 1
    for start in range(tl.program_id(0) * BLOCK, num_blocks, programs * BLOCK):
        block = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + block, mask=block < num_blocks, other=0)[:, None] + delta[None, :]
        real = (block < num_blocks)[:, None] & (side < SIDES)[None, :]
        slot, hit = find(table_ptr, key, real & (key >= 0), capacity, volume, BLOCK * LANES // 128)
        number = tl.load(ids_ptr + slot, mask=hit, other=-1)
        tl.store(around_ptr + block.to(tl.int64)[:, None] * SIDES + side[None, :], number, mask=real)


@triton.jit
def masks_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr,
    n, num_runs, num_taps, capacity, num_chunks, key_chunk, room, lost, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr, COUNTED: tl.constexpr, TAPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CUBE: tl.constexpr,
):  # fmt: skip
    """Masks of the taps of rows -> their sort keys in each group of taps, and counts of edges."""
    read_masks(
        coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
        words_ptr, keys_ptr, counts_ptr, totals_ptr,
        n, num_runs, num_taps, capacity, num_chunks, key_chunk, room, lost, programs,
        RANK, SHIFTS, PLACES, PERIODIC, SIDES, GROUPS, COUNTED, TAPS, CHUNK, BLOCK, CUBE,
    )  # fmt: skip


@triton.jit
def read_masks(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr,
    n, num_runs, num_taps, capacity, num_chunks, key_chunk, room, lost, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, GROUPS: tl.constexpr, COUNTED: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, CUBE: tl.constexpr,
):  # fmt: skip
    """`masks_kernel` for every ``programs``-th run of BLOCK rows."""
    lane = tl.arange(0, TAPS)
    total = tl.zeros((TAPS,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        live = row < n
        entry = entry_of(row, live, entries_ptr, SIDES)
        own_run = row // key_chunk
        if CUBE:
            mask = mask_of_cube(entry, live, info_ptr, around_ptr)
        else:
            mask = tl.zeros((BLOCK,), tl.int32)
            for run in range(0, num_runs, 3):  # the loads of three runs are on their way together
                for part in tl.static_range(3):
                    run_ptr = window_ptr + 3 * RANK + tl.minimum(run + part, num_runs - 1) * (2 + RANK)
                    seen, _near, _far, _cell = look(
                        row, entry, live, run_ptr, tl.load(run_ptr + 1), coords_ptr, ranges_ptr, table_ptr, ids_ptr,
                        info_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES,
                    )  # fmt: skip
                    mask |= seen << tl.load(run_ptr)  # a last run met twice says the same twice
        for group in tl.static_range(GROUPS):
            word_ptr = words_ptr + 1025 * group
            ours = mask & tl.load(word_ptr)
            key = tl.load(word_ptr + 1 + (ours & 255)) ^ tl.load(word_ptr + 257 + ((ours >> 8) & 255))
            key = key ^ tl.load(word_ptr + 513 + ((ours >> 16) & 255)) ^ tl.load(word_ptr + 769 + ((ours >> 24) & 255))
            key = key_in(own_run, key, ours == 0, room, lost)
            tl.store(keys_ptr + group * n.to(tl.int64) + row, key, mask=live)
        if COUNTED:
            if CUBE:
                edges = count_in_warps(mask, BLOCK // 32)
            else:
                edges = tl.sum((mask[None, :] >> lane[:, None]) & 1, 1)
            tl.atomic_add(counts_ptr + lane * num_chunks + first // CHUNK, edges, mask=lane < num_taps, sem="relaxed")
            total += edges
    if COUNTED:
        tl.atomic_add(totals_ptr + lane, total.to(tl.int64), mask=lane < num_taps, sem="relaxed")


@triton.jit
def search_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr, barriers_ptr, block_keys_ptr, status_ptr,
    starts_ptr, offsets_ptr, report_ptr, lines_ptr,
    n, num_runs, num_taps, capacity, num_chunks, states, counting, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Surroundings, masks and sums of counts in one launch, whose programs wait for each other in between.

    PASSES: the window is a cube, and the digits of the keys are counted, too.
    """
    LANES: tl.constexpr = 4 if RANK == 1 else 16 if RANK == 2 else 32 if RANK == 3 else 128  # 3^RANK blocks around
    if PASSES > 0:
        open_room(OPEN_COUNTERS)
    if SIDES > 0:
        num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
        find_around(
            ranges_ptr, table_ptr, ids_ptr, block_keys_ptr, num_blocks, around_ptr, capacity, programs,
            RANK + 1, SHIFTS, SIDES, LANES, LOOKUPS // LANES,
        )  # fmt: skip
        wait_for_all(barriers_ptr, programs)
    read_masks(
        coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
        words_ptr, keys_ptr, counts_ptr, totals_ptr,
        n, num_runs, num_taps, capacity, num_chunks, n, 31, 0, programs,
        RANK, SHIFTS, PLACES, PERIODIC, SIDES, 1, True, TAPS, CHUNK, ROWS_EACH, PASSES > 0,
    )  # fmt: skip
    wait_for_all(barriers_ptr + 1, programs)
    for tap in range(tl.program_id(0), num_taps, programs):
        scan_tap(
            tap, counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks, SCANNED
        )
    if PASSES > 0:
        place = programs - 1 - tl.program_id(0)  # from the last on: the first programs have summed taps
        if place < counting:
            count_digits(place, counting, keys_ptr, lines_ptr, n, states, BITS, PASSES, WARPS, STEPS)
    leave(barriers_ptr, programs, BARRIERS)


SEARCH_TYPES = (_I32, _I32, _I64, _I32, _I64, _I32, _I64, _I32, _I32)
AROUND = Launcher(around_kernel, (_I32, _I64, _I32, _I64, _I64, _I32, int, int, int))
_MASK_TYPES = (*SEARCH_TYPES, _I32, _I32, _I32, _I64, *(int,) * 9)
MASKS = Launcher(masks_kernel, _MASK_TYPES, num_warps=1)
CUBE_MASKS = Launcher(masks_kernel, _MASK_TYPES)  # a row a thread, see `count_in_warps`
SEARCH = Launcher(
    search_kernel,
    (*SEARCH_TYPES, _I32, _I32, _I32, _I64, _I32, _I64, _I64, _I32, _I64, _I64, _I64, *(int,) * 8),
    resident=RESIDENT,
)
