"""Coordinates -> rows on the GPU: a hash table of occupied blocks of cells, built without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cells import cells_of, claim, count_blocks, find, pack_half, place_of, popcount
from sparseconv.geometry.triton_launch import (
    NUM_GATES,
    Arena,
    Launcher,
    Pointer,
    Report,
    Unseen,
    ceil_div,
    crew_of,
    gates_of,
    leave,
    on_device,
    pointer,
    power_of_2,
    wait_for_all,
)

#: log2 of a block's edge along each axis, by rank: at most 64 cells, one bit each of a 64-bit word, at most 16 in line
BLOCK_SHIFTS = {1: (4,), 2: (3, 3), 3: (2, 2, 2), 4: (1, 1, 2, 2)}
#: up to this many rows a table of single cells is built: two launches fewer outweigh its more frequent look-ups
SINGLE_CELL_ROWS = 0
#: up to this many rows the passes of a build share one launch, which the host is faster with
FUSED_ROWS = 600_000
MAX_ROWS = 2**29


@dataclass(frozen=True, eq=False)
class CoordinateTable:
    """Occupied blocks of cells, found by open addressing; everything stays on the device.

    A block of 64 cells (4 x 4 x 4 in space) is one slot: its key + 1 (0: empty slot) and the 64-bit word of its
    occupied cells. Occupied blocks are numbered; ``info`` has the bits of each one's two halves, each with its first
    place in ``rows``, where the rows of its cells lie side by side in the order of their bits. So the 27 look-ups of a
    3 x 3 x 3 window touch 3.4 blocks on average. Where the blocks of the bounding box are no more than the slots, a
    block's slot is its key: a plain bitmap. With single cells (``shifts`` all 0), the second word of a slot is the
    row + 1.

    Which slot and number a block gets depends on a race between threads; which row is found does not.
    """

    coords: torch.Tensor  # (N, 1+D) int32, contiguous
    given_ranges: torch.Tensor | None  # (1+D, 2) int32, see measure_ranges; None: the arena's
    arena: Arena  # its arrays: SLOTS, STATUS, RANGES and so on
    capacity: int  # slots
    shifts: tuple[int, ...]  # log2 of a block's edge along each axis, the batch (0) first
    pointers: tuple[Pointer, ...]  # ranges, slots, block numbers, infos and rows as the kernels take them
    spare: list[tuple[int, int]]  # (start, length) of the zeros kept for the counts of the windows searched first
    report: Report | None  # status and ranges on their way to the host, where they were asked for
    unseen: Unseen | None = None  # of rows whose number the host does not know: nothing of theirs is ever read back

    read: dict[str, int] = field(default_factory=dict)  # "distinct", "overflow" and "blocks", once they were read

    @property
    def blocked(self) -> bool:
        return any(self.shifts)

    @property
    def has_duplicates(self) -> bool:
        """Whether a row occurs twice; after `read_table`."""
        return not self.read["overflow"] and self.read["distinct"] != self.coords.shape[0]

    @property
    def ranges(self) -> torch.Tensor:
        """(1+D, 2) int32 on the device, see `measure_ranges`."""
        if self.given_ranges is not None:
            return self.given_ranges
        return self.arena.tensor(RANGES).view(-1, 2)

    @property
    def most_blocks(self) -> int:
        """The number of occupied blocks where the host knows it, and of rows elsewhere; waits for nothing."""
        if "blocks" not in self.read and self.report is not None and self.report.has_arrived:
            read_table(self)
        return self.read.get("blocks", self.coords.shape[0])

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
SLOTS, STATUS, RANGES, COUNTS, IDS, INFO, KEYS, ROWS, ENTRIES = range(9)


def measure_ranges(coords: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Smallest and largest value of each column of coords (N, 1+D) int32, left on the device, encoded.

        out[c] = (max + 2^31, 2^32 - 1 - (min + 2^31)) as unsigned 32-bit numbers, so that zeros mean "no row yet"

    Returns (1+D, 2) int32; ``decode_ranges`` reads it.
    """
    if out is None:
        out = torch.zeros(coords.shape[1], 2, dtype=torch.int32, device=coords.device)
    if coords.shape[0]:
        with on_device(coords.device):
            _launch_ranges(coords, pointer(out))
    return out


def read_table(table: CoordinateTable) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column, inclusive, on the host, and the table's status, in one wait for the device."""
    if table.given_ranges is not None:
        raise ValueError("the ranges of this table were given: they are not in its arena")
    if table.report is not None:
        found, overflow, *encoded = table.report.read()
        ranges = _decode(list(zip(encoded[::2], encoded[1::2])))
    else:
        status, spread = table.arena.read(STATUS, RANGES)
        found, overflow = status.tolist()
        ranges = decode_ranges(spread.view(-1, 2))
    table.read.update(distinct=found & 0xFFFFFFFF, overflow=overflow)
    if table.blocked:
        table.read["blocks"] = found >> 32
    return ranges


def decode_ranges(ranges: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(low, high) of each column, inclusive, on the host; waits for the device. No row: low > high."""
    return _decode([(hi & 0xFFFFFFFF, lo & 0xFFFFFFFF) for hi, lo in ranges.tolist()])


def _decode(encoded: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(2**31 - 1 - lo for _, lo in encoded), tuple(hi - 2**31 for hi, _ in encoded)


def build_table(
    coords: torch.Tensor,
    ranges: torch.Tensor | None = None,
    *,
    blocked: bool | None = None,
    reported: bool = False,
    awaited: bool = False,
    unseen: Unseen | None = None,
    checked: bool = False,
) -> CoordinateTable:
    """A table of the rows of coords (N, 1+D) int32, N < 2^29, in any order; nothing is read back.

    ``ranges`` are those of ``measure_ranges`` where they are known; ``blocked=False`` makes a table of single cells.
    Duplicate rows and key overflow are found on the device: `raise_for_status` reports them at the next reading.
    ``reported`` sends status and ranges to the host, for a `read_table` that follows; ``awaited``: at once. With given
    ranges, rows outside of them are in no cell and never found; so are the dead ones of ``unseen`` rows, whose batch
    item is negative. ``checked``: their fault flag is raised, on the device, unless the first ``count`` rows alone are
    real, and the table has as many cells.
    """
    n, columns = coords.shape
    if n >= MAX_ROWS:
        raise ValueError(f"a grid on a GPU holds fewer than 2^29 voxels, got {n:,}: split the scene")
    coords = aligned(coords)
    device = coords.device
    if blocked is None:
        blocked = n > SINGLE_CELL_ROWS
    shifts = (0, *BLOCK_SHIFTS[columns - 1]) if blocked else (0,) * columns
    capacity = max(64, n + n // 2) if blocked else max(64, 2 * n)
    chunks = -(-n // rows_per_chunk(n))
    # two windows on the rows themselves or on coarser ones, 16 taps and 32: their totals before their counts
    spare = [(0, 16 * chunks + 96), (16 * chunks + 96, 32 * chunks + 96)]
    i32, i64, some = torch.int32, torch.int64, max(1, n)
    arrays = [(i64, 2 * capacity), (i64, 2), (i32, 2 * columns), (i32, sum(spare[1]))]
    if blocked:
        arrays += [(i32, capacity), (i64, 2 * some), (i64, some), (i32, some), (i64, some)]
    fused = blocked and 0 < n <= FUSED_ROWS
    arena = Arena(device, arrays, zeroed=0 if fused else 4)
    spread = arena[RANGES] if ranges is None else pointer(ranges)
    if blocked:
        pointers = (spread, arena[SLOTS], arena[IDS], arena[INFO], arena[ROWS])
    else:
        pointers = (spread, arena[SLOTS], arena[COUNTS], arena[SLOTS], arena[COUNTS])
    reported = reported and fused and ranges is None
    report = Report(2 + 2 * columns, device) if reported else None
    table = CoordinateTable(coords, ranges, arena, capacity, shifts, pointers, spare, report, unseen)
    if n:
        with on_device(device):
            if fused:
                _launch_table(table, unseen if checked else None)
                if report is not None:
                    report.sent(noted=not awaited)
                return table
            if ranges is None:
                _launch_ranges(coords, spread)
            _launch_build(table, unseen if checked else None)
    return table


def rows_per_chunk(n: int) -> int:
    """Rows whose edges are counted together: at most about sixteen thousand chunks."""
    return max(128, power_of_2(max(1, n)) // 16384)


def encode_ranges(low: Sequence[int], high: Sequence[int]) -> torch.Tensor:
    """(1+D, 2) int32 on the host: what `measure_ranges` leaves of rows from ``low`` to ``high``, inclusive."""
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
        constants = (coords.shape[1], pack_shifts(table.shifts), table.blocked, 128)
        grid = (ceil_div(coords.shape[0], 128),)
        args = (pointer(coords), *table.pointers, pointer(found), coords.shape[0], table.capacity)
        with on_device(coords.device):
            _LOOKUP(coords.device, grid, args, constants)
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


def _launch_ranges(coords: torch.Tensor, out: Pointer) -> None:
    n, columns = coords.shape
    blocks = min(ceil_div(n, 512), 528)
    _RANGES(coords.device, (blocks,), (pointer(coords), out, n, 512 * blocks), (columns, _width(columns), 512))


def _width(columns: int) -> int:
    return 2 if columns == 2 else 4 if columns <= 4 else 8


def _launch_table(table: CoordinateTable, checked: Unseen | None) -> None:
    arena, coords = table.arena, table.coords
    n, columns = coords.shape
    programs = crew_of(coords.device, ceil_div(n, 128))
    arrays = [arena[array] for array in (SLOTS, STATUS, IDS, INFO, KEYS, ROWS, ENTRIES)]
    zeros = arena.length_before(IDS) // 4
    report = arena[STATUS] if table.report is None else table.report.pointer
    told = _told(table, checked)
    sizes = (n, table.capacity, zeros, programs)
    args = (pointer(coords), table.pointers[0], *arrays, gates_of(coords.device, table.unseen), report, *told, *sizes)
    measured, reported = table.given_ranges is not None, table.report is not None
    shape = columns, _width(columns), pack_shifts(table.shifts)
    _TABLE(coords.device, (programs,), args, (*shape, measured, reported, checked is not None, 128, 512, NUM_GATES))


def _told(table: CoordinateTable, checked: Unseen | None) -> tuple[Pointer, Pointer]:
    """Where the number of real rows lies, and the fault; something of that kind where nobody looks."""
    return (table.arena[RANGES],) * 2 if checked is None else (pointer(checked.count), pointer(checked.fault))


def _launch_build(table: CoordinateTable, checked: Unseen | None) -> None:
    arena, device = table.arena, table.coords.device
    n, columns = table.coords.shape
    shifts = pack_shifts(table.shifts)
    entries = arena[ENTRIES] if table.blocked else arena[SLOTS]
    told = _told(table, checked)
    insert = (pointer(table.coords), table.pointers[0], arena[SLOTS], entries, arena[STATUS], *told, n, table.capacity)
    _INSERT(device, (ceil_div(n, 128),), insert, (columns, shifts, table.blocked, checked is not None, 128))
    if table.blocked:
        number = (arena[SLOTS], arena[IDS], arena[INFO], arena[KEYS], arena[STATUS], table.capacity)
        _NUMBER(device, (ceil_div(table.capacity, 512),), number, (512,))
        rows = (entries, arena[IDS], arena[INFO], arena[ROWS], arena[STATUS], *told, n)
        _ROWS(device, (ceil_div(n, 256),), rows, (checked is not None, 256))


# ---- kernels


@triton.jit
def ranges_kernel(coords_ptr, ranges_ptr, n, stride, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Largest x + 2^31 and largest 2^32 - 1 - (x + 2^31) of each column."""
    measure_rows(coords_ptr, ranges_ptr, n, stride, COLUMNS, WIDTH, BLOCK)


@triton.jit
def measure_rows(coords_ptr, ranges_ptr, n, stride, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The ranges of every ``stride``-th run of BLOCK rows, this program's first."""
    column = tl.arange(0, WIDTH)
    tops = tl.zeros((BLOCK, WIDTH), tl.uint32)
    bottoms = tl.zeros((BLOCK, WIDTH), tl.uint32)
    for start in range(tl.program_id(0) * BLOCK, n, stride):
        row = start + tl.arange(0, BLOCK)
        live = (row < n)[:, None] & (column < COLUMNS)[None, :]
        value = tl.load(coords_ptr + row.to(tl.int64)[:, None] * COLUMNS + column[None, :], mask=live, other=0)
        biased = value.to(tl.uint32, bitcast=True) ^ 0x80000000
        tops = tl.maximum(tops, tl.where(live, biased, 0))
        bottoms = tl.maximum(bottoms, tl.where(live, ~biased, 0))
    top = tl.max(tops, 0)
    bottom = tl.max(bottoms, 0)
    ranges_ptr = ranges_ptr.to(tl.pointer_type(tl.uint32))
    tl.atomic_max(ranges_ptr + 2 * column, top, mask=column < COLUMNS, sem="relaxed")
    tl.atomic_max(ranges_ptr + 2 * column + 1, bottom, mask=column < COLUMNS, sem="relaxed")


@triton.jit
def insert_kernel(
    coords_ptr, ranges_ptr, table_ptr, entries_ptr, status_ptr, count_ptr, fault_ptr, n, capacity,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, BLOCKED: tl.constexpr, CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the rows' cells into the table; entries[row] = 64 slot + bit.

    CHECKED: bit 0 of the fault is set where not just the first ``count`` rows have a batch item.
    """
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    first = tl.program_id(0) * BLOCK
    insert_rows(
        first, coords_ptr, ranges_ptr, table_ptr, entries_ptr, status_ptr, count_ptr, fault_ptr, n, capacity, volume,
        COLUMNS, SHIFTS, BLOCKED, CHECKED, BLOCK,
    )  # fmt: skip


@triton.jit
def insert_rows(
    first, coords_ptr, ranges_ptr, table_ptr, entries_ptr, status_ptr, count_ptr, fault_ptr, n, capacity, volume,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, BLOCKED: tl.constexpr, CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`insert_kernel` for the rows from ``first`` on."""
    row = first + tl.arange(0, BLOCK)
    live = row < n
    fits = row < tl.where(volume < 0x4000000000000000, n, 0)
    key, bit, inside = cells_of(coords_ptr, row, fits, ranges_ptr, COLUMNS, SHIFTS)
    slot, known = claim(table_ptr, key, inside, tl.minimum(row, capacity - 1), capacity, volume)
    if BLOCKED:
        flag = tl.full((BLOCK,), 1, tl.int64) << bit.to(tl.int64)
        tl.atomic_or(table_ptr + 2 * slot + 1, flag, mask=inside, sem="relaxed")
        tl.store(entries_ptr + row, tl.where(inside, slot.to(tl.int64) * 64 + bit, -1), mask=live)
    else:
        tl.atomic_max(table_ptr + 2 * slot + 1, row.to(tl.int64) + 1, mask=inside, sem="relaxed")
        tl.atomic_add(status_ptr, tl.sum((inside & ~known).to(tl.int64), 0), sem="relaxed")
    if CHECKED:
        item = tl.load(coords_ptr + row.to(tl.int64) * COLUMNS, mask=live, other=-1)
        if tl.sum(((item >= 0) != (row < tl.load(count_ptr))).to(tl.int32), 0) != 0:
            tl.atomic_or(fault_ptr, 1, sem="relaxed")
    if first == 0:
        tl.store(status_ptr + 1, (volume >= 0x4000000000000000).to(tl.int64))


@triton.jit
def number_kernel(table_ptr, ids_ptr, info_ptr, keys_ptr, status_ptr, capacity, BLOCK: tl.constexpr):
    """Number the occupied blocks, and give each as many places in the list of rows as it has cells.

    The counter holds both numbers, blocks above and cells in the lower 32 bits.
    """
    number_blocks(tl.program_id(0) * BLOCK, table_ptr, ids_ptr, info_ptr, keys_ptr, status_ptr, capacity, BLOCK)


@triton.jit
def number_blocks(first, table_ptr, ids_ptr, info_ptr, keys_ptr, status_ptr, capacity, BLOCK: tl.constexpr):
    """`number_kernel` for the slots from ``first`` on."""
    slot = first + tl.arange(0, BLOCK)
    word = tl.load(table_ptr + 2 * slot + 1, mask=slot < capacity, other=0)
    cells = popcount(word).to(tl.int64)
    both = tl.where(cells > 0, cells + 0x100000000, 0)
    total = tl.sum(both, 0)
    if total > 0:
        first_place = tl.atomic_add(status_ptr, total, sem="relaxed") + tl.cumsum(both, 0) - both
        block = first_place >> 32
        tl.store(ids_ptr + slot, block.to(tl.int32), mask=cells > 0)
        place = first_place & 0xFFFFFFFF
        tl.store(info_ptr + 2 * block, pack_half(word, place), mask=cells > 0)
        upper = pack_half(word >> 32, place + popcount(word & 0xFFFFFFFF))
        tl.store(info_ptr + 2 * block + 1, upper, mask=cells > 0)
        tl.store(keys_ptr + block, tl.load(table_ptr + 2 * slot, mask=cells > 0, other=1) - 1, mask=cells > 0)


@triton.jit
def rows_kernel(
    entries_ptr, ids_ptr, info_ptr, rows_ptr, status_ptr, count_ptr, fault_ptr, n,
    CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows[first place of the block + rank of the cell in it] = row; entries[row] = 64 block + bit."""
    if CHECKED and tl.program_id(0) == 0:
        check_cells(status_ptr, count_ptr, fault_ptr)
    place_rows(tl.program_id(0) * BLOCK, entries_ptr, ids_ptr, info_ptr, rows_ptr, n, BLOCK)


@triton.jit
def place_rows(first, entries_ptr, ids_ptr, info_ptr, rows_ptr, n, BLOCK: tl.constexpr):
    """`rows_kernel` for the rows from ``first`` on."""
    row = first + tl.arange(0, BLOCK)
    entry = tl.load(entries_ptr + row, mask=row < n, other=-1)  # -1 too where keys overflow
    live = entry >= 0
    block = tl.load(ids_ptr + (entry >> 6), mask=live, other=0).to(tl.int64)
    bit = entry & 63
    tl.store(rows_ptr + place_of(info_ptr, block, bit, live), row, mask=live)
    tl.store(entries_ptr + row, block * 64 + bit, mask=live)


@triton.jit
def table_kernel(
    coords_ptr, ranges_ptr, table_ptr, status_ptr, ids_ptr, info_ptr, keys_ptr, rows_ptr, entries_ptr, gates_ptr,
    report_ptr, count_ptr, fault_ptr, n, capacity, zeros, programs,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SHIFTS: tl.constexpr, MEASURED: tl.constexpr, REPORTED: tl.constexpr,
    CHECKED: tl.constexpr, BLOCK: tl.constexpr, SLOTS_EACH: tl.constexpr, NUM_GATES: tl.constexpr,
):  # fmt: skip
    """Zeros, ranges, blocks, their numbers and their rows in one launch; all programs wait for each other in between.

    The slots come first in memory; ``zeros`` words from there on start as zeros. REPORTED: status and ranges, as
    unsigned numbers, go to ``report_ptr`` too. CHECKED: bit 0 of the fault, as by
    `insert_kernel` and `check_cells`.
    """
    program = tl.program_id(0)
    words_ptr = table_ptr.to(tl.pointer_type(tl.int32))
    for first in range(program * 1024, zeros, programs * 1024):
        word = first + tl.arange(0, 1024)
        tl.store(words_ptr + word, 0, mask=word < zeros)
    wait_for_all(gates_ptr, programs)
    if not MEASURED:
        measure_rows(coords_ptr, ranges_ptr, n, programs * BLOCK, COLUMNS, WIDTH, BLOCK)
        wait_for_all(gates_ptr + 1, programs)
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    for first in range(program * BLOCK, n, programs * BLOCK):
        insert_rows(
            first, coords_ptr, ranges_ptr, table_ptr, entries_ptr, status_ptr, count_ptr, fault_ptr, n, capacity,
            volume, COLUMNS, SHIFTS, True, CHECKED, BLOCK,
        )  # fmt: skip
    wait_for_all(gates_ptr + 2, programs)
    for first in range(program * SLOTS_EACH, capacity, programs * SLOTS_EACH):
        number_blocks(first, table_ptr, ids_ptr, info_ptr, keys_ptr, status_ptr, capacity, SLOTS_EACH)
    wait_for_all(gates_ptr + 3, programs)
    if REPORTED and program == 0:
        tl.store(report_ptr, tl.load(status_ptr))
        tl.store(report_ptr + 1, tl.load(status_ptr + 1))
        side = tl.arange(0, 2 * WIDTH)
        spread = tl.load(ranges_ptr + side, mask=side < 2 * COLUMNS, other=0).to(tl.uint32, bitcast=True)
        tl.store(report_ptr + 2 + side, spread.to(tl.int64), mask=side < 2 * COLUMNS)
    for first in range(program * BLOCK, n, programs * BLOCK):
        place_rows(first, entries_ptr, ids_ptr, info_ptr, rows_ptr, n, BLOCK)
    if CHECKED and program == 0:
        check_cells(status_ptr, count_ptr, fault_ptr)
    leave(gates_ptr, programs, NUM_GATES)


@triton.jit
def check_cells(status_ptr, count_ptr, fault_ptr):
    """Bit 0 of the fault: the table has not as many cells as there are real rows, or its keys overflow."""
    if ((tl.load(status_ptr) & 0xFFFFFFFF) != tl.load(count_ptr)) | (tl.load(status_ptr + 1) != 0):
        tl.atomic_or(fault_ptr, 1, sem="relaxed")


@triton.jit
def lookup_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, found_ptr, n, capacity,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, BLOCKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found[row] = the table's row of the same coordinates, -1 if none."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    key, bit, inside = cells_of(coords_ptr, row, live, ranges_ptr, COLUMNS, SHIFTS)
    slot, hit = find(table_ptr, key, inside, capacity, volume)
    word = tl.load(table_ptr + 2 * slot + 1, mask=hit, other=0)
    if BLOCKED:
        hit = hit & (((word >> bit.to(tl.int64)) & 1) != 0)
        block = tl.load(ids_ptr + slot, mask=hit, other=0)
        found = tl.load(rows_ptr + place_of(info_ptr, block.to(tl.int64), bit, hit), mask=hit, other=-1)
    else:
        found = tl.where(hit, word.to(tl.int32) - 1, -1)
    tl.store(found_ptr + row, found, mask=live)


_I32, _I64 = torch.int32, torch.int64
_RANGES = Launcher(ranges_kernel, (_I32, _I32, int, int))
_INSERT = Launcher(insert_kernel, (_I32, _I32, _I64, _I64, _I64, _I32, _I32, int, int), num_warps=1)
_NUMBER = Launcher(number_kernel, (_I64, _I32, _I64, _I64, _I64, int))
_ROWS = Launcher(rows_kernel, (_I64, _I32, _I64, _I32, _I64, _I32, _I32, int))
_TABLE = Launcher(
    table_kernel,
    (_I32, _I32, _I64, _I64, _I32, _I64, _I64, _I32, _I64, _I32, _I64, _I32, _I32, *(int,) * 4),
    cooperative=True,
)
_LOOKUP = Launcher(lookup_kernel, (_I32, _I32, _I64, _I32, _I64, _I32, _I32, int, int), num_warps=1)


# ---- readable twin


def lookup_torch(source: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    """What `lookup` finds, by comparing every row with every row."""
    same = (coords[:, None] == source[None]).all(-1)
    return torch.where(same.any(1), same.int().argmax(1), -1).int()
