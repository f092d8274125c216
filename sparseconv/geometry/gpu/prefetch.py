"""What a plan will likely ask of a new grid, launched before it does: as the last one on the same stream was asked.

The host would wait for what the table says of the rows. Up to FUSED_ROWS rows, the search of the last request is
launched before that wait; the 3 x 3 x 3 map with the lists that were asked for is one launch with the table (`fused`).
Nothing is predicted for larger grids, for grids that plans make, and within a run that has streams of its own.
"""

from __future__ import annotations

import torch

from sparseconv.geometry.gpu.fused import FUSED_WIDEST_TILE, fused_map
from sparseconv.geometry.gpu.hash_table.table import (
    FUSED_ROWS,
    CoordinateTable,
    build_table,
)
from sparseconv.geometry.gpu.jobs.jobs import Jobs
from sparseconv.geometry.gpu.last_request import MapRequest, place_of, remember, take
from sparseconv.geometry.gpu.pairs.found_edges import FoundEdges
from sparseconv.geometry.gpu.tiles.build import KEPT_ROWS
from sparseconv.geometry.gpu.tiles.schedule import Schedule
from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.search import search_window
from sparseconv.geometry.kernel_map import KernelMap


def given_table(given: torch.Tensor, copy: torch.Tensor | None = None) -> tuple[CoordinateTable, WindowSearch | None]:
    """The table of a new grid's rows (N, 1+D) int32 with N > 0, and the search that it came with.

    ``copy``: an array like the given rows, which the launch that reads them fills with them; the table is then of it.
    """
    place = place_of(given.device)
    request = take(place)
    found = None if request is None else fused_map(given, copy, request.window, request.block_m, request.jobs)
    if found is not None:
        table, search = found
    else:
        table, search = build_table(given, copy=copy, reported=True), None
        if request is not None and fits(request, given):
            search = search_window(table, table.coords, request.window)
    table.given_at = place
    return table, search


def fits(request: MapRequest, coords: torch.Tensor) -> bool:
    """Whether the window of a request can be moved over these rows, and the host would wait otherwise."""
    n, columns = coords.shape
    return len(request.window.stride) == columns - 1 and 0 < n <= FUSED_ROWS


def prefetched_schedule(kernel_map: KernelMap, block_m: int) -> Schedule | None:
    """The schedule in one group of taps that was launched with the map's search; the next map's will be."""
    source = kernel_map.source
    if not isinstance(source, FoundEdges):
        return None
    search = source.search
    if search.is_cube and block_m <= FUSED_WIDEST_TILE:
        remember(search, block_m=block_m)
    made = search.prefetched
    if made is None or made.schedule.block_m != block_m:
        return None
    if kernel_map.num_out > KEPT_ROWS:
        source.wrote("schedule")
    return made.schedule


def prefetched_jobs(kernel_map: KernelMap, count: int) -> Jobs | None:
    """So many jobs that were launched with the map's search; the next map's will be."""
    source = kernel_map.source
    if not isinstance(source, FoundEdges):
        return None
    if source.search.is_cube:
        remember(source.search, jobs=count)
    made = source.search.prefetched
    return made.jobs if made is not None and made.jobs.count == count else None
