"""The edges of the 27 cells around rows by tap, on the GPU: a warp appends 32 rows at once, by whole sectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cube import corners, look_at_run, rank_in_warp
from sparseconv.geometry.triton_launch import Launcher, pointer
from sparseconv.geometry.triton_search import SEARCH_TYPES, STARTS

if TYPE_CHECKING:
    from sparseconv.geometry.triton_neighbors import WindowSearch

#: edges in a sector of 32 bytes, by which the card writes memory; from so many edges on they do not stay in its cache
SECTOR, MANY_EDGES = 8, 4_000_000


def list_cube(search: WindowSearch, in_rows: torch.Tensor, out_rows: torch.Tensor, num_edges: int) -> None:
    """Write the edges (P,) int32 of a search that `is_cube`, in the order of `pairs_of`."""
    sector = SECTOR if num_edges > MANY_EDGES else 0
    args = (
        *search.pointers, search.scratch[STARTS], pointer(search.pending.offsets), pointer(in_rows), pointer(out_rows),
        search.count_pointer, search.coords.shape[0], search.chunks,
    )  # fmt: skip
    CUBE_PAIRS(in_rows.device, (search.chunks, 3 if sector else 2), args, (search.chunk_rows, sector))


# ---- kernels


@triton.jit
def cube_pairs_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, counts_ptr, n, num_chunks,
    CHUNK: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """`pairs_kernel` for the 27 cells around rows: taps 0 to 8 and 9 to 13 of a chunk in a program each.

    Where sectors are cleared, more is held of each list, and taps 6 to 8 have a program of their own.
    """
    part = tl.program_id(1)
    if part == tl.num_programs(1) - 1:
        list_runs(
            info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr,
            counts_ptr, n, num_chunks, 9, 5, CHUNK, SECTOR,
        )  # fmt: skip
    elif SECTOR == 0:
        list_runs(
            info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr,
            counts_ptr, n, num_chunks, 0, 9, CHUNK, SECTOR,
        )  # fmt: skip
    elif part == 0:
        list_runs(
            info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr,
            counts_ptr, n, num_chunks, 0, 6, CHUNK, SECTOR,
        )  # fmt: skip
    else:
        list_runs(
            info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr,
            counts_ptr, n, num_chunks, 6, 3, CHUNK, SECTOR,
        )  # fmt: skip


@triton.jit
def list_runs(
    info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, counts_ptr, n,
    num_chunks, FIRST: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """The edges of one chunk of rows through TAPS taps of a plane from FIRST on; tap 13 is the centre."""
    lane = tl.arange(0, 32)
    own0, twin0, at0, shift0, end0 = open_list(
        in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 0, True, SECTOR
    )  # fmt: skip
    own1, twin1, at1, shift1, end1 = open_list(
        in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 1, True, SECTOR
    )  # fmt: skip
    own2, twin2, at2, shift2, end2 = open_list(
        in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 2, True, SECTOR
    )  # fmt: skip
    if TAPS > 3:
        own3, twin3, at3, shift3, end3 = open_list(
            in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 3, True, SECTOR
        )  # fmt: skip
        own4, twin4, at4, shift4, end4 = open_list(
            in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 4,
            FIRST + 4 < 13, SECTOR,
        )  # fmt: skip
    if TAPS > 5:
        own5, twin5, at5, shift5, end5 = open_list(
            in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 5, True, SECTOR
        )  # fmt: skip
    if TAPS > 6:
        own6, twin6, at6, shift6, end6 = open_list(
            in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 6, True, SECTOR
        )  # fmt: skip
        own7, twin7, at7, shift7, end7 = open_list(
            in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 7, True, SECTOR
        )  # fmt: skip
        own8, twin8, at8, shift8, end8 = open_list(
            in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, FIRST + 8, True, SECTOR
        )  # fmt: skip
    first = tl.program_id(0) * CHUNK
    last = tl.minimum(first + CHUNK, n)
    entry = tl.load(entries_ptr + first + lane, mask=first + lane < last, other=-1)
    for start in range(first, last, 32):
        row = start + lane
        bit, a, b, c, d, e, f, g, h = corners(entry, row < last, info_ptr, around_ptr)
        following = row + 32
        entry = tl.load(entries_ptr + following, mask=following < last, other=-1)
        found0, found1, found2 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, FIRST // 9, FIRST // 3 % 3)
        if TAPS > 3:
            found3, found4, found5 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, FIRST // 9, FIRST // 3 % 3 + 1)
        if TAPS > 6:
            found6, found7, found8 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, FIRST // 9, 2)
        tl.debug_barrier()  # what was cleared is written again, by other lanes
        at0 = append(
            in_rows_ptr, out_rows_ptr, own0, twin0, at0, shift0, end0, found0, row, True, SECTOR
        )  # fmt: skip
        at1 = append(
            in_rows_ptr, out_rows_ptr, own1, twin1, at1, shift1, end1, found1, row, True, SECTOR
        )  # fmt: skip
        at2 = append(
            in_rows_ptr, out_rows_ptr, own2, twin2, at2, shift2, end2, found2, row, True, SECTOR
        )  # fmt: skip
        if TAPS > 3:
            at3 = append(
                in_rows_ptr, out_rows_ptr, own3, twin3, at3, shift3, end3, found3, row, True, SECTOR
            )  # fmt: skip
            at4 = append(
                in_rows_ptr, out_rows_ptr, own4, twin4, at4, shift4, end4, found4, row, FIRST + 4 < 13, SECTOR
            )  # fmt: skip
        if TAPS > 5:
            at5 = append(
                in_rows_ptr, out_rows_ptr, own5, twin5, at5, shift5, end5, found5, row, True, SECTOR
            )  # fmt: skip
        if TAPS > 6:
            at6 = append(
                in_rows_ptr, out_rows_ptr, own6, twin6, at6, shift6, end6, found6, row, True, SECTOR
            )  # fmt: skip
            at7 = append(
                in_rows_ptr, out_rows_ptr, own7, twin7, at7, shift7, end7, found7, row, True, SECTOR
            )  # fmt: skip
            at8 = append(
                in_rows_ptr, out_rows_ptr, own8, twin8, at8, shift8, end8, found8, row, True, SECTOR
            )  # fmt: skip


@triton.jit
def open_list(
    in_rows_ptr, out_rows_ptr, starts_ptr, offsets_ptr, counts_ptr, num_chunks, tap, MIRRORED: tl.constexpr,
    SECTOR: tl.constexpr,
):  # fmt: skip
    """This chunk's part of the list of a tap, and of the mirrored tap.

    Returns the first edge of the sector of 32 bytes in which either part begins; the part's first place in them, a lane
    each; how many places farther the mirrored part begins in its own; and the place where the part ends.
    """
    place = tl.load(offsets_ptr + tap) + tl.load(starts_ptr + tap * num_chunks + tl.program_id(0))
    count = tl.load(counts_ptr + tap * num_chunks + tl.program_id(0))
    mirrored = place + tl.load(offsets_ptr + 26 - tap) - tl.load(offsets_ptr + tap)
    own = place >> 5 << 5
    twin = mirrored >> 5 << 5
    begin = (place - own).to(tl.int32)
    shift = (mirrored - twin).to(tl.int32) - begin
    at = tl.zeros((32,), tl.int32) + begin
    clear(in_rows_ptr + own, out_rows_ptr + own, at - 32, at, begin + count, SECTOR)
    if MIRRORED:
        clear(in_rows_ptr + twin, out_rows_ptr + twin, at - 32 + shift, at + shift, begin + count + shift, SECTOR)
    return own, twin, at, shift, begin + count


@triton.jit
def clear(in_rows_ptr, out_rows_ptr, before, after, end, SECTOR: tl.constexpr):
    """Write zeros to whole sectors of 32 bytes, 32 places ahead of a list that grew from ``before`` to ``after``.

    The card reads a sector from memory first where its first write is a part of it: written whole, it does not.
    """
    if SECTOR > 0:
        fresh = ((before + (SECTOR - 1)) & -SECTOR) + 32 + tl.arange(0, 32)
        stop = tl.minimum(((after + (SECTOR - 1)) & -SECTOR) + 32, end & -SECTOR)
        tl.store(in_rows_ptr + fresh, 0, mask=fresh < stop)
        tl.store(out_rows_ptr + fresh, 0, mask=fresh < stop)


@triton.jit
def append(
    in_rows_ptr, out_rows_ptr, own, twin, at, shift, end, found, row, MIRRORED: tl.constexpr, SECTOR: tl.constexpr
):
    """`put` for the 32 rows of one warp."""
    there = found >= 0
    rank, count = rank_in_warp(there.to(tl.int32))
    tl.store(in_rows_ptr + own + (at + rank), found, mask=there)
    tl.store(out_rows_ptr + own + (at + rank), row, mask=there)
    clear(in_rows_ptr + own, out_rows_ptr + own, at, at + count, end, SECTOR)
    if MIRRORED:
        tl.store(in_rows_ptr + twin + (at + rank + shift), row, mask=there)
        tl.store(out_rows_ptr + twin + (at + rank + shift), found, mask=there)
        clear(in_rows_ptr + twin, out_rows_ptr + twin, at + shift, at + count + shift, end + shift, SECTOR)
    return at + count


_I32, _I64 = torch.int32, torch.int64
CUBE_PAIRS = Launcher(cube_pairs_kernel, (*SEARCH_TYPES, _I32, _I64, _I32, _I32, _I32, int, int), num_warps=1)
