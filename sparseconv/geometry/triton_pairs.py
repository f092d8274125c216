"""The edges of a window by tap, and the table of the reversed edges, on the GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_launch import INTERPRETED, Launcher, ceil_div, on_device, pointer
from sparseconv.geometry.triton_neighbors import SEARCH_TYPES, WindowSearch, search_window
from sparseconv.geometry.triton_table import STATUS, CoordinateTable, build_table, raise_for_status
from sparseconv.geometry.triton_window import Ints, encode_window, look, take

if TYPE_CHECKING:
    from sparseconv.geometry.grid import VoxelGrid
    from sparseconv.geometry.ranges import IndexRange


@dataclass(frozen=True)
class PendingCounts:
    """Edge counts on their way to the host: queue more work before `read`, and nobody waits."""

    offsets: torch.Tensor  # (K+1,) int64 on the device: tap k owns the edges [offsets[k], offsets[k+1])
    starts: torch.Tensor  # (K, C) int32: edges of tap k before chunk c
    report: torch.Tensor  # (K+3,) int64 in pinned memory: offsets, distinct rows, overflow
    arrived: torch.cuda.Event | None
    table: CoordinateTable | None

    def read(self) -> tuple[int, ...]:
        """The offsets on the host; raises ValueError for duplicate rows or an extent too large for keys."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values = self.report.tolist()
        if self.table is not None and self.table.coords.shape[0]:
            raise_for_status(self.table, values[-2] & 0xFFFFFFFF, values[-1])
        return tuple(values[:-2])


def sum_counts(counts: torch.Tensor, table: CoordinateTable | None = None) -> PendingCounts:
    """Prefix sums of ``counts`` (K, C) int32, and the totals sent to the host together with the table's status."""
    taps, chunks = counts.shape
    device = counts.device
    offsets = torch.empty(taps + 1, dtype=torch.int64, device=device)
    starts = torch.empty_like(counts)
    report = torch.empty(taps + 3, dtype=torch.int64, pin_memory=device.type == "cuda")
    status = table.arena[STATUS] if table is not None else pointer(offsets)
    with on_device(device):
        args = (pointer(counts), pointer(starts), pointer(offsets), pointer(report), status, taps, chunks)
        _SCAN(device, (max(taps, 1),), args, (table is not None, 2048))
        arrived = None
        if not INTERPRETED:
            arrived = torch.cuda.Event()
            arrived.record()
    return PendingCounts(offsets, starts, report, arrived, table)


def pairs_of(search: WindowSearch, pending: PendingCounts) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The edges by tap, and by target row within a tap.

    Args:
        search: what a window sees.
        pending: its counts, from `sum_counts`; they are read here, which is the only wait.

    Returns:
        in_rows (P,) int32, out_rows (P,) int32, and the offsets of the taps (K+1,) on the host; on the device they are
        ``pending.offsets``.
    """
    n, device = search.coords.shape[0], search.coords.device
    offsets = pending.read()
    in_rows = torch.empty(offsets[-1], dtype=torch.int32, device=device)
    out_rows = torch.empty_like(in_rows)
    if offsets[-1]:
        chunks = search.counts.shape[1]
        args = (
            *search.pointers, pointer(pending.starts), pointer(pending.offsets), pointer(in_rows), pointer(out_rows),
            n, search.capacity, chunks,
        )  # fmt: skip
        with on_device(device):
            grid = (chunks, search.window.num_runs)
            _PAIRS(device, grid, args, (*search.constants, search.chunk_rows, 128))
    return in_rows, out_rows, offsets


@dataclass(frozen=True, eq=False)
class FoundEdges:
    """The edges of one window on a GPU, counted but not written down: an `EdgeSource` of a kernel map."""

    search: WindowSearch
    pending: PendingCounts

    @property
    def device(self) -> torch.device:
        return self.search.coords.device

    @property
    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32, -1 where there is none."""
        return self.search.neighbors

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """in_rows, out_rows, tap_offsets, and the edges of each tap on the host; waits for the counts alone."""
        in_rows, out_rows, offsets = pairs_of(self.search, self.pending)
        return in_rows, out_rows, self.pending.offsets, tuple(b - a for a, b in itertools.pairwise(offsets))


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
    search = search_window(table, table.coords if coords is fine.coords else coords, window)
    return FoundEdges(search, sum_counts(search.counts, table))


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
def scan_kernel(
    counts_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks,
    HAS_STATUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a tap: the edges of all taps before it, then of all chunks before each of its own."""
    tap = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tap * num_chunks, BLOCK):
        at = start + lane
        before += tl.load(counts_ptr + at, mask=at < tap * num_chunks, other=0)
    first = tl.sum(before, 0)
    total = tl.zeros((), tl.int32)
    for start in range(0, num_chunks, BLOCK):
        at = start + lane
        count = tl.load(counts_ptr + tap * num_chunks + at, mask=at < num_chunks, other=0)
        tl.store(starts_ptr + tap * num_chunks + at, total + tl.cumsum(count, 0) - count, mask=at < num_chunks)
        total += tl.sum(count, 0)
    if tap < num_taps:
        tl.store(offsets_ptr + tap, first)
        tl.store(report_ptr + tap, first)
    if tap >= num_taps - 1:
        tl.store(offsets_ptr + num_taps, first + total)
        tl.store(report_ptr + num_taps, first + total)
        if HAS_STATUS:
            tl.store(report_ptr + num_taps + 1, tl.load(status_ptr))
            tl.store(report_ptr + num_taps + 2, tl.load(status_ptr + 1))


@triton.jit
def pairs_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n, capacity, num_chunks,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Source and target rows of the edges of one run of taps in one chunk of rows, in the order of the target rows."""
    EDGE: tl.constexpr = 1 << ((SHIFTS >> (4 * RANK)) & 15)
    chunk = tl.program_id(0)
    run_ptr = window_ptr + 3 * RANK + tl.program_id(1) * (2 + RANK)
    tap = tl.load(run_ptr)
    length = tl.load(run_ptr + 1)
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
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        live = row < n
        seen, near, far, cell = look(
            row, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr,
            window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES,
        )  # fmt: skip
        found, near, far = take(rows_ptr, seen, near, far, cell, 0, EDGE, BLOCKED)
        place0 = put(in_rows_ptr, out_rows_ptr, place0, found, row)
        if LENGTH > 1:
            found, near, far = take(rows_ptr, seen, near, far, cell, 1, EDGE, BLOCKED)
            place1 = put(in_rows_ptr, out_rows_ptr, place1, found, row)
        if LENGTH > 2:
            found, near, far = take(rows_ptr, seen, near, far, cell, 2, EDGE, BLOCKED)
            place2 = put(in_rows_ptr, out_rows_ptr, place2, found, row)
        if LENGTH > 3:
            found, near, far = take(rows_ptr, seen, near, far, cell, 3, EDGE, BLOCKED)
            place3 = put(in_rows_ptr, out_rows_ptr, place3, found, row)


@triton.jit
def put(in_rows_ptr, out_rows_ptr, place, found, row):
    """Append the edges found to the lists at ``place``, which moves on."""
    there = (found >= 0).to(tl.int32)
    at = place + (tl.cumsum(there, 0) - there)
    tl.store(in_rows_ptr + at, found, mask=found >= 0)
    tl.store(out_rows_ptr + at, row, mask=found >= 0)
    return place + tl.sum(there, 0)


@triton.jit
def reverse_kernel(neighbors_ptr, reversed_ptr, n, num_in, BLOCK: tl.constexpr):
    """reversed[tap, neighbors[tap, row]] = row."""
    tap = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(neighbors_ptr + tap * n + row, mask=row < n, other=-1)
    tl.store(reversed_ptr + tap * num_in + found, row, mask=found >= 0)


_I32, _I64 = torch.int32, torch.int64
_SCAN = Launcher(scan_kernel, (_I32, _I32, _I64, _I64, _I64, int, int), num_warps=8)
_PAIRS = Launcher(pairs_kernel, (*SEARCH_TYPES, _I32, _I64, _I32, _I32, int, int, int), num_warps=1)
_REVERSE = Launcher(reverse_kernel, (_I32, _I32, int, int))


# ---- readable twin


def pairs_torch(neighbors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """in_rows, out_rows and tap offsets of a table (K, N_out), as `pairs_of` orders them."""
    live = neighbors >= 0
    offsets = torch.nn.functional.pad(live.sum(1).cumsum(0), (1, 0))
    return neighbors[live], live.nonzero()[:, 1].int(), offsets
