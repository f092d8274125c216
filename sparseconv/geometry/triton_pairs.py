"""The edges of a neighbour table by tap, and the table of the reversed edges, on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_launch import INTERPRETED, Launcher, on_device, pointer
from sparseconv.geometry.triton_neighbors import RowTable
from sparseconv.geometry.triton_table import CoordinateTable, raise_for_status


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
            raise_for_status(self.table, values[-2], values[-1])
        return tuple(values[:-2])


def sum_counts(counts: torch.Tensor, table: CoordinateTable | None = None) -> PendingCounts:
    """Prefix sums of ``counts`` (K, C) int32, and the totals sent to the host together with the table's status."""
    taps, chunks = counts.shape
    device = counts.device
    offsets = torch.empty(taps + 1, dtype=torch.int64, device=device)
    starts = torch.empty_like(counts)
    report = torch.empty(taps + 3, dtype=torch.int64, pin_memory=device.type == "cuda")
    status = table.arena[1] if table is not None else pointer(offsets)
    with on_device(device):
        args = (pointer(counts), pointer(starts), pointer(offsets), pointer(report), status, taps, chunks)
        _SCAN(device, (max(taps, 1),), args, (table is not None, 2048))
        arrived = None
        if not INTERPRETED:
            arrived = torch.cuda.Event()
            arrived.record()
    return PendingCounts(offsets, starts, report, arrived, table)


def pairs_of(found: RowTable, pending: PendingCounts) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The edges by tap, and by target row within a tap.

    Args:
        found: what a window sees.
        pending: its counts, from `sum_counts`; they are read here, which is the only wait.

    Returns:
        in_rows (P,) int32, out_rows (P,) int32, and the offsets of the taps (K+1,) on the host; on the device they are
        ``pending.offsets``.
    """
    n, width = found.rows.shape
    device = found.rows.device
    offsets = pending.read()
    in_rows = torch.empty(offsets[-1], dtype=torch.int32, device=device)
    out_rows = torch.empty_like(in_rows)
    if offsets[-1]:
        chunks = found.counts.shape[1]
        lanes = min(32, triton.next_power_of_2(width))
        args = (
            pointer(found.rows), pointer(found.window.data), pointer(pending.starts), pointer(pending.offsets),
            pointer(in_rows), pointer(out_rows), n, found.window.columns_at, chunks,
        )  # fmt: skip
        with on_device(device):
            grid = (chunks, triton.cdiv(width, lanes))
            _COMPACT(device, grid, args, (width, lanes, found.chunk_rows, 64))
    return in_rows, out_rows, offsets


def reverse_neighbors(neighbors: torch.Tensor, num_in: int) -> torch.Tensor:
    """The table (K, num_in) of the reversed edges: reversed[k, neighbors[k, r]] = r."""
    taps, n = neighbors.shape
    table = torch.full((taps, num_in), -1, dtype=torch.int32, device=neighbors.device)
    if taps and n:
        with on_device(neighbors.device):
            args = (pointer(neighbors), pointer(table), n, num_in)
            _REVERSE(neighbors.device, (triton.cdiv(n, 1024), taps), args, (1024,))
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
            tl.store(report_ptr + num_taps + 1, tl.load(status_ptr).to(tl.int64))
            tl.store(report_ptr + num_taps + 2, tl.load(status_ptr + 1).to(tl.int64))


@triton.jit
def compact_kernel(
    rows_ptr, window_ptr, starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n, columns_at, num_chunks,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Source and target rows of the edges of LANES columns in one chunk of rows, in the order of the target rows."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    tap = tl.load(window_ptr + columns_at + column, mask=column < WIDTH, other=-1)
    place = tl.load(offsets_ptr + tap, mask=tap >= 0, other=0)
    place += tl.load(starts_ptr + tap * num_chunks + chunk, mask=tap >= 0, other=0)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        wanted = (tap >= 0)[:, None] & (row < n)[None, :]
        found = tl.load(rows_ptr + row.to(tl.int64)[None, :] * WIDTH + column[:, None], mask=wanted, other=-1)
        live = (found >= 0).to(tl.int32)
        at = place[:, None] + (tl.cumsum(live, 1) - live)
        tl.store(in_rows_ptr + at, found, mask=found >= 0)
        tl.store(out_rows_ptr + at, tl.broadcast_to(row[None, :], (LANES, BLOCK)), mask=found >= 0)
        place += tl.sum(live, 1)


@triton.jit
def reverse_kernel(neighbors_ptr, reversed_ptr, n, num_in, BLOCK: tl.constexpr):
    """reversed[tap, neighbors[tap, row]] = row."""
    tap = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(neighbors_ptr + tap * n + row, mask=row < n, other=-1)
    tl.store(reversed_ptr + tap * num_in + found, row, mask=found >= 0)


_I32, _I64 = torch.int32, torch.int64
_SCAN = Launcher(scan_kernel, (_I32, _I32, _I64, _I64, _I32, int, int), num_warps=8)
_COMPACT = Launcher(compact_kernel, (_I32, _I32, _I32, _I64, _I32, _I32, int, int, int))
_REVERSE = Launcher(reverse_kernel, (_I32, _I32, int, int))


# ---- readable twin


def pairs_torch(neighbors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """in_rows, out_rows and tap offsets of a table (K, N_out), as `pairs_of` orders them."""
    live = neighbors >= 0
    offsets = torch.nn.functional.pad(live.sum(1).cumsum(0), (1, 0))
    return neighbors[live], live.nonzero()[:, 1].int(), offsets
