"""What a window sees from each target row, on the GPU: edge counts and sort keys in one pass, a table on demand."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from sparseconv.geometry.gpu.hash_table.table import (
    ENTRIES,
    FUSED_ROWS,
    CoordinateTable,
    aligned,
    pack_shifts,
    rows_per_chunk,
)
from sparseconv.geometry.gpu.order.row_keys import row_keys
from sparseconv.geometry.gpu.order.sort_ahead import SORTED_SCRATCH, SortAhead, expect_sorted
from sparseconv.geometry.gpu.window.counts import Counters, PendingCounts, scan_counts
from sparseconv.geometry.gpu.window.neighbor_table import COUNT, PLANES
from sparseconv.geometry.gpu.window.passes import (
    AROUND,
    LINES,
    ORDER,
    SORT_KEYS,
    STARTS,
    launch_around,
    launch_masks,
    launch_search,
    search_programs,
)
from sparseconv.geometry.gpu.window.taps import GIVEN, KEY_BITS, TapWindow, bit_places, encode_window
from sparseconv.geometry.gpu.window.window_3x3x3 import CUBE
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import Unseen
from sparseconv.gpu.launcher import INTERPRETED, Pointer, ceil_div, pointer
from sparseconv.gpu.pinned import Report
from sparseconv.gpu.radix_sort.sort import Passes, sort_rows, ticket_behind
from sparseconv.gpu.streams import Moment, building, current

#: blocks a row of the last grid of many rows, by device
_blocks: dict[int | None, float] = {}
#: room for what is made before its number is known, over what the last one of its kind would have taken
SPARE = 1.125


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
        sort = SortAhead.of(self) if patient else None  # begins while the host would wait
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
        scratch = self._scratch = Arena(device, SORTED_SCRATCH, lengths)
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
                    scratch = self._scratch = Arena(device, SORTED_SCRATCH, lengths)
                    launch_around(table, scratch[AROUND], found)
            if sort is not None:
                sort.launch(self, table, scratch, counters)
                self._ahead, self._is_ranked = (sort.chunk_rows, scratch[ORDER]), sort.chunk_rows is None
            elif n and taps and narrow:
                launch_masks(self, window.key_words, scratch[SORT_KEYS], counters, n, KEY_BITS, 0)
            elif n and taps:
                totals, counts = counters.pointers
                args = (pointer(self.neighbors), counts, totals, n, self.chunks)
                COUNT(self.coords.device, (self.chunks, taps), args, (self.chunk_rows, 128))
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
            expect_sorted(self.coords.device.index, chunk_rows)

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
            PLANES(planes.device, (ceil_div(n, 128), self.window.num_runs), args, (*self.constants, 128))
        return planes


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
