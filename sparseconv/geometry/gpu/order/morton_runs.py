"""Runs of neighbouring rows on the GPU, whatever order the rows come in: coarse cells along a Morton curve.

    in:  a `CoordinateTable`, and the Gray ranks of its rows
    out: keys (1, N) int32: the number of a row's run above its rank

Cells with 3, 0, 2 and 4 rows have 0, 3, 3 and 5 rows before them; in runs of about 4 rows they belong to the runs
0, 0, 0 and 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_table.hash_probe import cell_of, cell_size, popcount
from sparseconv.geometry.gpu.hash_table.table import ENTRIES, KEYS, STATUS, CoordinateTable, pack_shifts
from sparseconv.gpu.launcher import Launcher, Pointer, ceil_div, pointer

#: bits of the numbers of cells
CELL_BITS = 15
#: log2 of a cell's edge at least: a block of the table lies in one cell, whatever the rank
LEAST_SHIFT = 4
#: programs that share the cells between them when rows before each of them are counted
NUMBERED = 32


def chunk_keys(table: CoordinateTable, keys: Pointer, chunk_rows: int, room: int, lost: int) -> torch.Tensor:
    """(1, N) int32 sort keys with the number of a row's run of neighbours above ``room`` bits of its Gray rank.

    A cell's number has the batch item above, then the Morton code of its place, as fine as CELL_BITS allow. Cells are
    taken along that curve; cell c belongs to run (rows in the cells before c) // chunk_rows. A cell
    is never cut, so that runs do not depend on the order of the rows; one of more rows than a run makes a longer one.

    Args:
        table: of the rows.
        keys: the place of their Gray ranks (N,) int32; 2^31 - 1 for a row without a tap.
        chunk_rows: rows of a run, about.
        room: bits of the rank that are kept, after ``lost`` have been cut off below.
    """
    (n, columns), device, many = table.coords.shape, table.coords.device, 1 << CELL_BITS
    memory = torch.zeros(2 * many + NUMBERED + n, dtype=torch.int32, device=device)
    counts, before, sums, of_blocks = map(pointer, memory.split((many, many, NUMBERED, n)))
    programs = min(ceil_div(n, 256), 1056)
    args = (table.pointers[0], table.arena[KEYS], table.pointers[3], table.arena[STATUS], of_blocks, counts, programs)
    COUNT_CELLS(device, (programs,), args, (columns, pack_shifts(table.shifts), CELL_BITS, LEAST_SHIFT, 256))
    NUMBER_CELLS(device, (NUMBERED,), (counts, before, sums), (CELL_BITS, NUMBERED))
    found = torch.empty(1, n, dtype=torch.int32, device=device)
    run = (table.arena[ENTRIES], of_blocks, before, keys, pointer(found), n, chunk_rows, room, lost)
    RUN_KEYS(device, (ceil_div(n, 512),), run, (512,))
    return found


# ---- kernels


@triton.jit
def count_kernel(
    ranges_ptr, keys_ptr, info_ptr, status_ptr, cells_ptr, counts_ptr, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, CELL_BITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cells[block] = its cell, counts[cell] = rows in it, from the blocks of the table."""
    shift, above = cell_size(ranges_ptr, COLUMNS, CELL_BITS, LEAST)
    num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_blocks, programs * BLOCK):
        block = first + tl.arange(0, BLOCK)
        live = block < num_blocks
        rows = popcount(tl.load(info_ptr + 2 * block, mask=live, other=0) & 0xFFFFFFFF)
        rows += popcount(tl.load(info_ptr + 2 * block + 1, mask=live, other=0) & 0xFFFFFFFF)
        cell = cell_of(keys_ptr, block, live, ranges_ptr, shift, above, COLUMNS, SHIFTS, CELL_BITS)
        tl.store(cells_ptr + block, cell, mask=live)
        tl.atomic_add(counts_ptr + cell, rows, mask=live, sem="relaxed")


@triton.jit
def number_kernel(counts_ptr, before_ptr, sums_ptr, CELL_BITS: tl.constexpr, PROGRAMS: tl.constexpr):
    """before[cell] = rows in all cells before it, for each program's share of the cells.

    Each tells the programs behind it how many rows it has, and one more, in ``sums``, which start as zeros.
    """
    program = tl.program_id(0)
    EACH: tl.constexpr = (1 << CELL_BITS) // PROGRAMS
    cell = program * EACH + tl.arange(0, EACH)
    rows = tl.load(counts_ptr + cell)
    tl.atomic_xchg(sums_ptr + program, tl.sum(rows, 0) + 1, sem="relaxed")
    other = tl.arange(0, PROGRAMS)
    sums = tl.load(sums_ptr + other, mask=other < program, other=1, volatile=True)
    while tl.min(sums, 0) == 0:
        sums = tl.load(sums_ptr + other, mask=other < program, other=1, volatile=True)
    tl.store(before_ptr + cell, tl.sum(sums - 1, 0) + tl.cumsum(rows, 0) - rows)


@triton.jit
def keys_kernel(
    entries_ptr, cells_ptr, before_ptr, keys_ptr, found_ptr, n, chunk_rows, room, lost, BLOCK: tl.constexpr
):
    """found[row] = the run of a row's cell above its Gray rank."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    run = run_of(tl.load(entries_ptr + row, mask=live, other=-1), cells_ptr, before_ptr, chunk_rows)
    key = tl.load(keys_ptr + row, mask=live, other=0)
    tl.store(found_ptr + row, key_in(run, key, key == 0x7FFFFFFF, room, lost), mask=live)


@triton.jit
def run_of(entry, cells_ptr, before_ptr, chunk_rows):
    """The run of rows in blocks and places ``entry``; that of the last cell for rows that are in none."""
    last = tl.full(entry.shape, LAST_CELL, tl.int32)
    cell = tl.where(entry >= 0, tl.load(cells_ptr + (entry >> 6), mask=entry >= 0, other=0), last)
    return tl.load(before_ptr + cell) // chunk_rows


@triton.jit
def key_in(run, rank, no_taps, room, lost):
    """Sort keys of rows in a run of neighbours, from their Gray ranks; ``no_taps``: no tap sees anything there."""
    return tl.where(no_taps, (((1 << (room - 1)) - 1) << 1) | 1, rank >> lost) | (run << room)


LAST_CELL = tl.constexpr((1 << CELL_BITS) - 1)
_I32, _I64 = torch.int32, torch.int64
COUNT_CELLS = Launcher(count_kernel, (_I32, _I64, _I64, _I64, _I32, _I32, int))
NUMBER_CELLS = Launcher(number_kernel, (_I32, _I32, _I32))
RUN_KEYS = Launcher(keys_kernel, (_I64, _I32, _I32, _I32, _I32, *(int,) * 4))
