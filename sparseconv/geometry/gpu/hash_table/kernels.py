"""The kernels of a table of rows: ranges, insertion of blocks, their numbers, their rows, and looking up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_table.hash_probe import (
    cells_of,
    count_blocks,
    find,
    load_rows,
    occupy,
    pack_half,
    place_of,
    popcount,
    spans_of,
)
from sparseconv.gpu.cooperative import leave, wait_for_all
from sparseconv.gpu.launcher import Launcher


@triton.jit
def write_zeros(table_ptr, zeros, programs, AT_ONCE: tl.constexpr):
    """This program's share of so many words of zeros from the slots on."""
    words_ptr = table_ptr.to(tl.pointer_type(tl.int32))
    end = zeros // 32 * 32  # arrays begin at multiples of 128 bytes: the compiler learns it here
    for first in range(tl.program_id(0) * AT_ONCE, end, programs * AT_ONCE):
        word = first + tl.arange(0, AT_ONCE)
        tl.store(words_ptr + word, tl.zeros((AT_ONCE,), tl.int32), mask=word < end)


@triton.jit
def measure_rows(
    coords_ptr, copy_ptr, ranges_ptr, n, stride, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The ranges of a program's runs of BLOCK rows, ``stride`` apart; copies them where ``copy_ptr`` is elsewhere."""
    is_copied = copy_ptr.to(tl.int64) != coords_ptr.to(tl.int64)
    column = tl.arange(0, WIDTH)
    tops = tl.zeros((BLOCK, WIDTH), tl.uint32)
    bottoms = tl.zeros((BLOCK, WIDTH), tl.uint32)
    for start in range(tl.program_id(0) * BLOCK, n, stride):
        row = start + tl.arange(0, BLOCK)
        live = (row < n)[:, None] & (column < COLUMNS)[None, :]
        place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        value = tl.load(coords_ptr + place, mask=live, other=0)
        if is_copied:
            tl.store(copy_ptr + place, value, mask=live)
        biased = value.to(tl.uint32, bitcast=True) ^ 0x80000000
        tops = tl.maximum(tops, tl.where(live, biased, 0))
        bottoms = tl.maximum(bottoms, tl.where(live, ~biased, 0))
    top, bottom = tl.max(tops, 0), tl.max(bottoms, 0)
    live = column < COLUMNS
    ranges_ptr = ranges_ptr.to(tl.pointer_type(tl.uint32))
    # of many programs few have to write
    highest = tl.load(ranges_ptr + 2 * column, mask=live, other=0, volatile=True)
    lowest = tl.load(ranges_ptr + 2 * column + 1, mask=live, other=0, volatile=True)
    tl.atomic_max(ranges_ptr + 2 * column, top, mask=live & (top > highest), sem="relaxed")
    tl.atomic_max(ranges_ptr + 2 * column + 1, bottom, mask=live & (bottom > lowest), sem="relaxed")


@triton.jit
def insert_rows(
    first, coords_ptr, table_ptr, ids_ptr, keys_ptr, slots_ptr, entries_ptr, status_ptr, count_ptr, n, capacity,
    volume, lows, extents, counts,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put rows' cells from ``first`` on into the table, and number their blocks; entries[row] = 64 slot + bit.

    Numbers follow the rows, about: blocks around rows that lie side by side do so too. The upper half of the first
    word of the status counts them. Returns which rows are wrong where that is CHECKED: those of the first ``count``
    without a batch item, and others with one.
    """
    row = first + tl.arange(0, BLOCK)
    live = row < n
    fits = row < tl.where(volume < 0x4000000000000000, n, 0)
    values = load_rows(coords_ptr, row, live, COLUMNS)
    wrong = row & 0
    if CHECKED:
        wrong = (((values[0] >= 0) != (row < tl.load(count_ptr))) & live).to(tl.int32)
    key, bit, inside = cells_of(values, fits, lows, extents, counts, COLUMNS, SHIFTS)
    elsewhere = tl.minimum(row, capacity - 1)
    slot, fresh = occupy(table_ptr, key, bit, inside, elsewhere, capacity, volume)
    tl.store(entries_ptr + row, tl.where(inside, slot.to(tl.int64) * 64 + bit, -1), mask=live)
    mine = fresh.to(tl.int32)
    total = tl.sum(mine, 0)
    if total > 0:
        before = (tl.atomic_add(status_ptr, total.to(tl.int64) << 32, sem="relaxed") >> 32).to(tl.int32)
        block = before + tl.cumsum(mine, 0) - mine
        tl.store(ids_ptr + slot, block, mask=fresh)
        tl.store(keys_ptr + block, key, mask=fresh)
        tl.store(slots_ptr + block, slot, mask=fresh)
    if first == 0:
        tl.store(status_ptr + 1, (volume >= 0x4000000000000000).to(tl.int64))
    return wrong


@triton.jit
def report_wrong(fault_ptr, wrong):
    """Bit 0 of the fault where a row was wrong."""
    if tl.max(wrong, 0) != 0:
        tl.atomic_or(fault_ptr, 1, sem="relaxed")


@triton.jit
def give_places(table_ptr, slots_ptr, info_ptr, status_ptr, programs, BLOCK: tl.constexpr):
    """Give this program's blocks as many places in the list of rows as they have cells, counted below the blocks."""
    num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_blocks, programs * BLOCK):
        block = first + tl.arange(0, BLOCK)
        live = block < num_blocks
        slot = tl.load(slots_ptr + block, mask=live, other=0)
        word = tl.load(table_ptr + 2 * slot + 1, mask=live, other=0)
        cells = popcount(word).to(tl.int64)
        place = tl.atomic_add(status_ptr, tl.sum(cells, 0), sem="relaxed") & 0xFFFFFFFF
        place += tl.cumsum(cells, 0) - cells
        tl.store(info_ptr + 2 * block, pack_half(word, place), mask=live)
        upper = pack_half(word >> 32, place + popcount(word & 0xFFFFFFFF))
        tl.store(info_ptr + 2 * block + 1, upper, mask=live)


@triton.jit
def place_rows(first, entries_ptr, ids_ptr, info_ptr, rows_ptr, n, BLOCK: tl.constexpr):
    """rows[first place of the block + rank of the cell in it] = row; entries[row] = 64 block + bit."""
    row = first + tl.arange(0, BLOCK)
    entry = tl.load(entries_ptr + row, mask=row < n, other=-1)  # -1 too where keys overflow
    live = entry >= 0
    block = tl.load(ids_ptr + (entry >> 6), mask=live, other=0).to(tl.int64)
    bit = entry & 63
    tl.store(rows_ptr + place_of(info_ptr, block, bit, live), row, mask=live)
    tl.store(entries_ptr + row, block * 64 + bit, mask=live)


@triton.jit
def table_kernel(
    coords_ptr, copy_ptr, ranges_ptr, table_ptr, status_ptr, ids_ptr, info_ptr, keys_ptr, rows_ptr, entries_ptr,
    barriers_ptr, report_ptr, count_ptr, fault_ptr, n, capacity, zeros, programs,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SHIFTS: tl.constexpr, MEASURED: tl.constexpr, REPORTED: tl.constexpr,
    CHECKED: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr, NUM_BARRIERS: tl.constexpr,
):  # fmt: skip
    """Zeros, ranges, blocks, their places and their rows in one launch; all programs wait for each other in between.

    The slots come first in memory; ``zeros`` words from there on start as zeros. Rows that are not MEASURED are copied
    to ``copy_ptr``, where that is not ``coords_ptr``: a grid keeps a copy of its own. REPORTED: status and ranges, as
    unsigned numbers, go to ``report_ptr`` too. CHECKED: the fault is 0, and bit 0 of it is set where not just the first
    ``count`` rows have a batch item, or as by `check_cells`.
    """
    program = tl.program_id(0)
    write_zeros(table_ptr, zeros, programs, 2048)
    if CHECKED and program == 0:
        tl.store(fault_ptr, 0)
    wait_for_all(barriers_ptr, programs)
    if not MEASURED:
        measure_rows(coords_ptr, copy_ptr, ranges_ptr, n, programs * BLOCK, COLUMNS, WIDTH, BLOCK)
        wait_for_all(barriers_ptr + 1, programs)
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    lows, extents, counts = spans_of(ranges_ptr, COLUMNS, SHIFTS)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(program * BLOCK, n, programs * BLOCK):
        wrong |= insert_rows(
            first, coords_ptr, table_ptr, ids_ptr, keys_ptr, rows_ptr, entries_ptr, status_ptr, count_ptr, n, capacity,
            volume, lows, extents, counts, COLUMNS, SHIFTS, CHECKED, BLOCK,
        )  # fmt: skip
    if CHECKED:
        report_wrong(fault_ptr, wrong)
    wait_for_all(barriers_ptr + 2, programs)
    give_places(table_ptr, rows_ptr, info_ptr, status_ptr, programs, EACH)  # slots by block lie where rows will
    wait_for_all(barriers_ptr + 3, programs)
    if REPORTED and program == 0:
        report(report_ptr, status_ptr, ranges_ptr, COLUMNS, WIDTH)
    for first in range(program * BLOCK, n, programs * BLOCK):
        place_rows(first, entries_ptr, ids_ptr, info_ptr, rows_ptr, n, BLOCK)
    if CHECKED and program == 0:
        check_cells(status_ptr, count_ptr, fault_ptr)
    leave(barriers_ptr, programs, NUM_BARRIERS)


@triton.jit
def report(report_ptr, status_ptr, ranges_ptr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Status and ranges, as unsigned numbers."""
    tl.store(report_ptr, tl.load(status_ptr))
    tl.store(report_ptr + 1, tl.load(status_ptr + 1))
    side = tl.arange(0, 2 * WIDTH)
    spread = tl.load(ranges_ptr + side, mask=side < 2 * COLUMNS, other=0).to(tl.uint32, bitcast=True)
    tl.store(report_ptr + 2 + side, spread.to(tl.int64), mask=side < 2 * COLUMNS)


@triton.jit
def check_cells(status_ptr, count_ptr, fault_ptr):
    """Bit 0 of the fault: the table has not as many cells as there are real rows, or its keys overflow."""
    if ((tl.load(status_ptr) & 0xFFFFFFFF) != tl.load(count_ptr)) | (tl.load(status_ptr + 1) != 0):
        tl.atomic_or(fault_ptr, 1, sem="relaxed")


@triton.jit
def lookup_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, found_ptr, n, capacity,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found[row] = the table's row of the same coordinates, -1 if none."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    lows, extents, counts = spans_of(ranges_ptr, COLUMNS, SHIFTS)
    values = load_rows(coords_ptr, row, live, COLUMNS)
    key, bit, inside = cells_of(values, live, lows, extents, counts, COLUMNS, SHIFTS)
    slot, hit = find(table_ptr, key, inside, capacity, volume)
    word = tl.load(table_ptr + 2 * slot + 1, mask=hit, other=0)
    hit = hit & (((word >> bit.to(tl.int64)) & 1) != 0)
    block = tl.load(ids_ptr + slot, mask=hit, other=0)
    found = tl.load(rows_ptr + place_of(info_ptr, block.to(tl.int64), bit, hit), mask=hit, other=-1)
    tl.store(found_ptr + row, found, mask=live)


_I32, _I64 = torch.int32, torch.int64
TABLE = Launcher(
    table_kernel,
    (_I32, _I32, _I32, _I64, _I64, _I32, _I64, _I64, _I32, _I64, _I32, _I64, _I32, _I32, *(int,) * 4),
    resident=6,
)
LOOKUP = Launcher(lookup_kernel, (_I32, _I32, _I64, _I32, _I64, _I32, _I32, int, int), num_warps=1)
