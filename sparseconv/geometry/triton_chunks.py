"""Runs of neighbouring rows on the GPU, whatever order the rows come in: coarse cells along a Morton curve."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cells import axis_blocks, axis_range, popcount
from sparseconv.geometry.triton_launch import Launcher, Pointer, ceil_div, pointer
from sparseconv.geometry.triton_table import KEYS, STATUS, CoordinateTable, pack_shifts

#: bits of a cell's number: the batch item above, then the Morton code of its place, as fine as fits
CELL_BITS = 15
#: log2 of a cell's edge at least: a block of the table lies in one cell, whatever the rank
LEAST_SHIFT = 4
#: programs that share the cells between them when runs are numbered
NUMBERED = 8


def chunk_keys(table: CoordinateTable, keys: Pointer, chunk_rows: int, room: int, lost: int) -> torch.Tensor:
    """(1, N) int32 sort keys with the number of a row's run of neighbours above ``room`` bits of its Gray rank.

    Cells are taken along the Morton curve; cell c belongs to run (rows in the cells before c) // chunk_rows. A cell
    is never cut, so that runs do not depend on the order of the rows; one of more rows than a run makes a longer one.

    Args:
        table: of the rows.
        keys: the place of their Gray ranks (N,) int32; 2^31 - 1 for a row without a tap.
        chunk_rows: rows of a run, about.
        room: bits of the rank that are kept, after ``lost`` have been cut off below.
    """
    coords, device = table.coords, table.coords.device
    n, columns = coords.shape
    cells = torch.zeros(1 << CELL_BITS, dtype=torch.int32, device=device)
    runs = torch.empty((1 << CELL_BITS) + 2, dtype=torch.int32, device=device)
    found = torch.empty(1, n, dtype=torch.int32, device=device)
    shifts, ranges, info = pack_shifts(table.shifts), table.pointers[0], table.pointers[3]
    programs = min(ceil_div(n, 256), 1056)
    counted = (ranges, table.arena[KEYS], info, table.arena[STATUS], pointer(cells), programs)
    _COUNT(device, (programs,), counted, (columns, shifts, CELL_BITS, LEAST_SHIFT, 256))
    numbered = (ranges, pointer(cells), pointer(runs), chunk_rows)
    _NUMBER(device, (NUMBERED,), numbered, (columns, CELL_BITS, LEAST_SHIFT, NUMBERED))
    args = (pointer(coords), ranges, pointer(runs), keys, pointer(found), n, room, lost)
    _KEYS(device, (ceil_div(n, 512),), args, (columns, CELL_BITS, 512))
    return found


# ---- kernels


@triton.jit
def cell_size(ranges_ptr, COLUMNS: tl.constexpr, CELL_BITS: tl.constexpr, LEAST: tl.constexpr):
    """log2 of a cell's edge, and the bits that the batch item's number is moved up by."""
    _low, batches = axis_range(ranges_ptr, 0)
    longest = tl.full((), 1, tl.int64)
    for axis in tl.static_range(1, COLUMNS):
        _low, extent = axis_range(ranges_ptr, axis)
        longest = tl.maximum(longest, extent)
    batch_bits = tl.zeros((), tl.int32)
    shift = tl.zeros((), tl.int32)
    for bit in tl.static_range(CELL_BITS):
        batch_bits += (batches > (1 << bit)).to(tl.int32)
    each = (CELL_BITS - batch_bits) // (COLUMNS - 1)
    for bit in tl.static_range(32):
        shift += (longest > (tl.full((), 1, tl.int64) << (each + bit))).to(tl.int32)
    return tl.maximum(shift, LEAST), each * (COLUMNS - 1)


@triton.jit
def add_to_cell(cell, q, axis, shift, COLUMNS: tl.constexpr, CELL_BITS: tl.constexpr):
    """Put the bits of a place along one axis where the Morton code has them."""
    coarse = (q >> shift).to(tl.int32)
    RANK: tl.constexpr = COLUMNS - 1
    for bit in tl.static_range(CELL_BITS // RANK):
        cell |= ((coarse >> bit) & 1) << (RANK * bit + (RANK - axis))
    return cell


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
        key = tl.load(keys_ptr + block, mask=live, other=0)
        rows = popcount(tl.load(info_ptr + 2 * block, mask=live, other=0) & 0xFFFFFFFF)
        rows += popcount(tl.load(info_ptr + 2 * block + 1, mask=live, other=0) & 0xFFFFFFFF)
        cell = block & 0
        for back in tl.static_range(COLUMNS - 1):
            axis = COLUMNS - 1 - back
            _low, extent = axis_range(ranges_ptr, axis)
            step = (SHIFTS >> (4 * axis)) & 15
            count = axis_blocks(extent, step)
            rest = key // count
            cell = add_to_cell(cell, (key - rest * count) << step, axis, shift, COLUMNS, CELL_BITS)
            key = rest
        cell = tl.minimum(cell | (key << above).to(tl.int32), (1 << CELL_BITS) - 1)
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
