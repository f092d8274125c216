"""Coordinates -> rows on the GPU: a hash table of occupied blocks of cells, built without waiting for the device.

    in:  coordinates (N, 1+D) int32, in any order
    out: a `CoordinateTable`; status and ranges are on their way to the host where they are asked for

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

from sparseconv.geometry.gpu.hash_table.kernels import LOOKUP, TABLE
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import NUM_BARRIERS, DeviceCount, barriers_of, programs_at_once
from sparseconv.gpu.launcher import Pointer, ceil_div, pointer, power_of_2
from sparseconv.gpu.report import Report

#: log2 of a block's edge along each axis, by rank: at most 64 cells, one bit each of a 64-bit word, at most 16 in line
BLOCK_SHIFTS = {1: (4,), 2: (3, 3), 3: (2, 2, 2), 4: (1, 1, 2, 2)}
_SHIFTS = {rank + 1: (0, *shifts) for rank, shifts in BLOCK_SHIFTS.items()}
#: rows up to which the launch that fills a table writes its zeros, whose words it counts in 32 bits
CLEARED_ROWS = 2**28
MAX_ROWS = 2**29


class TableStatus(NamedTuple):
    """What the host has read of a table."""

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
    spare: list[tuple[int, int]]  # (start, length) of the zeros kept for the counts of the windows searched first
    report: Report | None  # status and ranges on their way to the host; None where either is not asked for
    device_count: DeviceCount | None = (
        None  # of rows whose number the host does not know: nothing of theirs is ever read back
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
        """The number of occupied blocks where the host knows it, and of rows elsewhere; waits for nothing."""
        if self.status is None and self.report is not None and self.report.has_arrived:
            read_table(self)
        return self.coords.shape[0] if self.status is None else self.status.blocks

    def spare_zeros(self, length: int) -> int | None:
        """Where in the arena's COUNTS so many zeros begin that nobody else gets; None if none are left."""
        for piece in tuple(self.spare):
            if piece[1] >= length:
                try:
                    self.spare.remove(piece)
                except ValueError:  # another thread was faster
                    continue
                return piece[0]
        return None


#: the arrays of a table's arena; those up to COUNTS start as zeros
SLOTS, STATUS, RANGES, COUNTS, IDS, INFOS, KEYS, ROWS, ENTRIES = range(9)
_I32, _I64 = torch.int32, torch.int64
TABLE_DTYPES = (_I64, _I64, _I32, _I32, _I32, _I64, _I64, _I32, _I64)


def read_table(table: CoordinateTable) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column, inclusive, on the host, and the table's status, in one wait for the device."""
    if table.report is None:
        raise ValueError("a table of no rows, or of given ranges, sends nothing to the host")
    found, overflow, *encoded = table.report.read()
    table.status = TableStatus(found & 0xFFFFFFFF, found >> 32, overflow != 0)
    return bounds_of(encoded)


def decode_ranges(ranges: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column, inclusive, on the host; waits for the device. No row: low > high."""
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
    Status and ranges are sent to the host, for a `read_table` that follows. With given ranges they are not, and rows
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
    device = coords.device
    lengths = table_lengths(n, columns)
    arena = Arena(device, TABLE_DTYPES, lengths, 0 if 0 < n <= CLEARED_ROWS else 4)
    report = Report(2 + 2 * columns, device) if n and ranges is None and device_count is None else None
    table = table_in(arena, coords, ranges, report, device_count)
    if n:
        _launch_table(table, given, device_count if checked else None)
        if report is not None:
            report.send()
    return table


def table_lengths(n: int, columns: int) -> list[int]:
    """Those of the arrays in the arena of a table of n rows, whose kinds are `TABLE_DTYPES`."""
    capacity, some = max(64, n + n // 2), n or 1
    lengths = [2 * capacity, 2, 2 * columns, 3 * _counts_of_16(n) + 192]
    return [*lengths, capacity, 2 * some, some, some, some]


def table_in(
    arena: Arena,
    coords: torch.Tensor,
    ranges: torch.Tensor | None = None,
    report: Report | None = None,
    device_count: DeviceCount | None = None,
) -> CoordinateTable:
    """The table of coords (N, 1+D) int32 that a launch writes into an arena."""
    n, columns = coords.shape
    capacity = arena.length_of(SLOTS) // 2
    spread = arena[RANGES] if ranges is None else pointer(ranges)
    pointers = (spread, arena[SLOTS], arena[IDS], arena[INFOS], arena[ROWS])
    return CoordinateTable(
        coords, ranges, arena, capacity, _SHIFTS[columns], pointers, spare_of(n), report, device_count
    )


def spare_of(n: int) -> list[tuple[int, int]]:
    """Where the zeros begin that a table of n rows keeps in its COUNTS, and how many: for two windows on the rows
    themselves or on coarser ones, of 16 taps and of 32, whose totals stand before their counts."""
    unit = _counts_of_16(n)
    return [(0, unit + 96), (unit + 96, 2 * unit + 96)]


def _counts_of_16(n: int) -> int:
    return 16 * -(-n // rows_per_chunk(n))


def rows_per_chunk(n: int) -> int:
    """Rows whose edges are counted together: at most about sixteen thousand chunks."""
    return 128 if n <= 1 << 21 else power_of_2(n) >> 14


def encode_ranges(low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
    """(1+D, 2) int32 on the host, the ranges of rows from ``low`` to ``high``, inclusive, as kernels read them.

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
    """Shifts as one integer, four bits an axis."""
    return sum(s << (4 * axis) for axis, s in enumerate(shifts))


def shifts_of(columns: int) -> tuple[int, ...]:
    """log2 of a block's edge along each column of coordinates."""
    return _SHIFTS[columns]


def width_of(columns: int) -> int:
    """Columns as kernels take them: a power of two, or 8."""
    return 2 if columns == 2 else 4 if columns <= 4 else 8


def _launch_table(table: CoordinateTable, given: torch.Tensor, checked: DeviceCount | None) -> None:
    arena, coords = table.arena, table.coords
    n, columns = coords.shape
    device = coords.device
    programs = programs_at_once(device, ceil_div(n, 128), TABLE.resident)
    args = (
        pointer(given), pointer(coords), table.pointers[0], *arena[:RANGES], *arena[IDS:],
        barriers_of(device, table.device_count), _reported(table), *_checks(table, checked),
        n, table.capacity, arena.length_before(IDS) // 4 if n <= CLEARED_ROWS else 0, programs,
    )  # fmt: skip
    measured, reported = table.given_ranges is not None, table.report is not None
    shape = columns, width_of(columns), pack_shifts(table.shifts)
    TABLE(device, (programs,), args, (*shape, measured, reported, checked is not None, 128, 128, NUM_BARRIERS))


def _reported(table: CoordinateTable) -> Pointer:
    """Where status and ranges go for the host; something of that kind where it does not ask."""
    return table.arena[STATUS] if table.report is None else table.report.pointer


def _checks(table: CoordinateTable, checked: DeviceCount | None) -> tuple[Pointer, Pointer]:
    """Where the number of real rows lies, and the fault; something of that kind where nobody looks."""
    return (table.arena[RANGES],) * 2 if checked is None else (pointer(checked.count), pointer(checked.fault))
