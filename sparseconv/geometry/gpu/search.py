"""What a window sees from each target row, on the GPU: the blocks around, tap masks, sort keys and counts of edges.

    in:  a table of source rows, target rows (N_out, 1+D) int32, a window of K taps
    out: a `WindowSearch`; nothing is read back

Up to 31 taps it is one launch, whose programs wait for each other; of more taps, masks do not fit and a table is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_probe import axis_blocks, axis_range, count_blocks, find
from sparseconv.geometry.gpu.table import (
    ENTRIES,
    KEYS,
    STATUS,
    CoordinateTable,
    aligned,
    pack_shifts,
    raise_for_status,
    rows_per_chunk,
)
from sparseconv.geometry.gpu.taps import GIVEN, KEY_BITS, TapWindow, bit_places, encode_window, entry_of, look, take
from sparseconv.geometry.gpu.window_3x3x3 import CUBE, count_in_warps, mask_of_cube
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import NUM_BARRIERS, DeviceCount, barriers_of, leave, programs_at_once, wait_for_all
from sparseconv.gpu.launcher import RESIDENT, Launcher, Pointer, ceil_div, constant, pointer
from sparseconv.gpu.program import power_of_2
from sparseconv.gpu.radix_sort import COOPERATIVE_STEPS, COOPERATIVE_WARPS, Passes, count_digits, digits_of
from sparseconv.gpu.report import Report
from sparseconv.gpu.streams import StreamEvent, current, map_stream
from sparseconv.gpu.warp_ptx import OPEN_COUNTERS, open_room

_I32, _I64 = torch.int32, torch.int64


class PendingCounts:
    """Edge counts on their way to the CPU: queue more work before `read`, and nobody waits.

    Those of rows that the CPU does not know stay on the device, and to `read` them is an error.

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
        self.is_cleared = False
        self._values: tuple[int, ...] = ()

    def read(self) -> tuple[int, ...]:
        """The offsets on the CPU; raises ValueError for duplicate rows or an extent too large for keys."""
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


@triton.jit
def scan_tap(
    tap, counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The edges of all taps before one, and of all chunks before each of its own; the report gets the table's status
    behind the offsets."""
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


#: the arrays of a search's scratch: edges by tap, and by tap and chunk, both from 0 on; edges of tap k before chunk c,
#: sort keys, the blocks around a block, and a sort's
TOTALS, COUNTS, STARTS, SORT_KEYS, NEIGHBORS, LINES, ORDER = range(7)
SCRATCH = (_I64, _I32, _I32, _I32, _I32, _I64, _I32)


@dataclass(eq=False)
class WindowSearch:
    """The edges between the rows of a table and target rows, found but not written down.

    Nobody writes to a search that others have. It is not frozen all the same: Python would set each of its fields by a
    call, which takes the CPU as long as a launch.

    Of the voxels x = 0, 1 and 5 of a line, rows 0, 1 and 2, through a window of three taps:

        masks   row 0: 0b110 (taps 1 and 2), row 1: 0b011 (taps 0 and 1), row 2: 0b010 (tap 1)
        counts  [[1], [3], [1]]: edges of each tap in the one chunk of rows
        starts  [[0], [0], [0]]: edges of a tap in the chunks before; pending.offsets [0, 1, 4, 5]
        keys    [[2, 6, 1]]

    Sort keys are the Gray ranks of the masks, so that rows sorted by them change taps one at a time. The scratch memory
    goes back when all that is wanted was made of it (`released`); whoever wants more searches again.
    """

    coords: torch.Tensor  # (N_out, 1+D) int32: the target rows; none where the edges were given as a table
    window: TapWindow
    table: CoordinateTable | None  # the source rows; None where the edges were given as a table
    device_count: DeviceCount | None  # of rows whose number the CPU does not know
    rows: int  # N_out
    capacity: int  # slots of the table; of a given one, the length of its rows
    constants: tuple  # RANK, SHIFTS, PLACES, PERIODIC, SIDES and LENGTH of the kernels
    is_local: bool = False  # whether the target rows are the table's own: a row's block tells the blocks around it
    is_cube: bool = False  # whether each row looks at the 27 cells around it, for which there are kernels of their own
    chunk_rows: int = 1  # rows whose edges are counted together
    chunks: int = 0
    pending: PendingCounts | None = None  # the counts of the edges, on their way to the CPU
    scratch: Arena | None = None
    passes: Passes | None = None  # of the sort of its rows, whose digits its launch may have counted
    neighbors: torch.Tensor | None = None  # (K, N_out) int32, where it was given, and of more than 31 taps
    pointers: tuple[Pointer, ...] = ()  # what kernels take to look rows up: see `passes.SEARCH_TYPES`
    moment: StreamEvent | None = None  # when it was launched, in a run whose maps have streams of their own
    #: constants on the device that launches read: kept as long as a graph that holds those launches may run
    kept: list[torch.Tensor] = field(default_factory=list)

    def released(self) -> WindowSearch:
        """The same without its scratch memory."""
        rest = object.__new__(WindowSearch)
        rest.__dict__.update(self.__dict__, scratch=None, pointers=())
        return rest

    @property
    def is_released(self) -> bool:
        """Whether there is nothing left to read."""
        return self.scratch is None and self.table is not None

    @property
    def found(self) -> tuple[CoordinateTable, Arena, PendingCounts]:
        """Table, scratch memory and counts of the search of a table; an error where edges were given, or released."""
        if self.table is None or self.scratch is None or self.pending is None:
            raise ValueError("this search has no scratch memory: its edges were given, or it was released")
        return self.table, self.scratch, self.pending

    @property
    def counts(self) -> torch.Tensor:
        """(K, C) int32: the edges of tap k among the target rows [c, c + 1) * chunk_rows."""
        return self.found[1].tensor(COUNTS).view(self.window.num_taps, self.chunks)

    @property
    def keys(self) -> torch.Tensor | None:
        """(1, N_out) int32 sort keys, see `row_keys`; None above 31 taps and for given edges."""
        if self.table is None or self.window.num_taps > KEY_BITS:
            return None
        return self.found[1].tensor(SORT_KEYS)[: self.rows].view(1, -1)

    @property
    def most_edges(self) -> int:
        """A number that the edges cannot exceed, whatever rows occur twice; known without a look at the device."""
        return self.rows * self.window.num_taps


#: chunks that a program of a search sums at once: one number for all sizes, so that none is compiled for
SCANNED = constant(1024)
#: rows whose masks one of its programs reads together, and numbers of blocks that it asks for at once
ROWS_EACH, LOOKUPS = constant(128), constant(512)
#: the sort key of a row without a tap
NO_RANK = 2**31 - 1
NO_TAPS = constant(NO_RANK)
#: its barriers; its warps, and keys that each of their threads counts at once
BARRIERS, WARPS, STEPS = constant(NUM_BARRIERS), constant(COOPERATIVE_WARPS), constant(COOPERATIVE_STEPS)


def launch_block_neighbors(table: CoordinateTable, around: Pointer, blocks: int) -> None:
    """The blocks around each block of a table, of the first ``blocks`` of them at most."""
    sides = 3 ** (len(table.shifts) - 1)
    lanes = power_of_2(sides)
    block = max(1, 256 // lanes)
    programs = min(ceil_div(blocks, block), 4096)
    keys, status = table.arena[KEYS], table.arena[STATUS]
    args = (*table.pointers[:3], keys, status, around, table.capacity, blocks, programs)
    constants = len(table.shifts), pack_shifts(table.shifts), sides, lanes, block
    BLOCK_NEIGHBORS(table.coords.device, (programs,), args, constants)


def launch_search(search: WindowSearch, passes: Passes, programs: int) -> None:
    """Surroundings, masks and sums of counts in one launch, and the digits of a cube's keys."""
    (table, scratch, pending), window = search.found, search.window
    taps, device, n = window.num_taps, table.coords.device, search.rows
    args = (
        *search.pointers, pointer(window.key_words), scratch[SORT_KEYS], scratch[COUNTS], scratch[TOTALS],
        barriers_of(device, table.device_count),
        table.arena[KEYS], table.arena[STATUS],
        scratch[STARTS], pointer(pending.offsets), pending.report.pointer, scratch[LINES],
        n, window.num_runs, taps, search.capacity, search.chunks,
        passes.states, passes.counting, programs,
    )  # fmt: skip
    digits = digits_of(window.key_bits)[:2] if search.is_cube else (0, 0)  # those of a cube's keys are counted
    SEARCH(device, (programs,), args, (*search.constants[:5], power_of_2(taps), search.chunk_rows, *digits))


# ---- kernels


@triton.jit
def block_neighbors_kernel(
    ranges_ptr, table_ptr, ids_ptr, keys_ptr, status_ptr, around_ptr, capacity, most, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, SIDES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """around[block, side] = the number of the block there, -1 if it is empty; of ``most`` blocks at most."""
    num_blocks = tl.minimum((tl.load(status_ptr) >> 32).to(tl.int32), most)
    find_block_neighbors(
        ranges_ptr, table_ptr, ids_ptr, keys_ptr, num_blocks, around_ptr, capacity, programs,
        COLUMNS, SHIFTS, SIDES, LANES, BLOCK,
    )  # fmt: skip


@triton.jit
def find_block_neighbors(
    ranges_ptr, table_ptr, ids_ptr, keys_ptr, num_blocks, around_ptr, capacity, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, SIDES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`block_neighbors_kernel` for every ``programs``-th run of BLOCK blocks."""
    volume = count_blocks(ranges_ptr, COLUMNS, SHIFTS)
    side = tl.arange(0, LANES)
    delta = tl.zeros((LANES,), tl.int64)
    power: tl.constexpr = SIDES // 3
    rest = side
    scale = power
    for axis in tl.static_range(1, COLUMNS):
        _low, extent = axis_range(ranges_ptr, axis)
        delta = delta * axis_blocks(extent, (SHIFTS >> (4 * axis)) & 15) + (rest // scale - 1)
        rest = rest % scale
        scale = scale // 3 if axis < COLUMNS - 1 else 1
    for start in range(tl.program_id(0) * BLOCK, num_blocks, programs * BLOCK):
        block = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + block, mask=block < num_blocks, other=0)[:, None] + delta[None, :]
        real = (block < num_blocks)[:, None] & (side < SIDES)[None, :]
        slot, hit = find(table_ptr, key, real & (key >= 0), capacity, volume, BLOCK * LANES // 128)
        number = tl.load(ids_ptr + slot, mask=hit, other=-1)
        tl.store(around_ptr + block.to(tl.int64)[:, None] * SIDES + side[None, :], number, mask=real)


@triton.jit
def read_masks(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr, n, num_runs, num_taps, capacity, num_chunks, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr, SIDES: tl.constexpr,
    TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CUBE: tl.constexpr,
):  # fmt: skip
    """Masks of the taps of every ``programs``-th run of BLOCK rows -> their sort keys, and counts of edges."""
    lane = tl.arange(0, TAPS)
    total = tl.zeros((TAPS,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        live = row < n
        entry = entry_of(row, live, entries_ptr, SIDES)
        if CUBE:
            mask = mask_of_cube(entry, live, info_ptr, around_ptr)
        else:
            mask = tl.zeros((BLOCK,), tl.int32)
            for run in range(0, num_runs, 3):  # the loads of three runs are on their way together
                for part in tl.static_range(3):
                    run_ptr = window_ptr + 3 * RANK + tl.minimum(run + part, num_runs - 1) * (2 + RANK)
                    seen, _near, _far, _cell = look(
                        row, entry, live, run_ptr, tl.load(run_ptr + 1), coords_ptr, ranges_ptr, table_ptr, ids_ptr,
                        info_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES,
                    )  # fmt: skip
                    mask |= seen << tl.load(run_ptr)  # a last run met twice says the same twice
        key = tl.load(words_ptr + (mask & 255)) ^ tl.load(words_ptr + 256 + ((mask >> 8) & 255))
        key = key ^ tl.load(words_ptr + 512 + ((mask >> 16) & 255)) ^ tl.load(words_ptr + 768 + ((mask >> 24) & 255))
        tl.store(keys_ptr + row, tl.where(mask == 0, NO_TAPS, key), mask=live)
        if CUBE:
            edges = count_in_warps(mask, BLOCK // 32)
        else:
            edges = tl.sum((mask[None, :] >> lane[:, None]) & 1, 1)
        tl.atomic_add(counts_ptr + lane * num_chunks + first // CHUNK, edges, mask=lane < num_taps, sem="relaxed")
        total += edges
    tl.atomic_add(totals_ptr + lane, total.to(tl.int64), mask=lane < num_taps, sem="relaxed")


@triton.jit
def search_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr, barriers_ptr, block_keys_ptr, status_ptr,
    starts_ptr, offsets_ptr, report_ptr, lines_ptr,
    n, num_runs, num_taps, capacity, num_chunks, states, counting, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, PASSES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Surroundings, masks and sums of counts in one launch, whose programs wait for each other in between.

    PASSES: the window is a cube, and the digits of the keys are counted, too.
    """
    LANES: tl.constexpr = 4 if RANK == 1 else 16 if RANK == 2 else 32 if RANK == 3 else 128  # 3^RANK blocks around
    if PASSES > 0:
        open_room(OPEN_COUNTERS)
    if SIDES > 0:
        num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
        find_block_neighbors(
            ranges_ptr, table_ptr, ids_ptr, block_keys_ptr, num_blocks, around_ptr, capacity, programs,
            RANK + 1, SHIFTS, SIDES, LANES, LOOKUPS // LANES,
        )  # fmt: skip
        wait_for_all(barriers_ptr, programs)
    read_masks(
        coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
        words_ptr, keys_ptr, counts_ptr, totals_ptr, n, num_runs, num_taps, capacity, num_chunks, programs,
        RANK, SHIFTS, PLACES, PERIODIC, SIDES, TAPS, CHUNK, ROWS_EACH, PASSES > 0,
    )  # fmt: skip
    wait_for_all(barriers_ptr + 1, programs)
    for tap in range(tl.program_id(0), num_taps, programs):
        scan_tap(
            tap, counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks, SCANNED
        )
    if PASSES > 0:
        place = programs - 1 - tl.program_id(0)  # from the last on: the first programs have summed taps
        if place < counting:
            count_digits(place, counting, keys_ptr, lines_ptr, n, states, BITS, PASSES, WARPS, STEPS)
    leave(barriers_ptr, programs, BARRIERS)


SEARCH_TYPES = (_I32, _I32, _I64, _I32, _I64, _I32, _I64, _I32, _I32)
BLOCK_NEIGHBORS = Launcher(block_neighbors_kernel, (_I32, _I64, _I32, _I64, _I64, _I32, int, int, int))
SEARCH = Launcher(
    search_kernel,
    (*SEARCH_TYPES, _I32, _I32, _I32, _I64, _I32, _I64, _I64, _I32, _I64, _I64, _I64, *(int,) * 8),
    resident=RESIDENT,
)


def neighbor_table(search: WindowSearch) -> torch.Tensor:
    """(K, N_out) int32: the source row of each target row through each tap; -1 absent."""
    if search.neighbors is not None:
        return search.neighbors
    n, taps = search.rows, search.window.num_taps
    planes = torch.empty(taps, n, dtype=torch.int32, device=search.coords.device)
    if n and taps:
        args = (*search.pointers, pointer(planes), n, search.capacity)
        PLANES(planes.device, (ceil_div(n, 128), search.window.num_runs), args, (*search.constants, 128))
    return planes


# ---- kernels


@triton.jit
def planes_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    planes_ptr, n, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """planes[tap, row] = source row, for BLOCK rows and one run of taps."""
    EDGE: tl.constexpr = 1 << ((SHIFTS >> (4 * RANK)) & 15)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    run_ptr = window_ptr + 3 * RANK + tl.program_id(1) * (2 + RANK)
    tap = tl.load(run_ptr)
    length = tl.load(run_ptr + 1)
    entry = entry_of(row, live, entries_ptr, SIDES)
    seen, near, far, cell = look(
        row, entry, live, run_ptr, length, coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, around_ptr,
        window_ptr, capacity, RANK, SHIFTS, PLACES, PERIODIC, SIDES,
    )  # fmt: skip
    for step in tl.static_range(LENGTH):
        found, near, far = take(rows_ptr, seen, near, far, cell, step, EDGE, SIDES)
        tl.store(planes_ptr + (tap + step).to(tl.int64) * n + row, found, mask=row < tl.where(length > step, n, 0))


@triton.jit
def plane_keys_kernel(
    planes_ptr, bits_ptr, keys_ptr, n, num_taps, key_chunk, room, lost, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Sort keys of BLOCK rows in one group of taps, from the table."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    mask = tl.zeros((BLOCK,), keys_ptr.dtype.element_ty)
    one = tl.full((BLOCK,), 1, keys_ptr.dtype.element_ty)
    for tap in range(num_taps):
        bit = tl.load(bits_ptr + group * num_taps + tap)
        found = tl.load(planes_ptr + row, mask=row < tl.where(bit >= 0, n, 0), other=-1)
        mask |= tl.where(found >= 0, one << tl.maximum(bit, 0), 0)
        planes_ptr += n
    key = mask ^ (mask >> 1)  # Gray code to its rank: the parity of the bits above
    key ^= key >> 2
    key ^= key >> 4
    key ^= key >> 8
    key ^= key >> 16
    if WIDE:
        key ^= key >> 32
    key = tl.where(mask == 0, (((one << (room - 1)) - 1) << 1) | 1, key >> lost)
    key |= (row // key_chunk).to(keys_ptr.dtype.element_ty) << room
    tl.store(keys_ptr + group.to(tl.int64) * n + row, key, mask=row < n)


PLANES = Launcher(planes_kernel, (*SEARCH_TYPES, _I32, int, int), num_warps=1)
PLANE_KEYS = Launcher(plane_keys_kernel, (_I32, _I32, _I32, *(int,) * 5))
PLANE_KEYS_WIDE = Launcher(plane_keys_kernel, (_I32, _I32, _I64, *(int,) * 5))


def search_window(table: CoordinateTable, coords: torch.Tensor, window: TapWindow) -> WindowSearch:
    """Find what target rows see: row of (stride * coords[r] + offsets[k], folded into the torus) for each r and k.

    Args:
        table: the source rows.
        coords: (N_out, 1+D) int32 on the same device, in any order; ``table.coords`` itself is faster.
        window: of the same device.
    """
    with map_stream():
        return _search(table, coords, window)


def _search(table: CoordinateTable, coords: torch.Tensor, window: TapWindow) -> WindowSearch:
    n, taps, device = coords.shape[0], window.num_taps, coords.device
    is_local, is_cube, constants = lookup_constants(window, table.shifts, coords is table.coords and n > 0)
    coords = coords if is_local else aligned(coords)
    chunk_rows = rows_per_chunk(n)
    chunks = ceil_div(n, chunk_rows)
    narrow, side = taps <= KEY_BITS, current()
    pending = PendingCounts(taps, table)
    blocks = table.most_blocks if is_local else 0
    lengths = [taps, taps * chunks, taps * chunks, n if narrow else 0, blocks * constants[4]]
    passes, programs = None, 0
    if narrow and n:
        programs = programs_at_once(device, max(taps, ceil_div(n, 128)))
        passes = Passes(n, window.key_bits, device, max(1, programs - taps) if is_cube else 0)
        lengths += (passes.words, n)
    scratch = Arena(device, SCRATCH, lengths, zeroed=2)
    entries, around = table.pointers[3:5]
    if is_local:
        entries, around = table.arena[ENTRIES], scratch[NEIGHBORS]
    pointers: tuple[Pointer, ...] = (pointer(coords), *table.pointers, entries, around, pointer(window.data))
    search = WindowSearch(
        coords, window, table, table.device_count, n, table.capacity, constants, is_local, is_cube, chunk_rows, chunks,
        pending, scratch, passes, None, pointers,
    )  # fmt: skip
    if passes is not None and taps:
        launch_search(search, passes, programs)
    else:
        if is_local:
            launch_block_neighbors(table, scratch[NEIGHBORS], blocks)
        search = replace(search, neighbors=neighbor_table(search))
        count_table(search)
    if table.device_count is None:
        pending.report.send()
    return search if side is None else replace(search, moment=side.moment())


def count_table(search: WindowSearch) -> None:
    """What `search_kernel` counts, of edges that are a table already."""
    table, scratch, pending = search.found
    live = torch.nn.functional.pad(neighbor_table(search) >= 0, (0, search.chunks * search.chunk_rows - search.rows))
    counts = live.view(*search.counts.shape, search.chunk_rows).sum(2, dtype=torch.int32)
    search.counts.copy_(counts)
    scratch.tensor(STARTS).view_as(counts).copy_(counts.cumsum(1) - counts)
    pending.offsets[:1] = 0
    torch.cumsum(counts.sum(1), 0, out=pending.offsets[1:])
    torch.cat((pending.offsets, table.arena.tensor(STATUS)), out=pending.report.values)


def search_table(neighbors: torch.Tensor, device_count: DeviceCount | None = None) -> WindowSearch:
    """The search that finds the edges of a table (K, N_out) int32, -1 absent, made elsewhere: a reversed map, say.

    ``device_count``: of rows whose number the CPU does not know.
    """
    taps, n = neighbors.shape
    neighbors = aligned(neighbors)
    window = encode_window(tuple((tap,) for tap in range(taps)), (1,), None, neighbors.device, True)
    pointers = (pointer(neighbors),) * 8 + (pointer(window.data),)
    chunk_rows, constants = rows_per_chunk(n), (1, 0, 0, False, GIVEN, 1)
    chunks = ceil_div(n, chunk_rows)
    return WindowSearch(
        neighbors.new_empty(n, 0), window, None, device_count, n, n, constants, chunk_rows=chunk_rows, chunks=chunks,
        neighbors=neighbors, pointers=pointers,
    )  # fmt: skip


@lru_cache(maxsize=512)
def lookup_constants(window: TapWindow, shifts: tuple[int, ...], same: bool) -> tuple[bool, bool, tuple]:
    """`is_local`, `is_cube` and the constants of searches in a table of such blocks; ``same``: for its own rows."""
    rank = len(shifts) - 1
    local = same and 0 <= window.reach <= 2 ** min(shifts[1:])
    sides = 3**rank if local else 0
    constants = rank, pack_shifts(shifts), bit_places(shifts), window.periodic, sides, window.run_length
    return local, local and window.is_cube and shifts == CUBE[1], constants
