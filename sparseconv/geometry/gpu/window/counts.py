"""Edge counts on the GPU: their prefix sums, and the totals on their way to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_table.table import COUNTS, STATUS, CoordinateTable, raise_for_status
from sparseconv.gpu.launcher import INTERPRETED, Launcher, Pointer, pointer
from sparseconv.gpu.report import Report


class PendingCounts:
    """Edge counts on their way to the host: queue more work before `read`, and nobody waits.

    Those of rows that the host does not know stay on the device, and to `read` them is an error.

    Args:
        taps: of the window.
        table: the one that was searched; its status is read along.
    """

    def __init__(self, taps: int, table: CoordinateTable) -> None:
        device = table.coords.device
        #: (K+1,) int64 on the device: tap k owns the edges [offsets[k], offsets[k+1])
        self.offsets = torch.empty(taps + 1, dtype=torch.int64, device=device)
        #: offsets, distinct rows, overflow
        self.report = Report(taps + 3, device)
        self._table: CoordinateTable | None = table
        #: whether the offsets were cut to what there is room for
        self.is_confined = False
        self._values: tuple[int, ...] = ()

    def read(self) -> tuple[int, ...]:
        """The offsets on the host; raises ValueError for duplicate rows or an extent too large for keys."""
        table = self._table
        if table is not None:
            if table.device_count is not None:
                raise RuntimeError(
                    "the edges of a grid of fixed size are counted on the device alone, and layers in float64 ask for "
                    "their number: ask a plan of an ordinary grid"
                )
            values = self.report.read()
            if table.coords.shape[0]:
                raise_for_status(table, values[-2] & 0xFFFFFFFF, values[-1])
            self._values, self._table = tuple(values[:-2]), None
        return self._values


def first_count(taps: int) -> int:
    """Where the counts begin behind the totals of so many taps, in 32-bit words."""
    return (2 * taps + 3) & -4


class Counters:
    """Zeros in which edges are counted: totals of the taps (K,) int64, and counts (K, C) int32 by chunk.

    ``start``: of the table's spare zeros that were taken before.
    """

    def __init__(self, table: CoordinateTable, taps: int, chunks: int, start: int | None = None) -> None:
        self.shape = taps, chunks
        self._first = first_count(taps)
        length = self._first + taps * chunks
        self._start, self._arena = table.spare_zeros(length) if start is None else start, table.arena
        self._own: torch.Tensor | None = None
        if self._start is None:
            self._own = torch.zeros(length, dtype=torch.int32, device=table.coords.device)

    @property
    def pointers(self) -> tuple[Pointer, Pointer]:
        """Totals and counts, for the kernels."""
        if INTERPRETED:
            return self._memory[: 2 * self.shape[0]].view(torch.int64), self.counts
        base = self._arena[COUNTS] + 4 * (self._start or 0) if self._own is None else self._own.data_ptr()
        return base, base + 4 * self._first

    @property
    def _memory(self) -> torch.Tensor:
        return self._arena.tensor(COUNTS)[self._start :] if self._own is None else self._own

    @property
    def counts(self) -> torch.Tensor:
        """(K, C) int32."""
        taps, chunks = self.shape
        return self._memory[self._first : self._first + taps * chunks].view(taps, chunks)


def scan_counts(counters: Counters, starts: Pointer, pending: PendingCounts, table: CoordinateTable) -> None:
    """Launch `scan_kernel`."""
    taps, chunks = counters.shape
    totals, counts = counters.pointers
    args = (counts, totals, starts, pointer(pending.offsets), pending.report.pointer, table.arena[STATUS], taps, chunks)
    SCAN(table.coords.device, (max(taps, 1),), args, (4 * SCAN_BLOCK,))


#: chunks that four warps sum at once
SCAN_BLOCK = 2048


@triton.jit
def scan_kernel(
    counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks, BLOCK: tl.constexpr
):
    """One program a tap: the edges of all taps before it, and of all chunks before each of its own."""
    scan_tap(
        tl.program_id(0), counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps,
        num_chunks, BLOCK,
    )  # fmt: skip


@triton.jit
def scan_tap(
    tap, counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`scan_kernel` for one tap; the report gets the table's status behind the offsets."""
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, tap, BLOCK):
        before += tl.load(totals_ptr + start + lane, mask=start + lane < tap, other=0)
    first = tl.sum(before, 0)
    total = tl.zeros((), tl.int32)
    for start in range(0, tl.where(tap < num_taps, num_chunks, 0), BLOCK):
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
        tl.store(report_ptr + num_taps + 1, tl.load(status_ptr))
        tl.store(report_ptr + num_taps + 2, tl.load(status_ptr + 1))


_I32, _I64 = torch.int32, torch.int64
SCAN = Launcher(scan_kernel, (_I32, _I64, _I32, _I64, _I64, _I64, int, int), num_warps=16)
