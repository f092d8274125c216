"""Coordinates -> rows on the GPU: a hash table of occupied blocks of cells, built without waiting for the device.

    in:  coordinates (N, 1+D) int32, in any order
    out: a `CoordinateTable`; status and ranges are on their way to the CPU where they are asked for

The voxels x = 0, 1 and 5 of a line lie in one block of 16 cells: one slot with the word 0b100011, number 0, and the
rows (0, 1, 2) side by side in the order of their cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_probe import (
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
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import NUM_BARRIERS, DeviceCount, barriers_of, leave, programs_at_once, wait_for_all
from sparseconv.gpu.launcher import Launcher, Pointer, ceil_div, pointer
from sparseconv.gpu.program import power_of_2
from sparseconv.gpu.report import Report

_I32, _I64 = torch.int32, torch.int64


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
    slot, fresh = occupy(table_ptr, key, bit, inside, capacity, volume)
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


TABLE = Launcher(
    table_kernel,
    (_I32, _I32, _I32, _I64, _I64, _I32, _I64, _I64, _I32, _I64, _I32, _I64, _I32, _I32, *(int,) * 4),
    resident=6,
)
LOOKUP = Launcher(lookup_kernel, (_I32, _I32, _I64, _I32, _I64, _I32, _I32, int, int), num_warps=1)


#: log2 of a block's edge along each axis, by rank: at most 64 cells, one bit each of a 64-bit word, at most 16 in line
BLOCK_SHIFTS = {1: (4,), 2: (3, 3), 3: (2, 2, 2), 4: (1, 1, 2, 2)}
_SHIFTS = {rank + 1: (0, *shifts) for rank, shifts in BLOCK_SHIFTS.items()}
#: rows up to which the launch that fills a table writes its zeros, whose words it counts in 32 bits
CLEARED_ROWS = 2**28
MAX_ROWS = 2**29


class TableStatus(NamedTuple):
    """What the CPU has read of a table."""

    distinct: int  # rows, each voxel once
    blocks: int  # that are occupied
    overflows: bool  # whether the extent is too large for keys


@dataclass(eq=False)
class CoordinateTable:
    """Occupied blocks of cells, found by open addressing; everything stays on the device.

    A block of 64 cells (4 x 4 x 4 in space) is one slot: its key + 1 (0: empty slot) and the 64-bit word of its
    occupied cells. Occupied blocks are numbered; ``info`` has the bits of each one's two halves, each with its first
    place in ``rows``, where the rows of its cells lie side by side in the order of their bits. So the 27 look-ups of a
    3 x 3 x 3 window touch 3.4 blocks on average. Where the blocks of the bounding box are no more than the slots, a
    block's slot is its key: a plain bitmap.

    Which slot and number a block gets depends on a race between threads; which row is found does not.
    """

    coords: torch.Tensor  # (N, 1+D) int32, contiguous
    given_ranges: torch.Tensor | None  # (1+D, 2) int32, see encode_ranges; None: the arena's
    arena: Arena  # its arrays: SLOTS, STATUS, RANGES and so on
    capacity: int  # slots
    shifts: tuple[int, ...]  # log2 of a block's edge along each axis, the batch (0) first
    pointers: tuple[Pointer, ...]  # ranges, slots, block numbers, infos and rows as the kernels take them
    report: Report | None  # status and ranges on their way to the CPU; None where either is not asked for
    device_count: DeviceCount | None = (
        None  # of rows whose number the CPU does not know: nothing of theirs is ever read back
    )

    status: TableStatus | None = None  # once it was read

    @property
    def has_duplicates(self) -> bool:
        """Whether a row occurs twice; after `read_table`."""
        status = self.status
        return status is not None and not status.overflows and status.distinct != self.coords.shape[0]

    @property
    def ranges(self) -> torch.Tensor:
        """(1+D, 2) int32 on the device, see `encode_ranges`."""
        if self.given_ranges is not None:
            return self.given_ranges
        return self.arena.tensor(RANGES).view(-1, 2)

    @property
    def most_blocks(self) -> int:
        """The number of occupied blocks where the CPU knows it, and of rows elsewhere; waits for nothing."""
        if self.status is None and self.report is not None and self.report.has_arrived:
            read_table(self)
        return self.coords.shape[0] if self.status is None else self.status.blocks


#: the arrays of a table's arena; those before IDS start as zeros
SLOTS, STATUS, RANGES, IDS, INFOS, KEYS, ROWS, ENTRIES = range(8)
TABLE_DTYPES = (_I64, _I64, _I32, _I32, _I64, _I64, _I32, _I64)


def read_table(table: CoordinateTable) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column, inclusive, on the CPU, and the table's status, in one wait for the device."""
    if table.report is None:
        raise ValueError("a table of no rows, or of given ranges, sends nothing to the CPU")
    found, overflow, *encoded = table.report.read()
    table.status = TableStatus(found & 0xFFFFFFFF, found >> 32, overflow != 0)
    return bounds_of(encoded)


def decode_ranges(ranges: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column, inclusive, on the CPU; waits for the device. No row: low > high."""
    return bounds_of([v & 0xFFFFFFFF for v in ranges.flatten().tolist()])


def bounds_of(encoded: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column of ranges as unsigned numbers."""
    return tuple([2**31 - 1 - v for v in encoded[1::2]]), tuple([v - 2**31 for v in encoded[::2]])


def build_table(
    coords: torch.Tensor,
    ranges: torch.Tensor | None = None,
    *,
    copy: torch.Tensor | None = None,
    device_count: DeviceCount | None = None,
    checked: bool = False,
) -> CoordinateTable:
    """A table of the rows of coords (N, 1+D) int32, N < 2^29, in any order; nothing is read back.

    ``ranges`` are those of ``encode_ranges`` where they are known; else ``copy`` may be an array like coords, into
    which the launch that measures them copies them: the table is then of the copy.
    Duplicate rows and key overflow are found on the device: `raise_for_status` reports them at the next reading.
    Status and ranges are sent to the CPU, for a `read_table` that follows. With given ranges they are not, and rows
    outside of them are in no cell and never found; so are the dead ones of ``device_count`` rows, whose batch item is
    negative.
    ``checked``: their fault flag is raised, on the device, unless the first ``count`` rows alone are real, and the
    table has as many cells.
    """
    n, columns = coords.shape
    if n >= MAX_ROWS:
        raise ValueError(f"a grid on a GPU holds fewer than 2^29 voxels, got {n:,}: split the scene")
    given = aligned(coords)
    coords = given if copy is None else copy
    device, capacity, some = coords.device, max(64, n + n // 2), n or 1
    lengths = [2 * capacity, 2, 2 * columns, capacity, 2 * some, some, some, some]
    arena = Arena(device, TABLE_DTYPES, lengths, 0 if 0 < n <= CLEARED_ROWS else IDS)
    report = Report(2 + 2 * columns, device) if n and ranges is None and device_count is None else None
    spread = arena[RANGES] if ranges is None else pointer(ranges)
    pointers = (spread, arena[SLOTS], arena[IDS], arena[INFOS], arena[ROWS])
    table = CoordinateTable(coords, ranges, arena, capacity, _SHIFTS[columns], pointers, report, device_count)
    if n:
        _launch_table(table, given, device_count if checked else None)
        if report is not None:
            report.send()
    return table


def rows_per_chunk(n: int) -> int:
    """Rows whose edges are counted together: at most about sixteen thousand chunks."""
    return 128 if n <= 1 << 21 else power_of_2(n) >> 14


def encode_ranges(low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
    """(1+D, 2) int32 on the CPU, the ranges of rows from ``low`` to ``high``, inclusive, as kernels read them.

    out[c] = (high + 2^31, 2^32 - 1 - (low + 2^31)) as unsigned 32-bit numbers, so that zeros mean "no row yet"
    """
    return torch.tensor([(h + 2**31, 2**31 - 1 - v) for v, h in zip(low, high)]).int()


def block_volume(low: Sequence[int], high: Sequence[int]) -> int:
    """Block numbers of a bounding box, inclusive; 2^62 and more are too many for keys."""
    shifts = (0, *BLOCK_SHIFTS[len(low) - 1])
    return math.prod(((h - v) >> shift) + 2 for v, h, shift in zip(low, high, shifts))


def lookup(table: CoordinateTable, coords: torch.Tensor) -> torch.Tensor:
    """Rows (M,) int32 of coords (M, 1+D) int32, -1 where absent."""
    coords = aligned(coords)
    found = torch.empty(coords.shape[0], dtype=torch.int32, device=coords.device)
    if coords.shape[0]:
        constants = (coords.shape[1], pack_shifts(table.shifts), 128)
        grid = (ceil_div(coords.shape[0], 128),)
        args = (pointer(coords), *table.pointers, pointer(found), coords.shape[0], table.capacity)
        LOOKUP(coords.device, grid, args, constants)
    return found


def raise_for_status(table: CoordinateTable, distinct: int, overflow: int) -> None:
    """Raise ValueError for what a table's status says: an extent too large for keys, or duplicate rows, by name."""
    if overflow:
        low, high = decode_ranges(table.ranges)
        extent = " x ".join(f"{h - lo + 1}" for lo, h in zip(low, high))
        raise ValueError(
            f"the extent {extent} (batch first) is too large for 64-bit keys: remove far-off outliers, use larger "
            "voxels, or split the scene"
        )
    if distinct != table.coords.shape[0]:
        first = lookup(table, table.coords).long()
        rows = torch.arange(len(first), device=first.device)
        other = int((first != rows).nonzero()[0])
        pair = (int(first[other]), other)
        raise ValueError(
            f"rows {min(pair)} and {max(pair)} of coords are the same voxel {tuple(table.coords[other].tolist())}: "
            "remove one, or merge points with voxelize()"
        )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and at an address that kernels may assume a multiple of 16."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@cache
def pack_shifts(shifts: tuple[int, ...]) -> int:
    """Shifts as one integer, four bits per axis."""
    return sum(s << (4 * axis) for axis, s in enumerate(shifts))


def _launch_table(table: CoordinateTable, given: torch.Tensor, checked: DeviceCount | None) -> None:
    arena, coords = table.arena, table.coords
    n, columns = coords.shape
    device = coords.device
    programs = programs_at_once(device, ceil_div(n, 128), TABLE.resident)
    # where nobody asks, something of that kind
    reported = arena[STATUS] if table.report is None else table.report.pointer
    checks = (arena[RANGES],) * 2 if checked is None else (pointer(checked.count), pointer(checked.fault))
    args = (
        pointer(given), pointer(coords), table.pointers[0], *arena[:RANGES], *arena[IDS:],
        barriers_of(device, table.device_count), reported, *checks,
        n, table.capacity, arena.length_before(IDS) // 4 if n <= CLEARED_ROWS else 0, programs,
    )  # fmt: skip
    asked = table.given_ranges is not None, table.report is not None, checked is not None
    shape = columns, power_of_2(columns), pack_shifts(table.shifts)
    TABLE(device, (programs,), args, (*shape, *asked, 128, 128, NUM_BARRIERS))
