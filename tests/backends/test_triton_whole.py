"""Maps that are launched whole: the same arrays as by launches of their own, and asked for as the last one was."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sparseconv import ConvolutionPlan, VoxelGrid
from sparseconv.backends.base import Request
from sparseconv.backends.triton_implicit_gemm.backend import work_of
from sparseconv.backends.triton_implicit_gemm.config import weight_grad_candidates
from sparseconv.backends.triton_implicit_gemm.steps import WeightGradRecipe
from sparseconv.geometry.gpu import fused, prefetch
from sparseconv.geometry.gpu.fused import WHOLE_ROWS, WholeLaunch, jobs_made, schedule_made
from sparseconv.geometry.gpu.hash_table import table as hash_table
from sparseconv.geometry.gpu.hash_table.table import CoordinateTable, build_table, lookup, read_table
from sparseconv.geometry.gpu.jobs.jobs import JOB_QUANTUM, cut_jobs, jobs_of
from sparseconv.geometry.gpu.jobs.kernels import cut_jobs_on_device
from sparseconv.geometry.gpu.order import sort_ahead
from sparseconv.geometry.gpu.pairs import pair_lists
from sparseconv.geometry.gpu.pairs.pair_lists import FoundEdges, half_pairs_of, list_ahead, pairs_of
from sparseconv.geometry.gpu.prefetch import own_search, search_ahead, whole_ahead
from sparseconv.geometry.gpu.tiles.build import build_schedule
from sparseconv.geometry.gpu.tiles.schedule import schedule_of
from sparseconv.geometry.gpu.window import search as window_search
from sparseconv.geometry.gpu.window.search import WindowSearch, search_window
from sparseconv.geometry.gpu.window.taps import TapWindow, encode_window
from sparseconv.geometry.gpu.window.window_3x3x3 import CUBE
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu import launcher

DEVICE = torch.device("cpu") if launcher.INTERPRETED else torch.device("cuda", 0)
LISTS = "neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "turned_taps"
JOBS = "begin", "end", "order", "tap_jobs"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


@pytest.fixture(autouse=True)
def _nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("_asked", "_whole", "_lists"):
        monkeypatch.setattr(prefetch, kept, {})
    monkeypatch.setattr(prefetch, "LISTED_ROWS", (10, 2_000_000))
    monkeypatch.setattr(window_search, "_blocks", {})
    monkeypatch.setattr(sort_ahead, "_sorted", {})
    monkeypatch.setattr(fused, "_asked", {})


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """So many distinct voxels of two scenes in a random order, half of the cells of a box around the origin."""
    generator = torch.Generator().manual_seed(seed)
    side = 2 + round(count ** (1 / 3))
    cells = torch.randperm(2 * side**3, generator=generator)[:count]
    places = torch.stack([cells // side**3, cells // side**2 % side, cells // side % side, cells % side], 1)
    return (places - torch.tensor([0, 2, 1, side])).int().contiguous().to(DEVICE)


def cube() -> TapWindow:
    return encode_window(CUBE[0], (1, 1, 1), None, DEVICE)


def launched(coords: torch.Tensor, block_m: int = 128, count: int = 40) -> tuple[CoordinateTable, WindowSearch]:
    launch = WholeLaunch(cube(), block_m, count)
    found, began = launch(coords), time.monotonic()
    while found is None and time.monotonic() < began + 90:  # it compiles meanwhile
        time.sleep(0.05)
        found = launch(coords)
    assert found is not None
    return found


def map_of(search: WindowSearch) -> KernelMap:
    return KernelMap(search.rows, search.rows, 27, source=FoundEdges(search, search.rows))


def given(coords: torch.Tensor) -> WindowSearch:
    """The search of a table that is none of a plan's making."""
    table = build_table(coords)
    table.is_given = True
    return search_window(table, coords, cube())


@pytest.mark.parametrize(
    ("count", "block_m", "jobs"), [(1, 128, 27), (127, 64, 40), (256, 128, 28), (257, 16, 200), (1000, 128, 60)]
)
def test_one_launch_leaves_what_several_do(count: int, block_m: int, jobs: int) -> None:
    coords = rows(count, jobs)
    table, search = launched(coords, block_m, jobs)
    apart = given(coords)
    lists = build_schedule(apart, block_m)
    for name in LISTS:
        assert torch.equal(getattr(search.made["schedule"], name), getattr(lists, name)), name
    one, other = pairs_of(search), pairs_of(apart)
    assert one[2] == other[2]
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    cut = cut_jobs_on_device(apart.pending.offsets, jobs, JOB_QUANTUM, halved=True)
    for name in JOBS:
        assert torch.equal(getattr(search.made["jobs"], name), getattr(cut, name)), name
    assert search.keys is not None
    assert apart.keys is not None
    assert torch.equal(search.keys, apart.keys)
    assert torch.equal(search.counts, apart.counts)
    assert torch.equal(search.neighbors, apart.neighbors)
    assert torch.equal(lookup(table, coords).cpu(), torch.arange(count, dtype=torch.int32))
    low, high = read_table(table)
    assert low == tuple(coords.min(0).values.tolist())
    assert high == tuple(coords.max(0).values.tolist())
    assert not table.has_duplicates


@pytest.mark.parametrize("jobs", [27, 40])
def test_half_of_the_edges_say_it_all(jobs: int) -> None:
    search = given(rows(500))
    edges, offsets = pairs_of(search), search.pending.read()
    half = half_pairs_of(search)
    assert len(half[0]) == len(half[1]) == offsets[14] < offsets[-1]
    for some, every in zip(half, edges):
        assert torch.equal(some, every[: offsets[14]])
    counts = tuple(b - a for a, b in itertools.pairwise(offsets))
    straight, folded = cut_jobs(counts, jobs, 16), cut_jobs(counts, jobs, 16, halved=True)
    assert torch.equal(straight.order, folded.order)
    turned = 0
    for want, (begin, end) in zip(zip(straight.begin, straight.end), zip(folded.begin, folded.end)):
        sides = half
        if begin < 0:
            begin, end, sides, turned = -1 - begin, -1 - end, half[::-1], turned + 1
        for some, every in zip(sides, edges):
            assert torch.equal(some[begin:end], every[slice(*want)])
    assert 13 <= turned < jobs


@pytest.mark.parametrize("groups", [1, 2])
def test_a_weight_gradient_reads_half_of_the_edges_to_the_same_bits(groups: int) -> None:
    edges = map_of(given(rows(300)))
    every = KernelMap(300, 300, 27, pairs=(edges.in_rows, edges.out_rows, edges.tap_offsets))
    generator = torch.Generator().manual_seed(groups)
    x, g = (torch.randn(300, 8 * groups, generator=generator).to(DEVICE) for _ in range(2))
    assert edges.is_halved
    assert not every.is_halved
    edges.__dict__.pop("_pairs")
    grads = []
    for kernel_map in (edges, edges.reverse(), every):
        work = work_of(Request(kernel_map, DEVICE, x.dtype, 8 * groups, 8 * groups, groups), True)
        for config in weight_grad_candidates(work)[:1]:
            out = torch.full((27, 8, 8 * groups), float("nan"), device=DEVICE)
            WeightGradRecipe(config, work, x, g, 27).bind(kernel_map)(x, g, out)
            grads.append(out)
    assert "_pairs" not in edges.__dict__
    assert edges.half_pairs[0] is edges.reverse().half_pairs[1]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[0].flip(0))  # the mirrored taps, by the same pairs


def test_jobs_after_all_lists_make_no_search_anew() -> None:
    search = given(rows(300))
    edges, want = map_of(search), search.pending.read()
    schedule_of(edges, 128)
    for form in ("schedule", "pairs"):
        edges.source.wrote(form)
    assert search._scratch is None
    jobs = jobs_of(edges, 30)
    assert search._scratch is None
    assert jobs.count == 30
    assert edges.source.offsets().tolist() == list(want)


def test_its_search_is_made_anew_after_its_release() -> None:
    coords = rows(300)
    _, search = launched(coords)
    before = pairs_of(search)
    search.release()
    lists = build_schedule(search, 128)
    for name in LISTS:
        assert torch.equal(getattr(search.made["schedule"], name), getattr(lists, name)), name
    assert torch.equal(pairs_of(search)[0], before[0])


def test_other_windows_search_its_table() -> None:
    coords = rows(300)
    table, _ = launched(coords)
    for offsets in (((0, 0, 0), (0, 0, 1)), tuple(itertools.product((-2, 0, 2), repeat=3))):
        window = encode_window(offsets, (1, 1, 1), None, DEVICE)
        found, want = (search_window(one, coords, window) for one in (table, build_table(coords)))
        assert torch.equal(found.neighbors, want.neighbors)
        assert torch.equal(found.counts, want.counts)


def test_rows_that_occur_twice_are_found() -> None:
    coords = rows(200)
    coords[150] = coords[7]
    table, search = launched(coords)
    read_table(table)
    assert table.has_duplicates
    with pytest.raises(ValueError, match="rows 7 and 150 of coords are the same voxel"):
        search.pending.read()


def test_the_next_map_is_launched_as_the_last_one_was_asked_for() -> None:
    first, coords = map_of(given(rows(200))), rows(300)
    assert whole_ahead(coords) is None
    assert schedule_made(first, 64) is None
    assert jobs_made(first, 30) is None
    launched(coords, 64, 30)  # compiles, on a card
    found = whole_ahead(coords)
    assert found is not None
    table, search = found
    assert whole_ahead(coords) is None, "a map of which nobody asks is the last one"
    table.is_given = True
    second = map_of(search)
    assert schedule_made(second, 64) is search.made["schedule"]
    assert jobs_made(second, 30) is search.made["jobs"]
    again = whole_ahead(coords)
    assert again is not None
    again[0].is_given = True
    third = map_of(again[1])
    assert schedule_made(third, 128) is None, "others are not taken, and asked for the next time"
    assert jobs_made(third, 27) is None
    launched(coords, 128, 27)
    last = whole_ahead(coords)
    assert last is not None
    assert last[1].made["schedule"].block_m == 128
    assert last[1].made["jobs"].count == 27


@pytest.mark.parametrize("chunk_rows", [None, 64])
def test_lists_of_many_rows_are_made_behind_their_search(
    chunk_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prefetch, window_search, hash_table):
        monkeypatch.setattr(module, "FUSED_ROWS", 10)
    monkeypatch.setattr(fused, "WHOLE_ROWS", 10)
    coords = rows(300)

    def searched() -> WindowSearch:
        table = build_table(coords, reported=True)
        table.is_given = True
        return own_search(table, cube(), search_ahead(table))

    first = searched()
    assert schedule_made(map_of(first), 64, chunk_rows) is None
    want = build_schedule(first, 64, chunk_rows=chunk_rows)
    second = searched()
    assert schedule_made(map_of(second), 128, chunk_rows) is None, "others are not taken"
    third = searched()
    assert third.made["schedule"].block_m == 128
    assert schedule_made(map_of(third), 64, chunk_rows) is None
    fourth = searched()
    made = schedule_made(map_of(fourth), 64, chunk_rows)
    assert made is fourth.made["schedule"]
    for name in LISTS:
        assert torch.equal(getattr(made, name), getattr(want, name)), name
    assert "edges" not in fourth.made
    edges = FoundEdges(fourth, 300).half_pairs()
    assert searched().made, "asked for, it is made for the next one, too"
    assert not searched().made, "and not if nobody asked"
    schedule_made(map_of(fourth), 64, chunk_rows)
    FoundEdges(fourth, 300).half_pairs()
    assert jobs_made(map_of(fourth), 50) is None
    fifth = searched()
    cut = cut_jobs_on_device(first.pending.offsets, 50, JOB_QUANTUM, halved=True)
    for name in LISTS:
        assert torch.equal(getattr(fifth.made["schedule"], name), getattr(want, name)), name
    for name in JOBS:
        assert torch.equal(getattr(jobs_made(map_of(fifth), 50), name), getattr(cut, name)), name
    assert jobs_made(map_of(fifth), 51) is None
    listed = fifth.made["edges"]
    again = FoundEdges(fifth, 300).half_pairs()
    assert again[0].data_ptr() == listed.data_ptr()
    for a, b in zip(again, edges):
        assert torch.equal(a, b)
    searched()
    searched()
    assert sort_ahead._sorted.get(DEVICE.index, -1) == -1


def test_edges_are_listed_behind_a_map_that_is_launched_whole() -> None:
    coords = rows(300)
    first = map_of(given(coords))
    schedule_made(first, 128)
    jobs_made(first, 40)
    want = first.half_pairs
    launched(coords)  # compiles, on a card
    for _ in range(2):
        table, search = whole_ahead(coords) or (None, None)
        assert table is not None
        assert search is not None
        table.is_given = True
        edges, lists = map_of(search), search.made["edges"]
        assert 2 * len(want[0]) < len(lists) < 2.4 * len(want[0])
        schedule_made(edges, 128)
        for a, b in zip(edges.half_pairs, want):
            assert torch.equal(a, b)
        assert edges.half_pairs[0].data_ptr() == lists.data_ptr()
    table, search = launched(rows(300, 1))
    assert "edges" not in search.made, "nobody asked for those of this kind of launch"


@pytest.fixture
def _marked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(pair_lists.torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(-7))


@pytest.mark.usefixtures("_marked_memory")
def test_more_edges_than_lists_made_ahead_have_room_for_are_listed_again() -> None:
    coords = rows(300)
    search, want = given(coords), half_pairs_of(given(coords))
    list_ahead(0.5, search)
    lists = search.made["edges"]
    assert len(lists) < 2 * len(want[0])
    assert (lists == -7).all()
    edges = FoundEdges(search, 300).half_pairs()
    assert torch.equal(edges[0], want[0])
    assert torch.equal(edges[1], want[1])
    again = given(coords)
    list_ahead(len(want[0]) / 300, again)
    lists = again.made["edges"].view(2, -1)
    assert (lists[:, : len(want[0])] != -7).all()
    assert (lists[:, len(want[0]) :] == -7).all()


@pytest.mark.usefixtures("_marked_memory")
def test_edges_of_rows_that_occur_twice_are_not_listed_ahead() -> None:
    coords = rows(300)
    coords[40:] = coords[39]
    search = given(coords)
    list_ahead(27.0, search)
    assert (search.made["edges"] == -7).all()
    with pytest.raises(ValueError, match="are the same voxel"):
        FoundEdges(search, 300).half_pairs()


def test_maps_of_plans_making_and_wide_tiles_are_not_asked_for() -> None:
    coords = rows(100)
    made = map_of(search_window(build_table(coords), coords, cube()))
    assert schedule_made(made, 128) is None
    assert whole_ahead(coords) is None
    assert schedule_made(map_of(given(coords)), 256) is None
    assert whole_ahead(coords) is None


def test_rows_of_another_kind_are_declined() -> None:
    launch = WholeLaunch(cube(), 128, 40)
    assert launch(rows(100)[:, :3].contiguous()) is None
    assert launch(torch.zeros(401, dtype=torch.int32, device=DEVICE)[1:].view(100, 4)) is None
    assert launch(torch.zeros(launch.most_rows + 1, 4, dtype=torch.int32, device=DEVICE)) is None


# ---- on a card, through grids and plans


def arrays(coords: torch.Tensor) -> tuple[bool, list[torch.Tensor]]:
    """Whether a grid's map was launched whole, and what it holds."""
    plan = ConvolutionPlan(VoxelGrid(coords), 3)
    edges = plan.kernel_map
    lists, cut = schedule_of(edges, 128), jobs_of(edges, 396)
    assert isinstance(edges.source, FoundEdges)
    found = [getattr(lists, name) for name in LISTS] + [getattr(cut, name) for name in JOBS]
    return bool(edges.source.search.made), [*found, edges.in_rows, edges.out_rows, edges.tap_offsets]


@pytest.mark.gpu
@pytest.mark.skipif(launcher.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_of_scenes() -> None:
    sizes = [15_000, 1, 700, 64_000, 15_001, 120_000, WHOLE_ROWS, 33_000]
    scenes = [rows(size, size) for size in sizes]
    wanted = []
    for coords in scenes:
        prefetch._whole.clear()
        is_whole, found = arrays(coords)
        assert not is_whole
        wanted.append(found)
    launched(scenes[0], 128, 396)
    arrays(scenes[0])
    seen = []
    for _ in range(3):
        for coords, want in zip(scenes, wanted):
            is_whole, found = arrays(coords)
            seen.append(is_whole)
            for a, b in zip(found, want):
                assert torch.equal(a, b)
    assert sum(seen) > len(seen) // 2  # few pairs have fewer jobs, which the next map is then launched with
    twice = torch.cat([scenes[0], scenes[0][:1]])
    arrays(scenes[0])
    with pytest.raises(ValueError, match="rows 0 and 15000 of coords are the same voxel"):
        VoxelGrid(twice)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _, found = arrays(scenes[3])
            assert all(torch.equal(a, b) for a, b in zip(found, wanted[3]))
    torch.cuda.synchronize()


def test_there_are_gates_enough_for_grids_of_fixed_size() -> None:
    from sparseconv.geometry.fixed_grid import GATES

    assert launcher.NUM_GATES + 1 <= GATES
