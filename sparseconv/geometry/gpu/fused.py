"""The 3 x 3 x 3 map of up to FUSED_ROWS rows in one launch: table, search, order, tiles and jobs.

    in:  rows (N, 4) int32, an array like them for a copy, rows of a tile, number of jobs
    out: the table of the copy and the search, with the lists that came with them (`WindowSearch.prefetched`)

The arrays are those of the stages one by one: `table_kernel`, `search_kernel`, `cube_tiles_kernel`, `rank_kernel` and
`jobs_kernel` share their text with this launch. The host takes longer to launch the stages than the card to run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparseconv.geometry.gpu.hash_table.kernels import fill_table
from sparseconv.geometry.gpu.hash_table.table import (
    FUSED_ROWS,
    IDS,
    SLOTS,
    TABLE_KINDS,
    CoordinateTable,
    rows_per_chunk,
    spare_of,
    table_in,
    table_lengths,
)
from sparseconv.geometry.gpu.jobs.jobs import JOB_QUANTUM
from sparseconv.geometry.gpu.jobs.kernels import cut_run, job_constants
from sparseconv.geometry.gpu.jobs.packed import JOB_KINDS, PackedJobs, job_lengths
from sparseconv.geometry.gpu.tiles.build import KEPT_ROWS, bins_of, encode_parts
from sparseconv.geometry.gpu.tiles.kernels import cut_cube, rank_run
from sparseconv.geometry.gpu.tiles.packed import SCHEDULE_KINDS, PackedSchedule, schedule_lengths
from sparseconv.geometry.gpu.tiles.schedule import LOOKAHEAD, SLOT_ALIGNMENT
from sparseconv.geometry.gpu.window.counts import Counters, PendingCounts, first_count
from sparseconv.geometry.gpu.window.found import SCRATCH, Prefetched, WindowSearch
from sparseconv.geometry.gpu.window.passes import BARRIERS, find_around, search_programs, search_rows
from sparseconv.geometry.gpu.window.search import found_search
from sparseconv.geometry.gpu.window.taps import TapWindow
from sparseconv.geometry.gpu.window.window_3x3x3 import CUBE
from sparseconv.gpu.arena import Arena, Kinds, lay_out
from sparseconv.gpu.cooperative import barriers_of, leave, wait_for_all
from sparseconv.gpu.launcher import RESIDENT, Launcher, ceil_div, constant, pointer, power_of_2
from sparseconv.gpu.pinned import Report
from sparseconv.gpu.radix_sort.kernels import clear_lists
from sparseconv.gpu.radix_sort.sort import Passes, most_together, ticket_behind, together_constants
from sparseconv.gpu.warp_asm import OPEN_TOGETHER, open_room

#: rows up to which a map is made whole
MOST_ROWS = FUSED_ROWS
#: rows of a tile at most, so that a thread has one
FUSED_WIDEST_TILE = 128
TAPS, COLUMNS = len(CUBE[0]), len(CUBE[1])
#: numbers that a table reports, behind which those of the search follow
REPORTED = 2 + 2 * COLUMNS
#: the arrays of a table, of a schedule in one group of taps and of jobs, which one arena has, and where they begin
LASTING = Kinds((*TABLE_KINDS, *SCHEDULE_KINDS[:-1], *JOB_KINDS))
AT_SCHEDULE = len(TABLE_KINDS)
AT_JOBS = len(LASTING) - len(JOB_KINDS)


@dataclass(frozen=True)
class Places:
    """Where the arrays of a map lie, lengths and first bytes: in two allocations, what lasts and scratch memory; in
    one where few rows keep that."""

    table: list[int]  # lengths
    jobs: tuple[int, ...]
    starts: list[int]  # of table, schedule and jobs
    lasting: int  # bytes
    scratch: tuple[list[int], list[int]]
    passing: int
    numbers: tuple[int, ...]  # what the kernel takes that depends on them alone
    programs: int


class FusedLaunch:
    """Launches the map of a new grid whole: through ``window``, in tiles of ``block_m`` rows, with ``count`` jobs."""

    def __init__(self, window: TapWindow, block_m: int, count: int) -> None:
        self.window, self.block_m, self.count = window, block_m, count
        device = window.data.device
        #: rows that the programs of a launch can sort together there, and want to
        self.most_rows = min(MOST_ROWS, most_together(search_programs(device, TAPS, MOST_ROWS, True)[1]))
        self._line_of, _ = encode_parts(window.all_taps, device)
        self._fixed = pointer(window.data), pointer(window.key_words), pointer(self._line_of)
        self._constants = (block_m,)
        self._places: dict[int, Places] = {}

    def __call__(
        self, given: torch.Tensor, copy: torch.Tensor | None = None
    ) -> tuple[CoordinateTable, WindowSearch] | None:
        """The table of given rows (N, 4) int32 and their search, with the schedule and jobs with the search.

        ``copy``: an array like them, into which the launch copies them: the table is then of the copy. None where the
        rows are too many, and where the kernel is not compiled yet: that has then begun.
        """
        coords = given if copy is None else copy
        (n, columns), device = coords.shape, coords.device
        if columns != COLUMNS or n > self.most_rows or given.data_ptr() % 16:
            return None
        step = 1 << max(8, n.bit_length() - 5)  # few sizes, so that a stream of scenes finds its places known
        rows = (n + step - 1) & -step
        places = self._places.get(rows) or self._place(rows, device)
        slots, chunks = (n + SLOT_ALIGNMENT - 1) & -SLOT_ALIGNMENT, ceil_div(n, rows_per_chunk(n))
        tiles = slots // self.block_m
        lasting = torch.empty(places.lasting, dtype=torch.uint8, device=device)
        passing = torch.empty(places.passing, dtype=torch.uint8, device=device) if places.passing else lasting
        lengths = (*places.table, *schedule_lengths(TAPS, slots, tiles, True), *places.jobs)
        arena = Arena.of(lasting, lasting.data_ptr(), LASTING, lengths, places.starts)
        scratch = Arena.of(passing, passing.data_ptr(), SCRATCH, *places.scratch)
        offsets = torch.empty(TAPS + 1, dtype=torch.int64, device=device)
        report = Report(REPORTED + TAPS + 3, device)
        counted = report.cut(REPORTED)
        start = spare_of(n)[-1][0]
        args = (
            pointer(given), pointer(coords), *arena, *scratch, *self._fixed, barriers_of(device), report.pointer,
            pointer(offsets), n, start, *places.numbers,
        )  # fmt: skip
        FUSED(device, (places.programs,), args, self._constants)  # the card begins; what follows is for the host alone
        table = table_in(arena, coords, None, report)
        table.spare.pop()  # in which the launch counts
        schedule = PackedSchedule(self.block_m, arena, (TAPS + 1, tiles, TAPS + LOOKAHEAD), first=AT_SCHEDULE)
        counters, pending = Counters(table, TAPS, chunks, start), PendingCounts(TAPS, table, (offsets, counted))
        made = Prefetched(schedule, PackedJobs(arena, AT_JOBS))
        search = found_search(table, coords, self.window, scratch, counters, pending, None, True, made)
        search.kept.append(self._line_of)
        return table, search

    def _place(self, rows: int, device: torch.device) -> Places:
        """Places of so many rows at most, found once."""
        slots = ceil_div(rows, SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        programs, spare, _ = search_programs(device, TAPS, rows, True)
        passes = Passes(rows, TAPS, spare, True)
        chunks = ceil_div(rows, rows_per_chunk(rows))
        table, jobs = table_lengths(rows, COLUMNS), job_lengths(self.count, TAPS)
        scratch = [TAPS * chunks, rows, 3 ** (COLUMNS - 1) * rows, passes.words, ticket_behind(rows) + 1]
        schedule = schedule_lengths(TAPS, slots, slots // self.block_m, True)
        starts, lasting = lay_out(LASTING, (*table, *schedule, *jobs))
        at_scratch, passing = lay_out(SCRATCH, scratch, lasting if rows <= KEPT_ROWS else 0)
        if rows <= KEPT_ROWS:
            lasting, passing = passing, 0
        numbers = (table[SLOTS] // 2, starts[IDS] // 4, passes.share, self.count, programs)
        found = Places(table, jobs, starts, lasting, (scratch, at_scratch), passing, numbers, programs)
        self._places[rows] = found
        return found


_launch_of = lru_cache(maxsize=64)(FusedLaunch)


def fused_map(
    given: torch.Tensor, copy: torch.Tensor | None, window: TapWindow, block_m: int, jobs: int
) -> tuple[CoordinateTable, WindowSearch] | None:
    """Table and search of rows through the 3 x 3 x 3 window, in one launch with tiles and jobs, and with their copy.

    None for another window, for wide tiles or none, for many rows, and where the kernel is not compiled yet.
    """
    if not window.is_cube or not 0 < block_m <= FUSED_WIDEST_TILE:
        return None
    return _launch_of(window, block_m, jobs)(given, copy)


# ---- the kernel


SHIFTS = tl.constexpr(sum(shift << (4 * axis) for axis, shift in enumerate(CUBE[1])))
QUANTUM, COUNTED, COUNTS_AT = map(tl.constexpr, (JOB_QUANTUM, first_count(TAPS), REPORTED))
ALIGNMENT, ROOM, BINS = map(constant, (SLOT_ALIGNMENT, power_of_2(TAPS + LOOKAHEAD), bins_of(TAPS)))
LANES, JOBS_EACH = map(constant, job_constants(TAPS))
PASSES, BITS, _ = map(constant, together_constants(TAPS, True))


@triton.jit
def fused_kernel(
    coords_ptr, copy_ptr,
    table_ptr, status_ptr, ranges_ptr, counts_ptr, ids_ptr, info_ptr, block_keys_ptr, rows_ptr, entries_ptr,
    out_ptr, out_rows_ptr, tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, launch_order_ptr,
    begin_ptr, end_ptr, job_order_ptr, tap_jobs_ptr,
    starts_ptr, keys_ptr, around_ptr, lines_ptr, order_ptr, window_ptr, words_ptr, line_of_ptr, barriers_ptr,
    report_ptr, offsets_ptr,
    n, spare, capacity, zeros, share, jobs, programs, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`table_kernel`, `search_kernel`, `cube_tiles_kernel`, `rank_kernel`, `jobs_kernel` of 27 cells around rows.

    Blocks around blocks need no rows, so the programs do not meet between these.
    """
    num_slots = (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    tiles = num_slots // BLOCK_M
    open_room(OPEN_TOGETHER)
    clear_lists(lines_ptr, n, share, programs, BITS)
    fill_table(
        coords_ptr, copy_ptr, ranges_ptr, table_ptr, status_ptr, ids_ptr, info_ptr, block_keys_ptr, rows_ptr,
        entries_ptr, barriers_ptr, report_ptr, ranges_ptr, ranges_ptr, n, capacity, zeros, programs,
        4, 4, SHIFTS, False, True, False, 128, 128,
    )  # fmt: skip
    num_blocks = (tl.load(status_ptr) >> 32).to(tl.int32)
    find_around(
        ranges_ptr, table_ptr, ids_ptr, block_keys_ptr, num_blocks, around_ptr, capacity, programs,
        4, SHIFTS, 27, 32, 16,
    )  # fmt: skip
    wait_for_all(barriers_ptr + 4, programs)
    totals_ptr = (counts_ptr + spare).to(tl.pointer_type(tl.int64))
    search_rows(
        coords_ptr, ranges_ptr, table_ptr, ids_ptr, info_ptr, entries_ptr, around_ptr, window_ptr,
        words_ptr, keys_ptr, counts_ptr + spare + COUNTED, totals_ptr, barriers_ptr + 5, status_ptr,
        starts_ptr, offsets_ptr, report_ptr + COUNTS_AT, lines_ptr, order_ptr,
        n, 9, 27, capacity, (n + 127) // 128, 0, 0, share, programs,
        3, SHIFTS, 0, False, 27, 32, 128, PASSES, BITS, True,
    )  # fmt: skip
    wait_for_all(barriers_ptr + 5 + PASSES, programs)
    program = tl.program_id(0)
    for tile in range(program, tiles, programs):
        cut_cube(
            tile, tiles, info_ptr, rows_ptr, entries_ptr, around_ptr, order_ptr, line_of_ptr, out_ptr, out_rows_ptr,
            tile_counts_ptr, tile_rows_ptr, tile_taps_ptr, n, num_slots, 27, 31, BLOCK_M, ROOM,
        )  # fmt: skip
    for run in range(programs - 1 - program, (jobs + JOBS_EACH - 1) // JOBS_EACH, programs):
        cut_run(
            run, offsets_ptr, begin_ptr, end_ptr, job_order_ptr, tap_jobs_ptr, 27, jobs, QUANTUM, LANES, JOBS_EACH, True
        )
    wait_for_all(barriers_ptr + 6 + PASSES, programs)
    for first in range(program * 64, tiles, programs * 64):
        rank_run(first, tile_counts_ptr, launch_order_ptr, tiles, BINS, 64, 1024)
    leave(barriers_ptr, programs, BARRIERS)


_I32, _I64 = torch.int32, torch.int64
FUSED = Launcher(
    fused_kernel,
    (_I32, _I32, *LASTING, *SCRATCH, _I32, _I32, _I32, _I32, _I64, _I64, *(int,) * 7),
    resident=RESIDENT,
)
