"""What a window sees from each target row, on the GPU: edge counts and sort keys in one pass, the table on demand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import triton
import triton.language as tl

from sparseconv.geometry.triton_cells import axis_blocks, axis_range, count_blocks, find
from sparseconv.geometry.triton_counts import (
    SCAN_BLOCK,
    Counters,
    PendingCounts,
    arrival,
    report_of,
    scan_counts,
    scan_tap,
)
from sparseconv.geometry.triton_launch import (
    Arena,
    Launcher,
    Pointer,
    ceil_div,
    crew_of,
    on_device,
    pointer,
    power_of_2,
    wait_for_all,
)
from sparseconv.geometry.triton_table import (
    ENTRIES,
    FUSED_ROWS,
    KEYS,
    STATUS,
    CoordinateTable,
    aligned,
    pack_shifts,
    rows_per_chunk,
)
from sparseconv.geometry.triton_window import (
    GIVEN,
    KEY_BITS,
    TapWindow,
    bit_places,
    encode_window,
    entry_of,
    key_words,
    look,
    take,
    tap_order,
)

#: key bits of windows with more than 31 taps: the most significant taps
WIDE_KEY_BITS = 62
#: the arrays of a search's scratch: edges of tap k before chunk c, sort keys, and the blocks around each block
STARTS, SORT_KEYS, AROUND = range(3)


class WindowSearch:
    """The edges between the rows of a table and target rows, found but not written down: three passes write them.

    Nothing is read back. `release` gives the scratch memory back; who asks for it again gets it made anew.

    Args:
        table: the source rows; None where the edges were given as a table.
        coords: (N_out, 1+D) int32 on the same device, in any order; ``table.coords`` itself is faster.
        window: of the same device, with ``single=True`` for a table that is not blocked.
        given: (K, N_out) int32: the table of a search that has none of rows.
    """

    def __init__(
        self,
        table: CoordinateTable | None,
        coords: torch.Tensor,
        window: TapWindow,
        given: torch.Tensor | None = None,
    ) -> None:
        #: whether the target rows are those of the table, so that a row's own block tells the blocks around it
        self.is_local = (
            table is not None
            and coords is table.coords
            and table.blocked
            and 0 <= window.reach <= 2 ** min(table.shifts[1:])
            and coords.shape[0] > 0
        )
        self.table, self.window, self.given = table, window, given
        self.coords = aligned(coords)
        self.chunk_rows = rows_per_chunk(coords.shape[0])
        self.chunks = ceil_div(coords.shape[0], self.chunk_rows)
        self._scratch: Arena | None = None
        self._pointers: tuple[Pointer, ...] | None = None
        if table is not None:
            self._run()

    def _run(self) -> Arena:
        """Fill the scratch memory, and send the counts of edges on their way."""
        table, window = self.table, self.window
        device, (n, columns) = self.coords.device, self.coords.shape
        taps = window.num_taps
        narrow = taps <= KEY_BITS
        if table is None:
            raise ValueError("a search without a table of rows has no scratch memory: its edges were given")
        blocks = table.read.get("blocks", n) if self.is_local else 0
        i32 = torch.int32
        arrays = [(i32, taps * self.chunks), (i32, n if narrow else 0), (i32, blocks * 3 ** (columns - 1))]
        scratch = self._scratch = Arena(device, arrays)
        counters = self._counters = Counters(table, taps, self.chunks)
        offsets, report = report_of(taps, device)
        with on_device(device):
            if narrow and 0 < n <= FUSED_ROWS and taps:
                _launch_search(self, scratch, counters, offsets, report)
            else:
                if self.is_local:
                    _launch_around(table, scratch[AROUND], blocks)
                if n and taps and narrow:
                    _launch_masks(self, window.key_words, scratch[SORT_KEYS], counters, n, KEY_BITS, 0)
                elif n and taps:
                    totals, _, counts = counters.pointers
                    args = (pointer(self.neighbors), counts, totals, n, self.chunks)
                    _COUNT(device, (self.chunks, taps), args, (self.chunk_rows, 128))
                scan_counts(counters, scratch[STARTS], offsets, report, table)
            #: the counts of the edges, on their way to the host
            self.pending = PendingCounts(offsets, report, arrival(), table)
        return scratch

    def release(self) -> None:
        """Give the scratch memory back."""
        self._scratch = self._pointers = None
        self.__dict__.pop("_counters", None)

    @property
    def scratch(self) -> Arena:
        return self._run() if self._scratch is None else self._scratch

    @property
    def counts(self) -> torch.Tensor:
        """(K, C) int32: the edges of tap k among the target rows [c, c + 1) * chunk_rows."""
        self.scratch  # noqa: B018 (counted with it)
        return self._counters.counts

    @property
    def keys(self) -> torch.Tensor | None:
        """(1, N_out) int32 sort keys, see row_keys; None above 31 taps and for given edges."""
        if self.table is None or self.window.num_taps > KEY_BITS:
            return None
        return self.scratch.tensor(SORT_KEYS).view(1, -1)

    @property
    def around(self) -> torch.Tensor | None:
        """(blocks, 3^D) int32: the blocks around each block; None where target rows are looked up by key."""
        return self.scratch.tensor(AROUND).view(-1, 3 ** (self.coords.shape[1] - 1)) if self.is_local else None

    @property
    def capacity(self) -> int:
        """Slots of the table; of a given one, the length of its rows."""
        return self.coords.shape[0] if self.table is None else self.table.capacity

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        """Coordinates, ranges, slots, block numbers, infos, rows, entries, surroundings and window, for the kernels."""
        if self._pointers is None:
            window = pointer(self.window.data)
            if self.table is None:
                self._pointers = (pointer(self.neighbors),) * 8 + (window,)
            else:
                parts = self.table.pointers
                entries, around = parts[3], parts[4]
                if self.is_local:
                    entries, around = self.table.arena[ENTRIES], self.scratch[AROUND]
                self._pointers = (pointer(self.coords), *parts, entries, around, window)
        return self._pointers

    @cached_property
    def constants(self) -> tuple:
        """RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES and LENGTH of the kernels."""
        if self.table is None:
            return 1, 0, 0, False, False, GIVEN, 1
        shifts, rank = self.table.shifts, self.coords.shape[1] - 1
        sides = 3**rank if self.is_local else 0
        places, blocked = bit_places(shifts), self.table.blocked
        return rank, pack_shifts(shifts), places, blocked, self.window.periodic, sides, self.window.run_length

    @cached_property
    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32: the source row of each target row through each tap; -1 absent."""
        if self.given is not None:
            return self.given
        n, taps = self.coords.shape[0], self.window.num_taps
        planes = torch.empty(taps, n, dtype=torch.int32, device=self.coords.device)
        if n and taps:
            args = (*self.pointers, pointer(planes), n, self.capacity)
            with on_device(planes.device):
                _PLANES(planes.device, (ceil_div(n, 128), self.window.num_runs), args, (*self.constants, 128))
        return planes


def search_window(table: CoordinateTable, coords: torch.Tensor, window: TapWindow) -> WindowSearch:
    """Find what target rows see: row of (stride * coords[r] + offsets[k], folded into the torus) for each r and k."""
    return WindowSearch(table, coords, window)


def search_table(neighbors: torch.Tensor) -> WindowSearch:
    """The search that finds the edges of a table (K, N_out) int32, -1 absent, made elsewhere: a reversed map, say."""
    taps, n = neighbors.shape
    neighbors = aligned(neighbors)
    window = encode_window(tuple((tap,) for tap in range(taps)), (1,), None, neighbors.device, True)
    return WindowSearch(None, neighbors.new_empty(n, 0), window, neighbors)


def row_keys(
    search: WindowSearch,
    parts: tuple[tuple[int, ...], ...],
    significance: Sequence[int] | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """(G, N_out) sort keys, not negative: the Gray rank of each row's mask of the taps of a group.

    Rows sorted by them change taps one at a time; rows without a tap come last. ``chunk_rows`` puts the number of the
    row's run of so many rows above the rank, which then loses its last bits. int64 for groups of more than 31 taps.
    """
    n, taps = search.coords.shape[0], search.window.num_taps
    device = search.coords.device
    wide = max(map(len, parts), default=0) > KEY_BITS
    ranked = tap_order(search.window.offsets) if significance is None else tuple(significance)
    keys = torch.empty(len(parts), n, dtype=torch.int64 if wide else torch.int32, device=device)
    chunk_bits, chunk = 0, max(n, 1)
    if chunk_rows is not None and n > chunk_rows:
        chunk, chunk_bits = chunk_rows, (-(-n // chunk_rows) - 1).bit_length()
    room = (WIDE_KEY_BITS if wide else KEY_BITS) - chunk_bits
    lost = max(0, min(max(map(len, parts), default=0), WIDE_KEY_BITS) - room)
    if n and taps and taps <= KEY_BITS and search.given is None:
        with on_device(device):
            _launch_masks(search, key_words(ranked, parts, device), pointer(keys), None, chunk, room, lost, len(parts))
    elif n and taps:
        bits = torch.full((len(parts), taps), -1, dtype=torch.int32)
        for index, part in enumerate(parts):
            kept = [tap for tap in ranked if tap in part][: WIDE_KEY_BITS if wide else KEY_BITS]
            for place, tap in enumerate(kept):
                bits[index, tap] = len(kept) - 1 - place
        args = (pointer(search.neighbors), pointer(bits := bits.to(device)), pointer(keys), n, taps, chunk, room, lost)
        with on_device(device):
            launcher = _PLANE_KEYS_WIDE if wide else _PLANE_KEYS
            launcher(device, (ceil_div(n, 128), len(parts)), args, (wide, 128))
    return keys


def _launch_masks(
    search: WindowSearch,
    words: torch.Tensor,
    keys: Pointer,
    counters: Counters | None,
    chunk: int,
    room: int,
    lost: int,
    groups: int = 1,
) -> None:
    n, window = search.coords.shape[0], search.window
    programs = min(ceil_div(n, 128), 4224)
    totals, _, counts = (keys,) * 3 if counters is None else counters.pointers
    args = (
        *search.pointers, pointer(words), keys, counts, totals,
        n, window.num_runs, window.num_taps, search.capacity, search.chunks, chunk, room, lost, programs,
    )  # fmt: skip
    taps = power_of_2(window.num_taps)
    constants = (*search.constants, groups, counters is not None, taps, search.chunk_rows, 128)
    _MASKS(words.device, (programs,), args, constants)


def _launch_around(table: CoordinateTable, around: Pointer, blocks: int) -> None:
    arena, columns = table.arena, table.coords.shape[1]
    sides = 3 ** (columns - 1)
    lanes = power_of_2(sides)
    block = max(1, 256 // lanes)
    ranges, slots, ids, _, _ = table.pointers
    programs = min(ceil_div(blocks, block), 4096)
    args = (ranges, slots, ids, arena[KEYS], arena[STATUS], around, table.capacity, programs)
    constants = (columns, pack_shifts(table.shifts), sides, lanes, block)
    _AROUND(table.coords.device, (programs,), args, constants)


def _launch_search(
    search: WindowSearch, scratch: Arena, counters: Counters, offsets: torch.Tensor, report: torch.Tensor
) -> None:
    table, window, n = search.table, search.window, search.coords.shape[0]
    if table is None:
        return
    taps, device = window.num_taps, offsets.device
    programs = crew_of(device, max(taps, ceil_div(n, 128)))
    totals, gates, counts = counters.pointers
    lanes = power_of_2(3 ** (search.coords.shape[1] - 1))
    args = (
        *search.pointers, pointer(window.key_words), scratch[SORT_KEYS], counts, totals, gates,
        table.arena[KEYS] if table.blocked else scratch[SORT_KEYS], table.arena[STATUS],
        scratch[STARTS], pointer(offsets), pointer(report),
        n, window.num_runs, taps, search.capacity, search.chunks, programs,
    )  # fmt: skip
    scan = min(SCAN_BLOCK, max(128, power_of_2(search.chunks)))
    constants = (*search.constants, power_of_2(taps), search.chunk_rows, 128, lanes, max(1, 256 // lanes), scan)
    _SEARCH(device, (programs,), args, constants)


# ---- kernels


@triton.jit
def around_kernel(
    ranges_ptr, table_ptr, ids_ptr, keys_ptr, status_ptr, around_ptr, capacity, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, SIDES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """around[block, side] = the number of the block there, -1 if it is empty."""
    find_around(
        ranges_ptr, table_ptr, ids_ptr, keys_ptr, status_ptr, around_ptr, capacity, programs,
        COLUMNS, SHIFTS, SIDES, LANES, BLOCK,
    )  # fmt: skip


@triton.jit
def find_around(
    ranges_ptr, table_ptr, ids_ptr, keys_ptr, status_ptr, around_ptr, capacity, programs,
    COLUMNS: tl.constexpr, SHIFTS: tl.constexpr, SIDES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`around_kernel` for every ``programs``-th run of BLOCK blocks."""
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
    num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
    for start in range(tl.program_id(0) * BLOCK, num_blocks, programs * BLOCK):
        block = start + tl.arange(0, BLOCK)
        key = tl.load(keys_ptr + block, mask=block < num_blocks, other=0)[:, None] + delta[None, :]
        real = (block < num_blocks)[:, None] & (side < SIDES)[None, :]
        slot, hit = find(table_ptr, key, real & (key >= 0), capacity, volume)
        number = tl.load(ids_ptr + slot, mask=hit, other=-1)
        tl.store(around_ptr + block.to(tl.int64)[:, None] * SIDES + side[None, :], number, mask=real)


@triton.jit
def masks_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr,
    n, num_runs, num_taps, capacity, num_chunks, key_chunk, room, lost, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, GROUPS: tl.constexpr, COUNTED: tl.constexpr, TAPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Masks of the taps of rows -> their sort keys in each group of taps, and counts of edges."""
    read_masks(
        coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
        words_ptr, keys_ptr, counts_ptr, totals_ptr,
        n, num_runs, num_taps, capacity, num_chunks, key_chunk, room, lost, programs,
        RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES, GROUPS, COUNTED, TAPS, CHUNK, BLOCK,
    )  # fmt: skip


@triton.jit
def read_masks(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr,
    n, num_runs, num_taps, capacity, num_chunks, key_chunk, room, lost, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, GROUPS: tl.constexpr, COUNTED: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`masks_kernel` for every ``programs``-th run of BLOCK rows."""
    lane = tl.arange(0, TAPS)
    total = tl.zeros((TAPS,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, n, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        live = row < n
        entry = entry_of(row, live, entries_ptr, SIDES)
        mask = tl.zeros((BLOCK,), tl.int32)
        for run in range(0, num_runs, 3):  # the loads of three runs are on their way together
            for part in tl.static_range(3):
                run_ptr = window_ptr + 3 * RANK + tl.minimum(run + part, num_runs - 1) * (2 + RANK)
                seen, _near, _far, _cell = look(
                    row, entry, live, run_ptr, tl.load(run_ptr + 1), coords_ptr, ranges_ptr, table_ptr, ids_ptr,
                    info_ptr, around_ptr, window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES,
                )  # fmt: skip
                mask |= seen << tl.load(run_ptr)  # a last run met twice says the same twice
        above = (row // key_chunk) << room
        for group in tl.static_range(GROUPS):
            word_ptr = words_ptr + 1025 * group
            ours = mask & tl.load(word_ptr)
            key = tl.load(word_ptr + 1 + (ours & 255)) ^ tl.load(word_ptr + 257 + ((ours >> 8) & 255))
            key = key ^ tl.load(word_ptr + 513 + ((ours >> 16) & 255)) ^ tl.load(word_ptr + 769 + ((ours >> 24) & 255))
            key = tl.where(ours == 0, (((1 << (room - 1)) - 1) << 1) | 1, key >> lost) | above
            tl.store(keys_ptr + group * n.to(tl.int64) + row, key, mask=live)
        if COUNTED:
            edges = tl.sum((mask[None, :] >> lane[:, None]) & 1, 1)
            tl.atomic_add(counts_ptr + lane * num_chunks + first // CHUNK, edges, mask=lane < num_taps, sem="relaxed")
            total += edges
    if COUNTED:
        tl.atomic_add(totals_ptr + lane, total.to(tl.int64), mask=lane < num_taps, sem="relaxed")


@triton.jit
def search_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    words_ptr, keys_ptr, counts_ptr, totals_ptr, gate_ptr, block_keys_ptr, status_ptr,
    starts_ptr, offsets_ptr, report_ptr,
    n, num_runs, num_taps, capacity, num_chunks, programs,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, BLOCKS_EACH: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Surroundings, masks and sums of counts in one launch, whose programs wait for each other in between."""
    if SIDES > 0:
        find_around(
            ranges_ptr, table_ptr, ids_ptr, block_keys_ptr, status_ptr, around_ptr, capacity, programs,
            RANK + 1, SHIFTS, SIDES, LANES, BLOCKS_EACH,
        )  # fmt: skip
        wait_for_all(gate_ptr, programs)
    read_masks(
        coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
        words_ptr, keys_ptr, counts_ptr, totals_ptr,
        n, num_runs, num_taps, capacity, num_chunks, n, 31, 0, programs,
        RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES, 1, True, TAPS, CHUNK, BLOCK,
    )  # fmt: skip
    wait_for_all(gate_ptr + 1, programs)
    for tap in range(tl.program_id(0), num_taps, programs):
        scan_tap(
            tap, counts_ptr, totals_ptr, starts_ptr, offsets_ptr, report_ptr, status_ptr, num_taps, num_chunks, SCAN
        )


@triton.jit
def planes_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    planes_ptr, n, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
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
        window_ptr, capacity, RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES,
    )  # fmt: skip
    for step in tl.static_range(LENGTH):
        found, near, far = take(rows_ptr, seen, near, far, cell, step, EDGE, BLOCKED)
        tl.store(planes_ptr + (tap + step).to(tl.int64) * n + row, found, mask=row < tl.where(length > step, n, 0))


@triton.jit
def count_kernel(planes_ptr, counts_ptr, totals_ptr, n, num_chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """counts[tap, chunk] = entries that are not negative; totals[tap] likewise."""
    chunk = tl.program_id(0)
    tap = tl.program_id(1)
    live = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        found = tl.load(planes_ptr + tap.to(tl.int64) * n + row, mask=row < n, other=-1)
        live += (found >= 0).to(tl.int32)
    tl.store(counts_ptr + tap * num_chunks + chunk, tl.sum(live, 0))
    tl.atomic_add(totals_ptr + tap, tl.sum(live, 0).to(tl.int64), sem="relaxed")


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


_I32, _I64 = torch.int32, torch.int64
SEARCH_TYPES = (_I32, _I32, _I64, _I32, _I64, _I32, _I64, _I32, _I32)
_AROUND = Launcher(around_kernel, (_I32, _I64, _I32, _I64, _I64, _I32, int, int))
_MASKS = Launcher(masks_kernel, (*SEARCH_TYPES, _I32, _I32, _I32, _I64, *(int,) * 9), num_warps=1)
_SEARCH = Launcher(
    search_kernel,
    (*SEARCH_TYPES, _I32, _I32, _I32, _I64, _I32, _I64, _I64, _I32, _I64, _I64, *(int,) * 6),
    cooperative=True,
)
_PLANES = Launcher(planes_kernel, (*SEARCH_TYPES, _I32, int, int), num_warps=1)
_COUNT = Launcher(count_kernel, (_I32, _I32, _I64, int, int))
_PLANE_KEYS = Launcher(plane_keys_kernel, (_I32, _I32, _I32, *(int,) * 5))
_PLANE_KEYS_WIDE = Launcher(plane_keys_kernel, (_I32, _I32, _I64, *(int,) * 5))


# ---- readable twin


def find_neighbors_torch(
    source: torch.Tensor,
    coords: torch.Tensor,
    offsets: Sequence[Sequence[int]],
    stride: Sequence[int],
    torus: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """(K, N_out): ``WindowSearch.neighbors``, by comparing every row with every row."""
    found = torch.empty(len(offsets), len(coords), dtype=torch.int32)
    for tap, offset in enumerate(offsets):
        fine = coords.long() * torch.tensor([1, *stride]) + torch.tensor([0, *offset])
        if torus is not None:
            start, size = (torch.tensor(v) for v in torus)
            fine[:, 1:] = (fine[:, 1:] - start) % size + start
        same = (fine[:, None] == source[None].long()).all(-1)
        found[tap] = torch.where(same.any(1), same.int().argmax(1), -1).int()
    return found
