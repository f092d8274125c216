"""A map is the same whatever was launched before somebody asked, and it takes few launches and waits."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv.geometry.gpu import fused, last_request, prefetch
from sparseconv.geometry.gpu.hash_table import table as hash_table
from sparseconv.geometry.gpu.hash_table.table import read_table
from sparseconv.geometry.gpu.pairs.found_edges import FoundEdges
from sparseconv.geometry.gpu.window import search as window_search
from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.search import search_window
from sparseconv.geometry.gpu.window.taps import TapWindow, encode_window
from sparseconv.geometry.gpu.work_lists import jobs_of, schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu import launcher
from tests.geometry.triton_cases import CASES
from tests.launches import counted

DEVICE = torch.device("cpu") if launcher.INTERPRETED else torch.device("cuda", 0)
CUBE, PLANE = replace(CASES[3], rows=40), CASES[1]
LISTS = "neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "turned_taps"
JOBS = "begin", "end", "order", "tap_jobs"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


@pytest.fixture(autouse=True)
def _nothing_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_request, "_last", {})
    fused._launch_of.cache_clear()


class Rows:
    """A grid of given rows on a card, as far as its map asks."""

    def __init__(self, coords: torch.Tensor, copy: torch.Tensor | None = None) -> None:
        self.coords, self.num_voxels = coords if copy is None else copy, len(coords)
        self.cells, self._search = prefetch.given_table(coords, copy)
        self.came_with_search = self._search is not None

    def take_search(self) -> WindowSearch | None:
        search, self._search = self._search, None
        return search


def cube() -> TapWindow:
    return encode_window(CUBE.offsets, (1, 1, 1), None, DEVICE)


class Taps:
    """A window, as far as edges ask."""

    def __init__(self, offsets: tuple[tuple[int, ...], ...]) -> None:
        self.offsets, self.stride, self.encoded = offsets, (1,) * len(offsets[0]), {}


def map_of(rows: Rows, offsets: tuple[tuple[int, ...], ...] = CUBE.offsets) -> KernelMap:
    from sparseconv.geometry.gpu.pairs.found_edges import find_edges_on_gpu

    edges = find_edges_on_gpu(rows, rows.coords, Taps(offsets), None)
    return KernelMap(len(rows.coords), len(rows.coords), len(offsets), source=edges, mirror=None)


def arrays(edges: KernelMap) -> list[torch.Tensor]:
    """All that a training step asks for, in its order."""
    lists, cut = schedule_of(edges, 64), jobs_of(edges, 40)
    found = [getattr(lists, name) for name in LISTS] + [getattr(cut, name) for name in JOBS]
    lists = edges.half_pairs if edges.is_halved else (edges.in_rows, edges.out_rows, edges.tap_offsets)
    return [t for t in (*found, *lists, edges.neighbors) if t is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def test_the_next_map_has_the_same_arrays_in_fewer_launches_and_waits() -> None:
    coords = CUBE.source(device=DEVICE)
    found = []
    with counted() as (launches, waits):
        found.append(arrays(map_of(Rows(coords))))
    assert launches.total() <= 6  # table, search, tiles, jobs, lists; the table of neighbours for this test
    assert waits.total() <= 2  # the counts of the edges, and what the table says of its rows
    launched = fused.FusedLaunch(cube(), 64, 40)(coords)  # compiles, on a card
    assert launched is not None or not launcher.INTERPRETED
    with counted() as (launches, waits):
        found.append(arrays(map_of(Rows(coords))))
    assert launches.total() <= 3  # all at once, lists; the table of neighbours
    assert waits.total() <= 2
    assert same(*found)


@pytest.mark.parametrize("offsets", [CUBE.offsets, tuple(itertools.product((0, 1), repeat=3))], ids=["cube", "eight"])
def test_many_rows_take_a_launch_a_pass(offsets: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    coords = CUBE.source(device=DEVICE)
    want = arrays(map_of(Rows(coords), offsets))
    for module in (prefetch, window_search, hash_table):
        monkeypatch.setattr(module, "FUSED_ROWS", 10)
    monkeypatch.setattr(fused, "MOST_ROWS", 10)
    fused._launch_of.cache_clear()
    with counted() as (launches, waits):
        rows = Rows(coords)
        found = arrays(map_of(rows, offsets))
    assert launches.total() <= 16  # four for the table, three to search, up to four to sort, two for tiles, three lists
    assert waits.total() <= 2
    assert not rows.came_with_search
    assert same(found, want)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("fused_rows", [10, 1000], ids=["many", "few"])
def test_the_launch_that_reads_given_rows_copies_them(
    rank: int, fused_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prefetch, hash_table):
        monkeypatch.setattr(module, "FUSED_ROWS", fused_rows)
    cells = torch.randperm(7 ** (1 + rank), generator=torch.Generator().manual_seed(rank))[:45]
    coords = torch.stack([cells // 7**axis % 7 - 3 * (axis > 0) for axis in range(1 + rank)], 1).int()
    want = coords.unique(dim=0).to(DEVICE)
    for given in (want.clone(), torch.cat([want.view(-1)[:1], want.view(-1)])[1:].view_as(want)):  # and not aligned
        copy = torch.full_like(want, 77)
        with counted() as (launches, _):
            table, _ = prefetch.given_table(given, copy)
        assert launches.total() == (1 if fused_rows > len(want) else 4)
        assert torch.equal(copy, want)
        assert table.coords is copy
        given.zero_()  # once all is launched, its owner may write to it
        assert torch.equal(hash_table.lookup(table, copy).cpu(), torch.arange(len(want), dtype=torch.int32))


def test_a_map_made_at_once_is_of_a_copy_of_the_given_rows() -> None:
    coords = CUBE.source(device=DEVICE)
    want, given, copy = arrays(map_of(Rows(coords))), coords.clone(), torch.full_like(coords, 77)
    fused.FusedLaunch(cube(), 64, 40)(coords)  # compiles, on a card
    rows = Rows(given, copy)
    given.zero_()
    assert rows.came_with_search
    assert torch.equal(copy, coords)
    assert same(arrays(map_of(rows)), want)


def test_speculation_ends_after_one_unused_result() -> None:
    coords = CUBE.source(device=DEVICE)
    assert not Rows(coords).came_with_search, "nothing was asked yet"
    map_of(Rows(coords))
    assert Rows(coords).came_with_search
    assert not Rows(coords).came_with_search
    map_of(Rows(coords))
    assert Rows(coords).came_with_search


def test_another_window_is_searched_for_anew() -> None:
    coords, line = CUBE.source(device=DEVICE), ((0, 0, 0), (0, 0, 1))
    map_of(Rows(coords))
    rows = Rows(coords)
    assert rows.came_with_search
    edges = map_of(rows, line)
    assert edges.num_taps == 2
    want = search_window(rows.cells, coords, encode_window(line, (1, 1, 1), None, DEVICE))
    assert edges.source.counts() == FoundEdges(want, len(coords)).counts()


def test_grids_of_another_rank_are_not_searched() -> None:
    map_of(Rows(CUBE.source(device=DEVICE)))
    assert not Rows(PLANE.source(device=DEVICE)).came_with_search


def test_grids_that_plans_make_leave_no_request() -> None:
    coords = CUBE.source(device=DEVICE)
    rows = Rows(coords)
    rows.cells.given_at = None
    map_of(rows)
    assert last_request.take(last_request.place_of(DEVICE)) is None


def test_rows_that_occur_twice_are_found() -> None:
    coords = CUBE.source(device=DEVICE)
    arrays(map_of(Rows(coords)))
    twice = coords.clone()
    twice[9] = twice[4]
    rows = Rows(twice)
    read_table(rows.cells)
    assert rows.cells.has_duplicates
    with pytest.raises(ValueError, match="are the same voxel"):
        map_of(rows).tap_counts
