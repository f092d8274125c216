"""What a window sees from each target row, on the GPU: the blocks around, tap masks, sort keys and counts of edges.

    in:  a table of source rows, target rows (N_out, 1+D) int32, a window of K taps
    out: a `WindowSearch`; nothing is read back

Up to 31 taps it is one launch, whose programs wait for each other; of more taps, masks do not fit and a table is made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from sparseconv.geometry.gpu.hash_table.table import (
    ENTRIES,
    CoordinateTable,
    aligned,
    pack_shifts,
    rows_per_chunk,
)
from sparseconv.geometry.gpu.window.counts import Counters, PendingCounts, scan_counts
from sparseconv.geometry.gpu.window.found import AROUND, SCRATCH, STARTS, WindowSearch
from sparseconv.geometry.gpu.window.neighbor_table import COUNT, neighbor_table
from sparseconv.geometry.gpu.window.passes import launch_around, launch_search, search_programs
from sparseconv.geometry.gpu.window.taps import GIVEN, KEY_BITS, TapWindow, bit_places, encode_window
from sparseconv.geometry.gpu.window.window_3x3x3 import CUBE
from sparseconv.gpu.arena import Arena
from sparseconv.gpu.cooperative import DeviceCount
from sparseconv.gpu.launcher import Pointer, ceil_div, pointer
from sparseconv.gpu.radix_sort.sort import Passes
from sparseconv.gpu.streams import building, current


def search_window(table: CoordinateTable, coords: torch.Tensor, window: TapWindow) -> WindowSearch:
    """Find what target rows see: row of (stride * coords[r] + offsets[k], folded into the torus) for each r and k.

    Args:
        table: the source rows.
        coords: (N_out, 1+D) int32 on the same device, in any order; ``table.coords`` itself is faster.
        window: of the same device.
    """
    with building():
        return _search(table, coords, window)


def _search(table: CoordinateTable, coords: torch.Tensor, window: TapWindow) -> WindowSearch:
    n, taps, device = coords.shape[0], window.num_taps, coords.device
    is_local, is_cube, constants = looks_of(window, table.shifts, coords is table.coords and n > 0)
    coords = coords if is_local else aligned(coords)
    chunk_rows = rows_per_chunk(n)
    chunks = ceil_div(n, chunk_rows)
    narrow, side = taps <= KEY_BITS, current()
    counters, pending = Counters(table, taps, chunks), PendingCounts(taps, table)
    blocks = table.most_blocks if is_local else 0
    lengths = [taps * chunks, n if narrow else 0, blocks * constants[4]]
    passes, programs = None, 0
    if narrow and n:
        programs, spare = search_programs(device, taps, n)
        passes = Passes(n, window.key_bits, spare if is_cube else 0)
        lengths += (passes.words, n)
    scratch = Arena(device, SCRATCH, lengths)
    entries, around = table.pointers[3:5]
    if is_local:
        entries, around = table.arena[ENTRIES], scratch[AROUND]
    pointers: tuple[Pointer, ...] = (pointer(coords), *table.pointers, entries, around, pointer(window.data))
    search = WindowSearch(
        coords, window, table, table.device_count, n, table.capacity, constants, is_local, is_cube, chunk_rows, chunks,
        counters, pending, scratch, passes, None, pointers,
    )  # fmt: skip
    if passes is not None and taps:
        launch_search(search, counters, passes, programs)
    else:
        if is_local:
            launch_around(table, scratch[AROUND], blocks)
        if n and taps:
            neighbors = neighbor_table(search)
            search = replace(search, neighbors=neighbors)
            totals, counts = counters.pointers
            args = (pointer(neighbors), counts, totals, n, chunks)
            COUNT(device, (chunks, taps), args, (search.chunk_rows, 128))
        scan_counts(counters, scratch[STARTS], pending, table)
    if table.device_count is None:
        pending.report.send()
    return search if side is None else replace(search, moment=side.moment())


def search_table(neighbors: torch.Tensor, device_count: DeviceCount | None = None) -> WindowSearch:
    """The search that finds the edges of a table (K, N_out) int32, -1 absent, made elsewhere: a reversed map, say.

    ``device_count``: of rows whose number the host does not know.
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
def looks_of(window: TapWindow, shifts: tuple[int, ...], same: bool) -> tuple[bool, bool, tuple]:
    """`is_local`, `is_cube` and the constants of searches in a table of such blocks; ``same``: for its own rows."""
    rank = len(shifts) - 1
    local = same and 0 <= window.reach <= 2 ** min(shifts[1:])
    sides = 3**rank if local else 0
    constants = rank, pack_shifts(shifts), bit_places(shifts), window.periodic, sides, window.run_length
    return local, local and window.is_cube and shifts == CUBE[1], constants
