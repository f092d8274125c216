"""The edges of a window by tap, and the table of the reversed edges, on the GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cube import corners, look_along, look_at_plane, rank_in_warp
from sparseconv.geometry.triton_launch import Launcher, ceil_div, on_device, pointer
from sparseconv.geometry.triton_neighbors import WindowSearch, search_window
from sparseconv.geometry.triton_search import SEARCH_TYPES, STARTS
from sparseconv.geometry.triton_table import build_table
from sparseconv.geometry.triton_window import Ints, encode_window, entry_of, look, take

if TYPE_CHECKING:
    from sparseconv.geometry.grid import VoxelGrid
    from sparseconv.geometry.ranges import IndexRange


def pairs_of(search: WindowSearch) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The edges by tap, and by target row within a tap; waits for ``search.pending``, the counts, alone.

    Edges between the rows of one grid through a symmetric window are found once for two mirrored taps: those of the
    second half of the taps are then ordered by source row.

    Returns:
        in_rows (P,) int32, out_rows (P,) int32, and the offsets of the taps (K+1,) on the host; on the device they are
        ``search.pending.offsets``.
    """
    n, device = search.coords.shape[0], search.coords.device
    scratch = search.scratch
    pending = search.pending
    offsets = pending.read()
    in_rows = torch.empty(offsets[-1], dtype=torch.int32, device=device)
    out_rows = torch.empty_like(in_rows)
    if offsets[-1]:
        window, mirrored = search.window, search.is_local and search.window.is_symmetric
        args = (
            *search.pointers, scratch[STARTS], pointer(pending.offsets), pointer(in_rows), pointer(out_rows),
            n, search.capacity, search.chunks, window.num_taps,
        )  # fmt: skip
        with on_device(device):
            if search.is_cube:
                _CUBE_PAIRS(device, (search.chunks, 2), args, (search.chunk_rows,))
            else:
                grid = (search.chunks, window.runs_of_half if mirrored else window.num_runs)
                _PAIRS(device, grid, args, (*search.constants, mirrored, search.chunk_rows, 128))
    return in_rows, out_rows, offsets


@dataclass(frozen=True, eq=False)
class FoundEdges:
    """The edges of one window on a GPU, counted but not written down: an `EdgeSource` of a kernel map."""

    search: WindowSearch
    written: set[str] = field(default_factory=set)  # the forms that were made

    @property
    def device(self) -> torch.device:
        return self.search.coords.device

    @property
    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32, -1 where there is none."""
        return self.search.neighbors

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """in_rows, out_rows, tap_offsets, and the edges of each tap on the host; waits for the counts alone."""
        in_rows, out_rows, offsets = pairs_of(self.search)
        counts = tuple(b - a for a, b in itertools.pairwise(offsets))
        self.wrote("pairs")
        return in_rows, out_rows, self.search.pending.offsets, counts

    def wrote(self, form: str) -> None:
        """Note that a form was made; with pairs and a schedule a step has all, and scratch memory goes back."""
        self.written.add(form)
        if {"pairs", "schedule"} <= self.written:
            self.search.release()


def find_edges_on_gpu(
    fine: VoxelGrid, coords: torch.Tensor, offsets: tuple[Ints, ...], stride: Ints, torus: IndexRange | None
) -> FoundEdges:
    """The edges that a window joins: fine = stride * coords + offsets[k], folded into the torus if there is one.

    The table of the fine rows is kept with their grid.
    """
    table = fine.derived.get("cells")
    if table is None:
        table = fine.derived["cells"] = build_table(fine.coords)
    folded = None if torus is None else (torus.start, torus.shape)
    window = encode_window(offsets, stride, folded, coords.device)
    return FoundEdges(search_window(table, table.coords if coords is fine.coords else coords, window))


def reverse_neighbors(neighbors: torch.Tensor, num_in: int) -> torch.Tensor:
    """The table (K, num_in) of the reversed edges: reversed[k, neighbors[k, r]] = r."""
    taps, n = neighbors.shape
    table = torch.full((taps, num_in), -1, dtype=torch.int32, device=neighbors.device)
    if taps and n:
        with on_device(neighbors.device):
            args = (pointer(neighbors), pointer(table), n, num_in)
            _REVERSE(neighbors.device, (ceil_div(n, 1024), taps), args, (1024,))
    return table


# ---- kernels


@triton.jit
def pairs_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n, capacity, num_chunks, num_taps,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, MIRRORED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Source and target rows of the edges of one run of taps in one chunk of rows, in the order of the target rows.

    MIRRORED: the edges of the first half of the taps, turned round, are those of the second.
    """
    EDGE: tl.constexpr = 1 << ((SHIFTS >> (4 * RANK)) & 15)
    chunk = tl.program_id(0)
    run_ptr = window_ptr + 3 * RANK + tl.program_id(1) * (2 + RANK)
    tap = tl.load(run_ptr)
    length = tl.load(run_ptr + 1)
    if MIRRORED:
        taken = tl.minimum(length, (num_taps + 1) // 2 - tap)
    else:
        taken = length
    places_ptr = starts_ptr + tap * num_chunks + chunk
    place0 = tl.load(offsets_ptr + tap) + tl.load(places_ptr)
    place1 = place0
    place2 = place0
    place3 = place0
    if LENGTH > 1:
        place1 = tl.load(offsets_ptr + tap + 1) + tl.load(places_ptr + num_chunks, mask=length > 1, other=0)
    if LENGTH > 2:
        place2 = tl.load(offsets_ptr + tap + tl.minimum(length, 2))
        place2 += tl.load(places_ptr + 2 * num_chunks, mask=length > 2, other=0)
    if LENGTH > 3:
        place3 = tl.load(offsets_ptr + tap + tl.minimum(length, 3))
        place3 += tl.load(places_ptr + 3 * num_chunks, mask=length > 3, other=0)
    turn0 = twin_of(offsets_ptr, tap, num_taps, MIRRORED)
    turn1 = twin_of(offsets_ptr, tap + 1, num_taps, MIRRORED)
    turn2 = twin_of(offsets_ptr, tap + 2, num_taps, MIRRORED)
    turn3 = twin_of(offsets_ptr, tap + 3, num_taps, MIRRORED)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        live = row < n
        entry = entry_of(row, live, entries_ptr, SIDES)
        seen, near, far, cell = look(
            row, entry, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, around_ptr,
            window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES,
        )  # fmt: skip
        seen = seen & ((1 << taken) - 1)
        found, near, far = take(rows_ptr, seen, near, far, cell, 0, EDGE, BLOCKED)
        place0 = put(in_rows_ptr, out_rows_ptr, place0, turn0, found, row, MIRRORED)
        if LENGTH > 1:
            found, near, far = take(rows_ptr, seen, near, far, cell, 1, EDGE, BLOCKED)
            place1 = put(in_rows_ptr, out_rows_ptr, place1, turn1, found, row, MIRRORED)
        if LENGTH > 2:
            found, near, far = take(rows_ptr, seen, near, far, cell, 2, EDGE, BLOCKED)
            place2 = put(in_rows_ptr, out_rows_ptr, place2, turn2, found, row, MIRRORED)
        if LENGTH > 3:
            found, near, far = take(rows_ptr, seen, near, far, cell, 3, EDGE, BLOCKED)
            place3 = put(in_rows_ptr, out_rows_ptr, place3, turn3, found, row, MIRRORED)


@triton.jit
def twin_of(offsets_ptr, tap, num_taps, MIRRORED: tl.constexpr):
    """How far the list of the mirrored tap lies behind the list of a tap of the first half; 0: it has no other."""
    if MIRRORED:
        first_half = tap < num_taps // 2
        here = tl.load(offsets_ptr + tap, mask=first_half, other=0)
        return tl.load(offsets_ptr + num_taps - 1 - tap, mask=first_half, other=0) - here
    else:
        return tap


@triton.jit
def put(in_rows_ptr, out_rows_ptr, place, turn, found, row, MIRRORED: tl.constexpr):
    """Append the edges found to the lists at ``place``, which moves on, and turned round to those ``turn`` behind."""
    there = (found >= 0).to(tl.int32)
    at = place + (tl.cumsum(there, 0) - there)
    tl.store(in_rows_ptr + at, found, mask=found >= 0)
    tl.store(out_rows_ptr + at, row, mask=found >= 0)
    if MIRRORED:
        turned = found >= tl.where(turn > 0, 0, 0x7FFFFFFF)
        tl.store(in_rows_ptr + at + turn, row, mask=turned)
        tl.store(out_rows_ptr + at + turn, found, mask=turned)
    return place + tl.sum(there, 0)


@triton.jit
def cube_pairs_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n, capacity, num_chunks, num_taps, CHUNK: tl.constexpr,
):  # fmt: skip
    """`pairs_kernel` for the 27 cells around rows: taps 0 to 8 in one program of a chunk, 9 to 13 in the other."""
    if tl.program_id(1) == 0:
        list_plane(
            info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr,
            n, num_chunks, 0, CHUNK,
        )  # fmt: skip
    else:
        list_plane(
            info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr,
            n, num_chunks, 1, CHUNK,
        )  # fmt: skip


@triton.jit
def list_plane(
    info_ptr, rows_ptr, entries_ptr, around_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n, num_chunks,
    X: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The edges of the nine taps at X = 0, or of the four before the centre and the centre itself at X = 1."""
    lane = tl.arange(0, 32)
    tap = 9 * X
    place0, turn0 = list_of(starts_ptr, offsets_ptr, num_chunks, tap)
    place1, turn1 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 1)
    place2, turn2 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 2)
    place3, turn3 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 3)
    place4, turn4 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 4)
    if X == 0:
        place5, turn5 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 5)
        place6, turn6 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 6)
        place7, turn7 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 7)
        place8, turn8 = list_of(starts_ptr, offsets_ptr, num_chunks, tap + 8)
    first = tl.program_id(0) * CHUNK
    last = tl.minimum(first + CHUNK, n)
    entry = tl.load(entries_ptr + first + lane, mask=first + lane < last, other=-1)
    for start in range(first, last, 32):
        row = start + lane
        bit, a, b, c, d, e, f, g, h = corners(entry, row < last, info_ptr, around_ptr)
        following = row + 32
        entry = tl.load(entries_ptr + following, mask=following < last, other=-1)
        if X == 0:
            found0, found1, found2, found3, found4, found5, found6, found7, found8 = look_at_plane(
                bit, a, b, c, d, e, f, g, h, rows_ptr, 0
            )  # fmt: skip
            place4 = append(in_rows_ptr, out_rows_ptr, place4, turn4, found4, row, True)
            place5 = append(in_rows_ptr, out_rows_ptr, place5, turn5, found5, row, True)
            place6 = append(in_rows_ptr, out_rows_ptr, place6, turn6, found6, row, True)
            place7 = append(in_rows_ptr, out_rows_ptr, place7, turn7, found7, row, True)
            place8 = append(in_rows_ptr, out_rows_ptr, place8, turn8, found8, row, True)
        else:
            seen, near, far, cell = look_along(bit, a, b, c, d, e, f, g, h, 1, 0)
            found0, near, far = take(rows_ptr, seen, near, far, cell, 0, 4, True)
            found1, near, far = take(rows_ptr, seen, near, far, cell, 1, 4, True)
            found2, near, far = take(rows_ptr, seen, near, far, cell, 2, 4, True)
            seen, near, far, cell = look_along(bit, a, b, c, d, e, f, g, h, 1, 1)
            found3, near, far = take(rows_ptr, seen, near, far, cell, 0, 4, True)
            found4 = tl.where(((seen >> 1) & 1) != 0, row, -1)  # the centre
            place4 = append(in_rows_ptr, out_rows_ptr, place4, turn4, found4, row, False)
        place0 = append(in_rows_ptr, out_rows_ptr, place0, turn0, found0, row, True)
        place1 = append(in_rows_ptr, out_rows_ptr, place1, turn1, found1, row, True)
        place2 = append(in_rows_ptr, out_rows_ptr, place2, turn2, found2, row, True)
        place3 = append(in_rows_ptr, out_rows_ptr, place3, turn3, found3, row, True)


@triton.jit
def list_of(starts_ptr, offsets_ptr, num_chunks, tap):
    """Where this chunk's edges of a tap begin, and how far behind them those of the mirrored tap do."""
    here = tl.load(offsets_ptr + tap)
    place = here + tl.load(starts_ptr + tap * num_chunks + tl.program_id(0))
    return tl.zeros((32,), tl.int64) + place, tl.load(offsets_ptr + 26 - tap) - here


@triton.jit
def append(in_rows_ptr, out_rows_ptr, place, turn, found, row, MIRRORED: tl.constexpr):
    """`put` for the 32 rows of one warp."""
    rank, count = rank_in_warp((found >= 0).to(tl.int32))
    at = place + rank
    tl.store(in_rows_ptr + at, found, mask=found >= 0)
    tl.store(out_rows_ptr + at, row, mask=found >= 0)
    if MIRRORED:
        tl.store(in_rows_ptr + at + turn, row, mask=found >= 0)
        tl.store(out_rows_ptr + at + turn, found, mask=found >= 0)
    return place + count


@triton.jit
def reverse_kernel(neighbors_ptr, reversed_ptr, n, num_in, BLOCK: tl.constexpr):
    """reversed[tap, neighbors[tap, row]] = row."""
    tap = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(neighbors_ptr + tap * n + row, mask=row < n, other=-1)
    tl.store(reversed_ptr + tap * num_in + found, row, mask=found >= 0)


_I32, _I64 = torch.int32, torch.int64
_PAIRS = Launcher(pairs_kernel, (*SEARCH_TYPES, _I32, _I64, _I32, _I32, *(int,) * 4), num_warps=1)
_CUBE_PAIRS = Launcher(cube_pairs_kernel, (*SEARCH_TYPES, _I32, _I64, _I32, _I32, *(int,) * 4), num_warps=1)
_REVERSE = Launcher(reverse_kernel, (_I32, _I32, int, int))


# ---- readable twin


def pairs_torch(neighbors: torch.Tensor, mirrored: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """in_rows, out_rows and tap offsets of a table (K, N_out), as `pairs_of` orders them.

    ``mirrored``: the table is one of a symmetric window between the rows of one grid.
    """
    live = neighbors >= 0
    offsets = torch.nn.functional.pad(live.sum(1).cumsum(0), (1, 0))
    in_rows, out_rows = neighbors[live], live.nonzero()[:, 1].int()
    if mirrored:
        taps = len(neighbors)
        parts = [(in_rows[a:b], out_rows[a:b]) for a, b in itertools.pairwise(offsets.tolist())]
        turned = [parts[taps - 1 - tap][::-1] if tap >= (taps + 1) // 2 else parts[tap] for tap in range(taps)]
        in_rows, out_rows = (torch.cat(side) for side in zip(*turned))
    return in_rows, out_rows, offsets
