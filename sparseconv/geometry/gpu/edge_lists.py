"""The edges of a kernel map on a GPU: found by a search, written down by tap or as a table when they are asked for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.edge_lists_3x3x3 import HALF, list_cube
from sparseconv.geometry.gpu.search import (
    SEARCH_TYPES,
    STARTS,
    PendingCounts,
    WindowSearch,
    neighbor_table,
    search_window,
)
from sparseconv.geometry.gpu.taps import encode_window, entry_of, look, take
from sparseconv.gpu.launcher import Launcher, ceil_div, pointer
from sparseconv.gpu.program import power_of_2
from sparseconv.gpu.streams import StreamEvent, current

if TYPE_CHECKING:
    from sparseconv.geometry.grid import VoxelGrid
    from sparseconv.geometry.ranges import IndexRange
    from sparseconv.geometry.window import Window

_I32, _I64 = torch.int32, torch.int64

#: rows that one program turns round
REVERSED = 1024


def pairs_of(search: WindowSearch, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The edges by tap, and by target row within a tap; waits for ``search.pending``, the counts, alone.

    Of rows that the CPU does not know nothing is waited for: P is then ``most``, no less than target rows (default: a
    bound), and what lies behind the edges there is undefined. Where there are more, every tap's list is empty and bit 2
    of the fault flag is set.

    Edges between the rows of one grid through a symmetric window are found once for two mirrored taps: those of the
    second half of the taps are then ordered by source row.

    Returns:
        in_rows (P,) int32, out_rows (P,) int32, and the offsets of the taps (K+1,) on the CPU, empty where it does not
        know them; on the device they are ``search.pending.offsets``.
    """
    _, scratch, pending = search.found
    device = search.coords.device
    offsets = pending.read() if search.device_count is None else ()
    if offsets or most is None:
        most = offsets[-1] if offsets else search.most_edges
    in_rows = torch.empty(most, dtype=torch.int32, device=device)
    out_rows = torch.empty(most, dtype=torch.int32, device=device)
    if most:
        window = search.window
        clear_on_overflow(search, most)
        if search.is_cube:
            list_cube(search, pointer(in_rows), pointer(out_rows), most)
        else:
            mirrored = search.is_local and window.is_symmetric
            args = (
                *search.pointers, scratch[STARTS], pointer(pending.offsets), pointer(in_rows), pointer(out_rows),
                search.rows, search.capacity, search.chunks, window.num_taps,
            )  # fmt: skip
            grid = (search.chunks, window.runs_of_half if mirrored else window.num_runs)
            PAIRS(device, grid, args, (*search.constants, mirrored, search.chunk_rows, 128))
    return in_rows, out_rows, offsets


def half_pairs_of(search: WindowSearch, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """in_rows and out_rows of the first HALF taps of a search that `is_cube`, the first of what `pairs_of` returns.

    The others' are these turned round. ``most`` is that of all taps.
    """
    _, scratch, pending = search.found
    device = search.coords.device
    if search.device_count is None:
        room = pending.read()[HALF.value]
    else:
        all_taps = search.most_edges if most is None else most
        room = _half_room(search, all_taps)
        clear_on_overflow(search, all_taps)
    in_rows = torch.empty(room, dtype=torch.int32, device=device)
    out_rows = torch.empty(room, dtype=torch.int32, device=device)
    if room and len(scratch):
        list_cube(search, pointer(in_rows), pointer(out_rows), room, half=True)
    return in_rows, out_rows


def _half_room(search: WindowSearch, most: int) -> int:
    """Edges of the first HALF taps where all have ``most``, and no row occurs twice: the center's are in one half."""
    return (most + search.rows + 1) // 2


def clear_on_overflow(search: WindowSearch, most: int) -> None:
    """Leave no tap an edge, and set the fault flag, where rows that the CPU does not know have more than ``most``.

    So too where half of them have more than fit: of rows that occur twice, mirrored taps are not alike.
    """
    pending = search.pending
    if search.device_count is None or pending is None:
        return
    if search.rows and most < search.most_edges and not pending.is_cleared:
        pending.is_cleared = True
        taps = search.window.num_taps
        half, room = (HALF.value, _half_room(search, most)) if search.is_cube else (taps, most)
        known = (pointer(pending.offsets), pointer(search.device_count.fault), most, taps, half, room)
        OVERFLOW(search.coords.device, (1,), known, (power_of_2(taps + 1),))


def reverse_neighbors(neighbors: torch.Tensor, num_in: int) -> torch.Tensor:
    """The table (K, num_in) of the reversed edges: reversed[k, neighbors[k, r]] = r."""
    taps, n = neighbors.shape
    table = torch.full((taps, num_in), -1, dtype=torch.int32, device=neighbors.device)
    if taps and n:
        args = (pointer(neighbors), pointer(table), n, num_in)
        REVERSE(neighbors.device, (ceil_div(n, REVERSED), taps), args, (REVERSED,))
    return table


# ---- kernels


@triton.jit
def overflow_kernel(offsets_ptr, fault_ptr, most, num_taps, half, room, TAPS: tl.constexpr):
    """Where there are more edges than places, or more of the first ``half`` taps than ``room``, no tap has any: each
    list then fits, whatever is written to it."""
    too_many = (tl.load(offsets_ptr + num_taps) > most) | (tl.load(offsets_ptr + half) > room)
    tl.debug_barrier()
    if too_many:
        tap = tl.arange(0, TAPS)
        tl.store(offsets_ptr + tap, tl.zeros((TAPS,), tl.int64), mask=tap <= num_taps)
        tl.atomic_or(fault_ptr, 4)


@triton.jit
def pairs_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    starts_ptr, offsets_ptr, in_rows_ptr, out_rows_ptr, n, capacity, num_chunks, num_taps,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
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
            window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES,
        )  # fmt: skip
        seen = seen & ((1 << taken) - 1)
        found, near, far = take(rows_ptr, seen, near, far, cell, 0, EDGE, SIDES)
        place0 = put(in_rows_ptr, out_rows_ptr, place0, turn0, found, row, MIRRORED)
        if LENGTH > 1:
            found, near, far = take(rows_ptr, seen, near, far, cell, 1, EDGE, SIDES)
            place1 = put(in_rows_ptr, out_rows_ptr, place1, turn1, found, row, MIRRORED)
        if LENGTH > 2:
            found, near, far = take(rows_ptr, seen, near, far, cell, 2, EDGE, SIDES)
            place2 = put(in_rows_ptr, out_rows_ptr, place2, turn2, found, row, MIRRORED)
        if LENGTH > 3:
            found, near, far = take(rows_ptr, seen, near, far, cell, 3, EDGE, SIDES)
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
def reverse_kernel(neighbors_ptr, reversed_ptr, n, num_in, BLOCK: tl.constexpr):
    """reversed[tap, neighbors[tap, row]] = row."""
    tap = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(neighbors_ptr + tap * n + row, mask=row < n, other=-1)
    tl.store(reversed_ptr + tap * num_in + found, row, mask=found >= 0)


OVERFLOW = Launcher(overflow_kernel, (_I64, _I32, *(int,) * 4), num_warps=1)
PAIRS = Launcher(pairs_kernel, (*SEARCH_TYPES, _I32, _I64, _I32, _I32, *(int,) * 4), num_warps=1)
REVERSE = Launcher(reverse_kernel, (_I32, _I32, int, int))


def find_edges_on_gpu(
    fine: VoxelGrid, coords: torch.Tensor, window: Window, torus: IndexRange | None, most: int | None = None
) -> FoundEdges:
    """The edges that a window joins: fine = stride * coords + offsets[k], folded into the torus if there is one.

    The table of the fine rows is the one that their grid keeps. ``most``: see `pairs_of`.
    """
    table, index = fine.hash_table, coords.get_device()
    taps = None if torus is not None else window.encoded.get(index)
    if taps is None:
        folded = None if torus is None else (torus.start, torus.shape)
        taps = encode_window(window.offsets, window.stride, folded, coords.device)
        if torus is None:
            window.encoded[index] = taps
    rows = table.coords if coords is fine.coords else coords
    return FoundEdges(search_window(table, rows, taps), fine.num_voxels, most)


@dataclass(eq=False)
class FoundEdges:
    """The edges of one window on a GPU, counted but not written down: the ``source`` of a kernel map.

    It owns the search, and lets its scratch memory go once all lists were made (`mark_built`).
    """

    search: WindowSearch
    num_in: int
    most: int | None = None  # places for pairs, where their number is not known to the CPU
    written: set[str] = field(default_factory=set)  # the forms that were made

    @property
    def device(self) -> torch.device:
        return self.search.coords.device

    @property
    def padded(self) -> bool:
        """Whether more pairs are written than there are edges, whose number the CPU does not know."""
        return self.search.device_count is not None

    @property
    def moment(self) -> StreamEvent | None:
        """When the search was launched, in a run whose maps have streams of their own."""
        return self.search.moment

    def searched(self) -> WindowSearch:
        """The search with its scratch memory: made anew where that was given back."""
        old = self.search
        if old.is_released and old.table is not None:
            self.search = search_window(old.table, old.coords, old.window)
            self.search.kept.extend(old.kept)
        return self.search

    @cached_property
    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32, -1 where there is none."""
        return self.look_up()

    def look_up(self) -> torch.Tensor:
        """`neighbors`, made anew where they were not kept."""
        kept = self.__dict__.get("neighbors", self.search.neighbors)
        return neighbor_table(self.searched()) if kept is None else kept

    @property
    def counted(self) -> PendingCounts:
        """The counts of the edges, on their way to the CPU."""
        if self.search.pending is None:
            raise ValueError("edges that were given as a table are not counted")
        return self.search.pending

    @property
    def is_halved(self) -> bool:
        """Whether there are `half_pairs`."""
        return self.search.is_cube

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """in_rows, out_rows and tap_offsets; waits for the counts alone."""
        in_rows, out_rows, _ = pairs_of(self.searched(), self.most)
        self.mark_built("pairs")
        return in_rows, out_rows, self.counted.offsets

    def half_pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """in_rows and out_rows of the first HALF taps, and the tap_offsets of all; waits for the counts alone."""
        in_rows, out_rows = half_pairs_of(self.searched(), self.most)
        self.mark_built("pairs")
        return in_rows, out_rows, self.counted.offsets

    def offsets(self) -> torch.Tensor:
        """tap_offsets; writes no edges down."""
        clear_on_overflow(self.search, self.search.most_edges if self.most is None else self.most)
        return self.counted.offsets

    def counts(self) -> tuple[int, ...]:
        """The edges of each tap, on the CPU; waits for them."""
        return tuple(b - a for a, b in itertools.pairwise(self.counted.read()))

    def total(self) -> int:
        """The number of edges; waits for the counts."""
        return self.counted.read()[-1]

    def reversed(self) -> ReversedEdges:
        """The same edges with input and output exchanged."""
        return ReversedEdges(self)

    def mark_built(self, form: str) -> None:
        """Note that a form was made; with pairs and a schedule a step has all, and scratch memory goes back."""
        self.written.add(form)
        if {"pairs", "schedule"} <= self.written:
            side = current()
            if side is not None and self.search.scratch is not None:
                side.retire(self.search.scratch)
            self.search = self.search.released()


@dataclass(frozen=True, eq=False)
class ReversedEdges:
    """Found edges with input and output exchanged; in all else the found ones."""

    found: FoundEdges

    def __getattr__(self, name: str) -> Any:
        return getattr(self.found, name)

    @property
    def neighbors(self) -> torch.Tensor:
        """(K, N_in) int32, -1 where there is none; the table of the found edges is not kept."""
        return reverse_neighbors(self.found.look_up(), self.found.num_in)

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output rows of the found edges, their input rows, and the tap_offsets."""
        in_rows, out_rows, offsets = self.found.pairs()
        return out_rows, in_rows, offsets

    def half_pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of `FoundEdges.half_pairs`."""
        in_rows, out_rows, offsets = self.found.half_pairs()
        return out_rows, in_rows, offsets

    def reversed(self) -> FoundEdges:
        """The found edges."""
        return self.found
