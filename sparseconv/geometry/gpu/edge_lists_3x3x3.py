"""The edges of the 27 cells around rows by tap, on the GPU: a warp appends 32 rows at once, and writes whole lines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.search import SEARCH_TYPES, STARTS, WindowSearch
from sparseconv.geometry.gpu.table import STATUS
from sparseconv.geometry.gpu.window_3x3x3 import corners, look_at_run
from sparseconv.gpu.cooperative import programs_at_once
from sparseconv.gpu.launcher import Launcher, Pointer, ceil_div, has_ptx, pointer
from sparseconv.gpu.streams import current

#: the taps up to the center: their edges, turned round, are those of all others
HALF = tl.constexpr(14)
#: programs on each multiprocessor where edges are listed during a sort, of 22 that fit: nothing of it waits for room
PROGRAMS_DURING_SORT = 16
# The GPU reads a sector of 32 bytes from memory first where its first write is a part of it, and takes as long to
# write a part as to write all. So edges wait in shared memory, which Triton knows nothing of, until a line of 128 bytes
# is whole: fewer than 32 for either side of a list, and 32 that are new; twice that many places, so that a slow lane
# still reads what it should while others append.
_PLACES = 128
WAITING = tl.constexpr(8 * _PLACES)  # bytes of a list
OPEN = tl.constexpr(f".shared .align 16 .b8 held_edges[{9 * WAITING.value}]; mov.b32 $0, 0;")
# Operands: where the list waits; in rows and out rows; in bytes, the first edge of the line in which the list begins,
# and that of the mirrored tap; the list's length with what precedes it in that line; what precedes it; how much more
# precedes the mirrored one in its line. To append: found rows and rows.
_BEGIN = (
    "{ .reg .pred p, q; .reg .b32 lane, list, all, at, new, line, place, edge, found, row; .reg .b64 ins, outs; "
    "mov.u32 lane, %laneid; mov.u32 list, held_edges; add.u32 list, list, $1; "
)
_PUT = (
    "setp.ge.s32 q, $9, 0; vote.sync.ballot.b32 all, q, 0xffffffff; mov.u32 at, %lanemask_lt; and.b32 at, at, all; "
    "popc.b32 at, at; popc.b32 new, all; add.u32 new, new, $6; add.u32 at, at, $6; "
    f"and.b32 at, at, {_PLACES - 1}; shl.b32 at, at, 3; add.u32 at, at, list; "
    "@q st.shared.v2.b32 [at], {$9, $10}; bar.warp.sync 0xffffffff; "
)
# One line becomes whole at most. {0}: the tap's operand; {3}: how much more precedes its list.
_UNLESS_WHOLE = "add.u32 all, new, {3}; xor.b32 all, all, line; setp.lt.u32 q, all, 32; @q bra PAST{0}; "
_WRITE = (
    "and.b32 place, line, -32; add.u32 place, place, lane; sub.u32 edge, place, {3}; "
    f"and.b32 at, edge, {_PLACES - 1}; "
    "shl.b32 at, at, 3; add.u32 at, at, list; ld.shared.v2.b32 {{found, row}}, [at]; setp.ge.s32 p, edge, $7; {4}"
    "mad.wide.u32 outs, place, 4, ${0}; add.s64 ins, outs, $2; add.s64 outs, outs, $3; "
    "@p st.global.b32 [ins], {1}; @p st.global.b32 [outs], {2}; "
)


def _code(mirrored: bool, last: bool) -> str:
    """Append a warp's found rows, and write the lines that are whole then; or write the ``last`` line as it is."""
    begin, skip, part, past, end = ("", "", "setp.lt.and.s32 p, edge, $6, p; ", "", "0")
    if not last:
        begin, skip, part, past, end = _PUT, _UNLESS_WHOLE, "", "PAST{0}: ", "new"
    side = "add.u32 line, $6, {3}; " + skip + _WRITE + past
    code = _BEGIN + begin + side.format(4, "found", "row", 0, part)
    if mirrored:
        code += side.format(5, "row", "found", "$8", part)
    if last:  # another list will wait there
        code += "bar.warp.sync 0xffffffff; "
    return code + f"mov.b32 $0, {end}; }}"


APPEND, APPEND_ONE = tl.constexpr(_code(True, False)), tl.constexpr(_code(False, False))
CLOSE, CLOSE_ONE = tl.constexpr(_code(True, True)), tl.constexpr(_code(False, True))


def list_cube(search: WindowSearch, in_rows: Pointer, out_rows: Pointer, most: int, half: bool = False) -> None:
    """Write the edges of a search that `is_cube`, in the order of `pairs_of`, to two arrays of ``most`` int32.

    ``half``: those of the first HALF taps alone. None are written where there are more, nor where rows occur twice:
    their lists would not be as long as was counted.
    """
    table, scratch, pending = search.found
    device, programs = search.coords.device, 2 * search.chunks
    distinct = search.rows if search.device_count is None else -1
    args = (
        *search.pointers, scratch[STARTS], pointer(pending.offsets), table.arena[STATUS], in_rows, out_rows,
        search.rows, search.chunks, ceil_div(most, 32), distinct,
    )  # fmt: skip
    if current() is not None:
        programs = programs_at_once(device, programs, PROGRAMS_DURING_SORT)
    CUBE_PAIRS(device, (programs,), args, (search.chunk_rows, half))


# ---- kernels


@triton.jit
def cube_pairs_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    starts_ptr, offsets_ptr, status_ptr, in_rows_ptr, out_rows_ptr, n, num_chunks, lines, distinct,
    CHUNK: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """`pairs_kernel` for the 27 cells around rows: taps 0 to 8 and 9 to 13 of a chunk one after another, or apart.

    For edges that fill no more than so many ``lines`` of 32, and ``distinct`` rows; -1: nobody knows how many. HALVED:
    of these taps alone.
    """
    if has_ptx():
        tl.inline_asm_elementwise(OPEN, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    found = (tl.load(status_ptr) & 0xFFFFFFFF).to(tl.int32)
    edges = tl.load(offsets_ptr + (HALF if HALVED else 27))
    fits = ((edges + 31) // 32 <= lines) & ((distinct < 0) | (found == distinct))
    for half in range(tl.program_id(0), tl.where(fits, 2 * num_chunks, 0), tl.num_programs(0)):
        if half % 2 == 0:
            list_runs(
                half // 2, info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr,
                out_rows_ptr, n, num_chunks, 0, 9, CHUNK, HALVED,
            )  # fmt: skip
        else:
            list_runs(
                half // 2, info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr,
                out_rows_ptr, n, num_chunks, 9, 5, CHUNK, HALVED,
            )  # fmt: skip


@triton.jit
def list_runs(
    chunk, info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n,
    num_chunks, FIRST: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """The edges of one chunk of rows through TAPS taps of a plane from FIRST on; tap 13 is the center."""
    lane = tl.arange(0, 32)
    own0, twin0, at0, begin0, shift0 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 0)
    own1, twin1, at1, begin1, shift1 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 1)
    own2, twin2, at2, begin2, shift2 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 2)
    own3, twin3, at3, begin3, shift3 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 3)
    own4, twin4, at4, begin4, shift4 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 4)
    if TAPS > 5:
        own5, twin5, at5, begin5, shift5 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 5)
        own6, twin6, at6, begin6, shift6 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 6)
        own7, twin7, at7, begin7, shift7 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 7)
        own8, twin8, at8, begin8, shift8 = open_list(chunk, starts_ptr, offsets_ptr, num_chunks, FIRST + 8)
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, n)
    entry = tl.load(entries_ptr + first + lane, mask=first + lane < last, other=-1)
    for start in range(first, last, 32):
        row = start + lane
        bit, a, b, c, d, e, f, g, h = corners(entry, row < last, info_ptr, around_ptr)
        is_there = entry >= 0
        following = row + 32
        entry = tl.load(entries_ptr + following, mask=following < last, other=-1)
        found0, found1, found2 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, FIRST // 9, FIRST // 3 % 3)
        found3, found4, found5 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, FIRST // 9, FIRST // 3 % 3 + 1)
        if HALVED and FIRST == 9:  # each row is at its own center
            found4 = tl.where(is_there, row, -1)
        if TAPS > 6:
            found6, found7, found8 = look_at_run(bit, a, b, c, d, e, f, g, h, rows_ptr, FIRST // 9, 2)
        at0 = append(
            in_rows_ptr, out_rows_ptr, own0, twin0, at0, begin0, shift0, found0, row, 0, not HALVED
        )  # fmt: skip
        at1 = append(
            in_rows_ptr, out_rows_ptr, own1, twin1, at1, begin1, shift1, found1, row, 1, not HALVED
        )  # fmt: skip
        at2 = append(
            in_rows_ptr, out_rows_ptr, own2, twin2, at2, begin2, shift2, found2, row, 2, not HALVED
        )  # fmt: skip
        at3 = append(
            in_rows_ptr, out_rows_ptr, own3, twin3, at3, begin3, shift3, found3, row, 3, not HALVED
        )  # fmt: skip
        at4 = append(
            in_rows_ptr, out_rows_ptr, own4, twin4, at4, begin4, shift4, found4, row, 4, FIRST < 9 and not HALVED
        )  # fmt: skip
        if TAPS > 5:
            at5 = append(
                in_rows_ptr, out_rows_ptr, own5, twin5, at5, begin5, shift5, found5, row, 5, not HALVED
            )  # fmt: skip
            at6 = append(
                in_rows_ptr, out_rows_ptr, own6, twin6, at6, begin6, shift6, found6, row, 6, not HALVED
            )  # fmt: skip
            at7 = append(
                in_rows_ptr, out_rows_ptr, own7, twin7, at7, begin7, shift7, found7, row, 7, not HALVED
            )  # fmt: skip
            at8 = append(
                in_rows_ptr, out_rows_ptr, own8, twin8, at8, begin8, shift8, found8, row, 8, not HALVED
            )  # fmt: skip
    close(in_rows_ptr, out_rows_ptr, own0, twin0, at0, begin0, shift0, 0, not HALVED)
    close(in_rows_ptr, out_rows_ptr, own1, twin1, at1, begin1, shift1, 1, not HALVED)
    close(in_rows_ptr, out_rows_ptr, own2, twin2, at2, begin2, shift2, 2, not HALVED)
    close(in_rows_ptr, out_rows_ptr, own3, twin3, at3, begin3, shift3, 3, not HALVED)
    close(in_rows_ptr, out_rows_ptr, own4, twin4, at4, begin4, shift4, 4, FIRST < 9 and not HALVED)
    if TAPS > 5:
        close(in_rows_ptr, out_rows_ptr, own5, twin5, at5, begin5, shift5, 5, not HALVED)
        close(in_rows_ptr, out_rows_ptr, own6, twin6, at6, begin6, shift6, 6, not HALVED)
        close(in_rows_ptr, out_rows_ptr, own7, twin7, at7, begin7, shift7, 7, not HALVED)
        close(in_rows_ptr, out_rows_ptr, own8, twin8, at8, begin8, shift8, 8, not HALVED)


@triton.jit
def open_list(chunk, starts_ptr, offsets_ptr, num_chunks, tap):
    """This chunk's part of the list of a tap, and of the mirrored tap.

    Returns the first edge of the line of 128 bytes in which either part begins, in bytes; the part's first place in
    its own, a lane each, and again; and how many places farther the mirrored part begins in its own.
    """
    place = tl.load(offsets_ptr + tap) + tl.load(starts_ptr + tap * num_chunks + chunk)
    mirrored = place + tl.load(offsets_ptr + 26 - tap) - tl.load(offsets_ptr + tap)
    own = place >> 5 << 5
    twin = mirrored >> 5 << 5
    begin = (place - own).to(tl.int32)
    shift = (mirrored - twin).to(tl.int32) - begin
    return own * 4, twin * 4, tl.zeros((32,), tl.int32) + begin, begin, shift


@triton.jit
def append(
    in_rows_ptr, out_rows_ptr, own, twin, at, begin, shift, found, row, LIST: tl.constexpr, MIRRORED: tl.constexpr
):
    """Append the edges of the 32 rows of one warp; returns the place behind them."""
    if not has_ptx():
        there = found >= 0
        rank = tl.cumsum(there.to(tl.int32), 0) - there
        place = own // 4 + (at + rank)
        tl.store(in_rows_ptr + place, found, mask=there)
        tl.store(out_rows_ptr + place, row, mask=there)
        if MIRRORED:
            place = twin // 4 + (at + rank + shift)
            tl.store(in_rows_ptr + place, row, mask=there)
            tl.store(out_rows_ptr + place, found, mask=there)
        return at + tl.sum(there.to(tl.int32), 0)
    else:
        return tl.inline_asm_elementwise(
            APPEND if MIRRORED else APPEND_ONE, "=&r,r,l,l,l,l,r,r,r,r,r",
            [
                LIST * WAITING, in_rows_ptr.to(tl.int64), out_rows_ptr.to(tl.int64), own, twin, at, begin, shift,
                found, row,
            ], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def close(in_rows_ptr, out_rows_ptr, own, twin, at, begin, shift, LIST: tl.constexpr, MIRRORED: tl.constexpr):
    """Write what is left of a list."""
    if has_ptx():
        tl.inline_asm_elementwise(
            CLOSE if MIRRORED else CLOSE_ONE, "=&r,r,l,l,l,l,r,r,r",
            [LIST * WAITING, in_rows_ptr.to(tl.int64), out_rows_ptr.to(tl.int64), own, twin, at, begin, shift],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


_I32, _I64 = torch.int32, torch.int64
CUBE_PAIRS = Launcher(cube_pairs_kernel, (*SEARCH_TYPES, _I32, _I64, _I64, _I32, _I32, *(int,) * 4), num_warps=1)
