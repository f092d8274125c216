"""What a window sees from each target row, on the GPU: edge counts and sort keys in one pass, the table on demand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparseconv.geometry.aside import Moment, building, current
from sparseconv.geometry.triton_chunks import cells_of_blocks, chunk_keys
from sparseconv.geometry.triton_counts import Counters, PendingCounts, scan_counts
from sparseconv.geometry.triton_cube import CUBE
from sparseconv.geometry.triton_launch import (
    INTERPRETED,
    Arena,
    Kinds,
    Launcher,
    Pointer,
    Unseen,
    ceil_div,
    follow,
    pointer,
)
from sparseconv.geometry.triton_order import Passes, sort_rows, ticket_behind
from sparseconv.geometry.triton_report import Report
from sparseconv.geometry.triton_search import (
    AROUND,
    LINES,
    ORDER,
    SCRATCH,
    SEARCH_TYPES,
    SORT_KEYS,
    STARTS,
    launch_around,
    launch_masks,
    launch_search,
    launch_sums,
    search_programs,
)
from sparseconv.geometry.triton_table import (
    ENTRIES,
    FUSED_ROWS,
    Cells,
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

#: rows of the runs that the last schedule of more than FUSED_ROWS rows was sorted by, by device, until an order began
#: that nobody had asked for
_sorted: dict[int | None, int | None] = {}
#: blocks a row of the last grid of many rows, by device
_blocks: dict[int | None, float] = {}
#: room for what is made before its number is known, over what the last one of its kind would have taken
SPARE = 1.125
#: the arrays of a search whose rows are sorted ahead: keys of runs behind the others
_SORTED_SCRATCH, _RUN_KEYS = Kinds((*SCRATCH, torch.int32)), len(SCRATCH)
#: key bits of windows with more than 31 taps: the most significant taps
WIDE_KEY_BITS = 62


class Sent(NamedTuple):
    """Where a launch leaves what a search finds."""

    scratch: Arena
    start: int | None  # of the table's spare zeros, in which edges are counted
    counted: tuple[torch.Tensor, Report]  # offsets of the taps, and they on their way to the host


class WindowSearch:
    """The edges between the rows of a table and target rows, found but not written down: three passes write them.

    Nothing is read back. `release` gives the scratch memory back; who asks for it again gets it made anew.

    Args:
        table: the source rows; None where the edges were given as a table.
        coords: (N_out, 1+D) int32 on the same device, in any order; ``table.coords`` itself is faster.
        window: of the same device, with ``single=True`` for a table that is not blocked.
        given: (K, N_out) int32: the table of a search that has none of rows.
        unseen: of given edges between rows whose number the host does not know; a table has its own.
        sent: where a launch leaves all this that was made before, with the rows in order.
        patient: whether to wait for the table's report, as the caller will anyway: memory is then taken for about as
            many blocks as there are, and not for as many as rows, which are sorted as those of the last schedule were.
    """

    def __init__(
        self,
        table: CoordinateTable | None,
        coords: torch.Tensor,
        window: TapWindow,
        given: torch.Tensor | None = None,
        unseen: Unseen | None = None,
        sent: Sent | None = None,
        patient: bool = False,
    ) -> None:
        #: N_out
        self.rows = coords.shape[0]
        #: slots of the table; of a given one, the length of its rows
        self.capacity = self.rows if table is None else table.capacity
        #: RANK, SHIFTS, PLACES, BLOCKED, PERIODIC, SIDES and LENGTH of the kernels
        self.constants: tuple = (1, 0, 0, False, False, GIVEN, 1)
        #: whether the target rows are those of the table, so that a row's own block tells the blocks around it
        self.is_local = False
        #: whether each row looks at the 27 cells around it, for which there are kernels of their own
        self.is_cube = False
        if table is not None:
            same = coords is table.coords and self.rows > 0
            self.is_local, self.is_cube, self.constants = _looks(window, table.shifts, same)
        self.table, self.window, self.given = table, window, given
        self.unseen = unseen if table is None else table.unseen
        self.coords = coords if self.is_local else aligned(coords)
        self.chunk_rows = rows_per_chunk(self.rows)
        self.chunks = ceil_div(self.rows, self.chunk_rows)
        #: constants on the device that its launches read: kept as long as a graph that holds those launches may run
        self.kept: list[torch.Tensor] = []
        self._scratch: Arena | None = None
        self._passes: Passes | None = None
        #: whether the rows are in order, as they are where the search's own launch has sorted them
        self._is_sorted = False
        #: what was sorted ahead: rows of a run, and `ordered` by them
        self._ahead: tuple[int | None, torch.Tensor | Pointer] | None = None
        #: whether there are Gray ranks, and not keys of runs alone
        self._is_ranked = True
        self._pointers: tuple[Pointer, ...] | None = None
        #: when it was launched, in a run whose maps are aside
        self.moment: Moment | None = None
        #: what else the launch makes that fills the scratch memory, under keys of those who take it
        self.made: dict[Any, Any] = {}
        if table is not None and sent is not None:
            self._is_sorted, self._scratch = True, sent.scratch
            self._begin(table, sent.start, sent.counted)
        elif table is not None:
            with building():
                self._run(patient)

    def _begin(
        self,
        table: CoordinateTable,
        start: int | None = None,
        counted: tuple[torch.Tensor, Report] | None = None,
    ) -> None:
        taps = self.window.num_taps
        self.counters = Counters(table, taps, self.chunks, start)
        #: whether `pending` was cut to what there is room for
        self.is_confined = False
        #: the counts of the edges, on their way to the host
        self.pending = PendingCounts(taps, table, counted)

    def _run(self, patient: bool = False) -> Arena:
        """Fill the scratch memory, and send the counts of edges on their way."""
        table, window = self.table, self.window
        if table is None:
            raise ValueError("a search without a table of rows has no scratch memory: its edges were given")
        n, taps, device = self.rows, window.num_taps, self.coords.device
        narrow = taps <= KEY_BITS
        fused = narrow and 0 < n <= FUSED_ROWS
        self._begin(table)
        sort = _SortAhead.of(self) if patient else None  # begins while the host would wait
        if patient and table.report is not None:
            blocks = int(SPARE * _blocks.get(device.index, 0.0) * n) or table.report.read()[0] >> 32
        else:
            blocks = table.most_blocks if self.is_local else 0
        lengths = [taps * self.chunks, n if narrow else 0, blocks * self.constants[5]]
        aside = current()
        if fused:  # one allocation less for the host, which is faster with one launch; aside, edges run beside a sort's
            sorting = self.is_cube and aside is None
            programs, spare, self._is_sorted = search_programs(device, taps, n, sorting)
            self._passes = passes = Passes(n, window.key_bits, spare if self.is_cube else 0, self._is_sorted)
            lengths += (passes.words, ticket_behind(n) + 1)
        elif sort is not None:
            lengths += sort.lengths
        scratch = self._scratch = Arena(device, _SORTED_SCRATCH, lengths)
        counters = self.counters
        if fused and taps:
            launch_search(self, scratch, counters, self.pending, passes, programs, self._is_sorted)
        else:
            if self.is_local:
                launch_around(table, scratch[AROUND], blocks)
            if patient and table.report is not None:  # not waited for before: the card would have nothing to do
                found = table.report.read()[0] >> 32
                _blocks[device.index] = found / n
                if found > blocks:
                    lengths[AROUND] = found * self.constants[5]
                    scratch = self._scratch = Arena(device, _SORTED_SCRATCH, lengths)
                    launch_around(table, scratch[AROUND], found)
            if sort is not None:
                sort.launch(self, table, scratch, counters)
                self._ahead, self._is_ranked = (sort.chunk_rows, scratch[ORDER]), sort.chunk_rows is None
            elif n and taps and narrow:
                launch_masks(self, window.key_words, scratch[SORT_KEYS], counters, n, KEY_BITS, 0)
            elif n and taps:
                totals, counts = counters.pointers
                args = (pointer(self.neighbors), counts, totals, n, self.chunks)
                _COUNT(self.coords.device, (self.chunks, taps), args, (self.chunk_rows, 128))
            if sort is None:
                scan_counts(counters, scratch[STARTS], self.pending, table)
        self.moment = None if aside is None else aside.moment()
        return scratch

    def release(self) -> None:
        """Give the scratch memory back."""
        aside = current()
        if aside is not None and self._scratch is not None:
            aside.retire((self._scratch, self.counters))
        self._scratch = self._pointers = self._ahead = None
        self._is_ranked = True
        self.__dict__.pop("counters", None)

    @property
    def scratch(self) -> Arena:
        if self._scratch is None:
            with building():
                return self._run()
        return self._scratch

    @property
    def counts(self) -> torch.Tensor:
        """(K, C) int32: the edges of tap k among the target rows [c, c + 1) * chunk_rows."""
        self.scratch  # noqa: B018 (counted with it)
        return self.counters.counts

    @property
    def keys(self) -> torch.Tensor | None:
        """(1, N_out) int32 sort keys, see row_keys; None above 31 taps and for given edges."""
        if self.table is None or self.window.num_taps > KEY_BITS:
            return None
        return self.ranked.tensor(SORT_KEYS)[: self.rows].view(1, -1)

    @property
    def ranked(self) -> Arena:
        """The scratch memory, with Gray ranks as sort keys."""
        scratch = self.scratch
        if not self._is_ranked:
            launch_masks(self, self.window.key_words, scratch[SORT_KEYS], None, self.rows, KEY_BITS, 0)
            self._is_ranked = True
        return scratch

    @property
    def order(self) -> torch.Tensor | Pointer:
        """Rows in the order of their `keys`: (1, N_out), or where they are few the place of (N_out,) int32."""
        scratch = self.ranked
        if self._is_sorted:
            return scratch[ORDER]
        with building():
            if self._passes is None:
                return sort_rows(scratch.tensor(SORT_KEYS).view(1, -1), self.window.key_bits)
            self._passes.launch(scratch[SORT_KEYS], scratch[LINES], scratch[ORDER], self.coords.device)
        return scratch[ORDER]

    def ordered(self, chunk_rows: int | None = None) -> torch.Tensor | Pointer:
        """`order`, or that of the keys of runs of so many rows, see `row_keys`."""
        ahead, self._ahead = self._ahead, None
        self.expect_order(chunk_rows)
        if ahead is not None and ahead[0] == chunk_rows:
            return ahead[1]
        if chunk_rows is None and self.table is not None and self.window.num_taps <= KEY_BITS:
            return self.order
        with building():
            return sort_rows(row_keys(self, self.window.all_taps, None, chunk_rows))

    def expect_order(self, chunk_rows: int | None) -> None:
        """Have the next new grid's rows, if they are many, sorted by keys of runs of so many; -1: have them not."""
        if self.is_local and self.rows > FUSED_ROWS and current() is None:
            _sorted[self.coords.device.index] = chunk_rows

    @property
    def ticket(self) -> Pointer | None:
        """A zero (1,) int32 for programs that count themselves, who leave it zero; None where rows are not sorted."""
        if not self._is_sorted or self._scratch is None:
            return None
        at = ticket_behind(self.rows)
        return self._scratch.tensor(ORDER)[at:] if INTERPRETED else self._scratch[ORDER] + 4 * at

    @property
    def most_edges(self) -> int:
        """A number that the edges cannot exceed, whatever rows occur twice; known without a look at the device."""
        return self.coords.shape[0] * self.window.num_taps

    @property
    def around(self) -> torch.Tensor | None:
        """(B, 3^D) int32: the blocks around each block, if there are so many; None where rows are looked up by key."""
        return self.scratch.tensor(AROUND).view(-1, 3 ** (self.coords.shape[1] - 1)) if self.is_local else None

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
    def neighbors(self) -> torch.Tensor:
        """(K, N_out) int32: the source row of each target row through each tap; -1 absent."""
        return self.look_up()

    def look_up(self) -> torch.Tensor:
        """`neighbors`, made anew where they were not kept."""
        kept = self.given if self.given is not None else self.__dict__.get("neighbors")
        if kept is not None:
            return kept
        n, taps = self.coords.shape[0], self.window.num_taps
        planes = torch.empty(taps, n, dtype=torch.int32, device=self.coords.device)
        if n and taps:
            args = (*self.pointers, pointer(planes), n, self.capacity)
            _PLANES(planes.device, (ceil_div(n, 128), self.window.num_runs), args, (*self.constants, 128))
        return planes


class _SortAhead:
    """The order that the last schedule of so many rows asked for, begun before somebody asks for it here."""

    def __init__(self, search: WindowSearch, table: CoordinateTable, chunk_rows: int | None) -> None:
        n, window = search.rows, search.window
        self.chunk_rows, bits = chunk_rows, window.key_bits
        self._cells: tuple[Cells, torch.Tensor | None] | None = None
        self._key_room = n, KEY_BITS, 0
        if chunk_rows is not None:
            self._key_room, bits = _key_room(n, window.num_taps, chunk_rows, KEY_BITS), KEY_BITS
            self._cells = cells_of_blocks(table)
        self._passes = Passes(n, bits)
        #: of the last arrays of the scratch memory
        self.lengths = self._passes.words, n, 0 if chunk_rows is None else n

    @classmethod
    def of(cls, search: WindowSearch) -> _SortAhead | None:
        """That of a search for its table's own rows; None where no schedule asked."""
        if not search.is_local or search.table is None or not 0 < search.window.num_taps <= KEY_BITS:
            return None
        chunk_rows = _sorted.pop(search.coords.device.index, -1)  # -1: nobody asked
        if chunk_rows is not None and not 0 < chunk_rows < search.rows:
            return None
        return cls(search, search.table, chunk_rows)

    def launch(self, search: WindowSearch, table: CoordinateTable, scratch: Arena, counters: Counters) -> None:
        """Masks, sums of their counts, and the rows in order, once there are the blocks around the blocks."""
        keys, cells = scratch[SORT_KEYS], None
        if self._cells is not None:
            keys, cells = scratch[_RUN_KEYS], self._cells[0]
        launch_masks(search, search.window.key_words, keys, counters, *self._key_room, cells=cells)
        counting = launch_sums(table, scratch, counters, search.pending, self._passes, keys)
        self._passes.launch(keys, scratch[LINES], scratch[ORDER], table.coords.device, counting)


@lru_cache(maxsize=512)
def _looks(window: TapWindow, shifts: tuple[int, ...], same: bool) -> tuple[bool, bool, tuple]:
    """`is_local`, `is_cube` and the constants of searches in a table of such blocks; ``same``: for its own rows."""
    rank, blocked = len(shifts) - 1, any(shifts)
    local = same and blocked and 0 <= window.reach <= 2 ** min(shifts[1:])
    sides = 3**rank if local else 0
    constants = rank, pack_shifts(shifts), bit_places(shifts), blocked, window.periodic, sides, window.run_length
    return local, local and window.is_cube and shifts == CUBE[1], constants


def search_window(
    table: CoordinateTable, coords: torch.Tensor, window: TapWindow, patient: bool = False
) -> WindowSearch:
    """Find what target rows see: row of (stride * coords[r] + offsets[k], folded into the torus) for each r and k."""
    return WindowSearch(table, coords, window, patient=patient)


def search_table(neighbors: torch.Tensor, unseen: Unseen | None = None) -> WindowSearch:
    """The search that finds the edges of a table (K, N_out) int32, -1 absent, made elsewhere: a reversed map, say."""
    taps, n = neighbors.shape
    neighbors = aligned(neighbors)
    window = encode_window(tuple((tap,) for tap in range(taps)), (1,), None, neighbors.device, True)
    return WindowSearch(None, neighbors.new_empty(n, 0), window, neighbors, unseen)


def row_keys(
    search: WindowSearch,
    parts: tuple[tuple[int, ...], ...],
    significance: Sequence[int] | None = None,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """(G, N_out) sort keys, not negative: the Gray rank of each row's mask of the taps of a group.

    Rows sorted by them change taps one at a time; rows without a tap come last. ``chunk_rows`` puts the number of the
    row's run of about so many rows above the rank, which then loses its last bits: runs of neighbours in space, see
    `chunk_keys`; of rows as they come where the target rows are not the table's. int64 for groups of more than 31 taps.
    """
    n, taps = search.coords.shape[0], search.window.num_taps
    device = search.coords.device
    wide = max(map(len, parts), default=0) > KEY_BITS
    key_bits = WIDE_KEY_BITS if wide else KEY_BITS
    chunk, room, lost = _key_room(n, max(map(len, parts), default=0), chunk_rows, key_bits)
    plain = significance is None and parts == (tuple(range(taps)),)
    if room < key_bits and plain and not wide and search.is_local and search.table is not None:
        return chunk_keys(search.table, search.ranked[SORT_KEYS], chunk, room, lost)
    ranked = tap_order(search.window.offsets) if significance is None else tuple(significance)
    keys = torch.empty(len(parts), n, dtype=torch.int64 if wide else torch.int32, device=device)
    if n and taps and taps <= KEY_BITS and search.given is None:
        search.kept.append(words := key_words(ranked, parts, device))
        launch_masks(search, words, pointer(keys), None, chunk, room, lost, len(parts))
    elif n and taps:
        search.kept.append(bits := _key_bits(ranked, parts, WIDE_KEY_BITS if wide else KEY_BITS, device))
        args = (pointer(search.neighbors), pointer(bits), pointer(keys), n, taps, chunk, room, lost)
        launcher = _PLANE_KEYS_WIDE if wide else _PLANE_KEYS
        launcher(device, (ceil_div(n, 128), len(parts)), args, (wide, 128))
    return keys


def _key_room(n: int, taps: int, chunk_rows: int | None, key_bits: int) -> tuple[int, int, int]:
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


# ---- kernels


@triton.jit
def planes_kernel(
    coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, rows_ptr, entries_ptr, around_ptr, window_ptr,
    planes_ptr, n, capacity,
    RANK: tl.constexpr, SHIFTS: tl.constexpr, PLACES: tl.constexpr, BLOCKED: tl.constexpr, PERIODIC: tl.constexpr,
    SIDES: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """planes[tap, row] = source row, for BLOCK rows and one run of taps."""
    follow()
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
    follow()
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
    follow()
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
