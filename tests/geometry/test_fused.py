"""Maps that are made in one launch have the arrays of those that are made stage by stage."""

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
from sparseconv.backends.triton_implicit_gemm.weight_grad_recipe import WeightGradRecipe
from sparseconv.geometry.gpu import last_request
from sparseconv.geometry.gpu.fused import MOST_ROWS, FusedLaunch
from sparseconv.geometry.gpu.hash_table.table import CoordinateTable, build_table, lookup, read_table
from sparseconv.geometry.gpu.jobs.jobs import JOB_QUANTUM
from sparseconv.geometry.gpu.jobs.kernels import cut_jobs_on_device
from sparseconv.geometry.gpu.pairs.found_edges import FoundEdges
from sparseconv.geometry.gpu.pairs.pair_lists import half_pairs_of, pairs_of
from sparseconv.geometry.gpu.tiles.build import build_schedule
from sparseconv.geometry.gpu.window.found import WindowSearch
from sparseconv.geometry.gpu.window.neighbor_table import neighbor_table
from sparseconv.geometry.gpu.window.search import search_window
from sparseconv.geometry.gpu.window.taps import TapWindow, encode_window
from sparseconv.geometry.gpu.window.window_3x3x3 import CUBE
from sparseconv.geometry.gpu.work_lists import jobs_of, schedule_of
from sparseconv.geometry.kernel_map import KernelMap
from sparseconv.gpu import launcher
from sparseconv.gpu.cooperative import NUM_BARRIERS
from tests.twins import cut_jobs

DEVICE = torch.device("cpu") if launcher.INTERPRETED else torch.device("cuda", 0)
LISTS = "neighbors", "out_rows", "tile_counts", "tile_rows", "tile_taps", "tile_order", "turned_taps"
JOBS = "begin", "end", "order", "tap_jobs"
pytestmark = pytest.mark.skipif(
    not launcher.INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)


@pytest.fixture(autouse=True)
def _nothing_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_request, "_last", {})


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
    launch = FusedLaunch(cube(), block_m, count)
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
    table.given_at = last_request.place_of(DEVICE)
    return search_window(table, coords, cube())


@pytest.mark.parametrize(
    ("count", "block_m", "jobs"),
    [(1, 128, 27), (127, 64, 40), (256, 128, 28), (257, 16, 200)]
    + [pytest.param(1000, 128, 60, marks=pytest.mark.slow)],
)
def test_one_launch_leaves_what_several_do(count: int, block_m: int, jobs: int) -> None:
    coords = rows(count, jobs)
    table, search = launched(coords, block_m, jobs)
    apart = given(coords)
    lists = build_schedule(apart, block_m)
    for name in LISTS:
        assert torch.equal(getattr(search.prefetched.schedule, name), getattr(lists, name)), name
    one, other = pairs_of(search), pairs_of(apart)
    assert one[2] == other[2]
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    cut = cut_jobs_on_device(apart.pending.offsets, jobs, JOB_QUANTUM, halved=True)
    for name in JOBS:
        assert torch.equal(getattr(search.prefetched.jobs, name), getattr(cut, name)), name
    assert search.keys is not None
    assert apart.keys is not None
    assert torch.equal(search.keys, apart.keys)
    assert torch.equal(search.counts, apart.counts)
    assert torch.equal(neighbor_table(search), neighbor_table(apart))
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
    assert edges.source.search.is_released
    jobs = jobs_of(edges, 30)
    assert edges.source.search.is_released
    assert jobs.count == 30
    assert edges.source.offsets().tolist() == list(want)


def test_its_search_is_made_anew_after_its_release() -> None:
    coords = rows(300)
    _, search = launched(coords)
    before = pairs_of(search)
    source = FoundEdges(search.released(), len(coords))
    lists = build_schedule(source.searched(), 128)
    for name in LISTS:
        assert torch.equal(getattr(search.prefetched.schedule, name), getattr(lists, name)), name
    assert torch.equal(pairs_of(source.search)[0], before[0])


def test_other_windows_search_its_table() -> None:
    coords = rows(300)
    table, _ = launched(coords)
    for offsets in (((0, 0, 0), (0, 0, 1)), tuple(itertools.product((-2, 0, 2), repeat=3))):
        window = encode_window(offsets, (1, 1, 1), None, DEVICE)
        found, want = (search_window(one, coords, window) for one in (table, build_table(coords)))
        assert torch.equal(neighbor_table(found), neighbor_table(want))
        assert torch.equal(found.counts, want.counts)


def test_rows_that_occur_twice_are_found() -> None:
    coords = rows(200)
    coords[150] = coords[7]
    table, search = launched(coords)
    read_table(table)
    assert table.has_duplicates
    with pytest.raises(ValueError, match="rows 7 and 150 of coords are the same voxel"):
        search.pending.read()


def test_rows_of_another_kind_are_declined() -> None:
    launch = FusedLaunch(cube(), 128, 40)
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
    return edges.source.search.prefetched is not None, [*found, edges.in_rows, edges.out_rows, edges.tap_offsets]


@pytest.mark.gpu
@pytest.mark.skipif(launcher.INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_of_scenes() -> None:
    sizes = [15_000, 1, 700, 64_000, 15_001, 120_000, MOST_ROWS, 33_000]
    scenes = [rows(size, size) for size in sizes]
    wanted = []
    for coords in scenes:
        last_request._last.clear()
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
    from sparseconv.geometry.fixed_grid import BARRIERS

    assert NUM_BARRIERS + 1 <= BARRIERS
