"""Runs of neighbouring rows on the GPU, whatever order the rows come in: coarse cells along a Morton curve."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cells import add_to_cell, cell_of, cell_size, popcount
from sparseconv.geometry.triton_launch import INTERPRETED, Launcher, Pointer, ceil_div, pointer
from sparseconv.geometry.triton_table import BEHIND, CELL_BITS, KEYS, LEAST_SHIFT, STATUS, CoordinateTable, pack_shifts

#: programs that share the cells between them when runs are numbered
NUMBERED = 8


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
    runs, _kept = number_runs(table, chunk_rows)  # what is kept goes when the launches are in line
    found = torch.empty(1, table.coords.shape[0], dtype=torch.int32, device=table.coords.device)
    put_runs(table, runs, keys, pointer(found), room, lost)
    return found


def number_runs(table: CoordinateTable, chunk_rows: int) -> tuple[Pointer, torch.Tensor | None]:
    """Launch what `put_runs` takes of the cells of a table, and what keeps it where that is not the table."""
    device, columns = table.coords.device, table.coords.shape[1]
    cells, ranges, kept = table.cells, table.pointers[0], None
    if cells is None:
        kept = torch.zeros(2 * BEHIND, dtype=torch.int32, device=device)
        cells = pointer(kept)
        programs = min(ceil_div(table.coords.shape[0], 256), 1056)
        counted = (ranges, table.arena[KEYS], table.pointers[3], table.arena[STATUS], cells, programs)
        _COUNT(device, (programs,), counted, (columns, pack_shifts(table.shifts), CELL_BITS, LEAST_SHIFT, 256))
    runs = cells[BEHIND:] if INTERPRETED else cells + 4 * BEHIND
    numbered = (ranges, cells, runs, chunk_rows)
    _NUMBER(device, (NUMBERED,), numbered, (columns, CELL_BITS, LEAST_SHIFT, NUMBERED))
    return runs, kept


def put_runs(table: CoordinateTable, runs: Pointer, keys: Pointer, found: Pointer, room: int, lost: int) -> None:
    """Launch the last pass of `chunk_keys`: from Gray ranks (N,) int32 to keys (N,) int32 elsewhere."""
    n, columns = table.coords.shape
    args = (pointer(table.coords), table.pointers[0], runs, keys, found, n, room, lost)
    _KEYS(table.coords.device, (ceil_div(n, 512),), args, (columns, CELL_BITS, 512))


# ---- kernels


@triton.jit
def count_kernel(
    ranges_ptr, keys_ptr, info_ptr, status_ptr, cells_ptr, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, CELL_BITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cells[cell] = rows in it, from the blocks of the table."""
    shift, above = cell_size(ranges_ptr, COLUMNS, CELL_BITS, LEAST)
    num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, num_blocks, programs * BLOCK):
        block = first + tl.arange(0, BLOCK)
        live = block < num_blocks
        rows = popcount(tl.load(info_ptr + 2 * block, mask=live, other=0) & 0xFFFFFFFF)
        rows += popcount(tl.load(info_ptr + 2 * block + 1, mask=live, other=0) & 0xFFFFFFFF)
        cell = cell_of(keys_ptr, block, live, ranges_ptr, shift, above, COLUMNS, SHIFTS, CELL_BITS)
        tl.atomic_add(cells_ptr + cell, rows, mask=live, sem="relaxed")


@triton.jit
def number_kernel(
    ranges_ptr, cells_ptr, runs_ptr, chunk_rows,
    COLUMNS: tl.constexpr, CELL_BITS: tl.constexpr, LEAST: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """runs[cell] = rows in the cells before it // chunk_rows, and behind the cells their `cell_size`.

    Each program counts all cells before its own: the loads are on their way together.
    """
    EACH: tl.constexpr = (1 << CELL_BITS) // PROGRAMS
    program = tl.program_id(0)
    lane = tl.arange(0, EACH)
    before = tl.zeros((EACH,), tl.int32)
    for part in tl.static_range(PROGRAMS - 1):
        before += tl.load(cells_ptr + part * EACH + lane, mask=lane < tl.where(part < program, EACH, 0), other=0)
    rows = tl.load(cells_ptr + program * EACH + lane)
    total = tl.sum(before, 0) + tl.cumsum(rows, 0) - rows
    tl.store(runs_ptr + program * EACH + lane, total // chunk_rows)
    if program == 0:
        shift, above = cell_size(ranges_ptr, COLUMNS, CELL_BITS, LEAST)
        tl.store(runs_ptr + (1 << CELL_BITS), shift)
        tl.store(runs_ptr + (1 << CELL_BITS) + 1, above)


@triton.jit
def keys_kernel(
    coords_ptr, ranges_ptr, runs_ptr, keys_ptr, found_ptr, n, room, lost,
    COLUMNS: tl.constexpr, CELL_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found[row] = the run of a row's cell above its Gray rank."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    shift = tl.load(runs_ptr + (1 << CELL_BITS))
    above = tl.load(runs_ptr + (1 << CELL_BITS) + 1)
    place = coords_ptr + row.to(tl.int64) * COLUMNS
    cell = offset_in(ranges_ptr, tl.load(place, mask=live, other=0), 0) << above
    for axis in tl.static_range(1, COLUMNS):
        q = offset_in(ranges_ptr, tl.load(place + axis, mask=live, other=0), axis)
        cell = add_to_cell(cell, q.to(tl.uint32, bitcast=True), axis, shift.to(tl.uint32), COLUMNS, CELL_BITS)
    cell = tl.minimum(cell.to(tl.uint32, bitcast=True), (1 << CELL_BITS) - 1)  # a dead row, of batch item -1, is last
    chunk = tl.load(runs_ptr + cell, mask=live, other=0)
    key = tl.load(keys_ptr + row, mask=live, other=0)
    last = (((1 << (room - 1)) - 1) << 1) | 1
    tl.store(found_ptr + row, tl.where(key == 0x7FFFFFFF, last, key >> lost) | (chunk << room), mask=live)


@triton.jit
def offset_in(ranges_ptr, value, axis):
    """How far values lie above the lowest of their column, as 32 bits without a sign."""
    bottom = tl.load(ranges_ptr + 2 * axis + 1)  # 2^31 - 1 - lowest
    return value - (0x7FFFFFFF - bottom)


_I32, _I64 = torch.int32, torch.int64
_COUNT = Launcher(count_kernel, (_I32, _I64, _I64, _I64, _I32, int))
_NUMBER = Launcher(number_kernel, (_I32, _I32, _I32, int), num_warps=16)
_KEYS = Launcher(keys_kernel, (_I32, _I32, _I32, _I32, _I32, *(int,) * 3))


# ---- readable twin


def chunks_torch(coords: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """(N,) int64: the run of each row, as `chunk_keys` numbers them."""
    q = coords.long() - coords.amin(0)
    batches, longest, rank = int(q[:, 0].max()) + 1, int(q[:, 1:].max()) + 1, coords.shape[1] - 1
    each = (CELL_BITS - (batches - 1).bit_length()) // rank
    coarse = q[:, 1:] >> max((longest - 1).bit_length() - each, LEAST_SHIFT)
    cell = q[:, 0] << (rank * each)
    for axis in range(rank):
        for bit in range(CELL_BITS // rank):
            cell |= ((coarse[:, axis] >> bit) & 1) << (rank * bit + rank - 1 - axis)
    cell.clamp_(max=2**CELL_BITS - 1)
    rows = torch.bincount(cell, minlength=2**CELL_BITS)
    return ((rows.cumsum(0) - rows) // chunk_rows)[cell]
