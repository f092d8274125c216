"""Target rows in an order in which neighbors share most of their taps: by a radix sort of their keys.

    in:  a `WindowSearch`, with the sort keys of its rows
    out: rows (N_out,) int32, in a stable order of the keys

Keys (2, 6, 1) give the order (2, 0, 1): row 2 with its one tap, row 0 with one more, then row 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_probe import cell_of, cell_size, popcount
from sparseconv.geometry.gpu.search import (
    LINES,
    NO_RANK,
    NO_TAPS,
    ORDER,
    PLANE_KEYS,
    PLANE_KEYS_WIDE,
    SORT_KEYS,
    WindowSearch,
    neighbor_table,
)
from sparseconv.geometry.gpu.table import ENTRIES, KEYS, STATUS, CoordinateTable, pack_shifts
from sparseconv.geometry.gpu.taps import KEY_BITS, tap_order
from sparseconv.gpu.launcher import Launcher, Pointer, ceil_div, pointer
from sparseconv.gpu.radix_sort import sort_rows
from sparseconv.gpu.streams import map_stream

_I32, _I64 = torch.int32, torch.int64

#: bits of the numbers of cells
CELL_BITS = 15
#: log2 of a cell's edge at least: a block of the table lies in one cell, whatever the rank
LEAST_SHIFT = 4
#: programs that share the cells between them when rows before each of them are counted
NUMBERED = 32


def chunk_keys(table: CoordinateTable, keys: Pointer, chunk_rows: int, room: int, lost: int) -> torch.Tensor:
    """(1, N) int32 sort keys with the number of a row's run of neighbors above ``room`` bits of its Gray rank.

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
    key = tl.where(key == NO_TAPS, (1 << room) - 1, key >> lost)
    tl.store(found_ptr + row, key | (run << room), mask=live)


@triton.jit
def run_of(entry, cells_ptr, before_ptr, chunk_rows):
    """The run of rows in blocks and places ``entry``; that of the last cell for rows that are in none."""
    last = tl.full(entry.shape, LAST_CELL, tl.int32)
    cell = tl.where(entry >= 0, tl.load(cells_ptr + (entry >> 6), mask=entry >= 0, other=0), last)
    return tl.load(before_ptr + cell) // chunk_rows


LAST_CELL = tl.constexpr((1 << CELL_BITS) - 1)
COUNT_CELLS = Launcher(count_kernel, (_I32, _I64, _I64, _I64, _I32, _I32, int))
NUMBER_CELLS = Launcher(number_kernel, (_I32, _I32, _I32))
RUN_KEYS = Launcher(keys_kernel, (_I64, _I32, _I32, _I32, _I32, *(int,) * 4))


#: key bits of windows with more than 31 taps: the most significant taps
WIDE_KEY_BITS = 62


def row_keys(
    search: WindowSearch,
    parts: tuple[tuple[int, ...], ...],
    significance: Sequence[int] | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """(G, N_out) sort keys, not negative: the Gray rank of each row's mask of the taps of a group.

    Rows sorted by them change taps one at a time; rows without a tap come last. ``chunk_rows`` puts the number of the
    row's run of about so many rows above the rank, which then loses its last bits: runs of neighbors in space, see
    `chunk_keys`; of rows as they come where the target rows are not the table's. int64 for groups of more than 31 taps.
    """
    n, taps = search.coords.shape[0], search.window.num_taps
    device = search.coords.device
    wide = max(map(len, parts), default=0) > KEY_BITS
    key_bits = WIDE_KEY_BITS if wide else KEY_BITS
    chunk, room, lost = key_room(n, max(map(len, parts), default=0), chunk_rows, key_bits)
    ranks = search.keys if significance is None and parts == search.window.all_taps else None
    if ranks is not None and search.table is not None:
        if room == key_bits:
            return ranks
        if search.is_local:
            return chunk_keys(search.table, search.found[1][SORT_KEYS], chunk, room, lost)
        run = torch.arange(n, dtype=torch.int32, device=device) // chunk << room
        return torch.where(ranks == NO_RANK, (1 << room) - 1, ranks >> lost) | run
    ranked = tap_order(search.window.offsets) if significance is None else tuple(significance)
    keys = torch.empty(len(parts), n, dtype=torch.int64 if wide else torch.int32, device=device)
    if n and taps:
        neighbors = neighbor_table(search)
        search.kept.append(bits := _key_bits(ranked, parts, WIDE_KEY_BITS if wide else KEY_BITS, device))
        args = (pointer(neighbors), pointer(bits), pointer(keys), n, taps, chunk, room, lost)
        launcher = PLANE_KEYS_WIDE if wide else PLANE_KEYS
        launcher(device, (ceil_div(n, 128), len(parts)), args, (wide, 128))
    return keys


def key_room(n: int, taps: int, chunk_rows: int | None, key_bits: int) -> tuple[int, int, int]:
    """Rows of a run, the bits that its number leaves the Gray rank of so many taps, and how many that one loses."""
    if chunk_rows is None or n <= chunk_rows:
        return max(n, 1), key_bits, max(0, min(taps, WIDE_KEY_BITS) - key_bits)
    room = key_bits - (-(-n // chunk_rows) - 1).bit_length()
    return chunk_rows, room, max(0, min(taps, WIDE_KEY_BITS) - room)


@lru_cache(maxsize=512)
def _key_bits(
    ranked: tuple[int, ...], parts: tuple[tuple[int, ...], ...], most: int, device: torch.device
) -> torch.Tensor:
    """(G, K) int32: the bit of each tap in the keys of each group, -1 for none; of ``most`` taps of a group."""
    bits = torch.full((len(parts), len(ranked)), -1, dtype=torch.int32)
    for index, part in enumerate(parts):
        kept = [tap for tap in ranked if tap in part][:most]
        for place, tap in enumerate(kept):
            bits[index, tap] = len(kept) - 1 - place
    return bits.to(device)


def row_order(search: WindowSearch, chunk_rows: int | None = None) -> torch.Tensor | Pointer:
    """Rows in the order of their `keys`: (1, N_out), or where a search has sorted them the place of (N_out,) int32.

    ``chunk_rows``: in the order of the keys of runs of so many rows, see `row_keys`.
    """
    if chunk_rows is None and search.table is not None and search.window.num_taps <= KEY_BITS:
        scratch = search.found[1]
        with map_stream():
            if search.passes is None:
                return sort_rows(scratch.tensor(SORT_KEYS).view(1, -1), search.window.key_bits)
            search.passes.launch(scratch[SORT_KEYS], scratch[LINES], scratch[ORDER], search.coords.device)
        return scratch[ORDER]
    with map_stream():
        return sort_rows(row_keys(search, search.window.all_taps, None, chunk_rows))
